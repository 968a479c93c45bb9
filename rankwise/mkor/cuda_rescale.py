"""Gives preconditioned gradients the norms of the gradients.

Bytes per element (fp32): norms 8 read, application 4 read and 4 written. Of update and gradient only one is read.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton.language as tl
from torch import Tensor

from rankwise.kernels.triton.language import jit, launch
from rankwise.kernels.triton.segments import Runs, run_sums

__all__ = ["rescale_"]

TILE = 2048


def rescale_(updates: Sequence[Tensor], grads: Sequence[Tensor], columns: int | None = None) -> None:
    """Give preconditioned gradients the norms of the gradients: :func:`rankwise.mkor.formulas.rescale_to_norm`.

    Three launches for any number of matrices; norms in fp64, summed in a fixed order.

    Args:
        updates: Preconditioned gradients, flattened, changed in place; become the gradient where their norm is 0 or
            not finite.
        grads: The gradients, alike.
        columns: Of each matrix, whose last column is the bias gradient, and the norm the sum of the two parts' norms;
            None: one norm.

    Raises:
        ValueError: If a tensor is not a contiguous fp32 run or the lists do not fit together.
    """
    if not updates:
        return
    runs = Runs([updates, grads], TILE)
    parts = 1 if columns is None else 2
    partials = runs.partial_sums(2 * parts)
    shape = {"PARTS": parts, "BLOCK": TILE}
    launch(_norms_kernel, (runs.count,), runs.device, runs.table, runs.tiles, partials, columns or 1, **shape)
    sums = run_sums(runs, partials)
    launch(_rescale_kernel, (runs.count,), runs.device, runs.table, runs.tiles, sums, runs.runs, **shape)


@jit
def _norms_kernel(
    table: tl.tensor,
    tiles: tl.tensor,
    partials: tl.tensor,
    columns: tl.tensor,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Squares of update and gradient; with two parts, without and with the last column apart."""
    program = tl.program_id(0).to(tl.int64)
    row = table + tl.load(tiles + 2 * program) * 3
    start = tl.load(tiles + 2 * program + 1)
    at = start + tl.arange(0, BLOCK)
    inside = at < tl.load(row + 2)
    partials += program * 2 * PARTS
    last = at % columns == columns - 1
    for field in tl.static_range(2):
        run = tl.load(row + field).to(tl.pointer_type(tl.float32))
        value = tl.load(run + at, mask=inside, other=0.0).to(tl.float64)
        square = value * value
        if PARTS == 2:
            tl.store(partials + 2 + field, tl.sum(tl.where(last, square, 0.0), axis=0))
            square = tl.where(last, 0.0, square)
        tl.store(partials + field, tl.sum(square, axis=0))


@jit
def _rescale_kernel(
    table: tl.tensor,
    tiles: tl.tensor,
    sums: tl.tensor,
    count: tl.tensor,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    program = tl.program_id(0).to(tl.int64)
    run = tl.load(tiles + 2 * program)
    row = table + run * 3
    at = tl.load(tiles + 2 * program + 1) + tl.arange(0, BLOCK)
    inside = at < tl.load(row + 2)
    update_norm = tl.sqrt(tl.load(sums + run))
    grad_norm = tl.sqrt(tl.load(sums + count + run))
    if PARTS == 2:
        update_norm += tl.sqrt(tl.load(sums + 2 * count + run))
        grad_norm += tl.sqrt(tl.load(sums + 3 * count + run))
    usable = (update_norm > 0.0) & (update_norm < float("inf"))
    place = tl.load(row).to(tl.pointer_type(tl.float32)) + at
    grad = tl.load(row + 1).to(tl.pointer_type(tl.float32)) + at
    ratio = (grad_norm / tl.where(usable, update_norm, 1.0)).to(tl.float32)
    if usable:
        tl.store(place, tl.load(place, mask=inside, other=0.0) * ratio, mask=inside)
    else:
        tl.store(place, tl.load(grad, mask=inside, other=0.0), mask=inside)
