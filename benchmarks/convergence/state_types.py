"""What narrow states cost in loss: the best run of every type once more, with its states in other types."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from benchmarks.convergence.experiment import Contender, Experiment, Options, Run
from benchmarks.convergence.language_models import E3, E4, E5
from benchmarks.convergence.results import Results
from benchmarks.convergence.search import final_runs
from benchmarks.convergence.session import done, work
from benchmarks.convergence.verdicts import mean_interval, verdict
from benchmarks.performance import markdown

__all__ = ["CASES", "NAME", "Case", "states_section", "work_on_states"]

NAME = "E10"
"""Name of the file of the rows, and of the section."""

_SONEW = Contender("SONew, band 1", "sonew", 4e-3, ({"betas": (0.9, 0.99), "weight_decay": 0.1},))
_TEXT = replace(E4, name=NAME, title="SONew on a language model", contenders=(_SONEW,), claims=())
"""For the rate of the one type that the other experiments on text do not have."""


@dataclass(frozen=True)
class Case:
    """A type whose states are to be narrow.

    Attributes:
        experiment: In which its best setting and rate are searched, with the seeds that are compared.
        contender: Its name there.
        narrow: Options of narrow states by the word for them.
    """

    experiment: Experiment
    contender: str
    narrow: dict[str, Options]

    def wide(self, results: Results) -> list[Run]:
        """The runs with float32 states, one a seed; empty before the search is over."""
        return final_runs(self.experiment, self.experiment.contender(self.contender), results) or []

    def runs(self, word: str, results: Results) -> list[Run]:
        """Runs with narrow states, alike in everything else."""
        return [replace(run, options={**run.options, **self.narrow[word]}) for run in self.wide(results)]


_WORDS: dict[str, Options] = {word: {"state_dtype": word} for word in ("int8", "bfloat16")}
_FACTORS = {f"{word}, factors bfloat16": {**own, "factor_dtype": "bfloat16"} for word, own in _WORDS.items()}

CASES: Sequence[Case] = (
    Case(E4, "MARS-AdamW", _WORDS),
    Case(E4, "MARS-Lion", _WORDS),
    Case(E4, "MARS-M", _WORDS),
    Case(_TEXT, _SONEW.name, _WORDS),
    Case(E5, "LDAdam, rank d/4", _WORDS),
    Case(E3, "MKOR on AdamW", _FACTORS),
)


def work_on_states(results: Results, end: float) -> Iterator[str]:
    """Do what is missing, the narrowest first, and write each row as it comes.

    Args:
        results: To be added to.
        end: End of ``time.monotonic()``, after which no run begins.

    Yields:
        A line for each run.
    """
    for place in range(2):
        for case in CASES:
            yield from work(case.experiment, (case.experiment.contender(case.contender),), results, end)
            for run in case.runs(list(case.narrow)[place], results):
                if run not in results and time.monotonic() < end:
                    yield done(run, NAME, case.experiment.metric, results)


_HEAD = """
## E10: Narrow states

This experiment measures what `state_dtype` costs in loss. The best run of every type on text was repeated at the same
rate with its states in bfloat16 and in 8 bits, paired by seed, 1 to 5. The models are those of the experiment that
found the rate (SONew's was found here, on E4's model). *no worse* means that the interval excludes a loss that is 0.01
nats higher. Bytes are of all states of the rows themselves. Small tensors weigh more there than in large models ([types
of states](state-types.md)). `python -m benchmarks states` runs what is missing.

"""


def states_section(results: Results) -> str:
    """Part of the page.

    Args:
        results: What has been run.
    """
    headings = ("type", "model of", "states", "bytes/param.", "loss", "difference, 95 % interval", "no worse")
    rows = [row for case in CASES for row in _rows(case, results)]
    return _HEAD + markdown(headings, rows)


def _rows(case: Case, results: Results) -> Iterator[Sequence[str]]:
    metric = case.experiment.metric
    wide = [results.figure(run, metric) for run in case.wide(results)]
    place = (E4 if case.experiment is _TEXT else case.experiment).name
    yield case.contender, place, "float32", _weight(case.wide(results), results), _mean(wide), "", ""
    for word in case.narrow:
        runs = case.runs(word, results)
        found = [results.figure(run, metric) for run in runs]
        pairs = [ours - base for ours, base in zip(found, wide, strict=True) if ours is not None and base is not None]
        if not pairs:
            yield case.contender, place, word, "", "", "", "not run yet"
            continue
        difference = mean_interval(pairs)
        words = verdict(difference, case.experiment.counts, "no worse")
        if len(pairs) < len(case.experiment.seeds):
            words = f"{len(pairs)} of {len(case.experiment.seeds)} seeds yet"
        interval = f"{difference.mean:+.4f}" + (f" ± {difference.half:.4f}" if len(pairs) > 1 else "")
        yield case.contender, place, word, _weight(runs, results), _mean(found), interval, words


def _mean(figures: Sequence[float | None]) -> str:
    known = [figure for figure in figures if figure is not None]
    return f"{mean_interval(known).mean:.4f}" if known else ""


def _weight(runs: Sequence[Run], results: Results) -> str:
    rows = [row for run in runs if (row := results.row(run)) is not None]
    return f"{rows[0]['state_bytes'] / rows[0]['parameters']:.2f}" if rows else ""
