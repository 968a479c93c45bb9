r"""Float32 numbers as two bfloat16 halves, ``x = high + low`` to 2^-17, which tensor cores multiply in three products.

The dropped product of the low halves is as small as what both halves leave out: an error of 2 to 3e-6 of the length of
a vector, where one product of bfloat16 makes 1 to 2e-3. Whoever writes a matrix that long products read writes its
halves, which have as many bytes as the numbers themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
import triton.language as tl
from torch import Tensor

from rankwise.kernels.triton.language import ceil_div, jit, launch
from rankwise.kernels.triton.segments import Runs, lanes_of, moved, place_of, read, wide, write

__all__ = [
    "empty_halves",
    "in_halves",
    "multiply",
    "multiply_halves",
    "read_halves",
    "split",
    "write_halves_",
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
    """Return the halves of contiguous float32 tensors, as :func:`empty_halves` lays them out."""
    halves = empty_halves([tensor.shape for tensor in tensors], tensors[0].device)
    write_halves_(tensors, halves)
    return halves


def write_halves_(tensors: Sequence[Tensor], halves: Sequence[Tensor], added: Sequence[Tensor] | None = None) -> None:
    """Split tensors, to which others may be added before: 16 bytes an element, or 8 where nothing is.

    Args:
        tensors: Contiguous float32; sums replace them.
        halves: As :func:`empty_halves` returned them together.
        added: Contiguous float32, as many; None: nothing is added.
    """
    if not tensors:
        return
    fields = [tensors] if added is None else [tensors, added]
    types = [torch.float32] * len(fields) + [torch.bfloat16]
    runs = Runs([*fields, [half[0] for half in halves]], TILE, types=types)
    low = halves[0].stride(0)
    launch(_halves_kernel, (runs.count,), runs.device, runs.table, runs.tiles, low, ADDED=added is not None, BLOCK=TILE)


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
def read_halves(place: tl.tensor, low: tl.tensor, inside: tl.tensor) -> tl.tensor:
    """Return the halves of a tile in memory, the low one so many elements behind the high one."""
    return tl.load(place, mask=inside, other=0.0), tl.load(place + low, mask=inside, other=0.0)


@jit
def _halves_kernel(
    table: tl.tensor, tiles: tl.tensor, low: tl.tensor, ADDED: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    FIELDS: tl.constexpr = 3 if ADDED else 2
    program = tl.program_id(0).to(tl.int64)
    row = table + tl.load(tiles + 2 * program) * (FIELDS + 1)
    start = tl.load(tiles + 2 * program + 1)
    length = tl.load(row + FIELDS)
    if (start + BLOCK <= length) & wide(row, FIELDS):
        _halve_tile(row, start, length, low, ADDED, BLOCK, True)
    else:
        _halve_tile(row, start, length, low, ADDED, BLOCK, False)


@jit
def _halve_tile(
    row: tl.tensor,
    start: tl.tensor,
    length: tl.tensor,
    low: tl.tensor,
    ADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    FAST: tl.constexpr,
) -> None:
    lanes = lanes_of(BLOCK)
    inside = start + lanes < length
    place = place_of(row, 0, start, FAST)
    value = read(place, lanes, inside, FAST)
    if ADDED:
        value += read(place_of(row, 1, start, FAST), lanes, inside, FAST)
        write(place, value, lanes, inside, FAST)
    first, second = split(value)
    target = place_of(row, 2 if ADDED else 1, start, FAST, tl.bfloat16)
    write(target, first, lanes, inside, FAST)
    write(moved(target, low, FAST), second, lanes, inside, FAST)
