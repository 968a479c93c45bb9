"""From paired runs to a verdict."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

__all__ = ["Difference", "mean_interval", "verdict"]

# Student's t, 97.5 %, by degrees of freedom.
_T = {1: 12.7062, 2: 4.3027, 3: 3.1824, 4: 2.7764, 5: 2.5706, 6: 2.4469, 7: 2.3646, 8: 2.3060, 9: 2.2622}


@dataclass(frozen=True)
class Difference:
    """A mean and half the width of its 95 % interval.

    Attributes:
        mean: Mean of the values.
        half: Infinite for a single value.
        count: Count of values.
    """

    mean: float
    half: float
    count: int

    @property
    def low(self) -> float:
        """Lower end of the interval."""
        return self.mean - self.half

    @property
    def high(self) -> float:
        """Upper end of the interval."""
        return self.mean + self.half


def mean_interval(values: Sequence[float]) -> Difference:
    """The mean of values and its 95 % interval, by Student's t; one that diverged makes both meaningless.

    Args:
        values: One to ten.
    """
    if not all(map(math.isfinite, values)):
        return Difference(math.inf, math.inf, len(values))
    mean = statistics.fmean(values)
    if len(values) < 2:
        return Difference(mean, math.inf, len(values))
    return Difference(mean, _T[len(values) - 1] * statistics.stdev(values) / len(values) ** 0.5, len(values))


def verdict(difference: Difference, counts: float, kind: Literal["less", "no worse"]) -> str:
    """What a difference, ours minus the other's, says of a claim.

    Args:
        difference: Difference of paired losses.
        counts: Smallest difference that counts, positive.
        kind: See :class:`benchmarks.convergence.experiment.Claim`.

    Returns:
        "holds": the interval is below zero and the mean below ``-counts``, or, for "no worse", the interval is below
        ``counts``. "does not hold": the interval leaves no room for a gain that counts, or lies above ``counts``.
        "not settled" otherwise.
    """
    if not math.isfinite(difference.mean):
        return "not settled"
    if kind == "less":
        if difference.high < 0 and difference.mean <= -counts:
            return "holds"
        return "does not hold" if difference.low > -counts else "not settled"
    if difference.high < counts:
        return "holds"
    return "does not hold" if difference.low > counts else "not settled"
