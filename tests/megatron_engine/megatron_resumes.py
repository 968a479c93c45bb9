"""Trains, saves and trains on; resumes what was saved. As a script: with the Megatron that its path finds first."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from megatron_cells import Cell
from megatron_harness import Result, opened, trained
from megatron_types import maker
from ranks import run_ranks

import megatron_patches
from megatron_patches.cpu import cpu_megatron

__all__ = ["AFTER", "BEFORE", "Job", "resume", "roll_back", "save", "went_on"]

BEFORE, AFTER = 3, 2
Job = tuple[Any, ...]
"""An optimizer's name and a cell, and the class of the trainer if it is another one."""


def save(rank: int, world: int, jobs: list[Job], folder: Path) -> list[Result | None]:
    """Train, save, train on: what an uninterrupted run gives. Each job's checkpoint has its number for a name."""
    found = []
    with cpu_megatron():
        for index, (name, cell, *kind) in enumerate(jobs):
            target = folder / str(index)
            target.mkdir(exist_ok=True)
            with opened(cell, maker(name), *kind) as trainer:
                trainer.advance(BEFORE)
                trainer.save(target)
                found.append(trained(trainer, AFTER))
    return found


def resume(rank: int, world: int, jobs: list[tuple[str, Cell, Path]] | list[Any]) -> list[Result | None]:
    """Go on from checkpoints, whose folders stand behind the cells."""
    found = []
    with cpu_megatron():
        for name, cell, source, *kind in jobs:
            with opened(cell, maker(name), *kind) as trainer:
                trainer.load(source)
                found.append(trained(trainer, AFTER))
    return found


def roll_back(rank: int, world: int, jobs: list[Job], folder: Path) -> list[tuple[Result | None, Result | None]]:
    """Train, save, train on, load into the same objects, train on: what came after the first time, and the second."""
    found = []
    megatron_patches.apply()
    with cpu_megatron():
        for index, (name, cell) in enumerate(jobs):
            target = folder / str(index)
            target.mkdir(exist_ok=True)
            with opened(cell, maker(name)) as trainer:
                trainer.advance(BEFORE)
                trainer.save(target)
                whole = trained(trainer, AFTER)
                trainer.load(target)
                found.append((whole, trained(trainer, AFTER)))
    return found


def went_on(
    jobs: Sequence[tuple[Any, ...]], folder: Path, world: int = 2, end_world: int | None = None
) -> Iterator[tuple[Any, Result, Result]]:
    """Of every job the uninterrupted run in its first cell, and the one that goes on in its second.

    Args:
        jobs: An optimizer's name and two cells, and the class of the trainer if it is another one.
        folder: An empty one.
        world: Ranks.
        end_world: Ranks that go on; as many, if None.
    """
    whole = run_ranks(world, save, [(name, cell, *kind) for name, cell, _, *kind in jobs], folder)[0]
    others = [(name, other, folder / str(index), *kind) for index, (name, _, other, *kind) in enumerate(jobs)]
    yield from zip(jobs, whole, run_ranks(end_world or world, resume, others)[0], strict=True)


def _main(action: str, folder: Path) -> None:
    """Two ranks do the jobs that lie beside the checkpoints, and leave there what they found."""
    megatron_patches.apply()
    jobs: list[Job] = torch.load(folder / "jobs", weights_only=False)
    if action == "save":
        found = run_ranks(2, save, jobs, folder)[0]
    else:
        found = run_ranks(2, resume, [(*job, folder / str(index)) for index, job in enumerate(jobs)])[0]
    torch.save(found, folder / action)


if __name__ == "__main__":
    _main(sys.argv[1], Path(sys.argv[2]))
