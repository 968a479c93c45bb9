"""Which run comes next where several are done side by side, what it should take, and the processes that do them."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from statistics import median
from typing import Any, NamedTuple

import torch

from benchmarks.convergence.experiment import Contender, Experiment, Run
from benchmarks.convergence.ladder import ANCHOR, CONTENDERS, FIRST, RUNGS, STEADY, Rung, experiment_of
from benchmarks.convergence.results import Results, Row
from benchmarks.convergence.runner import Place, train
from benchmarks.convergence.search import best_trial, final_runs, missing_at_once, tried
from benchmarks.convergence.session import line_of

__all__ = ["Entry", "Worker", "expected_seconds", "missing_rows", "queued", "work_beside"]

_STAGES = (
    *(("E13-1M", part, True) for part in ("trials", 1, 2, 3)),
    *(("E13-4M", part, True) for part in ("trials", 1, 2, 3)),
    *((name, "trials", False) for name in ("E13-1M", "E13-4M")),
    *((name, 1, False) for name in ("E13-1M", "E13-4M")),
    *((name, 1, first) for name in ("E13-16M-5", "E13-124M") for first in (True, False)),
    *((name, seed, False) for name in ("E13-4M", "E13-1M") for seed in (2, 3)),
    *(("E13-16M", 1, first) for first in (True, False)),
)
"""E13 by worth, see :mod:`benchmarks.convergence.ladder`; last whether it is a run of those who come first. 0.3 M is
done after all else, one contender after the other, as CPUs do it."""
_OPERATIONS = 2e14  # A second of an H200 on products of bfloat16, as far as such models reach them.
_HOST = 6e-3  # Seconds of a step beside its products: seven runs together took 52,000 steps of 1 and 4 M in 405 s.
_GRACE = 90.0  # Seconds after the end in which runs may be put aside.
Train = Callable[[Run, Place], Row | None]


class Entry(NamedTuple):
    """A run that is wanted.

    Attributes:
        experiment: Its experiment.
        contender: Name of the contender.
        run: The run.
    """

    experiment: Experiment
    contender: str
    run: Run


def queued(experiments: Sequence[Experiment], results: Results) -> list[Entry]:
    """What can be run now, in the order of its worth: E13 by its stages, and other experiments one after the other.

    Args:
        experiments: The experiments; E13's as they stand are taken from the results.
        results: What has been run.
    """
    rungs = {rung.name: rung for rung in RUNGS}
    today = [experiment_of(rungs[one.name], results) if one.name in rungs else one for one in experiments]
    entries = [
        Entry(experiment, contender.name, run)
        for experiment in today
        for contender in experiment.contenders
        for run in missing_at_once(experiment, contender, results)
    ]
    order = {experiment.name: place for place, experiment in enumerate(today)}
    return sorted(entries, key=lambda entry: (_stage(entry, results), order[entry.experiment.name]))


def _stage(entry: Entry, results: Results) -> int:
    experiment = entry.experiment
    searching = best_trial(experiment, experiment.contender(entry.contender), results) is None
    part = "trials" if searching and experiment.trials > 1 else entry.run.seed
    stage = (experiment.name, part, entry.contender.removesuffix(STEADY) in FIRST)
    return _STAGES.index(stage) if stage in _STAGES else len(_STAGES)


def expected_seconds(run: Run, results: Results, device: str) -> float:
    """Seconds of a run: the median of its like on the same device, else from its products, on an H200.

    Args:
        run: The run.
        results: What has been run.
        device: Name of the device.
    """
    rows = [row for row in results.rows.values() if row["device"] == device and Run(**row["run"]).kind == run.kind]
    if rows:
        return float(median(row["seconds"] for row in rows))
    rung = next((rung for rung in RUNGS if rung.task == run.task), None)
    if rung is None:
        return math.nan
    products = 6.0 * rung.parameters * rung.batch * rung.window
    return run.steps * (_HOST + products / _OPERATIONS)


def missing_rows(results: Results, device: str) -> Iterator[str]:
    """What E13 lacks, a line for each contender at each size that has not all its runs.

    Args:
        results: What has been run.
        device: Name of the device, whose recorded times are taken where there are any.
    """
    total = 0.0
    for rung in RUNGS:
        experiment = experiment_of(rung, results)
        there = {contender.name: contender for contender in experiment.contenders}
        for name in dict.fromkeys((*(rung.names or CONTENDERS), *there)):
            runs, seconds, waits = _lacking(experiment, there.get(name), rung, results, device)
            total += runs * seconds
            if runs:
                yield f"{rung.name} {name}: {runs} run{'s' if runs > 1 else ''} of {seconds:.0f} s" + waits
    if total:
        yield f"E13: {total / 60:.0f} minutes of an H200, one run after the other; less with some side by side"


def _lacking(
    experiment: Experiment, contender: Contender | None, rung: Rung, results: Results, device: str
) -> tuple[int, float, str]:
    """How many runs, of how many seconds, and what they wait for."""
    if contender is None:
        run = Run(rung.task, "", {}, 0.0, rung.steps, 1)
        return 1, expected_seconds(run, results, device), f", at the rate that {ANCHOR.name} finds"
    finals = final_runs(experiment, contender, results)
    (setting,) = contender.settings
    seconds = expected_seconds(experiment.run(contender, setting, 0, 1), results, device)
    if finals is not None:
        return sum(run not in results for run in finals), seconds, ""
    if experiment.trials == 1:
        return 1, seconds, ""
    done = len(tried(experiment, contender, setting, results))
    return max(1, experiment.trials - done) + len(experiment.seeds), seconds, ", or more if the best lies at the edge"


class Worker:
    """A process that does one run after the other; what breaks it, breaks nothing else."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._pool: ProcessPoolExecutor | None = None

    def begin(self, task: Train, run: Run, place: Place) -> Future[Row | None]:
        """Do a run there; a process that died since the last one is begun anew."""
        for _ in range(2):
            if self._pool is None:
                self._pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _prepare, (self._threads,))
            try:
                return self._pool.submit(task, run, place)
            except BrokenProcessPool:
                self.close()
        raise BrokenProcessPool("a process that does runs does not start")

    def close(self, kill: bool = False) -> None:
        """End the process.

        Args:
            kill: Whatever it is doing.
        """
        if self._pool is not None:
            for process in list((self._pool._processes or {}).values()) if kill else ():
                process.kill()
            self._pool.shutdown(cancel_futures=True)
            self._pool = None


def _prepare(threads: int) -> None:
    os.nice(19)
    torch.set_num_threads(threads)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End this process when the one that began it is gone: nobody would write its rows, and it holds the device."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def work_beside(
    experiments: Sequence[Experiment],
    results: Results,
    place: Place,
    beside: int,
    *,
    threads: int = 1,
    wanted: Callable[[Entry], bool] = lambda entry: True,
    task: Train = train,
) -> Iterator[str]:
    """Do what is missing, several runs at a time, and write each row as it comes.

    A run does not depend on those beside it. At the end of the time those on their way are put aside, and go on in the
    next session; runs whose like have taken longer than what is left begin after the others. A run that fails without
    a figure is left out of this session, and so is its process.

    Args:
        experiments: Whose runs.
        results: To be added to.
        place: Where runs are done, until when, and where those are put that take longer.
        beside: How many at a time.
        threads: Threads of each.
        wanted: Which entries are to be done.
        task: Does a run, in another process.

    Yields:
        A line for each run.
    """
    idle = [Worker(threads) for _ in range(beside)]
    busy: dict[Future[Row | None], tuple[Worker, Entry]] = {}
    begun: set[str] = set()
    took: dict[str, float] = {}
    try:
        while True:
            left = place.end - time.monotonic()
            if left > 0:
                entries = [one for one in queued(experiments, results) if wanted(one)]
                # What is put aside may be lost with this machine: whatever can end comes before what cannot.
                for entry in sorted(entries, key=lambda one: took.get(one.run.kind, 0.0) > left):
                    if not idle:
                        break
                    if entry.run.key not in begun:
                        begun.add(entry.run.key)
                        worker = idle.pop(0)
                        busy[worker.begin(task, entry.run, place)] = (worker, entry)
            if not busy:
                return
            patience = None if place.end == math.inf else max(0.0, place.end + _GRACE - time.monotonic())
            done = wait(busy, patience, FIRST_COMPLETED).done
            if not done:
                for worker, entry in busy.values():
                    worker.close(kill=True)
                    yield f"{_words(entry)}: no answer {_GRACE:.0f} s after the end"
                return
            for future in done:
                worker, entry = busy.pop(future)
                idle.append(worker)
                yield _ended(future, worker, entry, results, place)
                if (row := results.row(entry.run)) is not None:
                    took[entry.run.kind] = row["seconds"]
    finally:
        for worker in idle:
            worker.close()
        for worker, _ in busy.values():
            worker.close(kill=True)


def _words(entry: Entry) -> str:
    return f"{entry.experiment.name} {entry.contender}, seed {entry.run.seed}, lr {entry.run.lr:.3g}"


def _ended(future: Future[Row | None], worker: Worker, entry: Entry, results: Results, place: Place) -> str:
    try:
        row: dict[str, Any] | None = future.result()
    except Exception as error:
        worker.close()
        return f"{_words(entry)}: no figure, {type(error).__name__}: {error}"
    if row is None:
        return f"{_words(entry)}: put aside, to go on; or another process does it"
    try:
        results.write(entry.experiment.name, row)
    except OSError as error:
        told = json.dumps(row, default=list)
        return f"{_words(entry)}: not written, {error}; add this line to {entry.experiment.name}.jsonl: {told}"
    if (aside := place.file(entry.run, row["device"])) is not None:
        aside.unlink(missing_ok=True)
    return f"{entry.experiment.name} {line_of(entry.run, row, entry.experiment.metric)}"
