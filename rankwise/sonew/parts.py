"""Buckets a part at a time, and parts of what they hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from rankwise.planning.entries import Entry
from rankwise.planning.unit import Bucket, StepUnit
from rankwise.sharding import ReadField

__all__ = ["part_of", "split"]


def split(buckets: Sequence[Bucket], most: int, weight: Callable[[Entry, Tensor], int]) -> Iterator[list[Bucket]]:
    """Buckets and parts of them with so many elements at most, or one larger parameter, by the weights of entries."""
    some: list[Bucket] = []
    elements = 0
    for bucket in buckets:
        places: list[int] = []
        for place, (entry, grad) in enumerate(zip(bucket.entries, bucket.grads, strict=True)):
            size = weight(entry, grad) * grad.numel()
            if size and elements and elements + size > most:
                yield [*some, bucket.only(places)] if places else some
                some, places, elements = [], [], 0
            places.append(place)
            elements += size
        if places:
            some.append(bucket if len(places) == len(bucket.entries) else bucket.only(places))
    if some or not buckets:
        yield some


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
