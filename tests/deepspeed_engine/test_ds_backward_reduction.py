"""MKOR's vectors travel during the backward pass of real engines, at every stage, and overflow steps drop them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ds_harness as ds
import numpy as np
import pytest
import torch
from deepspeed.accelerator import get_accelerator
from ds_harness import run_ranks

from rankwise.statistics import backward_reduction as backward_reduction

STAGES = (0, 1, 2, 3)
SMALL_BUCKETS = 30
# The fused head of a step differs in the order of its sums alone; `torch.optim.AdamW` shows as much.
LARGEST_ERROR = 2e-5


def _job(**keywords: Any) -> ds.Job:
    return ds.Job("MKOR", {**ds.TYPES["MKOR"], "update_interval": 2}, **keywords)


def _run(rank: int, world: int, stage: int) -> dict[str, Any]:
    job = replace(_job(), config={"zero_optimization": {"stage": stage}})
    engine = ds.engine_of(job, world)
    optimizer = engine.basic_optimizer
    reduction = optimizer.statistics.early
    assert reduction.group is not engine.seq_data_parallel_group
    where: list[list[bool]] = []
    state = {"in step": False}
    step, send = optimizer.step, reduction._all_reduce

    def inside(*args: Any, **kwargs: Any) -> Any:
        state["in step"] = True
        try:
            return step(*args, **kwargs)
        finally:
            state["in step"] = False

    def counted(sent: torch.Tensor) -> Any:
        where[-1].append(state["in step"])
        return send(sent)

    optimizer.step, reduction._all_reduce = inside, counted
    for index in range(job.steps):
        where.append([])
        ds.train_step(engine, rank, world, index)
    found = {"weights": ds.master_weights(engine), "where": where, "buckets": len(reduction.message_bytes)}
    engine.destroy()
    return found


def _all(rank: int, world: int) -> dict[int, dict[str, Any]]:
    backward_reduction.BUCKET_ELEMENTS = SMALL_BUCKETS
    return {stage: _run(rank, world, stage) for stage in STAGES}


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3])
def test_engines_follow_one_process(world: int) -> None:
    initial, expected = ds.run_plain(_job())
    for rank in run_ranks(world, _all):
        for stage, found in rank.items():
            assert ds.error(found["weights"], expected, initial) <= LARGEST_ERROR, stage
            assert found["buckets"] == 3
            for index, where in enumerate(found["where"]):
                # The first factor step learns how often each layer is used; later ones send early.
                early = [False, False, True] if index else [True] * 3
                assert where == ([] if index % 2 else early), (stage, index)


def _overflowing(rank: int, world: int) -> list[tuple[str, str, int]]:
    backward_reduction.BUCKET_ELEMENTS = SMALL_BUCKETS
    get_accelerator().is_fp16_supported = lambda: True
    found = []
    for stage in (1, 2, 3):
        digests = []
        for overflows in (False, True):
            job = replace(_job(dtype=torch.float16, steps=5), config={"zero_optimization": {"stage": stage}})
            engine = ds.engine_of(job, world)
            optimizer = engine.basic_optimizer
            sent: list[int] = []
            send = optimizer.statistics.early._all_reduce

            def counted(message: torch.Tensor, sent: Any = sent, send: Any = send) -> Any:
                sent.append(message.numel())
                return send(message)

            optimizer.statistics.early._all_reduce = counted
            for step in range(job.steps):
                if overflows and step in (2, 4):  # factor steps, after the first: their vectors leave early
                    before = ds.digest(optimizer)
                    count = len(sent)
                    ds.train_step(engine, rank, world, 9 - step, factor=float("inf"))
                    assert ds.digest(optimizer) == before and len(sent) > count
                ds.train_step(engine, rank, world, step)
            assert engine.skipped_steps == 2 * overflows
            digests.append(ds.digest(optimizer))
            count = len(sent)
            engine.destroy()
        found.append((digests[0], digests[1], count))
    return found


@pytest.mark.slow
def test_vectors_of_an_overflow_step_are_dropped() -> None:
    for found in run_ranks(2, _overflowing):
        for clean, interrupted, count in found:
            assert clean == interrupted
            # Three factor steps, and twice all sums anew: what had left was of a step that overflowed.
            assert count == 3 * 3 + 2


def test_the_plain_run_moves() -> None:
    initial, expected = ds.run_plain(_job())
    assert all(np.isfinite(value).all() for value in expected.values()) and ds.largest_change(initial, expected) > 1e-2
