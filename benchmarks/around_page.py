"""The page of what users do between steps and around them, from what the tests of the play-book saw."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["DATA", "around_page", "merged", "recorded"]

Row = Mapping[str, Any]
DATA = Path(__file__).resolve().parent.parent / "docs/data/around.json"
_FIRST, _EARLY = ("nothing", "step()"), "the first step()"
_HEAD = """# What happens between two steps

This page says what an optimizer of rankwise does when something happens before a step or around it: a batch is thrown
away, weights are edited, a checkpoint is loaded, the step runs within `torch.autocast`. The short answer: what
`torch.optim.AdamW` does in the same place, or an error that names the thing and leaves everything as it was.

Tests play every row under every framework on one or two ranks. Each row trains a small model, lets the event happen,
trains on, and looks where the weights end: in the same bits as without the event, as with a plain step in its place, as
with a fresh optimizer, or as in new objects that have loaded a checkpoint. AdamW is played in the same cell, and the
answers must be the same. So no cell is written down by hand: `python -m benchmarks around` writes this page from what
the tests saw.

- **as AdamW**: the weights relate to those of the other runs as AdamW's do.
- **refused**: an error says what is wrong and what to do; weights, states, groups and the generator of random numbers
  are as before, and the next good step works.
- **AdamW fails too**: the framework or torch raises an error with AdamW.
- A number is a note below the table.

"""

_IN_CI = """CI plays these three in one process (plain), and `mkor` under DDP, FSDP2, ZeRO 2 and Megatron's distributed
optimizer, but for the rows of groups and of what a step is within. All frameworks and types are played by
`python -m pytest -m exhaustive tests/around/test_play_book.py`.
"""


def merged(known: Iterable[Row], rows: Iterable[Row]) -> list[dict[str, Any]]:
    """One row for each cell and type, the later ones in the places of the earlier, in their order."""
    found = {(r["framework"], r["event"], r["entry"], r["type"]): dict(r) for r in known}
    for row in rows:
        found[row["framework"], row["event"], row["entry"], row["type"]] = dict(row)
    return list(found.values())


def recorded(path: Path = DATA) -> list[dict[str, Any]]:
    """What the tests saw when the page was written."""
    return list(json.loads(path.read_text())) if path.exists() else []


def around_page(rows: Sequence[Row]) -> str:
    """The whole page."""
    types = list(dict.fromkeys(row["type"] for row in rows))
    events = [row for row in rows if row["entry"] == _FIRST[1]]
    entries = [row for row in rows if row["event"] == _FIRST[0] and row["entry"] not in (_FIRST[1], _EARLY)]
    listed = ", ".join(f"`{name}`" for name in types)
    parts = [_HEAD, f"The types of this table: {listed}. All others, and all options, are played by hand.\n", _IN_CI]
    firsts = [row for row in rows if row["entry"] == _EARLY]
    parts += ["\n## What happens before the next steps\n\n", _table(events, "event")]
    parts += ["\n## What happens before the first step\n\n", _table(firsts, "event")]
    parts += ["\n## What is called before the next steps\n\n", _table(entries, "entry")]
    return "".join(parts)


def _table(rows: Sequence[Row], key: str) -> str:
    frameworks = list(dict.fromkeys(row["framework"] for row in rows))
    notes: dict[str, int] = {}
    lines = [f"| | {' | '.join(frameworks)} |\n", "|---|" + "---|" * len(frameworks) + "\n"]
    for name in dict.fromkeys(row[key] for row in rows):
        cells = [[row for row in rows if row[key] == name and row["framework"] == at] for at in frameworks]
        lines.append(f"| {_escaped(name)} | " + " | ".join(_cell(cell, notes) for cell in cells) + " |\n")
    told = "".join(f"{number}. {note}\n" for note, number in notes.items())
    return "".join(lines) + (f"\n{told}" if told else "")


def _cell(rows: Sequence[Row], notes: dict[str, int]) -> str:
    if not rows:
        return "—"
    if {row["is"] for row in rows} == {"as AdamW"}:
        return "as AdamW"
    kinds: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        kinds.setdefault((row["is"], row["why"]), []).append(row["type"])
    told = []
    for (word, why), types in kinds.items():
        whose = "" if len(kinds) == 1 or word == "as AdamW" else f"{', '.join(types)}: "
        if word == "not applicable":
            told.append(f"{whose}— ({notes.setdefault(_sentence(why), len(notes) + 1)})")
        elif why:
            told.append(f"{whose}{word} ({notes.setdefault(_sentence(why), len(notes) + 1)})")
        else:
            told.append(f"{whose}{word}")
    return "; ".join(told)


def _sentence(text: str) -> str:
    return _escaped(text[:1].upper() + text[1:] + ("" if text.endswith(".") else "."))


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")
