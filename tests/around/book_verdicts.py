"""Judges cells by torch.optim.AdamW's in the same framework, and says what is refused by name and what is known."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from book_cells import NEARNESS, Cell, Outcome
from book_kinds import Kind

__all__ = ["KNOWN", "REFUSED", "Listed", "listed", "verdict"]


class Listed(NamedTuple):
    """Cells by patterns.

    Attributes:
        types, events, entries, frameworks: Patterns of names, `|` between them.
        why: In the reader's words; of a known fault its heading.
        fragment: Of a refusal, what its message says.
    """

    types: str
    events: str = "*"
    entries: str = "step()|the first step()"
    frameworks: str = "*"
    why: str = ""
    fragment: str = ""

    def has(self, framework: str, kind: Kind, cell: Cell) -> bool:
        """Whether a cell is one of these."""
        pairs = (
            (self.types, kind.name),
            (self.events, cell[0]),
            (self.entries, cell[1]),
            (self.frameworks, framework),
        )
        return all(any(fnmatchcase(name, one) for one in patterns.split("|")) for patterns, name in pairs)


_MKOR = "mkor|mkor-h|mkor [!r]*|mkor rule=[!s]*|mkor rescale*|mkor-h *"
"""MKOR with statistics of the model's layers."""
REFUSED = [
    Listed(
        "*",
        "a parameter exchanged",
        "*",
        why="a parameter in a group is another tensor than the optimizer was built on; build a new optimizer",
        fragment="in the place of 'mid.weight' that the optimizer was not built on: parameters must stay the tensors",
    ),
    Listed(
        _MKOR,
        "a group added",
        "*",
        why="MKOR learns nothing of a layer that no capture has seen; call `capture(model)` again",
        fragment="call optimizer.capture(model) again after add_param_group",
    ),
    Listed(
        _MKOR,
        "*",
        "add_param_group",
        why="MKOR learns nothing of a layer that no capture has seen; call `capture(model)` again",
        fragment="call optimizer.capture(model) again after add_param_group",
    ),
    Listed(
        _MKOR,
        "*",
        "deepcopy of both|pickle of both",
        why="the hooks of a copied MKOR are the first one's; call `capture(model)` on the copy",
        fragment="call optimizer.capture(model) before the first step (a copied or unpickled optimizer's, too)",
    ),
    Listed(
        _MKOR,
        "both copied, and the copies trained",
        "*",
        why="the hooks of a copied MKOR are the first one's; call `capture(model)` on the copy",
        fragment="call optimizer.capture(model) before the first step (a copied or unpickled optimizer's, too)",
    ),
]
"""What raises instead of doing as AdamW does, on purpose."""

BETTER = [
    Listed(
        "*",
        "nothing",
        "state_dict and load_state_dict of Megatron's optimizer",
        "Megatron distributed optimizer",
        why="Megatron's own dictionary lacks AdamW's averages, which are saved apart; ours has all",
    ),
]
"""Where AdamW loses something that ours keep: the relation differs, and that is meant."""

KNOWN: list[Listed] = []
"""Faults that stand, by their heading; a cell that is none any more has to leave the list."""


def listed(rows: Sequence[Listed], framework: str, kind: Kind, cell: Cell) -> Listed | None:
    """The first row that has a cell."""
    return next((row for row in rows if row.has(framework, kind, cell)), None)


def verdict(framework: str, kind: Kind, cell: Cell, ours: Outcome, adamw: Outcome) -> tuple[str, str]:
    """What a cell is, in a word, and why.

    Returns:
        "as AdamW", "more than AdamW", "refused", "not applicable", "AdamW fails too" or "fault".
    """
    if ours.lacks:
        return "not applicable", ours.lacks
    broken = ours.harm in ("hangs", "dies", "ranks differ")
    if adamw.error and not broken:
        return "AdamW fails too", adamw.error.split(":")[1].strip()
    if ours.error:
        known = listed(REFUSED, framework, kind, cell)
        if known and known.fragment in ours.error and not ours.harm:
            return "refused", known.why
        return "fault", f"{ours.error}" + (f"; changed: {ours.harm}" if ours.harm else "")
    for name, expected in adamw.relation.items():
        found = ours.relation.get(name, expected)
        exact = NEARNESS[2] in (found, expected)
        if found != expected and (exact or NEARNESS.index(found) > NEARNESS.index(expected)):
            better = listed(BETTER, framework, kind, cell)
            if better is not None and found == NEARNESS[0]:
                return "more than AdamW", better.why
            told = ours.known.get(name, float("nan"))
            return "fault", f"{name}: {found} (by {told:.1e}), where AdamW has: {expected}"
    return "as AdamW", ""
