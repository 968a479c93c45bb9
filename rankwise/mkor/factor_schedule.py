"""At which steps each matrix's factors are due: by its own count, until it has been seen at one of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

__all__ = ["FactorSchedule", "joined", "without_factors"]


class FactorSchedule:
    """Every ``interval`` steps of a matrix, from its first one; later where it was not in use when it was due.

    A gradient of zero counts as a step where ranks hold shards, so a layer that is used at other steps than those at
    which it is due would never be seen. After a step that missed it, every rank looks out for it by itself; the next
    step at which it is due tells all ranks whether one has glimpsed it, and then it is due at every step until it is
    seen, whose place in the interval it keeps. So ranks decide alike, and a layer that is not in use costs nothing.

    Args:
        interval: Steps between updates.

    Attributes:
        heard: Matrices that have had tokens at a step that was due.
        left_out: Those that take gradients but had no token so far; they have no factors until they do.
        missed: Matrices without a token at the last step that was due.
        glimpsed: Those among them that this rank has had tokens for since.
    """

    def __init__(self, interval: int) -> None:
        self.interval = interval
        self.heard: set[str] = set()
        self.left_out: set[str] = set()
        self.missed: set[str] = set()
        self.glimpsed: set[str] = set()
        # The exceptions alone: what is in use at every step needs neither.
        self._phases: dict[str, int] = {}
        # Of those searched for: intervals the search goes on, and how many it went on when it began.
        self._searching: dict[str, int] = {}
        self._efforts: dict[str, int] = {}

    def is_due(self, key: str, count: int) -> bool:
        """Whether a matrix takes a factor update.

        Args:
            key: The matrix.
            count: The number of its present step, from 1.
        """
        return self._in_place(key, count) or key in self._searching

    def note(self, key: str, count: int, seen: bool, glimpsed: bool) -> None:
        """Tell how a step went at which a matrix was due.

        Args:
            key: The matrix.
            count: The number of the step.
            seen: Whether any rank has had tokens for it.
            glimpsed: Whether any rank has had some since the step that missed it.
        """
        self.glimpsed.discard(key)
        if seen:
            self.heard.add(key)
            self.missed.discard(key)
            if key not in self.left_out:  # it has no factors yet that could have moved
                self._searching.pop(key, None)
                self._efforts.pop(key, None)
            if not self._in_place(key, count):
                self._phases[key] = count % self.interval
        elif self._in_place(key, count):
            self.missed.add(key)
            self._search_on(key, glimpsed)

    def _search_on(self, key: str, glimpsed: bool) -> None:
        """An interval has passed in vain; what is glimpsed again after a search is searched for twice as long."""
        if glimpsed:
            self._efforts[key] = self._searching[key] = 2 * self._efforts.get(key, 0) or 1
        elif self._searching.get(key, 0) > 1:
            self._searching[key] -= 1
        else:
            self._searching.pop(key, None)

    def forget(self, keys: Iterable[str]) -> None:
        """Count some matrices from their next step on, which is their first one again."""
        for key in keys:
            self.missed.discard(key)
            self.glimpsed.discard(key)
            for kept in (self._phases, self._searching, self._efforts):
                kept.pop(key, None)

    def put_off(self, key: str, count: int) -> None:
        """Have a matrix due at the step of this number, and from there on."""
        self._phases[key] = count % self.interval

    def _in_place(self, key: str, count: int) -> bool:
        return (count - self._phases.get(key, 1)) % self.interval == 0

    def state_dict(self) -> dict[str, Any]:
        """The schedule in plain data."""
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
        """Take over what :meth:`state_dict` gave; of an empty one, as if nothing had been seen yet."""
        self.heard, self.left_out, self.missed, self.glimpsed = (
            set(state.get(name, ())) for name in ("heard", "left_out", "missed", "glimpsed")
        )
        self._phases, self._searching, self._efforts = (
            dict(state.get(name, {})) for name in ("phases", "searching", "efforts")
        )


def joined(extras: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One extra state of those of ranks that step other matrices, whose schedules alone differ.

    Args:
        extras: As :meth:`rankwise.step.optimizer.ShardedOptimizer.extra_state` gave them, of any optimizer.
    """
    schedule: dict[str, Any] = {}
    for name, value in (item for extra in extras for item in extra.get("factor_schedule", {}).items()):
        if isinstance(value, Mapping):
            schedule[name] = {**schedule.get(name, {}), **value}
        else:
            schedule[name] = sorted({*schedule.get(name, ()), *value})
    return {**extras[0], **({"factor_schedule": schedule} if schedule else {})}


def without_factors(extra: Mapping[str, Any]) -> frozenset[str]:
    """Matrices that had no factors when an optimizer was saved, as they had had no token.

    Args:
        extra: See :func:`joined`.
    """
    return frozenset(extra.get("factor_schedule", {}).get("left_out", ()))
