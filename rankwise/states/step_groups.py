"""Param groups as steps read them: rates by name patterns, and decay by its method.

Groups themselves keep what schedulers write and loggers read. A step sees a view of each group for every multiplier of
``lr_scale``; where nothing is multiplied and decay is decoupled the views are the groups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from typing import Any

from torch import Tensor

from rankwise.options.checks import plain_number
from rankwise.options.fields import Options

__all__ = ["PEAK", "StepGroups", "peak_of", "rate_of"]

PEAK = "lr_max"
"""Key of a group with the rate that it was built with."""


def peak_of(group: Mapping[str, Any]) -> float:
    """The rate that a schedule's present one is a share of: ``max_lr``, where a schedule says so, or the first one."""
    return float(group.get("max_lr") or group.get(PEAK) or 0.0)


def rate_of(lr: Any) -> Any:
    """A rate as steps compute with it: a number of Python's, or a tensor without dimensions, in the same memory."""
    if isinstance(lr, Tensor):
        return lr.reshape(()) if lr.dim() and lr.numel() == 1 else lr
    return plain_number(lr)


class StepGroups:
    """Makes the views.

    Args:
        options: With ``lr_scale`` and ``weight_decay_method``, where the optimizer has them.

    Attributes:
        independent: Whether decay is a share of the schedule, not of the rate.
        cautious: Whether elements that step away from zero do not decay.
    """

    def __init__(self, options: Options) -> None:
        self._scales: Mapping[str, float] = getattr(options, "lr_scale", None) or {}
        self._distinct = (1.0, *sorted(set(self._scales.values()) - {1.0}))
        self._decays = options.decay_options
        method = getattr(options, "weight_decay_method", "decoupled")
        self.independent, self.cautious = method == "independent", method == "cautious"

    def scale(self, name: str) -> float:
        """What the rate of a parameter is multiplied by; of several patterns the last one counts, as in ``blocks``."""
        return next((self._scales[each] for each in reversed(list(self._scales)) if fnmatch(name, each)), 1.0)

    def place(self, position: int, scale: float) -> int:
        """Where a parameter's view is.

        Args:
            position: Position of its group.
            scale: Scale of the parameter.
        """
        return position * len(self._distinct) + self._distinct.index(scale)

    def views(self, groups: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
        """What steps read in the groups' place, by :meth:`place`."""
        if any(type(group.get("lr")) is not float for group in groups):
            groups = [{**group, "lr": rate_of(group["lr"])} if "lr" in group else group for group in groups]
        if len(self._distinct) == 1 and not self.independent:
            return groups
        return [self._view(group, scale) for group in groups for scale in self._distinct]

    def _view(self, group: dict[str, Any], scale: float) -> dict[str, Any]:
        found = dict(group)
        if scale != 1.0 and "lr" in group:
            found["lr"] = group["lr"] * scale
        if self.independent:
            # Rules decay by lr times this: by the share of the schedule, whatever the parameter's own rate.
            peak = peak_of(group) * scale
            found.update({key: group[key] / peak if peak else 0.0 for key in self._decays if key in group})
        return found
