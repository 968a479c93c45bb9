"""An fp32 weight as a bf16 one and the 16 bits that this lacks: both together are the weight, bit for bit.

A weight in the middle between two bf16 values goes to the one of larger magnitude (Transformer Engine's rule, too),
where a cast goes to the even one: which of two neighbours it came from would take a seventeenth bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["join", "split"]

_LOW_BITS = 16
_HALF = 1 << (_LOW_BITS - 1)


def split(weight: Tensor, rounded: Tensor, remainder: Tensor) -> None:
    """Write fp32 values as bf16 ones, rounded half away from zero, and what these lack.

    Args:
        weight: fp32 values; a NaN becomes the canonical one.
        rounded: Filled, in bf16. As with any rounding to the nearest, the largest finite values become infinite.
        remainder: Filled, in int16: the weight's bits less the rounded ones'.
    """
    bits = weight.masked_fill(weight.isnan(), torch.nan).view(torch.int32)
    high = (bits + _HALF).bitwise_right_shift_(_LOW_BITS)
    # Within 16 bits: no conversion has anything to cut off.
    rounded.view(torch.int16).copy_(high)
    remainder.copy_(bits.sub_(high.bitwise_left_shift_(_LOW_BITS)))


def join(rounded: Tensor, remainder: Tensor) -> Tensor:
    """The fp32 values that :func:`split` was given.

    A weight that somebody has changed since then is taken with its old remainder: within half a unit in the last place
    of bf16, and a zero stays at or beyond zero, an infinity no NaN.

    Args:
        rounded: In bf16.
        remainder: In int16.
    """
    known = torch.where(rounded == 0, remainder.clamp(min=0), remainder)
    known = torch.where(rounded.isinf(), known.clamp(max=0), known)
    return rounded.view(torch.int16).int().bitwise_left_shift_(_LOW_BITS).add_(known).view(torch.float32)
