"""An fp32 weight as a bf16 one and the 16 bits that this lacks: both together are the weight, bit for bit.

A weight in the middle between two bf16 values goes to the one of larger magnitude (Transformer Engine's rule, too),
where a cast goes to the even one: which of two neighbours it came from would take a seventeenth bit.

All is done by integers, which torch takes many at a time where it compares narrow floating-point numbers one by one,
and in tiles: what a tensor of any size needs beside itself stays small, and on CPUs in the cache.
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
    """Write fp32 values as bf16 ones, rounded half away from zero, and what these lack.

    Args:
        weight: fp32 values; a NaN may become the canonical one of its sign.
        rounded: Filled, in bf16. As with any rounding to the nearest, the largest finite values become infinite.
        remainder: Filled, in int16: the weight's magnitude less the rounded one's, in units of its last bit.
    """
    flat, filled = _flat(weight).view(torch.int32), [_flat(rounded).view(torch.int16), _flat(remainder)]
    for tile in _tiles(flat):
        bits = flat[tile]
        # A NaN of larger bits would be carried over into the sign.
        magnitude = (bits & _MAGNITUDE).clamp_(max=_NAN)
        high = (magnitude + _HALF).bitwise_right_shift_(_LOW_BITS)
        low = magnitude.sub_(high << _LOW_BITS)
        # Both are numbers of 16 bits: no conversion has anything to cut off.
        filled[0][tile] = high.add_((bits >> 31).bitwise_left_shift_(15))
        filled[1][tile] = low
    for target, values in zip((rounded, remainder), (filled[0].view(rounded.dtype), filled[1]), strict=True):
        if not target.is_contiguous():
            target.copy_(values.view(target.shape))


def join(rounded: Tensor, remainder: Tensor) -> Tensor:
    """The fp32 values that :func:`split` was given.

    A weight that somebody has changed since then is taken with its old remainder: within half a unit in the last place
    of bf16, and on the same side of zero.

    Args:
        rounded: In bf16.
        remainder: In int16; or in a wider type, with values of 16 bits.
    """
    found = torch.empty(rounded.shape, dtype=torch.float32, device=rounded.device)
    given, rest, joined = _flat(rounded).view(torch.int16), _flat(remainder), found.view(-1).view(torch.int32)
    for tile in _tiles(joined):
        high = given[tile]
        # Of a zero nothing is taken away, which would leave no number.
        least = (high & _SHORT_MAGNITUDE).clamp_(max=1).mul_(-_HALF)
        low = torch.maximum(rest[tile].short(), least, out=least)
        torch.bitwise_left_shift(high.int(), _LOW_BITS, out=joined[tile]).add_(low.int())
    return found


def _flat(values: Tensor) -> Tensor:
    """In a row; the same memory where they lie so."""
    return values.reshape(-1)


def _tiles(flat: Tensor) -> Iterator[slice]:
    size = _TILES.get(flat.device.type, _TILE)
    return (slice(first, first + size) for first in range(0, flat.numel(), size))
