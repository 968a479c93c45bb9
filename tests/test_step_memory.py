"""What a step needs beside weights, gradients and states: counted, and as estimates predict it."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import nn

pytest.importorskip("triton")

from benchmarks.counts import META, TYPES  # noqa: E402
from benchmarks.memory import counted_memory, memory_page  # noqa: E402
from benchmarks.models import layer_set  # noqa: E402
from rankwise import MARS, LDAdam  # noqa: E402
from rankwise.estimate import RankEstimate, estimate  # noqa: E402
from rankwise.plan.step_unit import AT_ONCE  # noqa: E402

MIB = 1 << 20
# What tables and sums take beyond the formulas.
SLACK, SHARE = 16 * MIB, 0.15


class Place(NamedTuple):
    model: str
    world: int = 1
    stage: int = 1
    rank: int = 0


PLACES = [Place("llama-7b-layers"), Place("llama-1b", 8, 1, 3), Place("llama-1b", 8, 3, 3)]
LARGE = [Place("llama-1b"), Place("llama-7b", 8, 1, 3), Place("llama-7b", 8, 3, 7)]


def check(name: str, place: Place) -> None:
    found = counted_memory(name, *place)
    assert abs(found.predicted - found.beyond) <= SHARE * found.beyond + SLACK, found


@pytest.mark.parametrize("place", PLACES, ids=lambda place: "-".join(map(str, place)))
@pytest.mark.parametrize("name", TYPES)
def test_it_is_predicted(name: str, place: Place) -> None:
    check(name, place)


@pytest.mark.parametrize("name", ["SONew, tridiagonal", "SONew, band 4"])
def test_of_what_only_has_tables_they_are_predicted(name: str) -> None:
    found = counted_memory(name, *PLACES[1])
    assert abs(found.predicted - found.beyond) <= MIB / 8, found


@pytest.mark.exhaustive
@pytest.mark.parametrize("place", LARGE, ids=lambda place: "-".join(map(str, place)))
@pytest.mark.parametrize("name", TYPES)
def test_it_is_predicted_of_larger_models(name: str, place: Place) -> None:
    check(name, place)


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("MARS-AdamW", 11),
        ("MARS-M", 640),
        ("SONew, tridiagonal", 134),
        ("SONew, tridiagonal, states int8", 134),
        ("SONew, tridiagonal, gradients kept", 512),
        ("SONew, band 4", 213),
        ("LDAdam, rank 256", 420),
        ("MKOR", 512),
        ("MKOR, factor step", 512),
    ],
)
@pytest.mark.parametrize("place", [Place("llama-7b-layers"), Place("llama-7b", 8, 1, 3)], ids=["alone", "zero-1"])
def test_a_rank_of_eight_at_7b(name: str, most: int, place: Place) -> None:
    assert counted_memory(name, *place).beyond <= most * MIB


@pytest.mark.parametrize("model", ["llama-7b-layers", pytest.param("llama-1b", marks=pytest.mark.exhaustive)])
def test_momenta_that_are_not_kept_are_there_a_part_at_a_time(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the gradients' memory may be taken, there is nothing more than with a kept momentum."""
    monkeypatch.setitem(
        TYPES, "gradients kept", (lambda net: MARS(net.named_parameters(), variant="muon", clip=None), 2)
    )
    found, spent = (counted_memory(name, model) for name in ("gradients kept", "MARS-M, no clip"))
    assert spent.beyond < found.beyond <= found.predicted <= spent.predicted + 4 * (AT_ONCE + 1)
    assert found.state == spent.state < 0.7 * counted_memory("MARS-M", model).state


@pytest.mark.parametrize("name", ["MARS-M", "SONew, band 4", "LDAdam, rank 256", "MKOR"])
def test_states_are_those_of_the_estimate(name: str) -> None:
    """The counted rank is the imagined one, but for the counts of its steps."""
    found = counted_memory(name, "llama-1b", 8, 3, 2)
    assert abs(found.state - found.predicted_state) < 4096 and found.state > 4 * found.parameters


@pytest.mark.exhaustive
def test_the_page_is_what_is_counted() -> None:
    assert (Path(__file__).parents[1] / "docs" / "step-memory.md").read_text() == memory_page()


@pytest.mark.parametrize(("error_dtype", "most"), [("int8", 1.2), ("bfloat16", 2.2), ("float32", 4.2)])
def test_ldadam_s_states_of_llama_7b(error_dtype: str, most: float) -> None:
    """Bytes a parameter at rank 16, AdamW's 8 of the embedding with them."""
    network = layer_set("llama-7b", META)
    optimizer = LDAdam(list(network.named_parameters()), rank=16, error_dtype=error_dtype)
    parameters = sum(parameter.numel() for parameter in network.parameters())
    assert most - 0.1 < estimate(optimizer, world=1)[0].state_bytes / parameters < most


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(64, 48, bias=False), nn.Linear(48, 200, bias=False)


def test_estimates_of_several_units_are_not_added() -> None:
    one = RankEstimate(elements=1, scratch_bytes=5) + RankEstimate(elements=2, scratch_bytes=3)
    assert (one.elements, one.scratch_bytes) == (3, 5)
    with torch.device("meta"):
        model = Net()
    alone = estimate(MARS([("b.weight", model.b.weight)], variant="muon"), world=4, stage=3)
    groups = [{"params": [("a.weight", model.a.weight)]}, {"params": [("b.weight", model.b.weight)]}]
    both = estimate(MARS(groups, variant="muon"), world=4, stage=3)
    assert max(rank.scratch_bytes for rank in both) == max(rank.scratch_bytes for rank in alone) > 0


def test_messages_of_narrower_types_need_less() -> None:
    with torch.device("meta"):
        model = Net()
    found = [
        max(rank.scratch_bytes for rank in estimate(MARS(model.named_parameters(), variant="muon", **options), 4, 3))
        for options in ({}, {"comm_dtype": "bfloat16"})
    ]
    assert found[1] < found[0]
