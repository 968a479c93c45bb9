"""Results as JSON lines: one per finished run, written as it ends."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.convergence.experiment import Run

__all__ = ["Results", "Row"]

Row = dict[str, Any]


class Results:
    """Rows by the runs they belong to, read from a folder and added to one of its files.

    Args:
        folder: Every ``*.jsonl`` in it is read, whatever experiment it is of: a run that two experiments share is done
            once.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rows: dict[str, Row] = {}
        for path in sorted(folder.glob("*.jsonl")):
            self.add(_rows(path))

    def add(self, rows: Iterable[Row]) -> None:
        """Takes rows in, without writing them."""
        for row in rows:
            self.rows.setdefault(Run(**row["run"]).key, row)

    def __contains__(self, run: Run) -> bool:
        return run.key in self.rows

    def row(self, run: Run) -> Row | None:
        """What a run gave, if it has been done."""
        return self.rows.get(run.key)

    def figure(self, run: Run, metric: str) -> float | None:
        """A figure of a run; infinity if it diverged, None if it has not been done."""
        row = self.row(run)
        if row is None:
            return None
        return math.inf if row["diverged"] else float(row[metric])

    def write(self, experiment: str, row: Row) -> None:
        """Adds a row to an experiment's file, at once and whole."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{experiment}.jsonl"
        if path.exists():
            _drop_unfinished(path)
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, default=list) + "\n")
        self.add([row])


def _rows(path: Path) -> list[Row]:
    """The rows of a file; a last line that a killed process left unfinished is none."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n") and line.strip()]


def _drop_unfinished(path: Path) -> None:
    text = path.read_bytes()
    if not text.endswith(b"\n"):
        path.write_bytes(text[: text.rfind(b"\n") + 1])
