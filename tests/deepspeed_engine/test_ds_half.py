"""bf16 and fp16 under every wrapper: the fp32 master weights follow one process, skipped steps leave no trace."""

from __future__ import annotations

import functools
from dataclasses import replace

import deepspeed
import numpy as np
import pytest
import torch
from deepspeed.accelerator import get_accelerator
from ds_harness import (
    STEPS,
    TYPES,
    Job,
    Record,
    digest,
    engine_of,
    error,
    first_statistics,
    jobs,
    mid_row_cuts,
    noise_response,
    ours,
    replay_error,
    replay_tolerance,
    run_all,
    run_plain,
    train_step,
    whole,
)
from ranks import run_ranks

from rankwise.options.validation import OptionError

FP32_ACCUMULATION = {"data_types": {"grad_accum_dtype": "fp32"}}
WRAPPERS = {
    "FP16_UnfusedOptimizer": (0, {}),
    "stage1": (1, {}),
    "stage2": (2, {}),
    "stage3": (3, {}),
    "BF16_Optimizer": (1, FP32_ACCUMULATION),
}
ALLOWED = 10.0
# Where a rule answers to rounding more strongly than AdamW in one process already (a flipped sign is a whole step), it
# is measured against that answer. bf16 rounds to 2^-9.
ALLOWED_RESPONSE = 3.0
ROUNDING = 2.0**-9


@functools.cache
def plain(name: str) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    return run_plain(job_of(name))


@functools.cache
def own_response(name: str) -> float:
    return noise_response(job_of(name), ROUNDING)


def job_of(name: str) -> Job:
    return next(job for job in jobs(dtype=torch.bfloat16) if job.name == name)


@pytest.mark.slow
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_bf16_master_weights_follow_one_process(wrapper: str) -> None:
    stage, config = WRAPPERS[wrapper]
    cell = jobs(dtype=torch.bfloat16, config=config)
    results = run_ranks(2, run_all, cell, {"stage": stage})
    end_to_end = {}
    for index, job in enumerate(cell):
        ranks: list[Record] = [rank[index] for rank in results]
        initial, expected = plain(job.name)
        end_to_end[job.name] = error(ranks[0].master, expected, initial)
        if job.is_reference:
            continue
        # The construction-time step of some wrappers has changed neither weight nor state.
        start, final = whole(record.initial for record in ranks), whole(record.final for record in ranks)
        assert all(np.array_equal(start[name], initial[name]) for name in initial)
        assert stage == 0 or mid_row_cuts(ranks)
        assert replay_error(job, ranks) <= replay_tolerance(job.name), job.name
        if "MKOR" in job.name:
            check_statistics(ranks, job)
        for name, values in final.items():
            rounded = torch.from_numpy(values).bfloat16().float().numpy()
            assert all(np.array_equal(record.model[name], rounded) for record in ranks)
    adamw = end_to_end.pop("AdamW")
    for name, value in end_to_end.items():
        assert value <= ALLOWED * adamw or value <= ALLOWED_RESPONSE * own_response(name), (name, value, adamw)


# --- fp16 -----------------------------------------------------------------------------------------------------------

SKIPPED = (0, 4)


def train_with_overflows(rank: int, world: int, job: Job, stage: int, overflows: bool) -> tuple[str, float, int, int]:
    """Train; before some of the steps, offer one whose gradients are infinite."""
    job = replace(job, config={**job.config, "zero_optimization": {"stage": stage}})
    engine = engine_of(job, world)
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


def overflow_main(rank: int, world: int, stage: int) -> dict[str, list[tuple[str, float, int, int]]]:
    get_accelerator().is_fp16_supported = lambda: True
    deepspeed.init_distributed("gloo")
    table = {}
    for job in ours(dtype=torch.float16):
        table[job.name] = [train_with_overflows(rank, world, job, stage, flag) for flag in (False, True)]
    return table


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_overflow_steps_leave_no_trace(stage: int) -> None:
    for table in run_ranks(2, overflow_main, stage):
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
