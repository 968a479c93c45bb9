"""In fp16 skipped steps leave no trace; see test_ds_parity for the rest."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from deepspeed.accelerator import get_accelerator
from ds_harness import (
    KINDS,
    STEPS,
    TYPES,
    Job,
    at_stage,
    digest,
    engine_of,
    ours,
    run_ranks,
    train_step,
)

STEPS_HERE, SKIPPED = 7, (0, 4)


def train_with_overflows(rank: int, world: int, job: Job, stage: int, overflows: bool) -> tuple[str, float, int, int]:
    """Train; before some of the steps, offer one whose gradients are infinite."""
    engine = engine_of(at_stage(job, stage), world)
    optimizer = engine.basic_optimizer
    kept = 0
    for step in range(job.steps):
        if overflows and step in SKIPPED:
            before = digest(optimizer)
            train_step(engine, rank, world, STEPS - 1 - step, factor=float("inf"))
            assert digest(optimizer) == before, f"{job.name} stage {stage}: a skipped step left a trace"
            kept += 1
        train_step(engine, rank, world, step)
    found = digest(optimizer)
    switched = float(getattr(optimizer, "switched", False))
    assert engine.skipped_steps == kept
    assert optimizer.state and (not job.name == "MKOR" or optimizer.matrix_states or world > 1)
    engine.destroy()
    return found, switched, kept, engine.global_steps


def overflow_main(
    rank: int, world: int, stage: int, names: Sequence[str]
) -> dict[str, list[tuple[str, float, int, int]]]:
    get_accelerator().is_fp16_supported = lambda: True
    table = {}
    for job in ours(names, dtype=torch.float16, steps=STEPS_HERE):
        table[job.name] = [train_with_overflows(rank, world, job, stage, flag) for flag in (False, True)]
    return table


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "names"), [(1, KINDS[1::2]), (2, tuple(TYPES)), (3, KINDS)])
def test_overflow_steps_leave_no_trace(stage: int, names: Sequence[str]) -> None:
    for table in run_ranks(2, overflow_main, stage, names):
        assert table.keys() == set(names)
        for name, (clean, interrupted) in table.items():
            assert interrupted[2] == len(SKIPPED)
            assert interrupted[:2] == clean[:2], f"{name}: the run with skipped steps ended elsewhere"
