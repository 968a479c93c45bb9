r"""One launch computes ``O = alpha A B + beta D`` for many matrices of one shape, wherever they lie.

The operands are read once and the result is written once, if the caches keep what tiles read again. Sums are in fp32.
Tensor cores multiply halves (:mod:`.halves`), and split what is fp32 beside halves where they read it; two fp32 factors
are multiplied as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, reduce
from itertools import chain
from operator import or_
from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from rankwise.kernels import graphs
from rankwise.kernels.triton.language import ceil_div, jit, launch
from rankwise.kernels.triton.tables import KEPT_TABLES, Table, table_here
from rankwise.ldadam.cuda.halves import multiply_halves, read_halves, split

__all__ = ["Operand", "grouped_product_", "judge_", "operand_of", "places_of", "table_of_pairs"]

_FLOAT32, _HALVES = (128, 64), (128, 128)
"""Rows and columns of a tile."""
_DEPTH, _LEAST = 32, 16
_ENOUGH = 256  # With fewer programs than this, smaller tiles occupy more of the device.


class Operand(NamedTuple):
    """One of the factors of every pair.

    Attributes:
        places: Address of each pair's factor, as a range or a tuple.
        strides: Strides of a row and of a column, in elements.
        low: Elements from the high half to the low one; 0: the factors are float32.
    """

    places: Sequence[int]
    strides: tuple[int, int]
    low: int = 0

    @property
    def turned(self) -> Operand:
        """The transposed factor."""
        return Operand(self.places, self.strides[::-1], self.low)


def operand_of(factors: Sequence[Tensor], strides: tuple[int, int]) -> Operand:
    """Return the operand that tensors are, or halves that were made together, with the strides of a factor."""
    low = factors[0].stride(0) if factors[0].dtype == torch.bfloat16 else 0
    return Operand(tuple(map(Tensor.data_ptr, factors)), strides, low)


def places_of(stack: Tensor) -> Sequence[int]:
    """Return the addresses of the entries of a stack."""
    first, size = stack.data_ptr(), stack.stride(0) * stack.itemsize
    return range(first, first + len(stack) * size, size) if size else (first,) * len(stack)


@lru_cache(maxsize=KEPT_TABLES)
def table_of_pairs(columns: tuple[Sequence[int], ...], device: torch.device) -> tuple[Table, bool]:
    """Make a table of addresses, pair by pair, and say whether all are multiples of 16; a call may find it again."""
    places = tuple(chain.from_iterable(zip(*columns, strict=True)))
    return Table(places, device), reduce(or_, places, 0) % 16 == 0


def _table(columns: tuple[Sequence[int], ...], device: torch.device) -> tuple[Tensor, bool]:
    if not graphs.is_capturing(device):
        table, aligned = table_of_pairs(columns, device)
        return table.here(), aligned
    places = tuple(chain.from_iterable(zip(*columns, strict=True)))
    return table_here(places, device), reduce(or_, places, 0) % 16 == 0


def grouped_product_(
    out: Tensor,
    left: Operand,
    right: Operand,
    depth: int,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    added: Sequence[int] | None = None,
    failed: Tensor | None = None,
) -> None:
    """Compute ``O = alpha A B + beta D`` for every pair.

    Args:
        out: ``O`` (pairs, rows, columns), contiguous fp32, or its halves (2, pairs, rows, columns); overwritten.
        left: ``A``, (rows, depth) each, fp32 or halves.
        right: ``B``, (depth, columns) each, fp32 or halves.
        depth: Length of the sums.
        alpha: Factor of the product.
        beta: Factor of ``D``.
        added: Addresses of ``D``, (rows, columns) each and contiguous fp32, as a range or a tuple; ``D`` may be ``O``.
            None: nothing is added.
        failed: (pairs,) uint8. Where it is not 0 the product is given up, and ``O`` is ``D``; elsewhere ``D`` becomes
            ``O``, to which nothing is added. None: ``D`` is read alone.
    """
    pairs, rows, columns = out.shape[-3:]
    halved = out.dim() == 4
    targets = places_of(out[0] if halved else out)
    table, aligned = _table((left.places, right.places, targets if added is None else added, targets), out.device)
    halves = left.low > 0, right.low > 0
    most = _HALVES if any(halves) else _FLOAT32
    if pairs * ceil_div(rows, most[0]) * ceil_div(columns, most[1]) < _ENOUGH:
        most = most[0] // 2, 64
    tile = [
        min(largest, max(_LEAST, 1 << (size - 1).bit_length()))
        for largest, size in zip(most, (rows, columns), strict=True)
    ]
    launch(
        _grouped_product_kernel,
        (ceil_div(columns, tile[1]), ceil_div(rows, tile[0]), pairs),
        out.device,
        table,
        table if failed is None else failed,
        rows,
        columns,
        depth,
        *left.strides,
        left.low,
        *right.strides,
        right.low,
        out.stride(0) if halved else 0,
        float(alpha),
        float(beta),
        ADDED=added is not None and failed is None,
        KEPT=failed is not None,
        LEFT_HALVED=halves[0],
        RIGHT_HALVED=halves[1],
        OUT_HALVED=halved,
        ALIGNED=aligned,
        ROWS=tile[0],
        COLUMNS=tile[1],
        DEPTH=_DEPTH,
        num_warps=8 if tile[0] * tile[1] > 8192 else 4,
    )


def judge_(grams: Tensor, factors: Tensor, info: Tensor, failed: Tensor, min_diagonal: float) -> None:
    """Mark triangular factors that cannot be trusted, as :func:`rankwise.updates.orthonormal.triangular_factor` does.

    Args:
        grams: (matrices, r, r), contiguous fp32.
        factors: (matrices, r, r), by rows or by columns.
        info: (matrices,) int32, what the factorization says of itself.
        failed: (matrices,) uint8, in which 1 is written.
        min_diagonal: Smallest diagonal entry that is accepted, relative to the length of its column.
    """
    count, rank, _ = grams.shape
    size = max(_LEAST, 1 << (rank - 1).bit_length())
    launch(_judge_kernel, (count,), grams.device, grams, factors, info, failed, rank, float(min_diagonal), SIZE=size)


@jit
def _judge_kernel(
    grams: tl.tensor,
    factors: tl.tensor,
    info: tl.tensor,
    failed: tl.tensor,
    rank: tl.tensor,
    min_diagonal: tl.tensor,
    SIZE: tl.constexpr,
) -> None:
    entry = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, SIZE)
    place = entry * rank * rank + lanes * (rank + 1)
    lengths = tl.sqrt(tl.load(grams + place, mask=lanes < rank, other=0.0))
    diagonal = tl.load(factors + place, mask=lanes < rank, other=0.0)
    accepted = (diagonal >= min_diagonal * lengths) | (lanes >= rank)
    if (tl.min(accepted.to(tl.int32), axis=0) == 0) | (tl.load(info + entry) != 0):
        tl.store(failed + entry, 1)


@jit
def _grouped_product_kernel(
    table: tl.tensor,
    failed: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    depth: tl.tensor,
    left_row: tl.tensor,
    left_depth: tl.tensor,
    left_low: tl.tensor,
    right_depth: tl.tensor,
    right_column: tl.tensor,
    right_low: tl.tensor,
    out_low: tl.tensor,
    alpha: tl.tensor,
    beta: tl.tensor,
    ADDED: tl.constexpr,
    KEPT: tl.constexpr,
    LEFT_HALVED: tl.constexpr,
    RIGHT_HALVED: tl.constexpr,
    OUT_HALVED: tl.constexpr,
    ALIGNED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
) -> None:
    entry = tl.program_id(2).to(tl.int64)
    left = tl.load(table + 4 * entry).to(tl.pointer_type(tl.bfloat16 if LEFT_HALVED else tl.float32))
    right = tl.load(table + 4 * entry + 1).to(tl.pointer_type(tl.bfloat16 if RIGHT_HALVED else tl.float32))
    added = tl.load(table + 4 * entry + 2).to(tl.pointer_type(tl.float32))
    out = tl.load(table + 4 * entry + 3).to(tl.pointer_type(tl.bfloat16 if OUT_HALVED else tl.float32))
    if ALIGNED:
        left = tl.multiple_of(left, 16)
        right = tl.multiple_of(right, 16)
        added = tl.multiple_of(added, 16)
        out = tl.multiple_of(out, 16)
    # Inside a matrix offsets have 32 bits.
    at_rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    at_columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.full((ROWS, COLUMNS), 0.0, tl.float32)
    for first in range(0, depth, DEPTH):
        along = first + tl.arange(0, DEPTH)
        at_left = left + (at_rows[:, None] * left_row + along[None, :] * left_depth)
        at_right = right + (along[:, None] * right_depth + at_columns[None, :] * right_column)
        in_left = (at_rows[:, None] < rows) & (along[None, :] < depth)
        in_right = (along[:, None] < depth) & (at_columns[None, :] < columns)
        if LEFT_HALVED or RIGHT_HALVED:
            a_high, a_low = read_halves(at_left, left_low, in_left, LEFT_HALVED)
            b_high, b_low = read_halves(at_right, right_low, in_right, RIGHT_HALVED)
            total = multiply_halves(a_high, a_low, b_high, b_low, total)
        else:
            a = tl.load(at_left, mask=in_left, other=0.0)
            b = tl.load(at_right, mask=in_right, other=0.0)
            total = tl.dot(a, b, total, input_precision="ieee")
    place = at_rows[:, None] * columns + at_columns[None, :]
    inside = (at_rows[:, None] < rows) & (at_columns[None, :] < columns)
    result = alpha * total
    if ADDED:
        result += beta * tl.load(added + place, mask=inside, other=0.0)
    if KEPT:
        if tl.load(failed + entry) != 0:
            result = tl.load(added + place, mask=inside, other=0.0)
        else:
            tl.store(added + place, result, mask=inside)
    if OUT_HALVED:
        high, low = split(result)
        tl.store(out + place, high, mask=inside)
        tl.store(out + out_low + place, low, mask=inside)
    else:
        tl.store(out + place, result, mask=inside)
