"""Parts of what neighbours read of each other."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rankwise.planning.unit import Bucket, StepUnit
from rankwise.sharding import ReadField

__all__ = ["part_of"]


def part_of(unit: StepUnit, buckets: Sequence[Bucket], name: str | None) -> ReadField:
    """Gives parts of a state of the fragments, or of their gradients."""
    place_of = {entry.index: (bucket, place) for bucket in buckets for place, entry in enumerate(bucket.entries)}
    zero = torch.zeros((), dtype=unit.dtype, device=unit.device)

    def read(wanted: Sequence[tuple[int, slice]]) -> Sequence[Tensor]:
        # Of parameters without a gradient, and of those that have no chain: what is fetched of them is not used.
        found = [zero.expand(part.stop - part.start) for _, part in wanted]
        by_bucket: dict[int, list[int]] = {}
        for number, (index, _) in enumerate(wanted):
            if index in place_of:
                by_bucket.setdefault(id(place_of[index][0]), []).append(number)
        for numbers in by_bucket.values():
            bucket = place_of[wanted[numbers[0]][0]][0]
            parts = [(place_of[wanted[number][0]][1], wanted[number][1]) for number in numbers]
            values = (
                [bucket.grads[place][part] for place, part in parts]
                if name is None
                else bucket.narrow.peeked(bucket, name, parts)
            )
            for number, value in zip(numbers, values, strict=True):
                found[number] = value
        return found

    return read
