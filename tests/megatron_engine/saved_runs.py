"""Runs that save in the middle, and what goes on from there, in the same layout or another."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from megatron_cells import Cell
from megatron_harness import Result, opened, trained
from megatron_types import maker
from ranks import run_ranks

from megatron_patches.cpu import cpu_megatron

Job = tuple[str, Cell, Cell]
BEFORE, AFTER = 2, 2


def went_on(jobs: list[Job], folder: Path, world: int = 2) -> Iterator[tuple[Job, Result, Result]]:
    """Of every job the uninterrupted run in its first cell, and the one that goes on in its second.

    Args:
        jobs: An optimizer's name and two cells.
        folder: An empty one.
        world: Ranks.
    """
    for job, (whole, again) in zip(jobs, run_ranks(world, _saved_and_resumed, jobs, folder)[0], strict=True):
        yield job, whole, again


def _saved_and_resumed(rank: int, world: int, jobs: list[Job], folder: Path) -> list[tuple[Result, Result]]:
    found = []
    with cpu_megatron():
        for index, (name, cell, other) in enumerate(jobs):
            target = folder / str(index)
            target.mkdir(exist_ok=True)
            with opened(cell, maker(name)) as trainer:
                trained(trainer, BEFORE)
                trainer.save(target)
                whole = trained(trainer, AFTER)
            with opened(other, maker(name)) as trainer:
                trainer.load(target)
                found.append((whole, trained(trainer, AFTER)))
    return found
