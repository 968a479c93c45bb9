"""Multipliers by name, methods of decay and AdamW's length of updates: cut as Megatron cuts, and in one process."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from megatron_cells import Cell
from megatron_harness import Result, Trainer, move, opened, trained
from megatron_types import maker
from ranks import run_ranks
from test_megatron_parity import _record, _replay
from torch import Tensor

from megatron_patches.cpu import cpu_megatron

STEPS = 4
CUT = Cell(clip=0.0, tp=2, sp=True, use_distributed_optimizer=True)
RATES: dict[str, Any] = {"lr_scale": {"*embedding*": 0.1, "*qkv*": 2.0}}
JOBS: dict[str, dict[str, Any]] = {
    "mars-shampoo": {"scale": "rms", "weight_decay_method": "cautious", **RATES},
    "mars-adamw": {"weight_decay_method": "independent", **RATES},
    "ldadam": {"weight_decay_method": "cautious", **RATES},
}


def _run(cell: Cell, name: str, options: dict[str, Any], steps: int, before: Any = None) -> Result | None:
    with opened(cell, maker(name, **options)) as trainer:
        for _ in range(steps):
            trainer.train_step(before)
            _check_logged(trainer)
        return trained(trainer, 0)


def _check_logged(trainer: Trainer) -> None:
    """The rate that Megatron logs is its schedule's."""
    rates = {group["lr"] for group in trainer.optimizer.param_groups}
    assert rates == {trainer.scheduler.get_lr(group) for group in trainer.optimizer.param_groups}


def _alone(rank: int, world: int) -> dict[str, Any]:
    found = {}
    with cpu_megatron():
        for name, options in JOBS.items():
            gradients: list[dict[str, Tensor]] = []
            cell = Cell(clip=0.0)
            start = _run(cell, name, options, 0)
            end = _run(cell, name, options, STEPS, functools.partial(_record, gradients))
            plain = _run(cell, name, {}, STEPS, functools.partial(_replay, gradients))
            found[name] = (start, end, gradients, plain)
    return found


def _together(rank: int, world: int, recorded: dict[str, Any]) -> list[Result | None]:
    with cpu_megatron():
        return [
            _run(CUT, name, options, STEPS, functools.partial(_replay, recorded[name][2]))
            for name, options in JOBS.items()
        ]


@pytest.mark.slow
def test_tensor_parallel_ranks_follow_one_process() -> None:
    recorded = run_ranks(1, _alone)[0]
    results = run_ranks(2, _together, recorded)[0]
    for name, result in zip(JOBS, results, strict=True):
        start, end, _, plain = recorded[name]
        assert move(result.weights, end.weights, start.weights).largest <= (1e-6 if name == "mars-adamw" else 1e-5)
        assert move(plain.weights, end.weights, start.weights).largest > 1e-2, "the options change nothing"
        assert result.replica_gap == 0.0
