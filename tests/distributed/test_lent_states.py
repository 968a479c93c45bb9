"""Factors that other ranks keep for the owners of matrices: no bit of a run depends on where they lie."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from saved_files import through_a_file
from simulated import CASES, Framework, reference, run_of, world_group
from torch import Tensor

from rankwise.checkpoint.named_vectors import owned_states, restore, saved_vectors
from rankwise.comm.owner_plan import keepers_of
from rankwise.estimate import estimate
from rankwise.layout.chunked_vectors import VectorFolder, save_vectors
from rankwise.plan import state_memory

F64 = torch.float64
CASE = "mkor-official-adamw"
MOVED = 6  # steps, of which the first and the fourth move factors
CELLS = [(2, ("replicated", "flat", "tensor")), (3, ("cut",))]
MORE = [(3, ("narrowed", "replicated")), (4, ("views", "tensor_copies"))]

Outcome = dict[str, Any]


@contextmanager
def lent(every: bool = True) -> Iterator[None]:
    """Let ranks plan that every factor lies with the owner's neighbour."""

    def all_of_them(owners: Any, states: Any, held: Any, given: Any) -> dict[tuple[str, str], int]:
        return {(key, name): (owners[key] + 1) % len(held) for key, sizes in states.items() for name in sizes}

    if not every:
        yield
        return
    with patch.object(state_memory, "keepers_of", all_of_them):
        yield


def _build(layout: str, rank: int, world: int, case: str = CASE, **options: Any) -> Framework:
    known = CASES[case]
    chosen = type(known)(case, known.build, {**known.options, **options})
    return Framework(layout, chosen, F64, rank, world, world_group() if world > 1 else None)


def _weights(framework: Framework) -> list[Tensor]:
    return [tensor.detach().clone() for tensor, _ in framework.shards]


def _steps(framework: Framework, count: int) -> Framework:
    for _ in range(count):
        framework.step()
    return framework


def _same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def _continued(build: Callable[[], Framework], weights: list[Tensor], state: Any, count: int) -> Framework:
    resumed = build()
    for (tensor, _), weight in zip(resumed.shards, weights, strict=True):
        tensor.data.copy_(weight)
    resumed.optimizer.load_state_dict(through_a_file(state))
    resumed.count = count
    return resumed


def _misplaced(framework: Framework) -> list[tuple[str, str]]:
    """States that lie with neither their keeper nor, where they have none, their owner."""
    optimizer, found = framework.optimizer, []
    plans = [unit.exchange.plan for unit in optimizer.planned_units if unit.exchange is not None]
    for plan in plans:
        for key in plan.owners.keys() & optimizer.matrix_states.everything().keys():
            for name in optimizer.matrix_states.everything()[key]:
                if plan.keepers.get((key, name), plan.owners[key]) != framework.rank:
                    found.append((key, name))
    return found


def _run(rank: int, world: int, case: str, layouts: tuple[str, ...]) -> dict[str, Outcome]:
    found = {}
    for layout in layouts:
        ends, outcome = {}, {}
        for every in (False, True):
            with lent(every):
                framework = _steps(_build(layout, rank, world, case), MOVED)
                ends[every] = _weights(framework)
        plans = [unit.exchange.plan for unit in framework.optimizer.planned_units if unit.exchange is not None]
        outcome["lent"] = sum(len(plan.keepers) for plan in plans)
        outcome["misplaced"] = _misplaced(framework)
        outcome["same"] = _same(ends[False], ends[True])
        found[layout] = outcome
    return found


@pytest.mark.parametrize(
    ("world", "layouts"), [*CELLS, *(pytest.param(*cell, marks=pytest.mark.exhaustive) for cell in MORE)]
)
def test_no_bit_depends_on_where_factors_lie(world: int, layouts: tuple[str, ...]) -> None:
    reference(CASE, F64, MOVED)  # what the forks have in common
    for case in (CASE, "mkor-one-sided") if world == 2 else (CASE,):
        for ranks in run_ranks(world, _run, case, layouts):
            for layout, outcome in ranks.items():
                assert outcome["same"] and outcome["lent"] >= 4, (layout, case)
                # Between steps they take memory with their keepers alone.
                assert outcome["misplaced"] == [], layout


# --- checkpoints ----------------------------------------------------------------------------------------------------


def _resume(rank: int, world: int, layout: str) -> Outcome:
    """Saved between two moves of the factors, when lent or not, and continued lent."""

    def build() -> Framework:
        return _build(layout, rank, world)

    expected = _weights(_steps(build(), 8))
    outcome: Outcome = {}
    for before in (False, True):
        with lent(before):
            saved = _steps(build(), 2)
            state, weights = through_a_file(saved.optimizer.state_dict()), _weights(saved)
        with lent():
            resumed = _continued(build, weights, state, 2)
            # Saved once more before the factors have moved to where they are kept now.
            resumed.step()
            again = _continued(build, _weights(resumed), resumed.optimizer.state_dict(), 3)
            outcome[f"lent before: {before}"] = _same(_weights(_steps(resumed, 5)), expected)
            outcome[f"again: {before}"] = _same(_weights(_steps(again, 5)), expected)
            outcome[f"misplaced: {before}"] = not _misplaced(resumed) + _misplaced(again)
    return outcome


@pytest.mark.parametrize("layout", ["flat", "replicated"])
def test_a_checkpoint_of_owners_that_kept_all_loses_no_factor(layout: str) -> None:
    for outcome in run_ranks(2, _resume, layout):
        assert all(outcome.values()), outcome


def _stranded(rank: int, world: int) -> str:
    with lent():
        saved = _steps(_build("flat", rank, world), 2)
    resumed = _continued(lambda: _build("flat", rank, world), _weights(saved), saved.optimizer.state_dict(), 2)
    before = _weights(resumed)
    try:
        resumed.step()
    except RuntimeError as error:
        return str(error) if _same(_weights(resumed), before) else "weights have changed"
    return ""


def test_what_a_rank_kept_is_not_lost_silently_where_it_keeps_nothing() -> None:
    for told in run_ranks(2, _stranded):
        assert "but its owner would not get it now" in told


def _save(rank: int, world: int, folder: Path) -> dict[str, Any]:
    with lent():
        framework = _steps(_build("flat", rank, world), 5)
    optimizer = framework.optimizer
    state = optimizer.state_dict()
    save_vectors(saved_vectors(state, _weights(framework)), folder, world_group())
    return {"extra": optimizer.extra_state(), "names": {key: set(part) for key, part in state["matrix_states"].items()}}


def _one_unit(optimizer: Any) -> list[list[tuple[Tensor, int]]]:
    return [[(tensor, at) for at, group in enumerate(optimizer.param_groups) for tensor in group["params"]]]


def _restore(rank: int, world: int, folder: Path, extra: Any, every: bool) -> float:
    expected, change, _ = reference(CASE, F64, 9)
    with lent(every):
        framework = _build("flat", rank, world)
        optimizer = framework.optimizer
        optimizer.plan_ahead(_one_unit(optimizer))
        restore(optimizer, VectorFolder(folder), world_group(), extra)
        framework.count = 5
        _steps(framework, 4)
    errors = [(values - run_of(expected[piece.key], piece)).abs().max() for piece, values in framework.pieces()]
    return float(max(errors)) / change


def test_they_are_found_on_another_number_of_ranks(tmp_path: Path) -> None:
    saved = run_ranks(2, _save, tmp_path)
    names = [part["names"] for part in saved]
    assert names[0].keys() == names[1].keys() and all(not names[0][key] & names[1][key] for key in names[0])
    reference(CASE, F64, 9)
    assert max(run_ranks(3, _restore, tmp_path, saved[0]["extra"], True)) <= 1e-10
    assert _restore(0, 1, tmp_path, saved[0]["extra"], False) <= 1e-10


def _stored_by_rank(rank: int, world: int) -> list[dict[str, list[str]]]:
    """What owners and keepers would write, before the first step and after two of them."""
    found = []
    with lent():
        framework = _build("flat", rank, world)
        optimizer = framework.optimizer
        optimizer.plan_ahead(_one_unit(optimizer))
        for count in (0, 1, 1):
            _steps(framework, count)
            states = owned_states(optimizer)
            found.append({key: sorted(part) for key, part in states.items()})
    return found


NAMES = ["failures", *(f"{side}_{part}" for side in ("left", "right") for part in ("vectors", "weights"))]


def test_every_state_is_written_once() -> None:
    for first, second in zip(*run_ranks(2, _stored_by_rank), strict=True):
        for key in first.keys() | second.keys():
            names = [*first.get(key, ()), *second.get(key, ())]
            assert sorted(names) == sorted(NAMES), (key, names)


# --- steps that do not count, and factors that fail -----------------------------------------------------------------


def _skipped(rank: int, world: int) -> Outcome:
    """The second step and the fourth, which would have moved factors, have gradients that are not finite at first."""
    ends = {}
    kept: list[bool] = []
    for every in (False, True):
        with lent(every):
            framework = _build("flat", rank, world, skip_nonfinite=True)
            for index in range(8):
                states = copy.deepcopy(dict(framework.optimizer.matrix_states))
                if index in (1, 4):
                    with patch.object(Framework, "_filled", staticmethod(_broken)):
                        framework.step()
                    now = framework.optimizer.matrix_states
                    kept += [
                        torch.equal(now[key][name], value)
                        for key, state in states.items()
                        for name, value in state.items()
                        if key != "unused.weight"  # of which no input has come by by then
                    ]
                else:
                    framework.step()
            ends[every] = _weights(framework)
    skipped = framework.optimizer.read_health()["skipped_steps"]
    return {"same": _same(ends[False], ends[True]), "kept": kept, "skipped": skipped}


def _broken(source: dict[str, Tensor], numel: int, slices: Any) -> Tensor:
    return torch.full((numel,), float("nan"), dtype=F64)


def test_steps_that_do_not_count_leave_lent_factors_alone() -> None:
    for outcome in run_ranks(2, _skipped):
        assert outcome["same"] and outcome["skipped"] > 0
        assert outcome["kept"] and all(outcome["kept"])


def _failing(rank: int, world: int) -> Outcome:
    """A layer's inputs are not finite at some factor steps."""
    ends, failures = {}, {}
    for every in (False, True):
        with lent(every):
            framework = _build("flat", rank, world)
            optimizer = framework.optimizer
            counts = []
            for index in range(14):
                record: Any = optimizer.statistics.records["c.weight"]
                sums = partial(_sums, record.whole_sums, index in (3, 9, 12))
                with patch.object(record, "whole_sums", sums):
                    framework.step()
                counts.append(int(optimizer.matrix_states.get("c.weight", {}).get("failures", 0)))
            ends[every], failures[every] = _weights(framework), counts
    return {"same": _same(ends[False], ends[True]), "failures": failures}


def _sums(usual: Callable[[], tuple[Tensor, Tensor]], broken: bool) -> tuple[Tensor, Tensor]:
    inputs, outputs = usual()
    return inputs * float("nan") if broken else inputs, outputs


def test_factors_that_fail_are_counted_by_owners() -> None:
    ranks = run_ranks(2, _failing)
    for outcome in ranks:
        assert outcome["same"] and outcome["failures"][True] == outcome["failures"][False]
    counts = [max(pair) for pair in zip(*(outcome["failures"][True] for outcome in ranks), strict=True)]
    assert counts == [0, 0, 0, 1, 1, 1, 0, 0, 0, 1, 1, 1, 2, 2]


def _switched(rank: int, world: int) -> list[list[Tensor]]:
    ends = []
    for every in (False, True):
        with lent(every):
            framework = _build(
                "flat", rank, world, hybrid=True, hybrid_min_steps=4, hybrid_patience=1, hybrid_beta=10.0
            )
            for index in range(7):
                framework.optimizer.record_loss(1.0 / (1 + index))
                framework.step()
            assert framework.optimizer.switched and not framework.optimizer.matrix_states.everything()
            ends.append(_weights(framework))
    return ends


def test_mkor_h_drops_what_is_lent_with_the_rest() -> None:
    for without, within in run_ranks(2, _switched):
        assert _same(without, within)


def _regrouped(rank: int, world: int) -> str:
    with lent():
        framework = _steps(_build("flat", rank, world), 1)
        other = copy.copy(framework)
        other.group = dist.new_group([0, 1])
        try:
            framework.optimizer.attach(other)
        except RuntimeError as error:
            return str(error)
    return ""


def test_other_ranks_cannot_go_on_with_states_that_lie_apart() -> None:
    assert all("the group of ranks cannot change now; save" in told for told in run_ranks(2, _regrouped))


# --- the plan -------------------------------------------------------------------------------------------------------

MIB = 1 << 20


def test_the_emptiest_keep_what_the_fullest_need_not() -> None:
    states = {"a": {"left": 8 * MIB, "right": 8 * MIB}, "b": {"right": 8 * MIB}}
    assert keepers_of({"a": 0, "b": 1}, states, [32 * MIB] * 3, {}) == {("a", "left"): 2}
    # A little more than the mean is left alone, and so is what is small.
    assert keepers_of({"a": 0, "b": 1}, states, [320 * MIB] * 3, {}) == {}
    small = {key: {name: size // 8 for name, size in sizes.items()} for key, sizes in states.items()}
    assert keepers_of({"a": 0, "b": 1}, small, [4 * MIB] * 3, {}) == {}
    # What is kept already stays, whatever it is.
    given = {("b", "right"): 0, "a": 0}
    assert keepers_of({"a": 0, "b": 1}, states, [320 * MIB] * 3, given) == {("b", "right"): 0}
    # Of two that help, the smaller one, where it is enough.
    states["a"]["right"] = 32 * MIB
    assert keepers_of({"a": 0, "b": 1}, states, [64 * MIB] * 5, {}) == {("a", "right"): 2}
    assert keepers_of({"a": 0, "b": 1}, states, [288 * MIB] * 5, {}) == {("a", "left"): 2}


def _measured(rank: int, world: int) -> dict[bool, dict[str, Any]]:
    found = {}
    for every in (False, True):
        with lent(every):
            framework = _steps(_build("flat", rank, world), 1)
            optimizer, sent = framework.optimizer, []
            for count in (0, 2, 1):  # the fourth step moves factors
                _steps(framework, count)
                health = optimizer.read_health()
                sent.append((health["bytes_sent"], health["collectives"]))
            found[every] = {"held": optimizer.state_bytes()["matrix"], "sent": sent[1:], "plan": estimate(optimizer)}
    return found


def test_an_estimate_counts_what_is_kept_and_sent() -> None:
    ranks = run_ranks(2, _measured)
    for every in (False, True):
        assert [rank[every]["held"] for rank in ranks] == [p.matrix_state_bytes for p in ranks[0][every]["plan"]]
    without, within = (ranks[0][every]["sent"] for every in (False, True))
    plans = [ranks[0][every]["plan"] for every in (False, True)]

    def grown(of: Callable[[Any], int]) -> int:
        before, after = (sum(map(of, plan)) for plan in plans)
        return after - before

    usual = grown(lambda rank: rank.bytes_sent), grown(lambda rank: rank.collectives)
    periodic = grown(lambda rank: rank.periodic_bytes), grown(lambda rank: rank.periodic_collectives)
    assert usual[1] == periodic[1] == 2  # on two ranks, which have one unit
    for place, expected in enumerate((usual, tuple(map(sum, zip(usual, periodic, strict=True))))):
        assert tuple(b - a for a, b in zip(without[place], within[place], strict=True)) == expected
