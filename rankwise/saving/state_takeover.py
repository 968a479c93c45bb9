"""Which states a successor can take over from an optimizer, by comparing names and shapes; nothing is changed."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from rankwise.states.optimizer_spec import MOMENTS

__all__ = ["StateTakeover", "TakeoverTarget", "listed", "plan_takeover"]


Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class TakeoverTarget:
    """A parameter of the optimizer that takes over.

    Attributes:
        shape: Shape of the parameter.
        moments: Names of its states by the :data:`MOMENTS` that mean the same; all are taken over, or none.
        rule: "matrix" or "fallback".
    """

    shape: tuple[int, ...]
    moments: Mapping[str, str]
    rule: str


@dataclass(frozen=True)
class StateTakeover:
    """Which states are taken over and which start afresh.

    Attributes:
        carried: Names of the successor's states by moment, for each parameter whose moments are taken over.
        afresh: Parameters that take over nothing; their counts start again.
        matrices: Parameters among ``carried`` whose matrix rule has states of its own, which start afresh.
    """

    carried: Mapping[str, Mapping[str, str]]
    afresh: tuple[str, ...]
    matrices: tuple[str, ...]

    def told(self, owner: str, author: str, ramp: int) -> str:
        """Describe the takeover in one line for the user.

        Args:
            owner: Name of the optimizer that takes over.
            author: Name of the optimizer that wrote the states.
            ramp: Steps over which updates by new states grow to full size.
        """
        both = [name for name, moments in self.carried.items() if len(moments) == len(MOMENTS)]
        first = [name for name in self.carried if name not in both]
        parts = [
            f"{text} of {listed(names)}"
            for text, names in (("both moments", both), ("the first moment", first))
            if names
        ]
        fresh = [*self.matrices, *self.afresh]
        start = "" if not fresh else f"; all other states of {listed(fresh)} start afresh"
        gently = f", with updates that grow to their size over {ramp} steps" if fresh and ramp else ""
        kept = f"{' and '.join(parts)} too" if parts else "no state goes on"
        return f"{owner} goes on from {author}: weights are kept, {kept}{start}{gently}."


def plan_takeover(saved: Mapping[str, Shapes], targets: Mapping[str, TakeoverTarget]) -> StateTakeover:
    """Compare the shapes of saved moments, named as :data:`MOMENTS`, with those of the successor's parameters."""
    carried: dict[str, Mapping[str, str]] = {}
    for name, heir in targets.items():
        shapes = saved.get(name, {})
        if heir.moments and all(shapes.get(moment) == heir.shape for moment in heir.moments):
            carried[name] = heir.moments
    afresh = tuple(name for name in targets if name not in carried)
    matrices = tuple(name for name in carried if targets[name].rule == "matrix")
    return StateTakeover(carried, afresh, matrices)


def listed(names: Collection[str]) -> str:
    """The first names, and how many more there are."""
    first_names: Sequence[str] = list(names)[:3]
    return ", ".join(first_names) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
