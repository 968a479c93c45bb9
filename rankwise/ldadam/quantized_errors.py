"""Error buffers that are kept in 8 bits: opened for a step, and closed at its end."""

from __future__ import annotations

import torch
from torch import Tensor

from rankwise.kernels.forms import quantization_for
from rankwise.kernels.run_views import RunPlace
from rankwise.planning.entries import Entry
from rankwise.planning.unit import Bucket, StepUnit

__all__ = ["QuantizedErrors"]


class QuantizedErrors:
    """The buffers of one step, between its beginning and its end in the type of the computation.

    They are opened into the gradients' memory where nobody reads it any more, else into memory of the step's own.

    Args:
        unit: The unit of the step.
    """

    def __init__(self, unit: StepUnit) -> None:
        self._unit = unit
        self._form = quantization_for(unit.device, unit.dtype)
        self._values: list[Tensor] = []
        self._bytes: list[Tensor] = []

    def opened(self, bucket: Bucket) -> list[Tensor]:
        """The sums of gradients and buffers of a bucket's fragments: what its buffers are until :meth:`close`."""
        # The blocks of a fused weight take one rule in one group: they are all here.
        places: dict[int, list[int]] = {}
        for place, entry in enumerate(bucket.entries):
            places.setdefault(_keeper(entry).index, []).append(place)
        found = list(bucket.grads)
        keepers, grads, sums = [], [], []
        for blocks in places.values():
            first = bucket.entries[blocks[0]]
            keeper, grad = _keeper(first), _gradient_around(first, found[blocks[0]])
            total = grad if self._unit.spends(keeper, grad) else torch.empty_like(grad)
            for place in blocks:
                found[place] = _place_in_keeper(bucket.entries[place]).of(total)
            keepers.append(keeper)
            grads.append(grad)
            sums.append(total)
        kept = bucket.in_bytes("error", keepers)
        self._form.add_dequantized(grads, kept, sums)
        self._values += sums
        self._bytes += kept
        return found

    def close(self) -> None:
        """Keep what the buffers are now."""
        self._form.quantize_(self._values, self._bytes)


def _keeper(entry: Entry) -> Entry:
    return entry if entry.stored is None else entry.stored


def _place_in_keeper(entry: Entry) -> RunPlace:
    part = entry.fragment
    return RunPlace(part.offset - _keeper(entry).fragment.offset, part.numel, part.spread)


def _gradient_around(entry: Entry, grad: Tensor) -> Tensor:
    """The gradient of all that is kept with an entry, given the entry's own part of it."""
    numel, first = _keeper(entry).fragment.numel, grad.storage_offset() - _place_in_keeper(entry).first
    return grad.as_strided((numel,), (1,), first)
