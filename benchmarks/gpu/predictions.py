"""What the model expects of a device: the floor by bytes and products, and how far above it things usually are."""

from __future__ import annotations

from functools import cache

from benchmarks.counts import TYPES, count
from benchmarks.gpu.peaks import Peaks
from benchmarks.launches import Counts

__all__ = ["GOALS", "MEMORY", "PRODUCTS", "counted_step", "seconds_of_step"]

MEMORY = (0.7, 1.0)
"""Shares of the peak bandwidth that a kernel bound by memory reaches: an H200 copies at 0.88 to 0.90 of it."""

PRODUCTS = {"bfloat16": (0.3, 0.85), "float32": (0.5, 0.95), "bf16x3": (0.25, 0.85)}
"""Shares of the peak that products reach, by what multiplies: cuBLAS at 8192 reaches 0.8 of an H200's bfloat16."""

_LAUNCH = 12e-6  # Seconds for each launch and operation that the device waits at most.

GOALS = {
    "MARS-AdamW": 1.4,
    "MARS-Lion": 1.15,
    "SONew, tridiagonal": 1.8,
    "SONew, band 4": 2.8,
    "SONew, tridiagonal, states int8": 1.2,
    "MARS-AdamW, states int8": 1.0,
    "LDAdam, rank 16": 2.0,
    "LDAdam, rank 256": 3.0,
    "MARS-M": 12.2,
    "MKOR": 1.7,
}
"""Most that a step may take over fused AdamW's, for the bytes and products that each must have."""


@cache
def counted_step(name: str, model: str) -> Counts | None:
    """A steady step's bytes, products and launches; None for a type that is not counted."""
    if name not in TYPES:
        return None
    return count(TYPES[name][0], model, TYPES[name][1])[0]


def seconds_of_step(counts: Counts | None, peaks: Peaks | None) -> tuple[float | None, float | None]:
    """The range of a step's time.

    Args:
        counts: Counts of the step.
        peaks: Peaks of the device.

    Returns:
        At the peaks of memory or products, whichever takes longer; and at the low ends of what is reached of both, one
        after the other, with every launch waited for. None where nothing is known.
    """
    if counts is None or peaks is None:
        return None, None
    moved = counts.bytes / peaks.bandwidth
    products = {kind: flops / peaks.rate(kind) for kind, flops in counts.flops.items()}
    slow = sum(seconds / PRODUCTS[kind][0] for kind, seconds in products.items())
    return max(moved * 0.9, sum(products.values())), moved / MEMORY[0] + slow + counts.launches * _LAUNCH
