"""Which entries are stepped together, and where they lie: planned once for every set of tensors that take a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from rankwise.planning.element_states import EntryRuns, offset_runs
from rankwise.planning.entries import Entry, PlannedEntries
from rankwise.planning.step_unit import StepUnit
from rankwise.routing.roles import Rule

__all__ = ["BucketPlan", "plans_of"]

_KEPT = 32


class BucketPlan(NamedTuple):
    """Entries of one param group, rule and step count.

    Attributes:
        place: Place of the group among those that steps read.
        rule: Theirs.
        before: Steps that their counts have from before their states began.
        entries: In storage order.
        runs: Where they lie in weights and gradients.
    """

    place: int
    rule: Rule
    before: int
    entries: PlannedEntries
    runs: EntryRuns


def plans_of(
    unit: StepUnit, counts: tuple[int | None, ...], before: Callable[[str], int], key: Any
) -> list[BucketPlan]:
    """The buckets of a step, from the last time if they are still kept.

    Args:
        unit: The unit of the step.
        counts: Counts of every tensor; None for one that takes no step. Only which are alike matters.
        before: Steps that the count of a parameter has from before its states began.
        key: Another one where ``before`` answers otherwise.
    """
    kept: dict[Any, list[BucketPlan]] = unit.scratch.setdefault("buckets", {})
    first = next((count for count in counts if count is not None), 0)
    sign = (key, counts if not first else tuple(None if count is None else count - first for count in counts))
    found = kept.get(sign)
    if found is None:
        if len(kept) >= _KEPT:
            kept.clear()
        found = kept[sign] = _planned(unit, counts, before)
    return found


def _planned(unit: StepUnit, counts: Sequence[int | None], before: Callable[[str], int]) -> list[BucketPlan]:
    found: dict[tuple[int, Rule, int, int], list[Entry]] = {}
    for entry in unit.entries:
        count = counts[entry.shard.tensor]
        if count is not None:
            earlier = before(entry.info.name)
            sign = (unit.step_group[entry.key], entry.route.rule, count - earlier, earlier)
            found.setdefault(sign, []).append(entry)
    return [
        BucketPlan(place, rule, earlier, PlannedEntries(entries), offset_runs(entries))
        for (place, rule, _, earlier), entries in found.items()
    ]
