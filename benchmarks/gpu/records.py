"""The file of what has been found: whole after every item, and gone on with by the next call."""

from __future__ import annotations

import json
import os
import statistics
from pathlib import Path
from typing import Any

from benchmarks.gpu.items import Item

__all__ = ["Records"]

_SAME = ("device", "torch", "triton")


class Records:
    """Rows of items by section and name.

    Args:
        path: JSON file, which need not be there yet.

    Attributes:
        about: The device and versions of the rows; None where there are none.
        rows: By "section/item".
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        content = json.loads(path.read_text()) if path.exists() else {}
        self.about: dict[str, Any] | None = content.get("about")
        self.rows: dict[str, dict[str, Any]] = content.get("items", {})

    def open(self, about: dict[str, Any]) -> None:
        """Begin to measure on a device.

        Args:
            about: The device and versions.

        Raises:
            ValueError: The rows are of another device or other versions.
        """
        if self.about is None:
            self.about = about
        other = [key for key in _SAME if self.about.get(key) != about.get(key)]
        if other:
            raise ValueError(
                f"{self._path} is of {other[0]} {self.about.get(other[0])!r}, this is {about.get(other[0])!r}; "
                "name another file with --output"
            )

    def is_done(self, key: str) -> bool:
        """Whether an item needs no further attempt: measured, failed, or not for this machine."""
        return self.rows.get(key, {}).get("status") in ("done", "failed", "skipped")

    def write(self, key: str, row: dict[str, Any]) -> None:
        """Keep a row; the file is whole at every time."""
        self.rows[key] = row
        beside = self._path.with_name(self._path.name + ".new")
        beside.write_text(json.dumps({"about": self.about, "items": self.rows}, indent=1) + "\n")
        os.replace(beside, self._path)

    def forget(self, section: str) -> None:
        """Measure a section again."""
        self.rows = {key: row for key, row in self.rows.items() if not key.startswith(f"{section}/")}

    def cost(self, key: str, item: Item) -> float:
        """Seconds that an item is to be given.

        What it should take, times how much slower this machine has been; twice what it was cut off after.
        """
        known = self.rows.values()
        slow = [row["seconds"] / row["planned"] for row in known if row["status"] == "done" and row["planned"] > 0]
        planned = item.seconds * max(1.0, statistics.median(slow) if slow else 1.0)
        cut = self.rows.get(key, {})
        return max(planned, 2 * cut["seconds"]) if cut.get("status") == "cut" else planned
