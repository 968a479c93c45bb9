"""Runs a cell's tasks one after the other, without waiting: many cells run side by side."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.frameworks.cells import Cell
from benchmarks.frameworks.judge import Distance, distance, verdict
from benchmarks.frameworks.problem import STEPS, Weights
from benchmarks.frameworks.processes import Ranks
from benchmarks.frameworks.tasks import PATIENCE_BESIDE_A_KILLED, Task, results_of
from benchmarks.gpu.items import Figure

__all__ = ["Place", "Reference", "Run", "judged"]

_TO_THE_END = 20.0  # Seconds for an interpreter to end after its error.
Reference = Mapping[str, Weights]


@dataclass(frozen=True)
class Place:
    """Where cells run.

    Attributes:
        device: "cuda" or "cpu".
        store: Folder of what ranks write.
        megatron: Folder with the version of Megatron to use; None for the installed one.
    """

    device: str
    store: str
    megatron: str | None = None


class Found(NamedTuple):
    """What came of a run.

    Attributes:
        figures: One for each optimizer that has ended.
        problems: What went wrong, by optimizer.
        left: Optimizers without a result.
    """

    figures: list[Figure]
    problems: dict[str, str]
    left: tuple[str, ...]


class Run:
    """A cell with some optimizers.

    Args:
        cell: The cell.
        kinds: The optimizers.
        place: Where it runs.
    """

    def __init__(self, cell: Cell, kinds: Sequence[str], place: Place) -> None:
        self.cell, self.kinds = cell, tuple(kinds)
        self._place = place
        self._folder = Path(tempfile.mkdtemp(dir=place.store))
        self._waiting = self._tasks()
        self._last = self._waiting[-1]
        self._dead_since: float | None = None
        self.ranks = self._started()
        self._seconds = 0.0

    def _tasks(self) -> list[Task]:
        cell, out = self.cell, str(self._folder / "found")
        told = {"key": cell.key, "kinds": self.kinds, "device": self._place.device, "store": self._place.store}
        if cell.resumed_on is None:
            return [Task(out=out, ranks=cell.ranks, **told)]
        return [
            Task(out=f"{out}-before", ranks=cell.ranks, last=STEPS // 2, **told),
            Task(out=out, ranks=cell.resumed_on, first=STEPS // 2, **told),
        ]

    def _started(self) -> Ranks:
        paths = (self._place.megatron,) if self._place.megatron and self.cell.front == "megatron" else ()
        return Ranks(self._waiting.pop(0), paths, self.cell.settings.get("environment"))

    @property
    def seconds(self) -> float:
        """Since the first rank was started."""
        return self._seconds + self.ranks.seconds

    def is_over(self) -> bool:
        """Whether all has ended; begins what comes next."""
        if self._dead_since is None and any(self.ranks.codes):
            self._dead_since = self.ranks.seconds
        if not self.ranks.is_over:
            return False
        if self._waiting and not any(self.ranks.codes):
            self._seconds += self.ranks.seconds
            self.ranks = self._started()
            return False
        return True

    def stop(self) -> None:
        """End what runs."""
        self.ranks.kill()

    def results(self) -> list[dict[str, dict[str, Any]]]:
        """What the ranks of the last task have found."""
        return results_of(self._last.out, self._last.ranks)

    def found(self, expected: Mapping[str, Reference]) -> Found:
        """Judge what there is.

        Args:
            expected: Weights of one process by optimizer; "start" has the first ones.
        """
        if self.cell.is_killed:
            return self._end_of_the_others()
        results = self.results()
        figures, problems = [], {}
        for kind in self.kinds:
            errors = [result[kind]["error"] for result in results if "error" in result.get(kind, {})]
            if errors or "weights" not in results[0].get(kind, {}):
                if errors:
                    problems[kind] = errors[0]
                continue
            try:
                figures.append(judged(kind, [result.get(kind, {}) for result in results], expected))
            except ValueError as error:
                problems[kind] = str(error)
        ended = {figure.name for figure in figures} | set(problems)
        return Found(figures, problems, tuple(kind for kind in self.kinds if kind not in ended))

    def _end_of_the_others(self) -> Found:
        codes, since = self.ranks.codes, self._dead_since
        waited = None if since is None or None in codes else self.ranks.seconds - since
        with_error = sum(code not in (0, None) for code in codes[:-1])
        figures = [
            Figure(f"{kind}: the others end after", waited, "s", 0, PATIENCE_BESIDE_A_KILLED + _TO_THE_END)
            for kind in self.kinds
        ]
        figures.append(Figure("others that end with an error", float(with_error), "ranks", len(codes) - 1))
        return Found(figures, {}, ())


def judged(kind: str, results: Sequence[Mapping[str, Any]], expected: Mapping[str, Reference]) -> Figure:
    """An optimizer's figure in a cell.

    Args:
        kind: The optimizer.
        results: What each rank has of it.
        expected: See :meth:`Run.found`.

    Raises:
        ValueError: There is nothing to compare with, or the ranks end with different weights.
    """
    if kind not in expected or "start" not in expected:
        raise ValueError("one process has no result")
    if len({result.get("weights checksum") for result in results}) > 1:
        raise ValueError("ranks end with different weights")
    start, weights = expected["start"]["weights"], results[0]["weights"]
    response: Distance | None = None
    if "perturbed" in results[0]:
        response = distance(results[0]["perturbed"], weights, start)
    found = verdict(distance(weights, expected[kind]["weights"], start), response)
    # What does not follow is above its bound, or the bound says nothing and nothing can be below it.
    bound = found.bound if found.follows or found.value > found.bound else 0.0
    return Figure(kind, found.value, found.unit, None, bound)
