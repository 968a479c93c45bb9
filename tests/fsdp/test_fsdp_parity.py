"""Every optimizer follows one process, however torch shards the model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import once, run_ranks
from shard_settings import SETTINGS
from sharded_models import CLASSES, Network, Run
from torch import Tensor

STEPS = 5
F64, F32 = torch.float64, torch.float32
# What is kept in 8 bits is rounded run by run.
EXACT = [case for case in CLASSES if "8bit" not in case]
# Of the others there is one of each kind; test_fsdp_grid has every type in every setting.
KINDS = ["mars-adamw", "mars-m", "sonew-4", "ldadam", "mkor-h"]
ALL = ("rows-3", "tensor-2")
# Their kinds of meshes are run on two or three ranks in any case.
LONG = ("experts-4", "strided-experts-4", "rows-4")
CELLS = {(setting, F64): EXACT if setting in ALL else KINDS for setting in SETTINGS}
CELLS[("rows-3", F32)] = [*KINDS, "ldadam-8bit"]
Weights = dict[str, Tensor]
Shapes = dict[tuple[int, str], tuple[int, ...]]


def _train(case: str, setting: str | None, dtype: torch.dtype) -> tuple[Weights, list[str], Shapes]:
    run = Run(case, setting, dtype).train(STEPS)
    states = enumerate(run.optimizer.state.values())
    shapes = {
        (at, name): tuple(value.shape) for at, state in states for name, value in state.items() if name != "matrix"
    }
    return run.weights(), list(run.optimizer.matrix_states), shapes


def _train_all(rank: int, world: int, setting: str, dtype: torch.dtype) -> dict[str, Any]:
    return {case: _train(case, setting, dtype) for case in CELLS[setting, dtype]}


@once
def _ranks(setting: str, dtype: torch.dtype) -> list[dict[str, Any]]:
    return run_ranks(SETTINGS[setting].world, _train_all, setting, dtype)


@once
def _alone(case: str, dtype: torch.dtype) -> tuple[Weights, list[str], Shapes]:
    return _train(case, None, dtype)


def _difference(found: Weights, expected: Weights) -> float:
    """Relative to the largest change; of NaN, infinite."""
    start = dict(Network().to(next(iter(expected.values())).dtype).named_parameters())
    change = max(float((expected[name] - start[name]).detach().abs().max()) for name in expected)
    differences = torch.stack([(found[name] - expected[name]).abs().max() for name in expected])
    return float(differences.nan_to_num(nan=torch.inf).max()) / change


@pytest.mark.parametrize(
    ("setting", "dtype", "case"),
    [
        pytest.param(
            *(setting, dtype, case),
            id=f"{setting}-{str(dtype)[6:]}-{case}",
            marks=[pytest.mark.exhaustive] * (setting in LONG),
        )
        for (setting, dtype), cases in CELLS.items()
        for case in cases
    ],
)
def test_follows_one_process(setting: str, dtype: torch.dtype, case: str) -> None:
    expected, keys, shapes = _alone(case, dtype)
    outcomes = [outcome[case] for outcome in _ranks(setting, dtype)]
    bound = 1e-10 if dtype is F64 else 0.3 if "8bit" in case else 2e-4
    assert max(_difference(weights, expected) for weights, _, _ in outcomes) <= bound
    # Every rank has all element states, which have the parameters' shapes; matrix states are their owners' alone.
    # Those in 8 bits are bytes of the part, in a step.
    assert "8bit" in case or all(found == shapes for _, _, found in outcomes)
    held = [key.partition("[")[0] for _, owned, _ in outcomes for key in owned]
    assert set(held) == {key.partition("[")[0] for key in keys}
