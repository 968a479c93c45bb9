"""A long run under ZeRO-3 whose ranks are killed, stopped, become more and fewer, beside an undisturbed one."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from benchmarks.soak_page import distance
from benchmarks.soak_rank import Segment, initial_model, live

__all__ = ["RUNS", "Start", "final_weights", "planned", "soak"]

RUNS = ("undisturbed", "disturbed", "one rank")
"""The run on four ranks, the same with faults, and a run on a single rank: the same sums in another order."""

WORLD = 4
NOTICE_SECONDS = 120.0
"""Within which the others must end when a rank is gone, and all when the last step is done."""
SILENT_SECONDS = 600.0
"""Without any step taken: the ranks wait for one another."""
_LOOK_SECONDS = 1.0
"""Longest time between two looks at the ranks that is believed."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Start:
    """One start of the ranks.

    Attributes:
        world: Number of ranks.
        until: Step at which they end.
        kill: Whether a rank is killed then, at a random moment; else all save and end.
    """

    world: int
    until: int
    kill: bool


def planned(run: str, steps: int, restarts: int, seed: int, save_every: int = 50) -> list[Start]:
    """The starts of a run; those of a disturbed one are drawn, the first and the last on four ranks.

    Args:
        run: One of :data:`RUNS`.
        steps: Steps of the whole run.
        restarts: Faults of a disturbed run.
        seed: Seed of the draw.
        save_every: Steps between checkpoints; a third of the faults come while one is being written.
    """
    if run != "disturbed":
        return [Start(WORLD if run == "undisturbed" else 1, steps, False)]
    draw = random.Random(seed)
    found, world = [], WORLD
    points = draw.sample(range(2, steps - save_every), restarts)
    saves = [-(-point // save_every) * save_every for point in points[::3]]
    for until in sorted({*saves, *(point for at, point in enumerate(points) if at % 3)}):
        found.append(Start(world, until, until in saves or draw.random() < 0.6))
        if draw.random() < 0.6:
            world = draw.choice([other for other in range(1, WORLD + 1) if other != world])
    return [*found, Start(WORLD, steps, False)]


def soak(
    types: Sequence[str],
    runs: Sequence[str],
    steps: int,
    restarts: int,
    rows: Path,
    folder: Path,
    every: tuple[int, int] = (100, 50),
    seed: int = 0,
) -> Iterator[Row]:
    """Train each type in each run; what is there already is not done again, an interrupted run goes on where it was.

    Args:
        types: JSON types.
        runs: Runs of :data:`RUNS`.
        steps: Steps of every run.
        restarts: Restarts of the disturbed ones.
        rows: File of JSON lines to which every row is added as it comes.
        folder: For the checkpoints.
        every: Steps between reports of the loss, and between checkpoints.
        seed: Seed of the faults.

    Yields:
        The new rows.

    Raises:
        RuntimeError: A rank raised that lost no peer, or the ranks hang.
    """
    known = [json.loads(line) for line in rows.read_text().splitlines()] if rows.exists() else []
    for kind in types:
        for run in runs:
            label = {"type": kind, "run": run, "steps": steps}
            ended = [row for row in known if row["kind"] == "segment" and label.items() <= row.items()]
            checkpoints = _checkpoints(folder, kind, run)
            checkpoints.mkdir(parents=True, exist_ok=True)
            for index, start in list(enumerate(planned(run, steps, restarts, seed, every[1])))[len(ended) :]:
                last = steps if start.kill else start.until
                segment = Segment(kind, start.world, last, steps, every[1], every[0], str(checkpoints))
                for row in _segment(segment, start, random.Random(f"{seed} {kind} {index}")):
                    row = {**label, "segment": index, "world": start.world, **row}
                    with rows.open("a") as file:
                        file.write(json.dumps(row) + "\n")
                    yield row


def final_weights(rows: Sequence[Row], folder: Path) -> Iterator[Row]:
    """How far the weights of finished runs lie from those of the undisturbed run of their type.

    Args:
        rows: Rows of the runs.
        folder: With their checkpoints.

    Yields:
        Rows to be put to the others.
    """
    initial = {name: parameter.detach() for name, parameter in initial_model().named_parameters()}
    for kind in dict.fromkeys(row["type"] for row in rows):
        found = {run: _checkpoints(folder, kind, run) / "weights.pt" for run in RUNS}
        loaded = {run: torch.load(path, weights_only=True) for run, path in found.items() if path.exists()}
        for run in loaded.keys() - {RUNS[0]}:
            if RUNS[0] in loaded:
                apart = distance(loaded[run], loaded[RUNS[0]], initial)
                yield {"kind": "weights", "type": kind, "run": run, **apart}


def _checkpoints(folder: Path, kind: str, run: str) -> Path:
    return folder / f"{kind} {run}".replace(" ", "-").lower()


def _rank(rank: int, segment: Segment, store: str, progress: Any, pipe: Connection) -> None:
    """A rank's process."""

    def report(row: Mapping[str, Any]) -> None:
        pipe.send({"rank": rank, **row})

    try:
        live(rank, segment, store, progress, report)
    except BaseException:
        report({"kind": "raised", "text": traceback.format_exc()})
        os._exit(1)


class _Ranks:
    """The processes of one start. They are forked: this process has imported the libraries and trains nothing."""

    def __init__(self, segment: Segment) -> None:
        context = multiprocessing.get_context("fork")
        store = Path(segment.folder) / "store"
        store.unlink(missing_ok=True)
        self.progress = context.RawArray("q", [-1] * segment.world)
        pipes = [context.Pipe(duplex=False) for _ in range(segment.world)]
        self.processes = [
            context.Process(target=_rank, args=(rank, segment, str(store), self.progress, sender), daemon=True)
            for rank, (_, sender) in enumerate(pipes)
        ]
        for process in self.processes:
            process.start()
        for _, sender in pipes:
            sender.close()
        self.open = [receiver for receiver, _ in pipes]

    def rows(self, seconds: float) -> list[Row]:
        """What the ranks have said; waits so long for the first word."""
        found = []
        for receiver in wait(self.open, seconds) if self.open else []:
            try:
                found.append(receiver.recv())  # type: ignore[union-attr]
            except EOFError:
                self.open.remove(receiver)  # type: ignore[arg-type]
        return found

    @property
    def alive(self) -> int:
        """How many still run."""
        return sum(process.is_alive() for process in self.processes)

    def end(self) -> None:
        """Leave nothing behind."""
        for process in self.processes:
            if process.is_alive():
                process.kill()
            process.join()


def _segment(segment: Segment, start: Start, draw: random.Random) -> Iterator[Row]:
    begun, ranks, watch = time.monotonic(), _Ranks(segment), _Watch()
    victim = draw.randrange(start.world) if start.kill else None
    killed, first, raised = None, 0, []
    try:
        while ranks.alive or ranks.open:
            for row in ranks.rows(0.02):
                first = row.get("first", first)
                if row["kind"] == "raised":
                    raised.append(row)
                elif row["rank"] == 0 and row["kind"] != "done":
                    yield row
            reached = max(ranks.progress)
            watch.see(reached)
            if victim is not None and killed is None and reached >= start.until:
                time.sleep(draw.random() * 2.0 * watch.pace)
                os.kill(ranks.processes[victim].pid, signal.SIGKILL)  # type: ignore[arg-type]
                killed = time.monotonic()
            if raised and killed is None:
                raise RuntimeError(f"rank {raised[0]['rank']} failed at step {reached}:\n{raised[0]['text']}")
            if killed is not None and time.monotonic() - killed > NOTICE_SECONDS:
                raise RuntimeError(
                    f"{ranks.alive} ranks still wait {NOTICE_SECONDS:.0f} s after rank {victim} was killed"
                )
            if watch.silence > SILENT_SECONDS:
                raise RuntimeError(
                    f"no step was taken for {SILENT_SECONDS:.0f} s; the ranks are at {list(ranks.progress)}"
                )
    finally:
        ranks.end()
    ended = {"kind": "segment", "first": first, "last": max(ranks.progress), "seconds": time.monotonic() - begun}
    if killed is not None:
        notice = time.monotonic() - killed
        ended |= {"victim": victim, "notice_seconds": notice, "errors": sorted({_last_line(row) for row in raised})}
    elif failed := [process.exitcode for process in ranks.processes if process.exitcode]:
        raise RuntimeError(f"ranks ended with {failed} and without a word")
    yield {**ended, "end": "stop" if killed is None else "kill"}


def _last_line(row: Row) -> str:
    return str(row["text"].strip().splitlines()[-1].split(":")[0])


class _Watch:
    """How fast steps come, and how long none has."""

    def __init__(self) -> None:
        self._step, self._when, self.pace = -1, time.monotonic(), 0.05
        self._looked = self._when
        self.silence = 0.0

    def see(self, step: int) -> None:
        """Note the step reached."""
        now = time.monotonic()
        # Where this process stood still itself (suspended, say), the ranks may have stood still with it.
        self.silence += min(now - self._looked, _LOOK_SECONDS)
        self._looked = now
        if step > self._step:
            if self._step > 0:
                self.pace += 0.1 * ((now - self._when) / (step - self._step) - self.pace)
            self._step, self._when, self.silence = step, now, 0.0
