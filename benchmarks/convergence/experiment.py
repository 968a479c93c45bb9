"""An experiment as data: who runs on what, with which trials, and which claims the results are to decide."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["Claim", "Contender", "Experiment", "Run", "harmless"]

Options = Mapping[str, Any]


@dataclass(frozen=True)
class Run:
    """One training run: all that its result depends on, and nothing else.

    Attributes:
        task: Data, model and batch, see :mod:`benchmarks.convergence.tasks`; and ``schedule``, if it is no cosine.
        optimizer: Name in :data:`benchmarks.convergence.optimizers.OPTIMIZERS`.
        options: Its keywords, without the learning rate.
        lr: Peak learning rate.
        steps: Optimizer steps; the learning rate has decayed to zero after the last.
        seed: Seed of the initial weights and of the order of the data.
    """

    task: Options
    optimizer: str
    options: Options
    lr: float
    steps: int
    seed: int

    @property
    def key(self) -> str:
        """The same text for the same run, in every session and experiment."""
        return self._text("lr", "seed")

    @property
    def kind(self) -> str:
        """The same text for runs that differ in learning rate and seed alone."""
        return self._text()

    def _text(self, *further: str) -> str:
        parts = {name: getattr(self, name) for name in ("task", "optimizer", "options", "steps", *further)}
        return json.dumps(parts, sort_keys=True, default=list)


@dataclass(frozen=True)
class Contender:
    """An optimizer in an experiment.

    Attributes:
        name: For tables and the command line.
        optimizer: Name in :data:`benchmarks.convergence.optimizers.OPTIMIZERS`.
        guess: Learning rate at which the search begins.
        settings: Keywords to be tried, each with its own search of the learning rate.
        steps: Share of the experiment's steps that it gets, to see what fewer steps reach.
        afterwards: Whether it was asked for when results were known: it may share
            trials of another, and its claims say so.
        halvings: Halvings of the best trial's rate before its seeds are run: whether the trials had picked too high a
            one; not beyond the lowest that was tried.
    """

    name: str
    optimizer: str
    guess: float
    settings: tuple[Options, ...] = ({},)
    steps: float = 1.0
    afterwards: bool = False
    halvings: int = 0

    def rate(self, exponent: int) -> float:
        """The learning rate of a trial.

        Args:
            exponent: Exponent of two, on the guessed learning rate.
        """
        return self.guess * 2.0**exponent


@dataclass(frozen=True)
class Claim:
    """What a paper says, as a comparison of two contenders.

    Attributes:
        paper: Where it is claimed; empty for a default of ours, which the table of defaults has.
        text: What is claimed, with its number.
        ours: Contender that is to be better, or as good.
        than: Contender it is compared with.
        kind: "less": a loss lower by what counts; "no worse": none that is higher by what counts.
    """

    paper: str
    text: str
    ours: str
    than: str
    kind: Literal["less", "no worse"] = "less"


def harmless(text: str, ours: str, than: str) -> Claim:
    """A default beside another value, asked about when other results were known."""
    return Claim("", f"{text}: no harm (asked afterwards)", ours, than, "no worse")


@dataclass(frozen=True)
class Experiment:
    """Contenders on one task.

    Attributes:
        name: "E1" and so on.
        title: A line.
        about: Paragraph for the page.
        task: See :class:`Run`.
        steps: Steps of a contender with a share of one.
        metric: Which of a row's figures is compared.
        counts: Smallest difference that counts, fixed before the first run; a share of the other's loss if relative.
        relative: How ``counts`` is meant.
        contenders: Their number of settings is the same, so that everybody has the same number of trials; afterwards
            it may be smaller.
        claims: Decided by fresh seeds at each contender's best trial.
        trials: Learning rates of a setting, a factor of two apart; more only if the best still lies at the edge.
        trial_seeds: Trial seeds of a trial, whose figure is the mean over them.
        seeds: Fresh ones for the best trial.
    """

    name: str
    title: str
    about: str
    task: Options
    steps: int
    metric: str
    counts: float
    relative: bool
    contenders: tuple[Contender, ...]
    claims: tuple[Claim, ...]
    trials: int = 5
    trial_seeds: tuple[int, ...] = (0,)
    seeds: tuple[int, ...] = field(default=(1, 2, 3, 4, 5))

    def contender(self, name: str) -> Contender:
        """One of them.

        Raises:
            ValueError: There is none of that name.
        """
        for contender in self.contenders:
            if contender.name == name:
                return contender
        names = "; ".join(contender.name for contender in self.contenders)
        raise ValueError(f"no contender {name!r} in {self.name}; there are: {names}")

    def run(self, contender: Contender, setting: Options, exponent: int, seed: int) -> Run:
        """A run of one of its contenders.

        Args:
            contender: Whose.
            setting: Setting of its settings.
            exponent: Exponent of two, on the guessed learning rate.
            seed: See :class:`Run`.
        """
        steps = round(self.steps * contender.steps)
        return Run(self.task, contender.optimizer, setting, contender.rate(exponent), steps, seed)
