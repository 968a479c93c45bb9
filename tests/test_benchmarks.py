"""The measurements, as far as they can be tested without timing anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from benchmarks import communication
from benchmarks.communication import FlatPiece, Waits, measure_communication
from benchmarks.contenders import OURS, selected
from benchmarks.host import calls_of
from benchmarks.models import fill_gradients, layer_set
from benchmarks.orthogonality import measure_errors, measure_times, newton_schulz_page
from benchmarks.performance import performance_page
from benchmarks.products import measure_products, products_of
from tests.ranks import forked_ranks, run_ranks

CPU, CUDA = torch.device("cpu"), torch.device("cuda")

# --- waits -----------------------------------------------------------------------------------------------------------


class Clock:
    now = 0.0

    def perf_counter(self) -> float:
        return self.now


def test_only_what_ends_with_a_message_counts_and_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()

    class Work:
        def wait(self) -> None:
            clock.now += 1.0

    def all_reduce(values: Any, async_op: bool = False) -> Work | None:
        clock.now += 10.0
        return Work() if async_op else Work().wait()

    monkeypatch.setattr(communication, "time", clock)
    monkeypatch.setattr(dist, "Work", Work)
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    before = dist.all_reduce, Work.wait
    with Waits(CPU) as waits:
        dist.all_reduce(None)
        assert (waits.count, waits.seconds) == (1, 11.0)
        work = dist.all_reduce(None, async_op=True)
        assert (waits.count, waits.seconds) == (1, 11.0), "it has only been started"
        clock.now += 100.0
        work.wait()  # type: ignore[union-attr]
    assert (waits.count, waits.seconds) == (2, 12.0)
    assert (dist.all_reduce, Work.wait) == before
    dist.all_reduce(None)
    assert waits.count == 2


def _messages(rank: int, world: int) -> list[int]:
    """Waits seen of each kind of message that a step sends, with the real process group."""
    one, two = torch.ones(2), torch.empty(2)
    parts = [torch.empty(2) for _ in range(world)]
    calls = (
        lambda: dist.all_reduce(one),
        lambda: dist.all_reduce(one, async_op=True).wait(),
        lambda: dist.all_to_all_single(two, one),
        lambda: dist.all_to_all_single(two, one, async_op=True).wait(),
        lambda: dist.all_gather(parts, one),
        lambda: dist.all_gather_object([None] * world, rank),
        lambda: dist.reduce_scatter(two, [one] * world),
    )
    found = []
    for call in calls:
        with Waits(CPU) as waits:
            call()
        assert waits.seconds > 0.0
        found.append(waits.count)
    return found


def test_every_message_of_a_step_is_seen() -> None:
    assert run_ranks(2, _messages) == [[1] * 7] * 2


def test_what_the_optimizers_call_is_covered() -> None:
    """Collectives by name in the sources of a step; Work.wait is where the others end."""
    root = Path(__file__).resolve().parents[1] / "rankwise"
    text = "".join(path.read_text() for path in sorted(root.rglob("*.py")))
    used = {name for name in dir(dist) if f"dist.{name}(" in text and name.startswith(("all_", "reduce", "broadcast"))}
    assert used == set(communication._COLLECTIVES)


# --- the layout ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 2, 3, 7])
def test_pieces_hold_every_element_once(world: int) -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1, bias=False))
    found = {name: torch.full_like(parameter, torch.nan).view(-1) for name, parameter in model.named_parameters()}
    for rank in range(world):
        piece = FlatPiece(model, rank, world)
        assert piece.tensor.numel() == -(-25 // world)
        for part in piece.contents(piece.tensor).slices:
            run = found[part.key][part.start : part.end]
            assert run.isnan().all()
            run.copy_(piece.tensor[part.offset :][: part.end - part.start])
    for name, parameter in model.named_parameters():
        assert torch.equal(found[name].view_as(parameter), parameter)


@pytest.mark.slow
def test_communication_of_real_ranks(tmp_path: Path) -> None:
    names = ["MARS-AdamW", "MKOR"]
    with forked_ranks():
        rows = measure_communication("tiny", CPU, 2, 1, names)
    assert [row["name"] for row in rows] == names
    for row in rows:
        assert 0.0 < row["waited_seconds"] <= row["most_waited_seconds"] < row["seconds"]
        assert 0.0 < row["host_seconds"] < row["seconds"] and row["ranks"] == 2 and row["peak_bytes"] == 0
    assert rows[0]["waits"] == 1, "the norm of the corrected gradients"
    assert performance_page(rows).count("## Exposed communication, tiny on 2 ranks") == 1


# --- the host's share ------------------------------------------------------------------------------------------------


# Calls of functions for every further tensor, and for every further shard of one.
CALLS = {
    "MARS-AdamW": (54, 0),
    "MARS-Lion": (50, 0),
    "MARS-M": (50, 5),
    "SONew, tridiagonal": (63, 9),
    "LDAdam, rank 4": (64, 28),
    "MKOR": (70, 24),
    "MKOR, factor step": (104, 57),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_host_calls_no_more_functions_than_this(name: str) -> None:
    """Deterministic where times are not: what the host does for a tensor grows with what it calls."""
    pytest.importorskip("triton")
    further = [(calls_of(name, 120, shards) - calls_of(name, 20, shards)) / 100 for shards in (False, True)]
    assert further[0] <= CALLS[name][0] + 3 and further[1] <= CALLS[name][1] + 3, further


def test_the_page_of_newton_schulz_has_every_set_form_and_shape() -> None:
    errors, times = measure_errors(), measure_times(1, ((4, 6), (4, 16)))
    by_key = {(row["name"], row["steps"], row["lowest"], row["dtype"]): row["error"] for row in errors}
    assert by_key["cans", 5, 0.01, "float64"] < 0.3 < by_key["published", 5, 0.01, "float64"]
    assert by_key["polar_express", 8, 0.1, "float64"] < 1e-12
    shares = {tuple(row["shape"]): row["share"] for row in times if row["form"] != "matrices" and row["steps"] == 5}
    assert shares[4, 16] < shares[4, 6] == 1.0, "one and a half times as long as wide is where both are as much work"
    page = newton_schulz_page(errors, times)
    assert page.count("| `cans` |") == 3 + 2 and page.count("| `published` |") == 1
    assert page.count("(0.67)") == 2 and "4 x 16" in page


@pytest.mark.parametrize(("name", "count"), [("MARS-M", 15 * 8), ("MKOR", 4 * 8)])
def test_steps_are_timed_over_exactly_their_products(name: str, count: int) -> None:
    """Of two blocks of four matrices each, in float32 whatever the step takes."""
    (row,) = measure_products("tiny", CPU, 1, [name])
    assert row["products"] in ("bfloat16", "float32") and row["product_ratio"] > 0
    (contender,) = selected(OURS, [name])
    model = layer_set("tiny")
    fill_gradients(model, 0)
    optimizer = contender.build(model)
    optimizer.step()
    found = [product() for product in products_of(optimizer, CPU)]
    assert len(found) == count and {matrix.dtype for matrix in found} == {torch.float32}
    assert max(matrix.shape[1] for matrix in found) == 4 * 64 + (name == "MKOR")
