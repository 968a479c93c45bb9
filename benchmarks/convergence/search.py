"""Which run comes next: a pure function of the results there are, so that a search can stop and go on anywhere."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from benchmarks.convergence.experiment import Contender, Experiment, Options, Run
from benchmarks.convergence.results import Results

__all__ = [
    "Best",
    "best_trial",
    "final_figures",
    "final_runs",
    "known_figures",
    "missing_at_once",
    "next_exponent",
    "next_run",
    "trial_runs",
    "tried",
]

_MOST_TRIALS = 20
"""After which a search gives up that finds no rate at which training does not diverge."""


class Best(NamedTuple):
    """A contender's best trial, its rate lowered by the contender's halvings."""

    setting: Options
    exponent: int
    figure: float


def next_exponent(figures: Mapping[int, float], trials: int) -> int | None:
    """The next learning rate of a search over powers of two.

    It begins with the guess and both neighbours, goes on beyond the edge at which the best lies, and widens the grid
    on the better side once the best is inside, until there were as many trials as everybody has.

    Args:
        figures: Figures of the exponents tried so far, infinity where a run diverged.
        trials: To be made in any case, three or more; one: nothing is searched.

    Returns:
        An exponent, or None if the search is over.
    """
    for first in (0, -1, 1)[:trials]:
        if first not in figures:
            return first
    if trials == 1:  # a rate that is not searched
        return None
    low, high = min(figures), max(figures)
    # Where all diverge, the lowest rate is the best of them.
    best = min(figures, key=lambda exponent: (figures[exponent], exponent))
    if best == low:
        return low - 1 if len(figures) < _MOST_TRIALS else None
    if best == high:
        return high + 1
    if len(figures) >= trials:
        return None
    return low - 1 if figures[low] <= figures[high] else high + 1


def trial_runs(experiment: Experiment, contender: Contender, setting: Options, exponent: int) -> list[Run]:
    """The runs of a trial, one per seed."""
    return [experiment.run(contender, setting, exponent, seed) for seed in experiment.trial_seeds]


def tried(experiment: Experiment, contender: Contender, setting: Options, results: Results) -> dict[int, float]:
    """Figures of the trials of a setting that the search has come to, by the exponent of the learning rate."""
    found: dict[int, float] = {}
    while (exponent := next_exponent(found, experiment.trials)) is not None:
        runs = trial_runs(experiment, contender, setting, exponent)
        figures = [results.figure(run, experiment.metric) for run in runs]
        if None in figures:
            break
        found[exponent] = statistics.fmean(figures)
    return found


def best_trial(experiment: Experiment, contender: Contender, results: Results) -> Best | None:
    """The best trial over all settings, or None before all searches are over."""
    found = []
    for index, setting in enumerate(contender.settings):
        figures = tried(experiment, contender, setting, results)
        if next_exponent(figures, experiment.trials) is not None:
            return None
        exponent = min(figures, key=lambda exponent: (figures[exponent], exponent))
        lowered = max(exponent - contender.halvings, min(figures))
        found.append((figures[exponent], index, lowered, figures[lowered]))
    _, index, exponent, figure = min(found)
    return Best(contender.settings[index], exponent, figure)


def final_runs(experiment: Experiment, contender: Contender, results: Results) -> list[Run] | None:
    """The runs that are compared, one per fresh seed, or None before the best trial is known."""
    best = best_trial(experiment, contender, results)
    if best is None:
        return None
    return [experiment.run(contender, best.setting, best.exponent, seed) for seed in experiment.seeds]


def final_figures(experiment: Experiment, contender: Contender, results: Results) -> list[float | None]:
    """What the final runs gave, by seed; empty before the best trial is known."""
    runs = final_runs(experiment, contender, results) or []
    return [results.figure(run, experiment.metric) for run in runs]


def known_figures(experiment: Experiment, contender: Contender, results: Results) -> list[float]:
    """What those of the final runs gave that have been done."""
    return [figure for figure in final_figures(experiment, contender, results) if figure is not None]


def missing_at_once(experiment: Experiment, contender: Contender, results: Results) -> Iterator[Run]:
    """A contender's runs that are known to be wanted and depend on no other that is missing, in the order of worth."""
    runs: list[Run] = []
    for setting in contender.settings:
        figures = tried(experiment, contender, setting, results)
        # The first trials do not depend on each other: with any figure they come next.
        while (exponent := next_exponent(figures, experiment.trials)) is not None:
            runs += trial_runs(experiment, contender, setting, exponent)
            figures = {**figures, exponent: 0.0}
            if len(figures) >= min(3, experiment.trials) or exponent not in (0, -1, 1):
                break
    runs = runs or final_runs(experiment, contender, results) or []
    return (run for run in runs if run not in results)


def next_run(experiment: Experiment, results: Results, contenders: tuple[Contender, ...] = ()) -> Run | None:
    """The next run: of the first contender that is not done its next trial, or its next seed once they are over.

    Args:
        experiment: Whose.
        results: So far.
        contenders: Only these.

    Returns:
        A run that is not among the results, or None if the experiment is complete.
    """
    wanted = contenders or experiment.contenders
    return next((run for one in wanted for run in missing_at_once(experiment, one, results)), None)
