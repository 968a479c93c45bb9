"""Columns of the play-book: what each type does in a framework's cells, and whether the page says so.

`RANKWISE_AROUND_ROWS` names a file for ``python -m benchmarks around``; with it `RANKWISE_AROUND_ONLY`, a pattern of
events and entry points, plays a part of the table.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from book_events import EVENTS
from book_kinds import ADAMW, Kind
from book_ranks import cells, play
from book_runs import DDP, FSDP2, Run
from book_verdicts import KNOWN, listed, verdict
from cpu_deepspeed import choose_cpu, prepare_ranks

from benchmarks.around_page import recorded

__all__ = ["FRAMEWORKS", "ROWS", "USUAL", "as_recorded", "check", "column"]

ROWS = os.environ.get("RANKWISE_AROUND_ROWS")
ONLY = re.compile(os.environ.get("RANKWISE_AROUND_ONLY", ""))
USUAL = ("mars-adamw", "ldadam", "mkor")
FRAMEWORKS = ("plain", "DDP", "FSDP2", *(f"ZeRO {stage}" for stage in range(4)), "Megatron DDP")
FRAMEWORKS = (*FRAMEWORKS, "Megatron distributed optimizer")


def _framework(name: str) -> type[Run]:
    """The class of a framework's runs; skips where it is not installed."""
    if name.startswith("ZeRO"):
        choose_cpu()
        pytest.importorskip("deepspeed")
        import book_deepspeed

        prepare_ranks()
        return book_deepspeed.ZEROS[name]
    if name.startswith("Megatron"):
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        pytest.importorskip("megatron.core")
        import book_megatron

        return book_megatron.MEGATRONS[name]
    return {"plain": Run, "DDP": DDP, "FSDP2": FSDP2}[name]


def told_by_plain(cell: Any) -> bool:
    """Whether a cell is of what a framework adds nothing to: the user's groups, and what surrounds a step."""
    return "groups" in getattr(EVENTS.get(cell[0]), "needs", ()) or cell[0].startswith("a step within")


def column(
    name: str, kinds: Sequence[Kind], whole: bool = False, own: bool = False, events: str = ""
) -> list[dict[str, Any]]:
    """Rows of a framework: what each type does in each cell. Ranks are started once for all of them.

    Args:
        name: The framework.
        kinds: The types.
        whole: Every entry point after every event.
        own: Without what is told by plain.
        events: How the names of events begin; all, if empty.
    """
    runs = _framework(name)
    chosen = [cell for cell in cells(runs, ADAMW, whole) if ONLY.search("; ".join(cell))]
    chosen = [cell for cell in chosen if cell[0].startswith(events) and not (own and told_by_plain(cell))]
    # Where rows are recorded, each type has ranks of its own: what is seen until an interruption is kept.
    parts = [[kind] for kind in (ADAMW, *kinds)] if ROWS else [[ADAMW, *kinds]]
    rows: list[dict[str, Any]] = []
    found: dict[tuple[Kind, Any], Any] = {}
    for part in parts:
        jobs = [(kind, cell) for kind in part for cell in chosen]
        found |= zip(jobs, play(runs, jobs, thorough=whole), strict=True)
        seen = [
            _row(name, kind, cell, found[kind, cell], found[ADAMW, cell]) for kind, cell in jobs if not kind.is_adamw
        ]
        _write_down(seen)
        rows += seen
    return rows


def _row(name: str, kind: Kind, cell: Any, ours: Any, adamw: Any) -> dict[str, Any]:
    word, why = verdict(name, kind, cell, ours, adamw)
    known = listed(KNOWN, name, kind, cell)
    if known is not None and word != "not applicable":
        word, why = ("known fault", known.why) if word == "fault" else ("no fault any more", known.why)
    return {"framework": name, "type": kind.name, "event": cell[0], "entry": cell[1], "is": word, "why": why}


def _write_down(rows: Sequence[dict[str, Any]]) -> None:
    if ROWS:
        with Path(ROWS).open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)


def check(rows: Sequence[dict[str, Any]]) -> None:
    assert rows
    wrong = [row for row in rows if row["is"] in ("fault", "no fault any more")]
    told = "\n".join(f"{r['framework']}, {r['type']}: {r['event']}, {r['entry']}: {r['is']}, {r['why']}" for r in wrong)
    assert not wrong, f"{len(wrong)} of {len(rows)} cells are not as AdamW's and not refused by name:\n{told}"


def _words(rows: Sequence[Any]) -> dict[tuple[str, ...], str]:
    return {tuple(row[key] for key in ("framework", "type", "event", "entry")): row["is"] for row in rows}


def as_recorded(rows: Sequence[dict[str, Any]], own: bool = False) -> None:
    """The page has these cells, and says of each what was seen."""
    known, seen = _words(recorded()), _words(rows)
    other = {key: (known.get(key), word) for key, word in seen.items() if known.get(key) != word}
    named = {(row["framework"], row["type"]) for row in rows}
    gone = [key for key in known if key[:2] in named and key not in seen and not (own and told_by_plain(key[2:]))]
    assert not other and not gone, f"python -m benchmarks around writes the page anew: {other} {gone}"
