"""The file of what has been found: whole after every item, and gone on with by the next call."""

from __future__ import annotations

import json
import os
import statistics
from pathlib import Path
from typing import Any

__all__ = ["STATES", "Records"]

STATES = ("unmeasured", "stale", "measured")
"""Of an item: there is no result; it is of other code than today's; it is of today's."""
_ENDED = ("done", "failed", "skipped")
_NAMED = ("torch", "triton", "date", "revision")


class Records:
    """Rows of items by section and name.

    Args:
        path: JSON file, which need not be there yet.

    Attributes:
        about: The device, and the versions of the last rows; None where there are no rows.
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
            about: The device and versions, which every row of this call keeps.

        Raises:
            ValueError: The rows are of another device.
        """
        if self.about is not None and self.about.get("device") != about.get("device"):
            raise ValueError(
                f"{self._path} is of device {self.about.get('device')!r}, this is {about.get('device')!r}; "
                "name another file with --output"
            )
        for row in self.rows.values():
            row.setdefault("about", {key: self.about.get(key) for key in _NAMED} if self.about else {})
        self.about = about

    def state(self, key: str, code: str) -> str:
        """Of an item, one of :data:`STATES`.

        Args:
            key: The item.
            code: Fingerprint of the code that it measures, as it is today.
        """
        row = self.rows.get(key, {})
        if row.get("status") not in _ENDED:
            return "unmeasured"
        # What failed or could not be run may do so today.
        return "measured" if row.get("code") == code else "stale"

    def write(self, key: str, row: dict[str, Any]) -> None:
        """Keep a row, with the versions that it is of; the file is whole at every time."""
        named = {name: (self.about or {}).get(name) for name in _NAMED}
        self.rows[key] = {**row, "about": named}
        beside = self._path.with_name(self._path.name + ".new")
        self._path.parent.mkdir(parents=True, exist_ok=True)
        beside.write_text(json.dumps({"about": self.about, "items": self.rows}, indent=1) + "\n")
        os.replace(beside, self._path)

    def forget(self, section: str) -> None:
        """Measure a section again."""
        self.rows = {key: row for key, row in self.rows.items() if not key.startswith(f"{section}/")}

    def cost(self, key: str, planned: float) -> float:
        """Seconds that an item is to be given.

        Args:
            key: The item.
            planned: Seconds that it should take: they are multiplied by how much slower this machine has been; an item
                that was cut off gets twice what it had.
        """
        known = self.rows.values()
        slow = [row["seconds"] / row["planned"] for row in known if row["status"] == "done" and row["planned"] > 0]
        expected = planned * max(1.0, statistics.median(slow) if slow else 1.0)
        cut = self.rows.get(key, {})
        return max(expected, 2 * cut["seconds"]) if cut.get("status") == "cut" else expected
