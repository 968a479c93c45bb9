"""Block-wise quantization on the device, see :mod:`rankwise.kernels.quantization`: one launch for all runs.

Bytes per value: quantizing reads 4 and writes 1 and a scale's share; adding reads as many and writes 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import triton.language as tl
from torch import Tensor

from rankwise.kernels.quantization import BLOCK, LEAST, MOST, QUANTIZED, check_quantized
from rankwise.kernels.triton.language import jit, launch
from rankwise.kernels.triton.segments import addresses, read, tiles_of, wide, write
from rankwise.kernels.triton.tables import table_here

__all__ = ["add_dequantized", "quantize_"]

_TILE = 32 * BLOCK
_WARPS = 4


def quantize_(values: Sequence[Tensor], quantized: Sequence[Tensor]) -> None:
    """As :func:`rankwise.kernels.quantization.quantize_`, of contiguous fp32 runs."""
    _launch(_quantize_kernel, values, quantized, values)


def add_dequantized(values: Sequence[Tensor], quantized: Sequence[Tensor], sums: Sequence[Tensor]) -> None:
    """As :func:`rankwise.kernels.quantization.add_dequantized`, of contiguous fp32 runs."""
    if [total.numel() for total in sums] != [value.numel() for value in values]:
        raise ValueError("the sums need one run per run of values, of its length")
    _launch(_add_dequantized_kernel, values, quantized, sums)


def _launch(kernel: object, values: Sequence[Tensor], quantized: Sequence[Tensor], sums: Sequence[Tensor]) -> None:
    check_quantized(values, quantized)
    if not values:
        return
    device, lengths = values[0].device, tuple(value.numel() for value in values)
    rows = zip(addresses(values), addresses(quantized, QUANTIZED), addresses(sums), lengths, strict=True)
    tiles = tiles_of(lengths, _TILE, device)
    table = table_here(tuple(chain.from_iterable(rows)), device)
    launch(
        kernel,
        (tiles.count,),
        device,
        table,
        tiles.rows,
        LEAST=LEAST,
        MOST=MOST,
        BLOCKS=_TILE // BLOCK,
        BLOCK=BLOCK,
        num_warps=_WARPS,
    )


@jit
def _power(exponents: tl.tensor) -> tl.tensor:
    """Of two, from its bits."""
    return ((exponents + 127) << 23).to(tl.float32, bitcast=True)


@jit
def _quantize(
    row: tl.tensor,
    first: tl.tensor,
    LEAST: tl.constexpr,
    MOST: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    FAST: tl.constexpr,
) -> None:
    length = tl.load(row + 3)
    inside = first + tl.arange(0, BLOCKS * BLOCK) < length
    values = read(row, 0, first, inside, BLOCKS * BLOCK, FAST).reshape(BLOCKS, BLOCK)
    # Magnitudes are ordered as their bits are, infinities and NaNs behind all others.
    bits = tl.max(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    found = (bits >> 23) - 126 - 7 + ((bits & 0x7FFFFF) > 0x7E0000).to(tl.int32)
    found = tl.minimum(tl.maximum(found, LEAST), MOST + 1)
    broken = bits >= 0x7F800000
    found = tl.where(broken, MOST + 1, found)
    # Added and taken away, this leaves no digits behind the point: rounded to the nearest, halves to even.
    scaled = values * _power(tl.where(broken, 0, -found))[:, None]
    codes = tl.where((found > MOST)[:, None], 0.0, (scaled + 12582912.0) - 12582912.0)
    write(row, 1, first, codes.to(tl.int8).reshape(BLOCKS * BLOCK), inside, BLOCKS * BLOCK, FAST, tl.int8)
    blocks = first // BLOCK + tl.arange(0, BLOCKS)
    exponents = tl.load(row + 1).to(tl.pointer_type(tl.int8)) + length + blocks
    tl.store(exponents, found.to(tl.int8), mask=blocks * BLOCK < length)


@jit
def _quantize_kernel(
    table: tl.tensor,
    tiles: tl.tensor,
    LEAST: tl.constexpr,
    MOST: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    tile = tl.program_id(0).to(tl.int64)
    row = table + tl.load(tiles + 2 * tile) * 4
    first = tl.load(tiles + 2 * tile + 1)
    if (first + BLOCKS * BLOCK <= tl.load(row + 3)) & wide(row, 2):
        _quantize(row, first, LEAST, MOST, BLOCKS, BLOCK, True)
    else:
        _quantize(row, first, LEAST, MOST, BLOCKS, BLOCK, False)


@jit
def _add(
    row: tl.tensor, first: tl.tensor, MOST: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, FAST: tl.constexpr
) -> None:
    length = tl.load(row + 3)
    inside = first + tl.arange(0, BLOCKS * BLOCK) < length
    blocks = first // BLOCK + tl.arange(0, BLOCKS)
    exponents = tl.load(row + 1).to(tl.pointer_type(tl.int8)) + length + blocks
    found = tl.load(exponents, mask=blocks * BLOCK < length, other=0).to(tl.int32)
    scales = tl.where(found > MOST, float("nan"), _power(found))
    codes = read(row, 1, first, inside, BLOCKS * BLOCK, FAST, tl.int8).to(tl.float32).reshape(BLOCKS, BLOCK)
    added = (codes * scales[:, None]).reshape(BLOCKS * BLOCK)
    values = read(row, 0, first, inside, BLOCKS * BLOCK, FAST)
    write(row, 2, first, values + added, inside, BLOCKS * BLOCK, FAST)


@jit
def _add_dequantized_kernel(
    table: tl.tensor,
    tiles: tl.tensor,
    LEAST: tl.constexpr,
    MOST: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    tile = tl.program_id(0).to(tl.int64)
    row = table + tl.load(tiles + 2 * tile) * 4
    first = tl.load(tiles + 2 * tile + 1)
    if (first + BLOCKS * BLOCK <= tl.load(row + 3)) & wide(row, 3):
        _add(row, first, MOST, BLOCKS, BLOCK, True)
    else:
        _add(row, first, MOST, BLOCKS, BLOCK, False)
