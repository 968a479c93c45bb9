"""Bytes, launches and waits of a steady step on a device, none of which may become more."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("triton")

from benchmarks.counts import GOALS, META, TYPES, Values, _mkor, count, counted  # noqa: E402
from benchmarks.launches import Counts  # noqa: E402
from benchmarks.state_costs import KINDS, state_row  # noqa: E402

# Bytes of a parameter (of MARS-M and MKOR those outside products), launches and operations, waits: Llama 1B, 7B.
BOUNDS: dict[str, tuple[tuple[float, int, int], tuple[float, int, int]]] = {
    "MARS-AdamW": ((44.1, 7, 0), (44.1, 7, 0)),
    "MARS-Lion": ((36.1, 7, 0), (36.1, 7, 0)),
    "MARS-AdamW, reference bfloat16": ((38.1, 7, 0), (38.1, 7, 0)),
    "MARS-Lion, reference bfloat16": ((30.1, 7, 0), (30.1, 7, 0)),
    "MARS-M": ((40.7, 167, 0), (43.7, 1225, 0)),
    "MARS-Lion, no clip": ((20.1, 2, 0), (20.1, 2, 0)),
    "MARS-M, no clip": ((31.2, 162, 0), (32.0, 1220, 0)),
    "SONew, tridiagonal": ((44.4, 12, 0), (44.4, 12, 0)),
    "SONew, band 4": ((68.6, 12, 0), (68.6, 12, 0)),
    "SONew, tridiagonal, gradients kept": ((44.4, 111, 0), (44.4, 716, 0)),
    "LDAdam, rank 16": ((38.3, 80, 0), (40.4, 66, 0)),
    "LDAdam, rank 256": ((48.3, 122, 0), (48.2, 290, 0)),
    "LDAdam, rank 256, buffer int8": ((49.9, 120, 0), (50.2, 282, 0)),
    "LDAdam, rank 256, buffer int8, gradients kept": ((49.9, 120, 0), (50.2, 282, 0)),
    "MARS-AdamW, states int8": ((23.2, 7, 0), (23.2, 7, 0)),
    "MARS-Lion, states int8": ((21.2, 7, 0), (21.2, 7, 0)),
    "MARS-M, states int8": ((39.3, 682, 0), (45.6, 3062, 0)),
    "SONew, tridiagonal, states int8": ((28.4, 12, 0), (28.4, 12, 0)),
    "LDAdam, rank 256, states int8": ((49.8, 244, 0), (51.9, 705, 0)),
    "MKOR, states int8": ((21.4, 97, 0), (22.4, 532, 0)),
    "MKOR": ((33.4, 96, 0), (34.3, 532, 0)),
    "MKOR, factor step": ((42.6, 352, 0), (41.7, 1244, 0)),
}


def test_every_type_has_bounds() -> None:
    assert set(BOUNDS) == set(TYPES) >= set(GOALS)


@pytest.mark.parametrize("name", BOUNDS)
@pytest.mark.parametrize("model", ["llama-1b", pytest.param("llama-7b", marks=pytest.mark.exhaustive)])
def test_a_step_does_no_more_than_this(name: str, model: str) -> None:
    of_bytes, launches, waits = BOUNDS[name][model == "llama-7b"]
    row = counted(name, model)
    outside = name.startswith(("MARS-M", "MKOR"))
    moved = row["outside_products" if outside else "bytes_per_parameter"]
    assert moved <= of_bytes and moved > of_bytes - 0.3, "lower the bound to what is counted now"
    assert (row["launches"], row["waits"]) == (launches, waits), f"{row['places']}, {row['by_name']}"


class _Layer(nn.Module):
    """A linear layer, and three more or stacks of as many experts."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.q_proj = nn.Linear(128, 128, bias=False, device=META)
        self.experts = nn.Module()
        for name, shape in {"w1": (96, 128), "w2": (128, 96), "w3": (96, 128)}.items():
            weight = nn.Linear(shape[1], shape[0], bias=False, device=META)
            if experts:
                weight.weight = nn.Parameter(torch.empty(experts, *shape, device=META))
            self.experts.add_module(name, weight)


@pytest.mark.parametrize("name", ["MARS-M", "LDAdam, rank 16", "SONew, band 4", "MKOR, sketch"])
def test_experts_take_the_launches_of_a_dense_layer(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    build, before = (partial(_mkor, rule="sketch"), 3) if name == "MKOR, sketch" else TYPES[name]
    launches = []
    for experts in (0, 4, 96):
        model = nn.Sequential(_Layer(experts), _Layer(experts))  # of one layer, some shapes would be there once
        monkeypatch.setattr("benchmarks.counts.layer_set", lambda *_, model=model: model)
        monkeypatch.setattr("benchmarks.counts._gradients", _empty_gradients)
        found, _ = count(build, "", before)
        launches.append((found.launches, found.waits.total()))
    assert launches[0] == launches[1] == launches[2]


def _empty_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.empty_like(parameter)


@pytest.mark.parametrize(
    ("call", "moved", "operations", "waits"),
    [
        (lambda x, y: x + y, 12, 1, 0),
        (lambda x, y: x.add_(y), 12, 1, 0),
        (lambda x, y: x.copy_(y), 8, 1, 0),
        (lambda x, y: torch._foreach_add_([x, y], [y, y], alpha=2.0), 16, 1, 0),
        (lambda x, y: x.view(10, 10).mT, 0, 0, 0),
        (lambda x, y: torch.empty_like(x), 0, 0, 0),
        (lambda x, y: torch.zeros_like(x), 4, 1, 0),
        (lambda x, y: x.expand(7, 100) * y, 8 + 28, 1, 0),
        (lambda x, y: x[0].item(), 0, 0, 1),
        (lambda x, y: bool(y[0]), 0, 0, 1),
        (lambda x, y: x.cpu(), 0, 0, 1),
        (lambda x, y: x.nonzero(), 0, 0, 1),
        (lambda x, y: x.view(10, 10) @ y.view(10, 10), 12, 1, 0),
    ],
)
def test_the_counter(call: Callable[..., Any], moved: int, operations: int, waits: int) -> None:
    x, y = torch.empty(100, device=META), torch.empty(100, device=META)
    counts = Counts()
    with Values(counts):
        call(x, y)
    assert (counts.bytes / 100, counts.launches, counts.waits.total()) == (moved, operations, waits)


_QUICK = ("MARS-AdamW", "MARS-M, no clip", "LDAdam, rank d/4")


@pytest.mark.parametrize(
    "kind", [kind if kind in _QUICK else pytest.param(kind, marks=pytest.mark.exhaustive) for kind in KINDS]
)
def test_what_states_weigh_is_on_the_page(kind: str) -> None:
    assert state_row(kind) in (Path(__file__).parents[1] / "docs" / "state-types.md").read_text()
