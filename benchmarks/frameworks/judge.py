"""Says whether a cell follows its one process: element by element in float32, else beside what rounding itself does."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from benchmarks.frameworks.problem import Weights

__all__ = ["EXACT", "TIMES_ROUNDING", "Distance", "Verdict", "distance", "verdict"]

EXACT = 2e-4
"""Of the largest change of a weight: what the largest difference of a cell in float32 may be."""
TIMES_ROUNDING = 4.0
"""How many times rounding's own response the distance of a cell may be that computes in 8 or 16 bits."""
_BLIND = 0.5
"""A bound above this would let a step pass that goes half the way, or twice."""


class Distance(NamedTuple):
    """How far weights are from others.

    Attributes:
        largest: Largest difference of an element, over the largest change.
        root_mean_square: Root mean square of the differences, over that of the changes.
    """

    largest: float
    root_mean_square: float


class Verdict(NamedTuple):
    """What is made of a cell.

    Attributes:
        value: The distance that counts.
        bound: What it may be at most.
        unit: What both are shares of.
        follows: Whether it follows one process.
    """

    value: float
    bound: float
    unit: str
    follows: bool


def distance(found: Weights, expected: Weights, start: Weights) -> Distance:
    """How far a run ended from another one that began at ``start``.

    Raises:
        ValueError: The runs have other weights, or one of them has not moved.
    """
    if found.keys() != expected.keys():
        raise ValueError(f"weights differ by name: {sorted(found.keys() ^ expected.keys())[:4]}")
    gaps = np.concatenate([(found[name].reshape(expected[name].shape) - expected[name]).ravel() for name in expected])
    changes = np.concatenate(
        [(expected[name] - start[name].reshape(expected[name].shape)).ravel() for name in expected]
    )
    gaps, changes = gaps.astype(np.float64), changes.astype(np.float64)
    if not np.abs(changes).max() > 0:
        raise ValueError("one process has not moved a weight")
    gaps = np.nan_to_num(gaps, nan=math.inf)
    with np.errstate(over="ignore"):
        mean = math.sqrt(float(np.square(gaps).mean()) / float(np.square(changes).mean()))
    return Distance(float(np.abs(gaps).max() / np.abs(changes).max()), mean)


def verdict(found: Distance, response: Distance | None) -> Verdict:
    """Judge a cell.

    Args:
        found: How far it is from one process.
        response: How far it moves if its first weights are changed by as much as its arithmetic rounds; None where it
            computes in float32.

    Returns:
        In float32 the largest element counts. In fewer bits single elements say nothing, as rounding takes them a whole
        step aside: the root mean square counts, beside the response. Where the response is so large that half a step
        could hide in it, nothing follows.
    """
    if response is None:
        return Verdict(found.largest, EXACT, "of the largest change", found.largest <= EXACT)
    bound = max(EXACT, TIMES_ROUNDING * response.root_mean_square)
    follows = found.root_mean_square <= EXACT or found.root_mean_square <= bound <= _BLIND
    return Verdict(found.root_mean_square, min(bound, _BLIND), "of the root mean square change", follows)


def alike(checksums: Mapping[int, str]) -> bool:
    """Whether all ranks have the same whole weights, bit by bit."""
    return len(set(checksums.values())) == 1
