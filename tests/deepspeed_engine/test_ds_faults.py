"""A rank that is killed: the others end with an error, and the last complete checkpoint continues bit for bit."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
import zipfile
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

from deepspeed_plugin.checkpoint import CheckpointError

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


def _zeroed(path: Path, folder: Path) -> list[str]:
    """A copy of the checkpoint for each tensor of the file that is large enough, 64 of its bytes set to zero."""
    made = []
    with zipfile.ZipFile(path) as archive:
        records = [record for record in archive.infolist() if "/data/" in record.filename and record.file_size >= 256]
    for number, record in enumerate(records):
        copy = folder / f"damaged{number}"
        shutil.copytree(path.parent, copy / path.parent.name)
        damaged = copy / path.parent.name / path.name
        content = bytearray(damaged.read_bytes())
        start = record.header_offset + 30 + int.from_bytes(content[record.header_offset + 26 :][:2], "little")
        start += int.from_bytes(content[record.header_offset + 28 :][:2], "little")
        middle = start + record.file_size // 2 - 32
        if any(content[middle : middle + 64]):
            content[middle : middle + 64] = bytes(64)
            damaged.write_bytes(content)
            made.append(str(copy))
    return made


def _load_damaged(rank: int, world: int, stage: int, folder: str) -> list[tuple[str, str, bool]]:
    """Of every damaged copy: where it is, what loading it said, and whether anything changed."""
    deepspeed.init_distributed("gloo")
    engine = ds.engine_of(_job("LDAdam", stage), world)
    for step in range(2):
        ds.train_step(engine, rank, world, step)
    engine.save_checkpoint(folder, tag="good")
    before, found = ds.digest(engine.basic_optimizer), []
    chosen: list[Any] = [None]
    if rank == 0:
        last = "*pp_rank_1_mp_rank_00_optim_states.pt"
        paths = [next(Path(folder, "good").glob(last)), next(Path(folder, "good").glob("*0_model_states.pt"))]
        chosen = [[copy for path in paths for copy in _zeroed(path, Path(folder) / path.name)]]
    dist.broadcast_object_list(chosen, src=0)
    for copy in chosen[0]:
        try:
            engine.load_checkpoint(copy, tag="good")
            told = "accepted"
        except CheckpointError as error:
            told = str(error)
        found.append((copy, told, ds.digest(engine.basic_optimizer) == before))
    path, _ = engine.load_checkpoint(folder, tag="good")
    assert path is not None
    engine.destroy()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_zeroed_bytes_are_noticed_before_anything_changes(tmp_path: Path, stage: int) -> None:
    """On every rank, whichever of them reads the file, with the file's name and the tensor's."""
    first, second = run_ranks(2, _load_damaged, stage, str(tmp_path))
    assert first == second
    for copy, told, unchanged in first:
        assert unchanged and told.startswith(f"{copy}/good/"), told
        assert "is damaged" in told and "checksum" in told, told
    text = " ".join(told for _, told, _ in first)
    for part in (
        "matrix_states",
        "element_states.0.exp_avg_sq (of ",
        "fp32_flat_groups" if stage == 3 else "single_part",
    ):
        assert part in text, text
