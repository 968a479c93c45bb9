"""Faults of running engines: overflows, late ranks, ranks that disagree, a signal."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import deepspeed
import ds_harness as ds
import numpy as np
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from killed_ranks import job_of
from seeing import Sentences, told
from torch import nn

OVERFLOWS, FIRST_POWER = 8, 12
SECONDS_LATE = 2.0
GRACE_STEP, STEPS = 2, 4
OTHER_VERSION = "0.0.9"


def storm(rank: int, world: int, folder: str) -> str:
    """Many fp16 overflows in a row; the other run is never disturbed and told the scale they end at."""
    fp16 = {"initial_scale_power": FIRST_POWER, "hysteresis": 1}
    held, goes_on, skipped = True, True, True
    for name in ("LDAdam", "MKOR"):
        job = replace(job_of(name, 2), dtype=torch.float16)
        job = replace(job, config={**job.config, "fp16": fp16})
        ends = []
        for stormy in (True, False):
            engine = ds.engine_of(job, world)
            for step in range(2):
                ds.train_step(engine, rank, world, step)
            if stormy:
                before = ds.digest(engine.basic_optimizer)
                for _ in range(OVERFLOWS):
                    ds.train_step(engine, rank, world, 2, factor=float("inf"))
                    held &= ds.digest(engine.basic_optimizer) == before
                skipped &= engine.skipped_steps == OVERFLOWS and ds.loss_scale_of(engine) == 2.0 ** (
                    FIRST_POWER - OVERFLOWS
                )
            else:
                engine.optimizer.loss_scaler.cur_scale = 2.0 ** (FIRST_POWER - OVERFLOWS)
            for step in range(2, STEPS):
                ds.train_step(engine, rank, world, step)
            ends.append((ds.digest(engine.basic_optimizer), before))
            engine.destroy()
        goes_on &= ends[0][0] == ends[1][0] != before
    return told(
        {
            "every state byte is as it was": held,
            "the scale is halved each time": skipped,
            "training goes on as in a run that only has the smaller scale": goes_on,
        }
    )


def late(rank: int, world: int, folder: str) -> str:
    """One rank sleeps, in the midst of a backward pass and before its step."""
    ends = []
    for slow in (True, False):
        engine = ds.engine_of(job_of("MKOR", 2), world)
        if slow and rank == 1:
            calls = [0]

            def dawdle(*_: Any, calls: list[int] = calls) -> None:
                calls[0] += 1
                if calls[0] == 2:
                    time.sleep(SECONDS_LATE)

            engine.module.norm.register_full_backward_hook(dawdle)
            engine.basic_optimizer.register_step_pre_hook(dawdle)
        for step in range(2):
            ds.train_step(engine, rank, world, step)
        ends.append(ds.digest(engine.basic_optimizer))
        engine.destroy()
    return told({"the others wait": True, "every bit is that of a run without it": ends[0] == ends[1]})


# --- ranks that disagree --------------------------------------------------------------------------------------------


class _Turned(ds.Net):
    """A layer of other sizes with as many elements, all of which another rank stores."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(6, 7)
        self.unused.weight = nn.Parameter(self.unused.weight.detach().reshape(6, 7).clone())


def _refusal(rank: int, world: int, job: ds.Job, words: str, patch: Any = None) -> str:
    """What comes of an engine whose ranks differ: a step that must end before it begins."""
    message, moved = "nothing was raised", False
    before: dict[str, np.ndarray] = {}
    engine = None
    try:
        with patch or nullcontext():
            engine = ds.engine_of(job, world)
            before = ds.model_weights(engine)
            ds.train_step(engine, rank, world, 0)
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
    if engine is not None:
        moved = any(not np.array_equal(value, before[name]) for name, value in ds.model_weights(engine).items())
        engine.destroy()
    assert words in message, (words, message)
    return told({f"all ranks raise, naming “{words}”": words in message, "no weight has changed": not moved})


def options(rank: int, world: int, folder: str) -> str:
    job = job_of("LDAdam", 2)
    return _refusal(
        rank, world, replace(job, params={**job.params, "rank": 3 + rank}), "rank is 3 on ranks [0], 4 on ranks [1]"
    )


def model(rank: int, world: int, folder: str) -> str:
    patch = mock.patch.object(ds, "model_of", lambda job: _Turned()) if rank == 1 else None
    return _refusal(rank, world, job_of("LDAdam", 2), "'unused.weight' has shape", patch)


def version(rank: int, world: int, folder: str) -> str:
    patch = mock.patch("rankwise.plan.planner.__version__", "0.1.0" if rank == 0 else OTHER_VERSION)
    words = f"the version of rankwise is 0.1.0 on ranks [0], {OTHER_VERSION} on ranks [1]"
    return _refusal(rank, world, job_of("LDAdam", 2), words, patch)


# --- a signal with grace --------------------------------------------------------------------------------------------


def told_to_stop(rank: int, world: int, folder: str) -> str:
    """SIGTERM reaches rank 1 in the midst of a step: the ranks agree at its end, save and stop."""
    asked = []
    before = signal.signal(signal.SIGTERM, lambda *_: asked.append(True))
    try:
        engine = ds.engine_of(job_of("LDAdam", 2), world)
        for step in range(STEPS):
            if step == GRACE_STEP - 1 and rank == 1:
                engine.module.norm.register_full_backward_hook(lambda *_: os.kill(os.getpid(), signal.SIGTERM))
            ds.train_step(engine, rank, world, step)
            stop = torch.tensor(float(bool(asked)))
            dist.all_reduce(stop, dist.ReduceOp.MAX)
            if stop:
                engine.save_checkpoint(folder)
                break
        steps = engine.global_steps
        engine.destroy()
    finally:
        signal.signal(signal.SIGTERM, before)
    return told({"all ranks save at the next step boundary and end": steps == GRACE_STEP})


def after_the_signal(rank: int, world: int, folder: str) -> str:
    """Continue, beside a run that nobody stopped."""
    ends = []
    for source in (folder, None):
        engine = ds.engine_of(job_of("LDAdam", 2), world)
        if source is not None:
            engine.load_checkpoint(source)
        for step in range(engine.global_steps, STEPS):
            ds.train_step(engine, rank, world, step)
        ends.append(ds.digest(engine.basic_optimizer))
        engine.destroy()
    return told({"the resumed run is bitwise that of one that was not stopped": ends[0] == ends[1]})


SCENARIOS: dict[str, Callable[[int, int, str], str]] = {
    "storm": storm,
    "late engine": late,
    "options of engines": options,
    "models of engines": model,
    "versions of engines": version,
    "signal": told_to_stop,
}


def seen_by_engines(rank: int, world: int, folder: str) -> Sentences:
    """What each scenario ends in; the folder is for the one that saves."""
    get_accelerator().is_fp16_supported = lambda: True
    deepspeed.init_distributed("gloo")
    return {name: scenario(rank, world, folder) for name, scenario in SCENARIOS.items()}
