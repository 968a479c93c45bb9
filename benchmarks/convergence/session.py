"""Doing runs one after the other, and doing recorded ones again."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

from benchmarks.convergence.experiment import Contender, Experiment, Run
from benchmarks.convergence.repeats import Repeat, keep_repeat
from benchmarks.convergence.results import Results, Row, device_type
from benchmarks.convergence.runner import train
from benchmarks.convergence.search import final_runs, next_exponent, next_run, tried

__all__ = ["compare", "done", "is_begun_elsewhere", "line_of", "missing_runs", "work"]


def work(experiment: Experiment, contenders: tuple[Contender, ...], results: Results, end: float) -> Iterator[str]:
    """Do what is missing, in order, and write each row as it comes.

    Args:
        experiment: Whose runs.
        contenders: Only theirs; empty for all.
        results: To be added to.
        end: End of ``time.monotonic()``, after which no run begins.

    Yields:
        A line for each run.
    """
    while time.monotonic() < end and (run := next_run(experiment, results, contenders)) is not None:
        yield done(run, experiment.name, experiment.metric, results)


def done(run: Run, name: str, metric: str, results: Results) -> str:
    """Do a run and write its row.

    Args:
        run: It.
        name: Name of the experiment.
        metric: Which figure is told.
        results: To be added to.

    Returns:
        A line about it.
    """
    row = train(run)
    assert row is not None  # without an end
    results.write(name, row)
    return f"{name} {line_of(run, row, metric)}"


def compare(experiment: Experiment, contenders: tuple[Contender, ...], results: Results) -> Iterator[str]:
    """Do the final runs that are recorded again, and keep both figures in ``repeated.json`` of their folder.

    Args:
        experiment: Whose runs.
        contenders: Only theirs; empty for all.
        results: With what is recorded.

    Yields:
        A line for each run, with both figures.
    """
    found = False
    for contender in contenders or experiment.contenders:
        for run in final_runs(experiment, contender, results) or []:
            recorded = results.figure(run, experiment.metric)
            if recorded is not None:
                found = True
                row = train(run)
                assert row is not None
                line = line_of(run, row, experiment.metric)
                keep_repeat(results.folder, Repeat.of(experiment, contender, run.seed, recorded, row))
                yield f"{experiment.name} {contender.name}: {line}, recorded {recorded:.4f}"
    if not found:
        yield f"{experiment.name}: no fresh seeds are recorded yet; without --again they are run"


def missing_runs(experiment: Experiment, results: Results) -> tuple[int, int]:
    """Runs that are known to be missing, and contenders whose seeds come on top once their searches are over."""
    least = unknown = 0
    for contender in experiment.contenders:
        finals = final_runs(experiment, contender, results)
        if finals is not None:
            least += sum(run not in results for run in finals)
            continue
        unknown += experiment.trials > 1
        for setting in contender.settings:
            figures = tried(experiment, contender, setting, results)
            if next_exponent(figures, experiment.trials) is not None:
                least += max(1, experiment.trials - len(figures)) * len(experiment.trial_seeds)
    return least, unknown


def is_begun_elsewhere(experiment: Experiment, kind: str, results: Results) -> bool:
    """Whether an experiment, other than the ladder's, has rows of another type of device, beside which these would be.

    Args:
        experiment: It; rows of its task count, whatever their length.
        kind: Type of the device on which it is to be run.
        results: What has been run anywhere.
    """
    task = json.dumps(experiment.task, sort_keys=True)
    others = (row["run"]["task"] for row in results.rows.values() if device_type(row) != kind)
    return "corpus" not in experiment.task and any(json.dumps(one, sort_keys=True) == task for one in others)


def line_of(run: Run, row: Row, metric: str) -> str:
    """A line about a run.

    Args:
        run: It.
        row: What it gave.
        metric: Which figure is told.
    """
    figure = "diverged" if row["diverged"] else f"{row[metric]:.4f}"
    options = " ".join(f"{name}={value}" for name, value in run.options.items())
    return f"{run.optimizer} {options} lr {run.lr:.3g} steps {run.steps} seed {run.seed}: {figure}, {row['seconds']} s"
