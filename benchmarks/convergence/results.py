"""Results as JSON lines: one per finished run, written as it ends."""

from __future__ import annotations

import copy
import fcntl
import json
import math
from collections.abc import Iterable
from io import FileIO
from pathlib import Path
from typing import Any

from benchmarks.convergence.experiment import Run

__all__ = ["Results", "Row", "device_type"]

Row = dict[str, Any]


def device_type(row: Row) -> str:
    """Where a row comes from, "cuda" or "cpu"; rows that do not say it are of CPUs."""
    return str(row.get("device_type", "cpu"))


class Results:
    """Rows by the runs they belong to, read from a folder and added to one of its files.

    Args:
        folder: Every ``*.jsonl`` in it is read, whatever experiment it is of: a run that two experiments share is done
            once.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rows: dict[str, Row] = {}
        self._all: list[Row] = []
        for path in sorted(folder.glob("*.jsonl")):
            self.add(_rows(path.read_bytes()))

    def add(self, rows: Iterable[Row]) -> None:
        """Takes rows in, without writing them."""
        for row in rows:
            self._all.append(row)
            self.rows.setdefault(_key(row), row)

    def of(self, kind: str) -> Results:
        """What was run on one type of device alone, as if nothing else had been; rows are written to the same files.

        Args:
            kind: See :func:`device_type`.
        """
        found = copy.copy(self)
        found.rows, found._all = {}, []
        found.add(row for row in self._all if device_type(row) == kind)
        return found

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
        """Adds a row to an experiment's file, at once and whole, unless another process has done the same run.

        Raises:
            OSError: The file cannot be written, and is as it was; the row counts here all the same.
        """
        self.add([row])
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / f"{experiment}.jsonl").open("a+b", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            _append(file, row)


def _append(file: FileIO, row: Row) -> None:
    """Writes a row at the end of a file that no other process writes to meanwhile."""
    file.seek(0)
    before = file.read()
    end = before.rfind(b"\n") + 1  # What follows, a killed process left unfinished.
    if (_key(row), device_type(row)) in {(_key(other), device_type(other)) for other in _rows(before)}:
        return
    try:
        file.truncate(end)
        left = json.dumps(row, default=list).encode() + b"\n"
        while left:
            left = left[file.write(left) :]
    except OSError:
        file.truncate(end)
        raise


def _key(row: Row) -> str:
    return Run(**row["run"]).key


def _rows(data: bytes) -> list[Row]:
    """The rows of a file; a last line that a killed process left unfinished is none."""
    return [json.loads(line) for line in data.splitlines(keepends=True) if line.endswith(b"\n") and line.strip()]
