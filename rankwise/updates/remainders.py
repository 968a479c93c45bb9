"""An fp32 weight is kept as a bf16 weight and the 16 bits that it lacks: together they are the weight, bit for bit.

A weight in the middle between two bf16 values goes to the one of larger magnitude (Transformer Engine's rule, too). A
cast goes to the even one, and to say which of two neighbours the weight came from would take a seventeenth bit.

The work is done on integers, because torch compares narrow floating-point numbers one by one; and in tiles, so that
temporaries stay small, and on CPUs in the cache.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

__all__ = ["join", "split"]

_LOW_BITS = 16
_HALF = 1 << (_LOW_BITS - 1)
_MAGNITUDE = 0x7FFFFFFF
_SHORT_MAGNITUDE = 0x7FFF
_NAN = 0x7FC00000
_TILES = {"cpu": 1 << 15}
_TILE = 1 << 24


def split(weight: Tensor, rounded: Tensor, remainder: Tensor) -> None:
    """Write fp32 values as bf16 ones, rounded half away from zero, and their remainders.

    Args:
        weight: fp32 values; a NaN may become the canonical one of its sign.
        rounded: bf16 tensor to fill. As with any rounding to the nearest, the largest finite values become infinite.
        remainder: int16 tensor to fill: the weight's magnitude less the rounded one's, in units of its last bit.
    """
    flat, filled = _flat(weight).view(torch.int32), [_flat(rounded).view(torch.int16), _flat(remainder)]
    for tile in _tiles(flat):
        bits = flat[tile]
        # Rounding up a NaN with larger bits would carry into the sign.
        magnitude = (bits & _MAGNITUDE).clamp_(max=_NAN)
        high = (magnitude + _HALF).bitwise_right_shift_(_LOW_BITS)
        low = magnitude.sub_(high << _LOW_BITS)
        # Both numbers have 16 bits, so that the conversions cut nothing off.
        filled[0][tile] = high.add_((bits >> 31).bitwise_left_shift_(15))
        filled[1][tile] = low
    for target, values in zip((rounded, remainder), (filled[0].view(rounded.dtype), filled[1]), strict=True):
        if not target.is_contiguous():
            target.copy_(values.view(target.shape))


def join(rounded: Tensor, remainder: Tensor) -> Tensor:
    """Return the fp32 values that :func:`split` was given.

    If a bf16 weight has been changed since then, the result differs from it by its old remainder, at most half a unit
    in the last place of bf16, and is on the same side of zero.

    Args:
        rounded: bf16 weights.
        remainder: Remainders in int16; or in a wider type, with values of 16 bits.
    """
    result = torch.empty(rounded.shape, dtype=torch.float32, device=rounded.device)
    given, lacking, joined = _flat(rounded).view(torch.int16), _flat(remainder), result.view(-1).view(torch.int32)
    for tile in _tiles(joined):
        high = given[tile]
        # Nothing is taken away from a zero, whose bits would become those of a NaN.
        least = (high & _SHORT_MAGNITUDE).clamp_(max=1).mul_(-_HALF)
        low = torch.maximum(lacking[tile].short(), least, out=least)
        torch.bitwise_left_shift(high.int(), _LOW_BITS, out=joined[tile]).add_(low.int())
    return result


def _flat(values: Tensor) -> Tensor:
    """Return values as one dimension, in the same memory where they are contiguous."""
    return values.reshape(-1)


def _tiles(flat: Tensor) -> Iterator[slice]:
    size = _TILES.get(flat.device.type, _TILE)
    return (slice(first, first + size) for first in range(0, flat.numel(), size))
