"""A rank that is killed: the others end with an error, and the last complete checkpoint continues bit for bit."""

from __future__ import annotations

import os
import random
import signal
import time
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import deepspeed
import ds_harness as ds
import numpy as np
import pytest
import torch.distributed as dist
import torch.multiprocessing as mp
from ranks import run_ranks

TYPES = ("MARS-AdamW", "LDAdam", "MKOR")
EVENTS = ("forward", "update", "save")
# The others must notice within this time; gloo does as soon as the connection drops.
NOTICE_SECONDS = 60.0


def _job(name: str, stage: int) -> ds.Job:
    job = next(job for job in ds.jobs() if job.name == name)
    return replace(job, config={**job.config, "zero_optimization": {"stage": stage}})


def _die_at(engine: Any, event: str, count: int) -> None:
    """Kill this process, without a chance to clean up, at the ``count``-th call of something."""
    owner, name = {
        "forward": (engine.module, "forward"),
        "update": (engine.basic_optimizer, "_update"),
        "save": (engine.checkpoint_engine, "save"),
    }[event]
    original, calls = getattr(owner, name), [0]

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == count:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)

    setattr(owner, name, wrapped)


def _victim_run(
    rank: int, world: int, job: ds.Job, folder: str, store: str, victim: int, event: str, count: int, pipe: Connection
) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    deepspeed.init_distributed("gloo")
    try:
        engine = ds.engine_of(job, world)
        if rank == victim:
            _die_at(engine, event, count)
        for step in range(ds.STEPS):
            ds.train_step(engine, rank, world, step)
            engine.save_checkpoint(folder)
        pipe.send("finished")
    except BaseException as error:
        pipe.send(f"{type(error).__name__}: {error}")
        os._exit(1)


def _resume(rank: int, world: int, job: ds.Job, folder: str | None) -> tuple[int, dict[str, np.ndarray]]:
    deepspeed.init_distributed("gloo")
    engine = ds.engine_of(job, world)
    if folder is not None:
        path, _ = engine.load_checkpoint(folder)
        assert path is not None
    first = engine.global_steps
    for step in range(first, ds.STEPS):
        ds.train_step(engine, rank, world, step)
    weights = ds.model_weights(engine)
    engine.destroy()
    return first, weights


def _random_point(index: int) -> tuple[str, int, str, int, int]:
    """(type, stage, event, victim, count): every event and stage occurs among ten points."""
    generator = random.Random(index)
    event = EVENTS[index % len(EVENTS)]
    stage = (2, 3, 1)[index // len(EVENTS) % 3]
    # Rank 0 names a checkpoint: only another rank's death while saving can leave an incomplete one behind.
    victim = 1 if event == "save" and index != 8 else generator.randrange(2)
    per_step = {"forward": ds.ACCUMULATION, "update": 1, "save": 1}[event]
    return TYPES[index % len(TYPES)], stage, event, victim, generator.randint(3, 7) * per_step + 1


@pytest.mark.parametrize(
    "index", [pytest.param(i, marks=pytest.mark.slow if i in (2, 4) else pytest.mark.exhaustive) for i in range(10)]
)
def test_killed_rank(tmp_path: Path, index: int) -> None:
    name, stage, event, victim, count = _random_point(index)
    job, folder = _job(name, stage), str(tmp_path / "checkpoints")
    context = mp.get_context("fork")
    pipes = [context.Pipe(duplex=False) for _ in range(2)]
    ranks = [
        context.Process(
            target=_victim_run,
            args=(rank, 2, job, folder, str(tmp_path / "store"), victim, event, count, pipes[rank][1]),
        )
        for rank in range(2)
    ]
    for process in ranks:
        process.start()
    ranks[victim].join(120)
    assert ranks[victim].exitcode == -signal.SIGKILL, "the chosen event did not come"
    start = time.monotonic()
    survivor = 1 - victim
    ranks[survivor].join(NOTICE_SECONDS)
    waited = time.monotonic() - start
    hung = ranks[survivor].is_alive()
    if hung:
        ranks[survivor].kill()
    assert not hung, f"rank {survivor} was still waiting {waited:.0f} s after its peer died"
    assert ranks[survivor].exitcode == 1
    assert pipes[survivor][0].poll(), "the survivor must say what happened"
    assert pipes[survivor][0].recv() != "finished"

    first, resumed = run_ranks(2, _resume, job, folder)[0]
    _, uninterrupted = run_ranks(2, _resume, job, None)[0]
    assert 0 < first < ds.STEPS
    for key, value in uninterrupted.items():
        np.testing.assert_array_equal(resumed[key], value, err_msg=key)
