"""Parts of what neighbours read of each other."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from rankwise.planning.step_unit import Bucket, StepUnit
from rankwise.sharding import ReadField

__all__ = ["parts_of"]


def parts_of(unit: StepUnit, buckets: Sequence[Bucket], states: Sequence[str]) -> list[ReadField]:
    """Fields that give parts of the shards' gradients, and of their states, for :class:`HaloExchange`."""
    places = [{entry.index: place for place, entry in enumerate(bucket.entries)} for bucket in buckets]
    zero = torch.zeros((), dtype=unit.dtype, device=unit.device)

    def read(state: str | None, wanted: Sequence[tuple[int, slice]]) -> Sequence[Tensor]:
        # Of parameters without a gradient, and of those that have no chain: what is fetched of them is not used.
        found = [zero.expand(part.stop - part.start) for _, part in wanted]
        for bucket, place_of in zip(buckets, places, strict=True):
            numbers = [number for number, (index, _) in enumerate(wanted) if index in place_of]
            parts = [(place_of[index], part) for index, part in (wanted[number] for number in numbers)]
            if state is None:
                values = [bucket.grads[place][part] for place, part in parts]
            else:
                values = bucket.narrow.peeked(bucket, state, parts)
            for number, value in zip(numbers, values, strict=True):
                found[number] = value
        return found

    return [partial(read, state) for state in (None, *states)]
