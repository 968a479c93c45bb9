"""How cases of the suites ended: kept as JSON, one case and type a line, and merged as a run goes on."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

__all__ = ["RESULTS", "Row", "key_of", "merge", "read"]

Row = Mapping[str, Any]
RESULTS = Path(__file__).resolve().parents[2] / "docs/data/peers.json"
"""Those that the page shows."""


def read(path: Path) -> list[dict[str, Any]]:
    """The rows of a file, none if there is no file yet."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else []


def key_of(row: Row) -> tuple[str, str, str]:
    """What a row is about: suite, type, case."""
    return row["suite"], row["type"], row["case"]


def merge(path: Path, rows: Iterable[Row]) -> None:
    """Add rows to a file in the place of those that said the same before.

    Args:
        path: The file.
        rows: Each with suite, type, case, outcome, message, seconds, and the version of the tests.
    """
    found = {key_of(row): row for row in read(path)}
    found |= {key_of(row): row for row in rows}
    lines = ",\n".join(json.dumps(found[key], ensure_ascii=False) for key in sorted(found))
    whole = path.with_suffix(".part")
    whole.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    whole.replace(path)
