r"""One launch computes ``O = alpha A B + beta D`` for many matrices of one shape, wherever they lie.

The operands are read once and the result is written once, if the caches keep what tiles read again. Sums are in fp32.
With precision "tf32x3" tensor cores multiply in three parts, which is as accurate as "ieee" to the last bits; with
"tf32" they multiply in one.
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

__all__ = ["Operand", "grouped_product_", "keep_", "places_of", "table_of_pairs"]

_ROWS, _COLUMNS, _DEPTH = 128, 64, 32
_LEAST = 16
_ENOUGH = 256  # With fewer programs than this, smaller tiles occupy more of the device.
_BLOCK = 1024


class Operand(NamedTuple):
    """One of the factors of every pair.

    Attributes:
        places: Address of each pair's factor, as a range or a tuple.
        strides: Strides of a row and of a column, in elements.
    """

    places: Sequence[int]
    strides: tuple[int, int]

    @property
    def turned(self) -> Operand:
        """The transposed factor."""
        return Operand(self.places, self.strides[::-1])


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
    scales: Tensor | None = None,
    precision: str = "ieee",
) -> None:
    """Compute ``O = alpha A B + beta D`` for every pair.

    Args:
        out: ``O`` (pairs, rows, columns), contiguous fp32, overwritten.
        left: ``A``, (rows, depth) each, fp32.
        right: ``B``, (depth, columns) each, fp32.
        depth: Length of the sums.
        alpha: Factor of the product.
        beta: Factor of ``D``.
        added: Addresses of ``D``, (rows, columns) each and contiguous, as a range or a tuple; ``D`` may be ``O``. None:
            nothing is added.
        scales: (pairs, rows), for products with as many rows as columns: row i of ``A`` and column i of ``B`` are
            multiplied by entry i, before anything can overflow. None: nothing is scaled.
        precision: Precision of the product, "ieee", "tf32x3" or "tf32".
    """
    pairs, rows, columns = out.shape
    targets = places_of(out)
    table, aligned = _table((left.places, right.places, targets if added is None else added, targets), out.device)
    enough = pairs * ceil_div(rows, _ROWS) * ceil_div(columns, _COLUMNS) >= _ENOUGH
    largest = _ROWS if enough else _ROWS // 2, _COLUMNS
    tile = [
        min(most, max(_LEAST, 1 << (size - 1).bit_length()))
        for most, size in zip(largest, (rows, columns), strict=True)
    ]
    launch(
        _grouped_product_kernel,
        (ceil_div(columns, tile[1]), ceil_div(rows, tile[0]), pairs),
        out.device,
        table,
        out if scales is None else scales,
        rows,
        columns,
        depth,
        *left.strides,
        *right.strides,
        float(alpha),
        float(beta),
        SCALED=scales is not None,
        ADDED=added is not None,
        ALIGNED=aligned,
        PRECISION=precision,
        ROWS=tile[0],
        COLUMNS=tile[1],
        DEPTH=_DEPTH,
        num_warps=4,
    )


def keep_(found: Tensor, old: Sequence[int], failed: Tensor) -> None:
    """Put old matrices in the place of those that failed; the others cost nothing.

    Args:
        found: New matrices (matrices, ...), contiguous fp32, changed in place.
        old: Addresses of the old matrices.
        failed: (matrices,) bool, which matrices failed.
    """
    numel = found[0].numel()
    table = table_here(tuple(old), found.device)
    grid = (ceil_div(numel, _BLOCK), len(found))
    launch(_keep_kernel, grid, found.device, table, found, failed.view(torch.uint8), numel, BLOCK=_BLOCK)


@jit
def _keep_kernel(table: tl.tensor, found: tl.tensor, failed: tl.tensor, numel: tl.tensor, BLOCK: tl.constexpr) -> None:
    entry = tl.program_id(1).to(tl.int64)
    if tl.load(failed + entry) != 0:
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        old = tl.load(table + entry).to(tl.pointer_type(tl.float32))
        tl.store(found + entry * numel + at, tl.load(old + at, mask=at < numel), mask=at < numel)


@jit
def _grouped_product_kernel(
    table: tl.tensor,
    scales: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    depth: tl.tensor,
    left_row: tl.tensor,
    left_depth: tl.tensor,
    right_depth: tl.tensor,
    right_column: tl.tensor,
    alpha: tl.tensor,
    beta: tl.tensor,
    SCALED: tl.constexpr,
    ADDED: tl.constexpr,
    ALIGNED: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
) -> None:
    entry = tl.program_id(2).to(tl.int64)
    left = tl.load(table + 4 * entry).to(tl.pointer_type(tl.float32))
    right = tl.load(table + 4 * entry + 1).to(tl.pointer_type(tl.float32))
    added = tl.load(table + 4 * entry + 2).to(tl.pointer_type(tl.float32))
    out = tl.load(table + 4 * entry + 3).to(tl.pointer_type(tl.float32))
    if ALIGNED:
        left = tl.multiple_of(left, 16)
        right = tl.multiple_of(right, 16)
        added = tl.multiple_of(added, 16)
        out = tl.multiple_of(out, 16)
    at_rows = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at_columns = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    if SCALED:
        row_scale = tl.load(scales + entry * rows + at_rows, mask=at_rows < rows, other=0.0)
        column_scale = tl.load(scales + entry * rows + at_columns, mask=at_columns < columns, other=0.0)
    total = tl.full((ROWS, COLUMNS), 0.0, tl.float32)
    for first in range(0, depth, DEPTH):
        along = first + tl.arange(0, DEPTH)
        a = tl.load(
            left + at_rows[:, None] * left_row + along[None, :] * left_depth,
            mask=(at_rows[:, None] < rows) & (along[None, :] < depth),
            other=0.0,
        )
        b = tl.load(
            right + along[:, None] * right_depth + at_columns[None, :] * right_column,
            mask=(along[:, None] < depth) & (at_columns[None, :] < columns),
            other=0.0,
        )
        if SCALED:
            a = a * row_scale[:, None]
            b = b * column_scale[None, :]
        total = tl.dot(a, b, total, input_precision=PRECISION)
    place = at_rows[:, None] * columns + at_columns[None, :]
    inside = (at_rows[:, None] < rows) & (at_columns[None, :] < columns)
    result = alpha * total
    if ADDED:
        result += beta * tl.load(added + place, mask=inside, other=0.0)
    tl.store(out + place, result, mask=inside)
