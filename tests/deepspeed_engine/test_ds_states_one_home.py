"""States that are removed from an engine's optimizer begin afresh, at every stage, as AdamW's do."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from unittest import mock

import deepspeed
import pytest
import torch
from deepspeed.utils import safe_get_full_fp32_param
from ds_harness import run_ranks
from torch import Tensor, nn

import deepspeed_plugin  # noqa: F401  registers the types
from rankwise.comm import votes

TYPES: dict[str, dict[str, Any]] = {
    "AdamW": {"lr": 1e-2, "torch_adam": True},
    "LDAdam": {"lr": 1e-2, "rank": 4},
    "MKOR": {"lr": 1e-2, "factor_dtype": "float32"},
}


def _engine(kind: str, stage: int, weights: dict[str, Tensor] | None = None) -> Any:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 8))
    if weights is not None:
        model.load_state_dict(weights)
    config = {
        "train_micro_batch_size_per_gpu": 12,
        "optimizer": {"type": kind, "params": TYPES[kind]},
        "zero_optimization": {"stage": stage},
        "steps_per_print": 10**9,
    }
    return deepspeed.initialize(model=model, config=config)[0]


def _weights(engine: Any, stage: int) -> dict[str, Tensor]:
    def whole(parameter: Tensor) -> Tensor:
        found: Tensor = safe_get_full_fp32_param(parameter) if stage else parameter.detach()
        return found.clone()

    return {name: whole(parameter) for name, parameter in engine.module.named_parameters()}


def _steps(engine: Any, rank: int, numbers: range) -> None:
    for number in numbers:
        source = torch.Generator().manual_seed(10 * number + rank)
        engine.backward(engine(torch.randn(12, 16, generator=source)).square().mean())
        engine.step()


def _after(rank: int, world: int, kind: str, stage: int, ranks: tuple[int, ...]) -> float:
    engine = _engine(kind, stage)
    _steps(engine, rank, range(13))
    fresh = _engine(kind, stage, _weights(engine, stage))
    if rank in ranks:
        getattr(engine.optimizer, "optimizer", engine.optimizer).state.clear()
    with mock.patch.object(votes, "PATIENCE", timedelta(seconds=120 if len(ranks) == world else 3)):
        _steps(engine, rank, range(50, 62))
    _steps(fresh, rank, range(50, 62))
    ours, theirs = _weights(engine, stage), _weights(fresh, stage)
    return max(float((ours[name] - theirs[name]).abs().max()) for name in ours)


def _all(rank: int, world: int, kinds: list[str], stage: int) -> list[float]:
    return [_after(rank, world, kind, stage, (0, 1)) for kind in kinds]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_cleared_states_begin_afresh(stage: int) -> None:
    for gaps in run_ranks(2, _all, list(TYPES), stage):
        assert dict(zip(TYPES, gaps, strict=True)) == dict.fromkeys(TYPES, 0.0)


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.exhaustive), 3])
def test_a_rank_that_clears_them_alone_keeps_none_waiting(stage: int) -> None:
    """It goes on with the others, whose states are not fresh."""
    assert min(run_ranks(2, _after, "MKOR", stage, (1,))) > 0
