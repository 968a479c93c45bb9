"""Fused weights on several ranks, cut anywhere, follow their twin with a weight for each matrix in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fused_networks import CASES, Framework, apart, gradients
from ranks import run_ranks

STEPS = 5
LAYOUTS = {2: ("flat", "each", "replicated", "tensor"), 3: ("flat", "each"), 4: ("tensor",)}
F64, F32 = torch.float64, torch.float32


def _follow(rank: int, world: int, dtype: torch.dtype, cases: list[str]) -> dict[tuple[str, str], Any]:
    found = {}
    for case in cases:
        for layout in LAYOUTS[world]:
            framework = Framework(layout, case, dtype, rank, world)
            for _ in range(STEPS):
                framework.step()
            found[case, layout] = framework.errors(case, STEPS), set(framework.optimizer.matrix_states)
    return found


@pytest.mark.parametrize(
    ("world", "dtype"),
    [
        (2, F64),
        (4, F64),
        pytest.param(3, F64, marks=pytest.mark.exhaustive),
        pytest.param(2, F32, marks=pytest.mark.exhaustive),
        pytest.param(4, F32, marks=pytest.mark.exhaustive),
    ],
    ids=lambda value: str(value).removeprefix("torch."),
)
def test_ranks_follow_the_twin(world: int, dtype: torch.dtype) -> None:
    for case in CASES:
        apart(case, dtype, STEPS)  # before the fork, so that no rank computes it
    ranks = run_ranks(world, _follow, dtype, list(CASES))
    for cell in ranks[0]:
        errors: dict[str, float] = {}
        for found in ranks:
            for name, error in found[cell][0].items():
                errors[name] = max(errors.get(name, 0.0), error)
        assert errors.keys() == gradients(0, dtype).keys()
        assert max(errors.values()) < (1e-10 if dtype is F64 else 1e-6), (cell, errors)
        keys = [key for found in ranks for key in found[cell][1]]
        assert len(keys) == len(set(keys)), cell
