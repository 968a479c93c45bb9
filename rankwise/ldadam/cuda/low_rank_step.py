r"""LDAdam steps shards by ``W -= lr U D`` and ``F = C - U Z``.

Bytes (fp32) per element of a shard: weight 4 read and 4 written, and with error feedback 4 read and 4 (bfloat16
buffer: 2) written; neither product of factors is ever in memory. The error buffer, a difference of a float32 number and
one of these products, is as exact as ``Z``: what halves leave out of the product is 2 to 5e-7 of the buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from itertools import chain
from operator import or_, sub
from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from rankwise.kernels.triton.language import ceil_div, device_scalar, jit, launch
from rankwise.kernels.triton.segments import addresses, tiles_of
from rankwise.kernels.triton.steps import number
from rankwise.kernels.triton.tables import table_here
from rankwise.ldadam.cuda.halves import in_halves, multiply_halves, read_halves
from rankwise.updates.adamw import Scalar

__all__ = ["Factors", "low_rank_step_"]

BLOCK_ROWS, BLOCK_COLUMNS, BLOCK_DEPTH = 128, 64, 32
"""Rows, columns and summed-over entries of a tile."""
_STAGES = 2
_ERROR_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16}


class Factors(NamedTuple):
    """What the owner of a matrix returns for one shard, contiguous; m <= n are the sides of the matrix.

    Halves are (2, ...) of the shapes below, and of all shards of a launch as far apart, for each kind of factor.

    Attributes:
        start: Flat index of the shard's first element in its (rows, cols) parameter.
        basis: ``U`` (m, r), fp32 or halves.
        direction: ``D`` (r, n), of the kind of the basis.
        kept: ``Z`` (r, n), fp32, the part that the error buffer loses; None without error feedback.
    """

    start: int
    basis: Tensor
    direction: Tensor
    kept: Tensor | None


def low_rank_step_(
    params: Sequence[Tensor],
    factors: Sequence[Factors],
    sources: Sequence[Tensor] | None,
    errors: Sequence[Tensor] | None,
    *,
    cols: int,
    right: bool,
    lr: Scalar,
    weight_decay: float,
) -> None:
    r"""Set ``W := (1 - lr wd) W - lr U D`` and ``F := C - U Z`` on shards of matrices of one shape.

    Args:
        params: Shards of the weights, updated in place.
        factors: Factors of each shard's matrix.
        sources: ``C = G + F`` of each shard; None without error feedback.
        errors: ``F``, fp32 or bfloat16, overwritten; may be ``sources`` themselves. None without error feedback.
        cols: Columns of the parameters, or of the block of columns that the shards are cut from.
        right: Whether the parameters are tall, and projected from the right: the products enter transposed.
        lr: Learning rate, a float or a 0-d tensor.
        weight_decay: Decoupled decay rate; 0 where weights have decayed already.

    Raises:
        ValueError: A tensor is of another kind, or the lists do not fit together.
    """
    if not params:
        return
    feedback = errors is not None and sources is not None
    if (errors is None) != (sources is None) or feedback != all(part.kept is not None for part in factors):
        raise ValueError("error feedback needs sources, errors and every shard's kept factor; pass all or none")
    device = params[0].device
    rank, long = factors[0].direction.shape[-2:]
    if factors[0].basis.dtype == torch.float32:
        halves = in_halves([tensor for part in factors for tensor in (part.basis, part.direction)])
        pairs = zip(factors, halves[::2], halves[1::2], strict=True)
        factors = [Factors(part.start, basis, direction, part.kept) for part, basis, direction in pairs]
    error_dtype = errors[0].dtype if errors else torch.float32
    rows = _shard_rows(params, factors, sources, errors, error_dtype)
    table = table_here(tuple(chain.from_iterable(rows)), device)
    aligned = reduce(or_, chain.from_iterable(rows), cols) % 16 == 0
    # First and last row that each shard touches; of whole matrices factors are read along the rows, many at a time.
    firsts = [part.start // cols for part in factors]
    lasts = [-(-(part.start + param.numel()) // cols) for part, param in zip(factors, params, strict=True)]
    even = reduce(or_, chain(firsts, lasts)) % 16 == 0
    touched = tuple(map(sub, lasts, firsts))
    # Without alignment, addresses of single elements take registers.
    block_rows = BLOCK_ROWS if aligned else BLOCK_ROWS // 2
    tiles = tiles_of(touched, block_rows, device)
    launch(
        _step_kernel,
        (tiles.count, ceil_div(cols, BLOCK_COLUMNS)),
        device,
        table,
        tiles.rows,
        device_scalar(lr, device),
        float(weight_decay),
        cols,
        rank,
        factors[0].basis.stride(0),
        factors[0].direction.stride(0),
        # These are strides of the factor with the parameter's rows, and of the factor with its columns.
        *((1, long, 1, rank) if right else (rank, 1, long, 1)),
        RIGHT=right,
        FEEDBACK=feedback,
        LR_ON_DEVICE=isinstance(lr, Tensor),
        ERROR=_ERROR_TYPES[error_dtype],
        ALIGNED=aligned,
        EVEN=even,
        ROWS=block_rows,
        COLUMNS=BLOCK_COLUMNS,
        DEPTH=BLOCK_DEPTH,
        num_warps=8,
        num_stages=_STAGES,
    )


def _shard_rows(
    params: Sequence[Tensor],
    factors: Sequence[Factors],
    sources: Sequence[Tensor] | None,
    errors: Sequence[Tensor] | None,
    error_dtype: torch.dtype,
) -> list[tuple[int, ...]]:
    """Return (weight, source, error, basis, direction, kept, length, start) of every shard."""
    if error_dtype not in _ERROR_TYPES:
        raise ValueError(f"error buffers must be float32 or bfloat16, got {error_dtype}; use the plain functions")
    none = [0] * len(params)
    lengths = list(map(Tensor.numel, params))
    for tensors in (sources, errors):
        if tensors is not None and list(map(Tensor.numel, tensors)) != lengths:
            raise ValueError("sources and errors need one run per shard, of its length")
    shapes = {(part.basis.shape, part.direction.shape) for part in factors}
    if len(shapes) != 1 or any(
        part.kept is not None and part.kept.shape != part.direction.shape[1:] for part in factors
    ):
        raise ValueError("the factors of one launch must have the same shapes; call once per shape")

    def places(tensors: Sequence[Tensor]) -> list[int]:
        return addresses([half[0] for half in tensors], torch.bfloat16)

    kept = [part.kept for part in factors if part.kept is not None]
    columns = (
        addresses(params),
        none if sources is None else addresses(sources),
        none if errors is None else addresses(errors, error_dtype),
        places([part.basis for part in factors]),
        places([part.direction for part in factors]),
        addresses(kept) if kept else none,
        lengths,
        [part.start for part in factors],
    )
    return list(zip(*columns, strict=True))


@jit
def _step_kernel(
    table: tl.tensor,
    tiles: tl.tensor,
    lr: tl.tensor,
    weight_decay: tl.tensor,
    cols: tl.tensor,
    rank: tl.tensor,
    basis_low: tl.tensor,
    ahead_low: tl.tensor,
    left_row: tl.tensor,
    left_rank: tl.tensor,
    right_rank: tl.tensor,
    right_column: tl.tensor,
    RIGHT: tl.constexpr,
    FEEDBACK: tl.constexpr,
    LR_ON_DEVICE: tl.constexpr,
    ERROR: tl.constexpr,
    ALIGNED: tl.constexpr,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
) -> None:
    tile = tl.program_id(0).to(tl.int64)
    row = table + tl.load(tiles + 2 * tile) * 8
    length = tl.load(row + 6)
    start = tl.load(row + 7)
    weights = tl.load(row).to(tl.pointer_type(tl.float32))
    sources = tl.load(row + 1).to(tl.pointer_type(tl.float32))
    errors = tl.load(row + 2).to(tl.pointer_type(ERROR))
    basis = tl.load(row + 3).to(tl.pointer_type(tl.bfloat16))
    ahead = tl.load(row + 4).to(tl.pointer_type(tl.bfloat16))
    kept = tl.load(row + 5).to(tl.pointer_type(tl.float32))
    if ALIGNED:
        length, start = tl.multiple_of(length, 16), tl.multiple_of(start, 16)
        weights, sources, errors = tl.multiple_of(weights, 16), tl.multiple_of(sources, 16), tl.multiple_of(errors, 16)
        basis, ahead, kept = tl.multiple_of(basis, 16), tl.multiple_of(ahead, 16), tl.multiple_of(kept, 16)
    first_row = (start // cols + tl.load(tiles + 2 * tile + 1)).to(tl.int32)
    # A tile may reach beyond the shard's rows, which need not exist in the matrix and are not read.
    end_row = ((start + length + cols - 1) // cols).to(tl.int32)
    if EVEN:
        first_row, end_row = tl.multiple_of(first_row, 16), tl.multiple_of(end_row, 16)
    rows = first_row + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    at = rows.to(tl.int64)[:, None] * cols + columns[None, :] - start
    inside = (columns[None, :] < cols) & (at >= 0) & (at < length)
    moved = tl.full((ROWS, COLUMNS), 0.0, tl.float32)
    lost = tl.full((ROWS, COLUMNS), 0.0, tl.float32)
    for first in range(0, rank, DEPTH):
        along = first + tl.arange(0, DEPTH)
        lefts = rows[:, None] * left_row + along[None, :] * left_rank
        rights = along[:, None] * right_rank + columns[None, :] * right_column
        in_left = (rows[:, None] < end_row) & (along[None, :] < rank)
        in_right = (along[:, None] < rank) & (columns[None, :] < cols)
        if RIGHT:
            high, low = read_halves(basis + rights, basis_low, in_right, True)
            a_high, a_low = read_halves(ahead + lefts, ahead_low, in_left, True)
            moved = multiply_halves(a_high, a_low, high, low, moved)
            if FEEDBACK:
                a_high, a_low = read_halves(kept + lefts, 0, in_left, False)
                lost = multiply_halves(a_high, a_low, high, low, lost)
        else:
            high, low = read_halves(basis + lefts, basis_low, in_left, True)
            b_high, b_low = read_halves(ahead + rights, ahead_low, in_right, True)
            moved = multiply_halves(high, low, b_high, b_low, moved)
            if FEEDBACK:
                b_high, b_low = read_halves(kept + rights, 0, in_right, False)
                lost = multiply_halves(high, low, b_high, b_low, lost)
    rate = number(lr, LR_ON_DEVICE)
    weight = tl.load(weights + at, mask=inside, other=0.0)
    if FEEDBACK:
        source = tl.load(sources + at, mask=inside, other=0.0)
        tl.store(errors + at, (source - lost).to(ERROR), mask=inside)
    tl.store(weights + at, weight * (1.0 - rate * weight_decay) - rate * moved, mask=inside)
