"""The schedule says at which steps each matrix's factors are due, by the matrix's own count of steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

__all__ = ["FactorSchedule", "joined", "without_factors"]


class FactorSchedule:
    """Makes factors due every ``interval`` steps of a matrix from its first one, or later if it was unused when due.

    A gradient of zero counts as a step where ranks hold shards, so that a layer that is used at other steps than the
    due ones would never be seen. After a step that missed it, every rank looks out for it by itself. The next due step
    says to all ranks whether one has glimpsed it. If so, it is due at every step until it is seen, and from then on at
    that place in the interval. Ranks so come to one decision, and an unused layer costs nothing.

    Args:
        interval: Steps between updates.

    Attributes:
        heard: Matrices that have had tokens at a step that was due.
        left_out: Matrices that take gradients but have had no token; they have no factors until they have one.
        missed: Matrices without a token at the last step that was due.
        glimpsed: Missed matrices for which this rank has had tokens since.
    """

    def __init__(self, interval: int) -> None:
        self.interval = interval
        self.heard: set[str] = set()
        self.left_out: set[str] = set()
        self.missed: set[str] = set()
        self.glimpsed: set[str] = set()
        # Only exceptions have entries here; a layer that is in use at every step has none.
        self._phases: dict[str, int] = {}
        # For how many intervals a matrix is still searched for, and for how many when its search began.
        self._searching: dict[str, int] = {}
        self._efforts: dict[str, int] = {}

    def is_due(self, key: str, count: int) -> bool:
        """Whether a matrix takes a factor update.

        Args:
            key: Name of the matrix.
            count: Number of its present step, from 1.
        """
        return self._in_place(key, count) or key in self._searching

    def note(self, key: str, count: int, seen: bool, glimpsed: bool) -> None:
        """Note how a step went at which a matrix was due.

        Args:
            key: Name of the matrix.
            count: Number of the step.
            seen: Whether any rank has had tokens for the matrix.
            glimpsed: Whether any rank has had tokens since the step that missed the matrix.
        """
        self.glimpsed.discard(key)
        if seen:
            self.heard.add(key)
            self.missed.discard(key)
            if key not in self.left_out:  # a matrix left out has no factors that could have moved
                self._searching.pop(key, None)
                self._efforts.pop(key, None)
            if not self._in_place(key, count):
                self._phases[key] = count % self.interval
        elif self._in_place(key, count):
            self.missed.add(key)
            self._search_on(key, glimpsed)

    def _search_on(self, key: str, glimpsed: bool) -> None:
        """Go on after an interval without tokens: what is glimpsed after a search is searched for twice as long."""
        if glimpsed:
            self._efforts[key] = self._searching[key] = 2 * self._efforts.get(key, 0) or 1
        elif self._searching.get(key, 0) > 1:
            self._searching[key] -= 1
        else:
            self._searching.pop(key, None)

    def forget(self, keys: Iterable[str]) -> None:
        """Forget some matrices, whose next step is their first one again."""
        for key in keys:
            self.missed.discard(key)
            self.glimpsed.discard(key)
            for kept in (self._phases, self._searching, self._efforts):
                kept.pop(key, None)

    def put_off(self, key: str, count: int) -> None:
        """Make a matrix due at the step of this number, and every interval from there on."""
        self._phases[key] = count % self.interval

    def _in_place(self, key: str, count: int) -> bool:
        return (count - self._phases.get(key, 1)) % self.interval == 0

    def state_dict(self) -> dict[str, Any]:
        """Return the schedule in plain data."""
        return {
            "heard": sorted(self.heard),
            "left_out": sorted(self.left_out),
            "missed": sorted(self.missed),
            "glimpsed": sorted(self.glimpsed),
            "searching": dict(self._searching),
            "efforts": dict(self._efforts),
            "phases": dict(self._phases),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` gave; after an empty one, nothing has been seen yet."""
        self.heard, self.left_out, self.missed, self.glimpsed = (
            set(state.get(name, ())) for name in ("heard", "left_out", "missed", "glimpsed")
        )
        self._phases, self._searching, self._efforts = (
            dict(state.get(name, {})) for name in ("phases", "searching", "efforts")
        )


def joined(extras: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Join the extra states of ranks that step different matrices, and differ in their schedules only.

    Args:
        extras: Results of :meth:`rankwise.step.optimizer.ShardedOptimizer.extra_state` of any optimizer.
    """
    schedule: dict[str, Any] = {}
    for name, value in (item for extra in extras for item in extra.get("factor_schedule", {}).items()):
        if isinstance(value, Mapping):
            schedule[name] = {**schedule.get(name, {}), **value}
        else:
            schedule[name] = sorted({*schedule.get(name, ()), *value})
    return {**extras[0], **({"factor_schedule": schedule} if schedule else {})}


def without_factors(extra: Mapping[str, Any]) -> frozenset[str]:
    """Return the matrices that had no factors when an optimizer was saved, because they had had no token.

    Args:
        extra: Extra state of any optimizer.
    """
    return frozenset(extra.get("factor_schedule", {}).get("left_out", ()))
