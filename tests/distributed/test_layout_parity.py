"""Every optimizer, under every layout and number of ranks, follows one process fed the same gradients."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from ranks import once, run_ranks
from simulated import CASES, LAYOUTS, Framework, reference, run_of, whole_key, world_group

F64, F32 = torch.float64, torch.float32
STEPS = 6  # two of which move MKOR's factors
Names, Cells = tuple[str, ...], dict[tuple[int, torch.dtype], tuple[str, ...]]
# The sharper type everywhere, the other one where all is cut; what tensor parallelism cuts at two and at four ranks,
# where copies and pieces of shards come in, the rest at three, which cut a matrix in the middle of a row.
CUT = tuple(layout for layout in LAYOUTS if not layout.startswith("tensor"))
CELLS: Cells = {
    (2, F64): tuple(layout for layout in LAYOUTS if layout not in CUT),
    (3, F64): CUT,
    (4, F64): ("tensor", "tensor_copies"),
    (2, F32): ("cut",),
}
WHOLE: Cells = dict.fromkeys([(1, F64), (2, F64), (3, F64), (4, F64), (2, F32), (3, F32)], LAYOUTS)
# One for each kind of states and messages; what differs from them in formulas alone follows where all is cut.
KINDS = (
    *("mars-adamw", "mars-muon", "mars-shampoo-rms", "sonew-1-row-adam", "sonew-4-tensor-rmsprop"),
    *("ldadam-ef", "ldadam-plain", "mkor-official-adamw", "mkor-one-sided", "mkor-sketch"),
)
OTHERS = tuple(case for case in CASES if case not in KINDS)
FEW: Cells = {(2, F64): ("tensor",), (3, F64): ("cut",)}


class Outcome(NamedTuple):
    error: float
    matrix_keys: frozenset[str]
    owned: frozenset[str]
    misplaced: list[str]


def _follow(rank: int, world: int, dtype: torch.dtype, layouts: Names, cases: Names) -> dict[tuple[str, str], Outcome]:
    return {(case, layout): _run(case, layout, rank, world, dtype) for case in cases for layout in layouts}


def _run(case: str, layout: str, rank: int, world: int, dtype: torch.dtype) -> Outcome:
    expected, change, _ = reference(case, dtype, STEPS)
    framework = Framework(layout, CASES[case], dtype, rank, world, world_group())
    for _ in range(STEPS):
        framework.step()
    error = 0.0
    for piece, values in framework.pieces():
        difference = (values - run_of(expected[piece.key], piece)).abs().max()
        # A comparison with NaN is false: it must not pass.
        error = max(error, float(difference.nan_to_num(nan=torch.inf)))
    optimizer = framework.optimizer
    owned = frozenset(key for key, owner in optimizer.owners().items() if owner == rank)
    return Outcome(error / change, frozenset(optimizer.matrix_states), owned, framework.misplaced_states())


@once
def _outcomes(world: int, dtype: torch.dtype, layouts: Names, cases: Names) -> list[dict[tuple[str, str], Outcome]]:
    for case in cases:
        reference(case, dtype, STEPS)  # before the fork, so that no rank computes it
    return [_follow(0, 1, dtype, layouts, cases)] if world == 1 else run_ranks(world, _follow, dtype, layouts, cases)


def _cells(table: Cells, cases: Names, marks: Any = ()) -> list[Any]:
    return [
        pytest.param(
            *(world, dtype, layouts, cases, layout, case),
            marks=marks,
            id=f"{world}-{str(dtype).removeprefix('torch.')}-{layout}-{case}",
        )
        for (world, dtype), layouts in table.items()
        for layout in layouts
        for case in cases
    ]


@pytest.mark.parametrize(
    ("world", "dtype", "layouts", "cases", "layout", "case"),
    [*_cells(CELLS, KINDS), *_cells(FEW, OTHERS), *_cells(WHOLE, tuple(CASES), pytest.mark.exhaustive)],
)
def test_follows_one_process(
    world: int, dtype: torch.dtype, layouts: Names, cases: Names, layout: str, case: str
) -> None:
    outcomes = [outcome[case, layout] for outcome in _outcomes(world, dtype, layouts, cases)]
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
