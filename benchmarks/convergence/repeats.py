"""Recorded runs that were done again by later code: both figures, and whether they differ."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.convergence.experiment import Contender, Experiment
from benchmarks.convergence.results import Row

__all__ = ["Repeat", "keep_repeat", "kept_repeats"]

_NAME = "repeated.json"


@dataclass(frozen=True)
class Repeat:
    """A run's figure as it is recorded, and as it came out again."""

    experiment: str
    contender: str
    seed: int
    recorded: float
    repeated: float
    state_bytes: int
    date: str

    @classmethod
    def of(cls, experiment: Experiment, contender: Contender, seed: int, recorded: float, row: Row) -> Repeat:
        """What a row of the repeated run says."""
        figure = float(row[experiment.metric])
        return cls(experiment.name, contender.name, seed, recorded, figure, row["state_bytes"], row["date"])


def kept_repeats(folder: Path) -> list[Repeat]:
    """The runs of a folder's results that were done again, in the order of experiments, contenders and seeds."""
    path = folder / _NAME
    return [Repeat(**row) for row in json.loads(path.read_text(encoding="utf-8"))] if path.exists() else []


def keep_repeat(folder: Path, repeat: Repeat) -> None:
    """Add a repeated run to the folder's; it takes the place of the same run's earlier repeat."""
    same = (repeat.experiment, repeat.contender, repeat.seed)
    others = [one for one in kept_repeats(folder) if (one.experiment, one.contender, one.seed) != same]
    rows = sorted([*others, repeat], key=lambda one: (one.experiment, one.contender, one.seed))
    (folder / _NAME).write_text(json.dumps([asdict(one) for one in rows], indent=1) + "\n", encoding="utf-8")
