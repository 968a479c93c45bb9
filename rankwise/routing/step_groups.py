"""Param groups as steps read them: rates by name patterns, and decay by its method.

Groups themselves keep what schedulers write and loggers read. A step reads a view of each group for every multiplier of
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
"""Key of a group for the rate that it was built with."""


def peak_of(group: Mapping[str, Any]) -> float:
    """Peak of the schedule: ``max_lr``, if the schedule sets it, or the rate that the group was built with."""
    return float(group.get("max_lr") or group.get(PEAK) or 0.0)


def rate_of(lr: Any) -> Any:
    """Convert a rate for a step: to a Python number, or to a tensor without dimensions in the same memory."""
    if isinstance(lr, Tensor):
        return lr.reshape(()) if lr.dim() and lr.numel() == 1 else lr
    return plain_number(lr)


class StepGroups:
    """Makes the views of param groups that steps read.

    Args:
        options: The optimizer's options; they may have ``lr_scale`` and ``weight_decay_method``.

    Attributes:
        independent: Whether decay follows the schedule alone, not the rate.
        cautious: Whether elements that step away from zero do not decay.
    """

    def __init__(self, options: Options) -> None:
        self._scales: Mapping[str, float] = getattr(options, "lr_scale", None) or {}
        self._distinct = (1.0, *sorted(set(self._scales.values()) - {1.0}))
        self._decays = options.decay_options
        method = getattr(options, "weight_decay_method", "decoupled")
        self.independent, self.cautious = method == "independent", method == "cautious"

    def scale(self, name: str) -> float:
        """Factor of a parameter's rate; of several matching patterns the last one counts, as in ``blocks``."""
        return next((self._scales[pattern] for pattern in reversed(list(self._scales)) if fnmatch(name, pattern)), 1.0)

    def place(self, position: int, scale: float) -> int:
        """Index of the view of a parameter with this scale, in the group at this position."""
        return position * len(self._distinct) + self._distinct.index(scale)

    def views(self, groups: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
        """Views of the groups; :meth:`place` gives their indices."""
        if any(type(group.get("lr")) is not float for group in groups):
            groups = [{**group, "lr": rate_of(group["lr"])} if "lr" in group else group for group in groups]
        if len(self._distinct) == 1 and not self.independent:
            return groups
        return [self._view(group, scale) for group in groups for scale in self._distinct]

    def _view(self, group: dict[str, Any], scale: float) -> dict[str, Any]:
        view = dict(group)
        if scale != 1.0 and "lr" in group:
            view["lr"] = group["lr"] * scale
        if self.independent:
            # Rules decay by lr times this value, so the share of the schedule must not depend on the parameter's rate.
            peak = peak_of(group) * scale
            view.update({key: group[key] / peak if peak else 0.0 for key in self._decays if key in group})
        return view
