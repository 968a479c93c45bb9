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

__all__ = ["CASES", "NAME", "Case", "work_on_states"]

NAME = "E10"
"""Of the file of the rows, and of the section."""

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
        """Those with narrow ones, alike in everything else."""
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
        end: Of ``time.monotonic()``, after which no run begins.

    Yields:
        A line for each run.
    """
    for place in range(2):
        for case in CASES:
            yield from work(case.experiment, (case.experiment.contender(case.contender),), results, end)
            for run in case.runs(list(case.narrow)[place], results):
                if run not in results and time.monotonic() < end:
                    yield done(run, NAME, case.experiment.metric, results)
