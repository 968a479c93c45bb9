r"""Float32 numbers as two bfloat16 halves, ``x = high + low`` to 2^-17, which tensor cores multiply in three products.

The dropped product of the low halves is as small as what both halves leave out: an error of 2 to 3e-6 of the length of
a vector, where one product of bfloat16 makes 1 to 2e-3. Thin factors are halved once, by whoever writes them, as every
tile of a product reads them again; large matrices stay as they are, and are split where they are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain

import torch
import triton.language as tl
from torch import Tensor

from rankwise.kernels.triton.language import ceil_div, jit, launch
from rankwise.kernels.triton.segments import (
    Runs,
    addresses,
    lanes_of,
    moved,
    place_of,
    read,
    tiles_of,
    wide,
    write,
)
from rankwise.kernels.triton.tables import table_here

__all__ = [
    "empty_halves",
    "in_halves",
    "multiply",
    "multiply_halves",
    "read_halves",
    "scaled_halves",
    "split",
]

TILE = 2048
_ALIGNED = 8  # elements of 16 bytes


def empty_halves(shapes: Sequence[Sequence[int]], device: torch.device) -> list[Tensor]:
    """Return memory for halves, (2, *shape) bfloat16 each, high before low; their first strides are equal."""
    sizes = [torch.Size(shape).numel() for shape in shapes]
    *starts, total = accumulate((ceil_div(size, _ALIGNED) * _ALIGNED for size in sizes), initial=0)
    planes = torch.empty(2, total, dtype=torch.bfloat16, device=device)
    return [
        planes[:, start : start + size].view(2, *shape)
        for start, size, shape in zip(starts, sizes, shapes, strict=True)
    ]


def in_halves(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the halves of contiguous float32 tensors, as :func:`empty_halves` lays them out: 8 bytes an element."""
    halves = empty_halves([tensor.shape for tensor in tensors], tensors[0].device)
    runs = Runs([tensors, [half[0] for half in halves]], TILE, types=[torch.float32, torch.bfloat16])
    low = halves[0].stride(0)
    launch(_halves_kernel, (runs.count,), runs.device, runs.table, runs.tiles, low, BLOCK=TILE)
    return halves


def scaled_halves(stacks: Sequence[Tensor]) -> list[Tensor]:
    """Return the halves of rows that are scaled to a largest entry of one; rows of zeros stay zeros.

    Args:
        stacks: (matrices, rows, length) each, contiguous float32.
    """
    device = stacks[0].device
    halves = empty_halves([stack.shape for stack in stacks], device)
    rows = zip(addresses(stacks), addresses([half[0] for half in halves], torch.bfloat16), strict=True)
    table = tuple(chain.from_iterable((*places, stack.shape[-1]) for places, stack in zip(rows, stacks, strict=True)))
    tiles = tiles_of(tuple(stack.shape[0] * stack.shape[1] for stack in stacks), 1, device)
    low = halves[0].stride(0)
    launch(_scaled_kernel, (tiles.count,), device, table_here(table, device), tiles.rows, low, BLOCK=TILE)
    return halves


@jit
def split(x: tl.tensor) -> tl.tensor:
    """Return the halves of float32 numbers."""
    high = x.to(tl.bfloat16)
    return high, (x - high.to(tl.float32)).to(tl.bfloat16)


@jit
def multiply(a: tl.tensor, b: tl.tensor, total: tl.tensor) -> tl.tensor:
    """Return ``total + A B`` of float32 tiles."""
    a_high, a_low = split(a)
    b_high, b_low = split(b)
    return multiply_halves(a_high, a_low, b_high, b_low, total)


@jit
def multiply_halves(
    a_high: tl.tensor, a_low: tl.tensor, b_high: tl.tensor, b_low: tl.tensor, total: tl.tensor
) -> tl.tensor:
    """Return ``total + A B``, the small products first."""
    total = tl.dot(a_low, b_high, total)
    total = tl.dot(a_high, b_low, total)
    return tl.dot(a_high, b_high, total)


@jit
def read_halves(place: tl.tensor, low: tl.tensor, inside: tl.tensor, HALVED: tl.constexpr) -> tl.tensor:
    """Return the halves of a tile of float32, or those in memory, the low one so many elements behind the high one."""
    if HALVED:
        return tl.load(place, mask=inside, other=0.0), tl.load(place + low, mask=inside, other=0.0)
    else:
        return split(tl.load(place, mask=inside, other=0.0))


@jit
def _halves_kernel(table: tl.tensor, tiles: tl.tensor, low: tl.tensor, BLOCK: tl.constexpr) -> None:
    program = tl.program_id(0).to(tl.int64)
    row = table + tl.load(tiles + 2 * program) * 3
    start = tl.load(tiles + 2 * program + 1)
    length = tl.load(row + 2)
    if (start + BLOCK <= length) & wide(row, 2):
        _halve_tile(row, start, length, low, BLOCK, True)
    else:
        _halve_tile(row, start, length, low, BLOCK, False)


@jit
def _halve_tile(
    row: tl.tensor, start: tl.tensor, length: tl.tensor, low: tl.tensor, BLOCK: tl.constexpr, FAST: tl.constexpr
) -> None:
    lanes = lanes_of(BLOCK)
    inside = start + lanes < length
    first, second = split(read(place_of(row, 0, start, FAST), lanes, inside, FAST))
    target = place_of(row, 1, start, FAST, tl.bfloat16)
    write(target, first, lanes, inside, FAST)
    write(moved(target, low, FAST), second, lanes, inside, FAST)


@jit
def _scaled_kernel(table: tl.tensor, tiles: tl.tensor, low: tl.tensor, BLOCK: tl.constexpr) -> None:
    program = tl.program_id(0).to(tl.int64)
    row = table + tl.load(tiles + 2 * program) * 3
    length = tl.load(row + 2)
    start = tl.load(tiles + 2 * program + 1) * length
    source = tl.load(row).to(tl.pointer_type(tl.float32)) + start
    target = tl.load(row + 1).to(tl.pointer_type(tl.bfloat16)) + start
    lanes = tl.arange(0, BLOCK)
    peaks = tl.full((BLOCK,), 1.1754943508222875e-38, tl.float32)
    for first in range(0, length, BLOCK):
        at = first + lanes
        peaks = tl.maximum(peaks, tl.abs(tl.load(source + at, mask=at < length, other=0.0)))
    peak = tl.max(peaks, axis=0)
    for first in range(0, length, BLOCK):
        at = first + lanes
        high, rest = split(tl.load(source + at, mask=at < length, other=0.0) / peak)
        tl.store(target + at, high, mask=at < length)
        tl.store(target + low + at, rest, mask=at < length)
