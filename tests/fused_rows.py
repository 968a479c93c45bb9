"""The rows of a part of a fused weight, written out from its description."""

from __future__ import annotations

from collections.abc import Iterator

from rankwise.routing.fused_shape import FusedShape


def runs_of(fused: FusedShape, name: str) -> Iterator[tuple[int, int]]:
    """Start and end of each run of a part along the dimension that is cut, in rising order."""
    for group in range(fused.groups):
        start = group * (fused.length // fused.groups)
        for part, size in fused.parts:
            if part == name:
                yield start, start + size
            start += size
