"""In fp16 skipped steps leave no trace, and statistics do not carry the loss scale; see test_ds_parity for the rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import deepspeed
import numpy as np
import pytest
import torch
from deepspeed.accelerator import get_accelerator
from ds_harness import (
    KINDS,
    STEPS,
    TYPES,
    Job,
    Record,
    at_stage,
    digest,
    engine_of,
    first_statistics,
    ours,
    replay_error,
    replay_tolerance,
    run_all,
    train_step,
)
from ranks import run_ranks

from rankwise.options.validation import OptionError

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
    deepspeed.init_distributed("gloo")
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


def check_statistics(ranks: list[Record], job: Job) -> None:
    """The first step's reduced statistics are those of one fp32 process, up to the half type's own rounding."""
    for key, (inputs, outputs, count) in first_statistics(replace(job, dtype=torch.float32)).items():
        for record in ranks:
            found_inputs, found_outputs, found_count = record.statistics[0][key]
            assert found_count == count
            # A loss scale, a number of ranks or of micro-batches left in would be a factor of at least 2.
            assert np.abs(found_inputs - inputs).max() <= 0.05 * np.abs(inputs).max()
            assert np.abs(found_outputs - outputs).max() <= 0.05 * np.abs(outputs).max()


def fp16_job(stage: int) -> Job:
    # DeepSpeed's stage 0 neither applies a loss scale nor leaves it out of the gradients, so only 1 is accepted there.
    config = {"fp16": {"loss_scale": 1.0}} if stage == 0 else {}
    return Job("MKOR", TYPES["MKOR"], dtype=torch.float16, steps=4, config=config)


def fp16_main(rank: int, world: int, stage: int) -> tuple[Record, str]:
    get_accelerator().is_fp16_supported = lambda: True
    record = run_all(rank, world, [fp16_job(stage)], {"stage": stage})[0]
    try:
        engine_of(replace(fp16_job(1), config={"zero_optimization": {"stage": stage}}), world)
        return record, "accepted"
    except OptionError as failure:
        return record, str(failure)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_statistics_do_not_carry_the_loss_scale(stage: int) -> None:
    results = run_ranks(2, fp16_main, stage)
    ranks = [record for record, _ in results]
    check_statistics(ranks, fp16_job(stage))
    assert replay_error(fp16_job(stage), ranks) <= replay_tolerance("MKOR")
    for _, message in results:
        if stage:
            assert message == "accepted"
        else:
            parts = ("zero_optimization.stage=0 is invalid", "loss scale (256)", "use stage 1")
            assert all(part in message for part in parts), message
