r"""Block-wise quantization (Dettmers et al., arXiv 2110.02861) to 8 bits, with powers of two as scales.

Of a run of *n* values, every :data:`BLOCK` share a scale :math:`2^e`, the smallest of which no value is more than 127
times. Kept are *n* integers :math:`q = \mathrm{round}(v / 2^e)`, halves to even, and behind them the exponents, all of
a byte, and up to a multiple of 16 bytes: :func:`quantized_length`. A value moves by at most half a scale, which is at
most 1/127 of the largest of its block.

With such scales nothing is rounded twice: :math:`q \, 2^e` is a number of bfloat16, and quantizing it gives the same
integers and exponents again. A block with a value that is not finite is NaN throughout. Numbers below :math:`2^{-127}`
are zero.

These are the plain forms, for every device and floating-point type; :func:`rankwise.kernels.forms.quantization_for`
knows the others, which have the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

__all__ = ["BLOCK", "QUANTIZED", "add_dequantized", "check_quantized", "dequantized", "quantize_", "quantized_length"]

BLOCK = 64
"""Values that share a scale."""

_ALIGNMENT = 16

QUANTIZED = torch.uint8
"""Type of what is kept, integers and exponents alike."""

LEAST, MOST = -126, 126
"""Exponents of scales; one more tells that a value was not finite."""

# 127 / 128: mantissas up to here fit in 127 times the scale below.
_FULL = 0.9921875
# Values that plain forms work on at a time, so that temporaries stay small.
_AT_ONCE = 1 << 22


def quantized_length(numel: int) -> int:
    """Bytes for so many values: a multiple of what wide accesses need, so that runs may lie one behind the other."""
    return -(-(numel + -(-numel // BLOCK)) // _ALIGNMENT) * _ALIGNMENT


def check_quantized(values: Sequence[Tensor], quantized: Sequence[Tensor]) -> None:
    """Refuse lists that do not fit together, of which compiled forms would read and write whatever lies there.

    Raises:
        ValueError: A tensor has another type or length than it must have.
    """
    for value, kept in zip(values, quantized, strict=True):
        if kept.dtype != QUANTIZED or kept.dim() != 1 or kept.numel() != quantized_length(value.numel()):
            raise ValueError(
                f"{value.numel()} values need {quantized_length(value.numel())} bytes in a row, got "
                f"{tuple(kept.shape)} of {kept.dtype}"
            )


def quantize_(values: Sequence[Tensor], quantized: Sequence[Tensor]) -> None:
    """Quantize runs.

    Args:
        values: 1-D, of any floating-point type.
        quantized: For each, :func:`quantized_length` bytes, overwritten.
    """
    check_quantized(values, quantized)
    for value, kept in zip(values, quantized, strict=True):
        codes, exponents = _split(kept, value.numel())
        for first in range(0, value.numel(), _AT_ONCE):
            part = value[first : first + _AT_ONCE]
            if part.dtype == torch.float16:
                part = part.float()  # what it is multiplied by may be beyond float16
            blocks = pad(part, (0, -part.numel() % BLOCK)).view(-1, BLOCK)
            found = _exponents(blocks)
            rounded = (blocks * _powers(-found, blocks.dtype)[:, None]).round_()
            rounded.masked_fill_((found > MOST)[:, None], 0.0)
            codes[first : first + _AT_ONCE].copy_(rounded.view(-1)[: part.numel()])
            exponents[first // BLOCK : first // BLOCK + len(found)].copy_(found)


def add_dequantized(values: Sequence[Tensor], quantized: Sequence[Tensor], sums: Sequence[Tensor]) -> None:
    """Add what was quantized to other values.

    Args:
        values: 1-D.
        quantized: For each, as :func:`quantize_` made it.
        sums: For each, a tensor alike, overwritten; may be the values themselves.
    """
    check_quantized(values, quantized)
    for value, kept, total in zip(values, quantized, sums, strict=True):
        for first, part in _parts(kept, value.numel(), value.dtype):
            here = slice(first, first + part.numel())
            torch.add(value[here], part, out=total[here])


def dequantized(quantized: Tensor, numel: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """What was quantized, exactly.

    Args:
        quantized: As :func:`quantize_` made it.
        numel: How many values it has.
        dtype: Of the result: one with bfloat16's exponents.
    """
    result = torch.empty(numel, dtype=dtype, device=quantized.device)
    for first, part in _parts(quantized, numel, torch.float32):
        result[first : first + part.numel()].copy_(part)
    return result


def _parts(quantized: Tensor, numel: int, dtype: torch.dtype) -> Iterator[tuple[int, Tensor]]:
    codes, exponents = _split(quantized, numel)
    for first in range(0, numel, _AT_ONCE):
        part = codes[first : first + _AT_ONCE].to(dtype)
        own = exponents[first // BLOCK : -(-(first + part.numel()) // BLOCK)]
        scales = _powers(own.to(torch.int32), dtype)
        scales.masked_fill_(own > MOST, torch.nan)
        yield first, part.mul_(scales.repeat_interleave(BLOCK)[: part.numel()])


def _split(quantized: Tensor, numel: int) -> tuple[Tensor, Tensor]:
    signed = quantized.view(torch.int8)
    return signed[:numel], signed[numel : numel + -(-numel // BLOCK)]


def _exponents(blocks: Tensor) -> Tensor:
    """Of each row, int32."""
    largest = blocks.abs().amax(1)
    mantissas, exponents = torch.frexp(largest)
    found = exponents.to(torch.int32) - 7 + (mantissas > _FULL)
    found = torch.where(largest > 0, found, LEAST).clamp_(LEAST, MOST + 1)
    return found.masked_fill_(~largest.isfinite(), MOST + 1)


def _powers(exponents: Tensor, dtype: torch.dtype) -> Tensor:
    """Of two, from their bits: functions may round."""
    return ((exponents + 127) << 23).view(torch.float32).to(dtype)
