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
from rankwise.kernels.triton.segments import addresses, tiles_of
from rankwise.kernels.triton.tables import table_here

__all__ = [
    "empty_halves",
    "in_halves",
    "multiply",
    "multiply_halves",
    "read_halves",
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


def in_halves(tensors: Sequence[Tensor], scaled: bool = False) -> list[Tensor]:
    """Return halves, as :func:`empty_halves` lays them out: 8 bytes an element.

    Args:
        tensors: Contiguous float32.
        scaled: Whether every row, along the last dimension, is divided by its largest entry; rows of zeros stay zeros.
    """
    device = tensors[0].device
    halves = empty_halves([tensor.shape for tensor in tensors], device)
    lengths = [tensor.shape[-1] if scaled else tensor.numel() for tensor in tensors]
    places = addresses(tensors), addresses([half[0] for half in halves], torch.bfloat16)
    table = table_here(tuple(chain.from_iterable(zip(*places, lengths, strict=True))), device)
    if scaled:
        rows = [tensor.numel() // length for tensor, length in zip(tensors, lengths, strict=True)]
        tiles = tiles_of(tuple(rows), 1, device)
    else:
        tiles = tiles_of(tuple(lengths), TILE, device)
    given = table, tiles.rows, halves[0].stride(0)
    launch(_halves_kernel, (tiles.count,), device, *given, SCALED=scaled, BLOCK=TILE)
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
def _halves_kernel(
    table: tl.tensor, tiles: tl.tensor, low: tl.tensor, SCALED: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    program = tl.program_id(0).to(tl.int64)
    run = table + tl.load(tiles + 2 * program) * 3
    length = tl.load(run + 2)
    start = tl.load(tiles + 2 * program + 1)
    lanes = tl.arange(0, BLOCK)
    if SCALED:
        start *= length
    else:
        length = tl.minimum(length - start, BLOCK)
    source = tl.load(run).to(tl.pointer_type(tl.float32)) + start
    target = tl.load(run + 1).to(tl.pointer_type(tl.bfloat16)) + start
    if SCALED:
        peaks = tl.full((BLOCK,), 1.1754943508222875e-38, tl.float32)
        for first in range(0, length, BLOCK):
            inside = first + lanes < length
            peaks = tl.maximum(peaks, tl.abs(tl.load(source + first + lanes, mask=inside, other=0.0)))
        peak = tl.max(peaks, axis=0)
    for first in range(0, length, BLOCK):
        inside = first + lanes < length
        value = tl.load(source + first + lanes, mask=inside, other=0.0)
        high, rest = split(tl.div_rn(value, peak) if SCALED else value)
        tl.store(target + first + lanes, high, mask=inside)
        tl.store(target + low + first + lanes, rest, mask=inside)
