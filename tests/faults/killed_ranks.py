"""A rank is killed while others train with it: what they do, and what the last checkpoint is worth."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import deepspeed
import ds_harness as ds
import numpy as np
import torch.distributed as dist
import torch.multiprocessing as mp
from seeing import told

from rankwise.step.matrices import _MatrixStep

EVENTS = ("backward", "exchange", "step", "save")
# The others must notice within this time; gloo does as soon as the connection drops.
NOTICE_SECONDS = 60.0
START_SECONDS = 240.0


@dataclass(frozen=True)
class Kill:
    """A run of which one rank dies.

    Attributes:
        job: What two ranks train; they save after every step.
        event: One of :data:`EVENTS`.
        victim: The rank that dies.
        saved: How many steps are saved before.
        steps: How long the run would be.
    """

    job: ds.Job
    event: str
    victim: int
    saved: int
    steps: int


def job_of(name: str, stage: int) -> ds.Job:
    """The usual job of a type at a ZeRO stage."""
    job = next(job for job in ds.jobs() if job.name == name)
    return ds.at_stage(job, stage)


def _die_at(engine: Any, event: str, saved: int) -> None:
    """Kill this process, without a chance to clean up, when something happens in the step after those saved."""
    taken = saved + (event == "save")

    def occurs(*_: Any) -> None:
        if engine.global_steps == taken:
            os.kill(os.getpid(), signal.SIGKILL)

    if event == "backward":
        # In its midst: the gradients of what comes after this layer are there.
        engine.module.norm.register_full_backward_hook(occurs)
        return
    # Matrices lie with their owner by then, and the others wait for what becomes of them.
    owner, name = {
        "exchange": (_MatrixStep, "_updated"),
        "step": (engine.basic_optimizer, "_update"),
        "save": (engine.checkpoint_engine, "save"),
    }[event]
    original = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        occurs()
        return original(*args, **kwargs)

    setattr(owner, name, wrapped)


def _run(rank: int, world: int, kill: Kill, folder: str, store: str, pipe: Connection) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    deepspeed.init_distributed("gloo")
    try:
        engine = ds.engine_of(kill.job, world)
        if rank == kill.victim:
            _die_at(engine, kill.event, kill.saved)
        for step in range(kill.steps):
            ds.train_step(engine, rank, world, step)
            engine.save_checkpoint(folder)
        pipe.send("finished")
    except BaseException as error:
        pipe.send(f"{type(error).__name__}: {error}")
        os._exit(1)


def survivor_of(kill: Kill, folder: str, store: str) -> str:
    """Run it until the other rank has ended, too; returns what was seen of that."""
    context = mp.get_context("fork")
    pipes = [context.Pipe(duplex=False) for _ in range(2)]
    ranks = [context.Process(target=_run, args=(rank, 2, kill, folder, store, pipes[rank][1])) for rank in range(2)]
    for process in ranks:
        process.start()
    victim, survivor = ranks[kill.victim], ranks[1 - kill.victim]
    victim.join(START_SECONDS)
    died = victim.exitcode == -signal.SIGKILL
    survivor.join(NOTICE_SECONDS)
    for process in ranks:
        if process.is_alive():
            process.kill()
            process.join()
    pipe = pipes[1 - kill.victim][0]
    message = pipe.recv() if pipe.poll() else "finished"
    ended = died and survivor.exitcode == 1 and message != "finished"
    return told({f"the other rank ends with an error within {NOTICE_SECONDS:.0f} s": ended})


Weights = dict[str, np.ndarray]


def resumed(rank: int, world: int, kill: Kill, folder: str | None) -> tuple[int, Weights]:
    """First step and last weights of a run that continues from a folder, or of one that nothing happens to."""
    engine = ds.engine_of(kill.job, world)
    if folder is not None:
        path, _ = engine.load_checkpoint(folder)
        assert path is not None
    first = engine.global_steps
    for step in range(first, kill.steps):
        ds.train_step(engine, rank, world, step)
    weights = ds.model_weights(engine)
    engine.destroy()
    return first, weights


def resumption_of(rank: int, world: int, kills: Sequence[tuple[Kill, str]]) -> list[str]:
    """What was seen of runs that continue where others were killed."""
    deepspeed.init_distributed("gloo")
    found = []
    for kill, folder in kills:
        first, again = resumed(rank, world, kill, folder)
        _, straight = resumed(rank, world, kill, None)
        same = all(np.array_equal(again[name], value) for name, value in straight.items())
        found.append(told({"the last checkpoint continues bit for bit": first == kill.saved and same}))
    return found
