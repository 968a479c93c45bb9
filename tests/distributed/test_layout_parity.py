"""Every optimizer, under every layout and number of ranks, follows one process fed the same gradients."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import pytest
import torch
from ranks import run_ranks
from simulated import CASES, LAYOUTS, Framework, reference, run_of, whole_key, world_group

F64, F32 = torch.float64, torch.float32
STEPS = 6  # two of which move MKOR's factors
# Both types in one process and on three ranks; elsewhere the sharper one.
CELLS = [(1, F64), (2, F64), (3, F64), (4, F64), (3, F32)]


class Outcome(NamedTuple):
    error: float
    matrix_keys: frozenset[str]
    owned: frozenset[str]
    misplaced: list[str]


def _follow(rank: int, world: int, dtype: torch.dtype) -> dict[tuple[str, str], Outcome]:
    return {(case, layout): _run(case, layout, rank, world, dtype) for case in CASES for layout in LAYOUTS}


def _run(case: str, layout: str, rank: int, world: int, dtype: torch.dtype) -> Outcome:
    expected, change, _ = reference(case, dtype, STEPS)
    framework = Framework(layout, CASES[case], dtype, rank, world, world_group())
    for _ in range(STEPS):
        framework.step()
    error = 0.0
    for piece, values in framework.pieces():
        difference = (values - run_of(expected[piece.name], piece)).abs().max()
        # A comparison with NaN is false: it must not pass.
        error = max(error, float(difference.nan_to_num(nan=torch.inf)))
    optimizer = framework.optimizer
    owned = frozenset(key for key, owner in optimizer.owners().items() if owner == rank)
    return Outcome(error / change, frozenset(optimizer.matrix_states), owned, framework.misplaced_states())


@functools.cache
def _outcomes(world: int, dtype: torch.dtype) -> list[dict[tuple[str, str], Outcome]]:
    for case in CASES:
        reference(case, dtype, STEPS)  # before the fork, so that no rank computes it
    return [_follow(0, 1, dtype)] if world == 1 else run_ranks(world, _follow, dtype)


def _ids(value: Any) -> str:
    return str(value).removeprefix("torch.")


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("world", "dtype"), CELLS, ids=_ids)
def test_follows_one_process(world: int, dtype: torch.dtype, layout: str, case: str) -> None:
    outcomes = [outcome[case, layout] for outcome in _outcomes(world, dtype)]
    bound = 1e-10 if dtype is F64 else 1e-6 if CASES[case].element_wise else 1e-5
    assert max(outcome.error for outcome in outcomes) <= bound
    # Matrix states exist on their owner alone.
    keys = [key for outcome in outcomes for key in outcome.matrix_keys]
    assert len(keys) == len(set(keys)) and set(map(whole_key, keys)) == reference(case, dtype, STEPS)[2]
    assert not keys or all(outcome.matrix_keys == outcome.owned for outcome in outcomes)
    assert not any(outcome.misplaced for outcome in outcomes)


@pytest.mark.parametrize("case", CASES)
def test_the_reference_moves_every_used_parameter(case: str) -> None:
    final, change, _ = reference(case, F64, STEPS)
    start = dict(Framework("replicated", CASES[case], F64).model.named_parameters())
    assert change > 1e-3
    assert all(bool((final[name] != start[name]).all()) for name in final)
