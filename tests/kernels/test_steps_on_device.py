"""Kernels whose steps' numbers lie on the device: as with numbers of the host, and in what a graph repeats."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from given_gradients import Training
from graph_recorder import Recorder, capturing, launches_recorded
from torch import Tensor
from triton_runs import assert_runs_close, runs

from rankwise import MARS, LDAdam, SONew
from rankwise.comm.exchange import MatrixExchange
from rankwise.kernels import lists as foreach
from rankwise.kernels import triton
from rankwise.kernels.dispatch import using
from rankwise.kernels.passes import Pass, Scalars
from rankwise.ldadam import rule as updates

pytest.importorskip("triton")

from triton_interpreter import kernel_modules  # noqa: E402

from rankwise.kernels.triton import segments, tables  # noqa: E402
from rankwise.ldadam import low_rank_matrices  # noqa: E402
from rankwise.ldadam.cuda.grouped_products import table_of_pairs  # noqa: E402
from rankwise.sonew.cuda import sonew_directions  # noqa: E402

LENGTHS = (130, 0, 1, 64, 2100)
STEPS = (1, 7, 2, 1000, 3)
BETAS = (0.9, 0.99)
COUNTS = torch.tensor(STEPS, dtype=torch.float32)


def fields(count: int) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(count)
    found = [[value.clone() for value in runs(LENGTHS, generator)] for _ in range(count)]
    found[-1] = [value.square() + 0.1 for value in found[-1]]
    return found


def _as_one_by_one(step: Callable[..., Any], start: list[list[Tensor]], count: int) -> None:
    """A call with tensors of numbers, and one with a number for each run."""
    together = [[value.clone() for value in field] for field in start]
    step(together, COUNTS[:count])
    for index, number in enumerate(STEPS[:count]):
        alone = [[field[index].clone()] for field in start]
        step(alone, number)
        assert_runs_close([field[index] for field in together], [field[0] for field in alone], 1e-6)


@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1)])
@pytest.mark.parametrize("module", [foreach, triton], ids=["foreach", "triton"])
def test_adamw(module: ModuleType, lr: Any, interpreter: None) -> None:
    options = {"lr": lr, "betas": BETAS, "eps": 1e-3, "weight_decay": 0.1}
    names = ("param", "grad", "exp_avg", "exp_avg_sq")

    def step(lists: list[list[Tensor]], number: Any) -> None:
        module.run(Pass("adamw", dict(zip(names, lists, strict=True)), Scalars(**options, step=number)))

    _as_one_by_one(step, fields(4), len(STEPS))


@pytest.mark.parametrize("module", [foreach, triton], ids=["foreach", "triton"])
def test_mars_adamw(module: ModuleType, interpreter: None) -> None:
    options: dict[str, Any] = {"k": 0.4, "lr": 0.1, "betas": BETAS, "eps": 1e-3, "weight_decay": 0.1, "advance": True}
    names = ("param", "grad", "reference", "exp_avg", "exp_avg_sq")

    def step(lists: list[list[Tensor]], number: Any) -> None:
        factors = torch.full((len(lists[0]),), 0.5)
        module.run(Pass("adamw", dict(zip(names, lists, strict=True)), Scalars(**options, step=number), factors))

    _as_one_by_one(step, fields(5), len(STEPS))


class Place(NamedTuple):
    start: int
    chain: int | None


@pytest.mark.parametrize("graft", ["adam", "adam_official", "momentum"])
@pytest.mark.parametrize("band", [0, 1, 4])
def test_sonew(band: int, graft: str, interpreter: None) -> None:
    start = fields(3 + band)
    start[2], start[-1] = [value.square() + 1.0 for value in start[2]], start[-1]
    for field in start[3:]:
        for value in field:
            value.mul_(0.1)
    squares: list[Tensor] = []

    def step(lists: list[list[Tensor]], number: Any) -> None:
        count = len(lists[0])
        found = sonew_directions(
            [Place(0, 64)] * count,
            *lists[:3],
            lists[3:],
            [None] * count,
            betas=BETAS,
            eps=1e-2,
            gamma=1e-2,
            step=number,
            graft=graft,
            graft_eps=1e-3,
            out=lists[0],
        )
        squares.append(found)

    _as_one_by_one(step, start, len(STEPS))
    torch.testing.assert_close(squares[0], torch.cat(squares[1:], dim=1), rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("feedback", [True, False])
def test_low_rank_moments(feedback: bool) -> None:
    form = updates.low_rank_moments
    projected, first = torch.randn(2, 3, 4, 70, generator=torch.Generator().manual_seed(0))
    second = first.square() * 3 + 0.1
    rotation = torch.linalg.qr(torch.randn(3, 4, 4, generator=torch.Generator().manual_seed(1)))[0].contiguous()
    counts, written = torch.tensor([2, 1000, 5]), torch.tensor([0.9, 0.8, 0.9], dtype=torch.float64)
    found = form(projected, rotation, first, second, counts, BETAS, 1e-3, feedback, written)
    for index in range(3):
        one = (projected[index], rotation[index], first[index], second[index])
        for numbers in ((int(counts[index]), float(written[index])), (counts[index], written[index])):
            alone = form(*one, numbers[0], BETAS, 1e-3, feedback, numbers[1])
            assert_runs_close([value[index] for value in found], alone, 1e-6)


def test_there_is_a_number_for_every_run() -> None:
    lists = dict(zip(("param", "grad", "exp_avg", "exp_avg_sq"), fields(4), strict=True))
    with pytest.raises(ValueError, match="one for each"):
        Pass("adamw", lists, Scalars(step=COUNTS[:2]))


# --- whole steps, repeated ------------------------------------------------------------------------------------------

KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "mars-adamw": (MARS, {"variant": "adamw"}),
    "mars-lion": (MARS, {"variant": "lion"}),
    "mars-muon": (MARS, {"variant": "muon", "ns_dtype": "float32"}),
    "mars-muon-cans": (MARS, {"variant": "muon", "ns_dtype": "float32", "ns_coefficients": "cans"}),
    "sonew-0": (SONew, {"band": 0}),
    "sonew-1": (SONew, {"band": 1}),
    "sonew-4": (SONew, {"band": 4, "graft": "momentum"}),
    "ldadam": (LDAdam, {"rank": 3}),
    "ldadam-bf16-error": (LDAdam, {"rank": 3, "error_dtype": "bfloat16"}),
    "ldadam-int8-error": (LDAdam, {"rank": 3, "error_dtype": "int8"}),
    "ldadam-no-error": (LDAdam, {"rank": 3, "error_feedback": False}),
}


def training(name: str, **overrides: Any) -> Training:
    kind, options = KINDS[name]
    return Training(kind, {**options, **overrides}, (9, 12, 9, 12))


@pytest.mark.parametrize("name", KINDS)
def test_replays_are_steps(name: str, interpreter: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MatrixExchange, "one_by_one_on", ())
    # LDAdam's captured steps multiply in float32, its others bfloat16 halves, unless they come in stacks.
    monkeypatch.setattr(low_rank_matrices, "steps_in_place_for", lambda device, dtype: None)
    run, twin = training(name, capturable=True), training(name)
    with using(triton):
        for each in (run, twin):
            each.step(0)
            each.step(1)
        run.prepare(2)
        graph = Recorder()
        caches = (tables.table_of, segments.planned_table, table_of_pairs)
        known = [cache.cache_info() for cache in caches]
        with launches_recorded(graph, kernel_modules()), capturing(), graph:
            run.optimizer.step()
        assert [cache.cache_info() for cache in caches] == known, "a graph's tables are its own"
        for index in (3, 4):
            run.prepare(index)
            graph.replay()
        for index in (2, 3, 4):
            twin.step(index)
    assert_runs_close(run.values(), twin.values(), 4e-3 if "-error" in name and "no" not in name else 2e-5)


def test_tables_of_tiles_must_be_there_before_a_graph(interpreter: None) -> None:
    run = training("mars-adamw", capturable=True)
    with using(foreach):
        run.step(0)
    from rankwise.kernels.triton import segments

    segments.tiles_of.cache_clear()
    with using(triton), capturing(), pytest.raises(RuntimeError, match="sizes that no earlier step has seen cannot be"):
        run.optimizer.step()
