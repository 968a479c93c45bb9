"""Plays the cells of a framework in ranks that are started once; a cell that hangs or kills its rank is named.

Ranks tell one another of every cell's end by files, since a collective would take a message of the cell before for its
own. A rank whose neighbour does not end its cell in time, because it waits for one that never comes, writes down the
cell, and all end; others are started for the cells that remain.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from book_cells import Cell, Outcome, Player, cells_of
from book_kinds import Kind
from book_runs import Run
from ranks import run_ranks

__all__ = ["cells", "play"]

PATIENCE = 90.0
"""Seconds that a cell may take with its references."""
Job = tuple[Kind, Cell]


class _Watch:
    """Ends this process when a cell takes too long, whatever the process waits for."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder, self.rank = folder, rank
        self.until = time.monotonic() + 10 * PATIENCE
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            time.sleep(0.5)
            if time.monotonic() > self.until or (self.folder / "stopped").exists():
                (self.folder / "stopped").touch()
                (self.folder / f"stopped.{self.rank}").touch()
                for child in multiprocessing.active_children():
                    child.kill()
                os._exit(1)


def _ranks(rank: int, world: int, framework: type[Run], jobs: Sequence[Job], folder: Path, thorough: bool) -> None:
    watch = _Watch(folder, rank)
    framework.start()
    player: Player | None = None
    for at, (kind, cell) in enumerate(jobs):
        if player is None or player.kind is not kind:
            player = Player(framework, kind, thorough)
        watch.until = time.monotonic() + PATIENCE
        outcome = player.outcome(cell)
        while (folder / "stopped").exists():
            time.sleep(1.0)  # what was raised is the end of another rank, and that of this one is near
        target = folder / f"{at}.{rank}"
        part = folder / f"{at}.{rank}.part"
        part.write_bytes(pickle.dumps(outcome))
        part.rename(target)
        while not all((folder / f"{at}.{other}").exists() for other in range(world)):
            time.sleep(0.0005)
    watch.until = time.monotonic() + PATIENCE
    framework.stop()


def _ended(folder: Path, at: int, world: int) -> list[Outcome | None]:
    files = [folder / f"{at}.{rank}" for rank in range(world)]
    return [pickle.loads(file.read_bytes()) if file.exists() else None for file in files]


def _joined(found: Sequence[Outcome]) -> Outcome:
    """The outcome of all ranks; where they differ, that is an error of its own."""
    first = found[0]
    for rank, other in enumerate(found):
        if (other.relation, bool(other.error), other.lacks) != (first.relation, bool(first.error), first.lacks):
            told = first.error or other.error or "they end in different bits"
            return first._replace(error=f"ranks 0 and {rank} differ: {told}", harm="ranks differ")
        if other.harm and not first.harm:
            first = first._replace(harm=f"rank {rank}: {other.harm}")
    return first


def _cells(rank: int, world: int, framework: type[Run], kind: Kind, whole: bool) -> list[Cell]:
    framework.start()
    found = cells_of(framework, kind, whole)
    framework.stop()
    return found


def cells(framework: type[Run], kind: Kind, whole: bool = False) -> list[Cell]:
    """The cells that there are in a framework, as its ranks see them."""
    return run_ranks(framework.world, _cells, framework, kind, whole)[0]


def play(framework: type[Run], jobs: Sequence[Job], thorough: bool = False) -> list[Outcome]:
    """The outcomes of cells, each of which names a hang or a death of its ranks as its error."""
    found: list[Outcome] = []
    while len(found) < len(jobs):
        rest = jobs[len(found) :]
        with tempfile.TemporaryDirectory() as name:
            folder, failure = Path(name), ""
            try:
                run_ranks(
                    framework.world, _ranks, framework, rest, folder, thorough, timeout=PATIENCE * (len(rest) + 10)
                )
            except AssertionError as error:
                failure = str(error)
            for at in range(len(rest)):
                ended = _ended(folder, at, framework.world)
                if None in ended:
                    stopped = [rank for rank in range(framework.world) if (folder / f"stopped.{rank}").exists()]
                    found.append(_broken(ended, failure, stopped))
                    break
                found.append(_joined([outcome for outcome in ended if outcome is not None]))
            else:
                assert not failure, failure
    return found


def _broken(ended: list[Outcome | None], failure: str, stopped: list[int]) -> Outcome:
    waiting = [rank for rank, outcome in enumerate(ended) if outcome is None]
    told = "; ".join(f"rank {rank}: {outcome.error or 'done'}" for rank, outcome in enumerate(ended) if outcome)
    if set(waiting) <= set(stopped):
        return Outcome(error=f"hangs: ranks {waiting} wait; {told}", harm="hangs")
    return Outcome(error=f"dies: {failure.strip().splitlines()[-1]}; {told}", harm="dies")
