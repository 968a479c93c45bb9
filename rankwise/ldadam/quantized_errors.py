"""Error buffers that are kept in 8 bits: opened for a step, and closed at its end."""

from __future__ import annotations

import torch
from torch import Tensor

from rankwise.kernels.forms import quantization_for
from rankwise.kernels.quantization import dequantized
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
        self._divided: dict[int, Tensor] = {}  # the buffers of fused weights, by the index of who keeps them

    def opened(self, bucket: Bucket) -> list[Tensor]:
        """The sums of gradients and buffers of a bucket's fragments: what its buffers are until :meth:`close`."""
        found: list[Tensor] = []
        grads, entries, sums = [], [], []
        for entry, grad in zip(bucket.entries, bucket.grads, strict=True):
            if not _is_whole(entry):
                found.append(self._block_of(entry, bucket).add_(grad))
                continue
            found.append(grad if self._unit.spends(entry, grad) else torch.empty_like(grad))
            grads.append(grad)
            entries.append(_keeper(entry))
            sums.append(found[-1])
        kept = bucket.in_bytes("error", entries)
        self._form.add_dequantized(grads, kept, sums)
        self._values += sums
        self._bytes += kept
        return found

    def _block_of(self, entry: Entry, bucket: Bucket) -> Tensor:
        """Of the buffer of a fused weight, the part of one block."""
        keeper, part = _keeper(entry), entry.fragment
        if keeper.index not in self._divided:
            (kept,) = bucket.in_bytes("error", [keeper])
            whole = dequantized(kept, keeper.fragment.numel, self._unit.dtype)
            self._divided[keeper.index] = whole
            self._values.append(whole)
            self._bytes.append(kept)
        place = RunPlace(part.offset - keeper.fragment.offset, part.numel, part.spread)
        return place.of(self._divided[keeper.index])

    def close(self) -> None:
        """Keep what the buffers are now."""
        self._form.quantize_(self._values, self._bytes)


def _keeper(entry: Entry) -> Entry:
    return entry if entry.stored is None else entry.stored


def _is_whole(entry: Entry) -> bool:
    return entry.fragment.spread is None and entry.fragment.numel == _keeper(entry).fragment.numel
