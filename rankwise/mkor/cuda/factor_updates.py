"""MKOR's guarded rank-1 update changes dense factor inverses in place.

An element of a factor is read twice and written once in its storage type, finite check and rollback included.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton.language as tl
from torch import Tensor

from rankwise.kernels.triton.language import ceil_div, jit, launch
from rankwise.kernels.triton.segments import addresses
from rankwise.kernels.triton.tables import table_of

__all__ = ["update_factors_"]

ROWS, COLUMNS = 16, 128
_VECTOR = 1024
_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def update_factors_(inverses: Sequence[Tensor], vectors: Tensor, *, decay: float, seen: Tensor | None = None) -> Tensor:
    """Do :func:`rankwise.mkor.cpu.update_factors_`, which has the arguments, on a device.

    Args:
        inverses: (d, d) each, contiguous, all of one type: float32, bfloat16 or float16.
        vectors: (n, d) float32, a vector for each inverse.
        decay: Factor momentum.
        seen: (n,) bool, inverses that take part; None: all.

    Returns:
        (n,) bool, which inverses took the update; False for those that take no part.

    Raises:
        ValueError: Shapes or types do not fit.
    """
    count, length = vectors.shape
    _check_factors(inverses, vectors, seen)
    device = vectors.device
    ok = torch.empty(count, dtype=torch.bool, device=device)
    if not count:
        return ok
    dtype = inverses[0].dtype
    places = tuple(addresses(inverses, dtype))
    table = table_of(places, device).here()
    # If the length is a multiple of 16, too, which Triton notices by itself, every row allows wide accesses.
    aligned = all(place % 16 == 0 for place in places)
    vectors = vectors.to(torch.float32).contiguous()
    products = torch.empty(count, length, dtype=torch.float32, device=device)
    shape = {"ROWS": ROWS, "COLUMNS": COLUMNS, "ELEMENT": _TYPES[dtype], "ALIGNED": aligned}
    grid = (ceil_div(length, ROWS), count)
    launch(_measure_kernel, grid, device, table, vectors, products, length, **shape)
    # Without a mask the kernel does not read this argument.
    mask, taken = vectors if seen is None else seen.view(torch.uint8), ok.view(torch.uint8)
    given = vectors, products, mask, taken, length, float(decay)
    launch(_decide_kernel, (count,), device, *given, SEEN=seen is not None, BLOCK=_VECTOR)
    blocks = (grid[0], ceil_div(length, COLUMNS), count)
    launch(_move_kernel, blocks, device, table, products, taken, length, float(decay), **shape)
    return ok


def _check_factors(inverses: Sequence[Tensor], vectors: Tensor, seen: Tensor | None) -> None:
    count, length = vectors.shape
    if len(inverses) != count or any(inverse.shape != (length, length) for inverse in inverses):
        raise ValueError(f"vectors {tuple(vectors.shape)} need {count} inverses of shape {(length, length)}")
    if any(inverse.dtype not in _TYPES for inverse in inverses):
        raise ValueError("factor inverses must be float32, bfloat16 or float16; use the plain functions for others")
    if seen is not None and (seen.shape != (count,) or seen.dtype != torch.bool):
        raise ValueError(f"seen must be ({count},) booleans, got {tuple(seen.shape)} {seen.dtype}")


@jit
def _place(table: tl.tensor, matrix: tl.tensor, ELEMENT: tl.constexpr, ALIGNED: tl.constexpr) -> tl.tensor:
    place = tl.load(table + matrix).to(tl.pointer_type(ELEMENT))
    if ALIGNED:
        place = tl.multiple_of(place, 16)
    return place


@jit
def _measure_kernel(
    table: tl.tensor,
    vectors: tl.tensor,
    products: tl.tensor,
    length: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ELEMENT: tl.constexpr,
    ALIGNED: tl.constexpr,
) -> None:
    """Compute rows of ``J v``."""
    matrix = tl.program_id(1).to(tl.int64)
    inverse = _place(table, matrix, ELEMENT, ALIGNED)
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    product = tl.full((ROWS, COLUMNS), 0.0, tl.float32)
    for start in range(0, length, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        vector = tl.load(vectors + matrix * length + columns, mask=columns < length, other=0.0)
        inside = (rows[:, None] < length) & (columns[None, :] < length)
        value = tl.load(inverse + rows[:, None] * length + columns[None, :], mask=inside, other=0.0).to(tl.float32)
        product += value * vector[None, :]
    tl.store(products + matrix * length + rows, tl.sum(product, axis=1), mask=rows < length)


@jit
def _decide_kernel(
    vectors: tl.tensor,
    products: tl.tensor,
    seen: tl.tensor,
    taken: tl.tensor,
    length: tl.tensor,
    decay: tl.tensor,
    SEEN: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Decide whether a matrix moves, and by which vector, which goes to ``products``."""
    matrix = tl.program_id(0).to(tl.int64)
    vectors += matrix * length
    products += matrix * length
    lanes = tl.arange(0, BLOCK)
    curvature = tl.full((BLOCK,), 0.0, tl.float32)
    for start in range(0, length, BLOCK):
        at = start + lanes
        vector = tl.load(vectors + at, mask=at < length, other=0.0)
        value = tl.load(products + at, mask=at < length, other=0.0)
        value = decay * value + (1.0 - decay) * vector
        tl.store(products + at, value, mask=at < length)
        curvature += value * vector
    weight = 1.0 / (1.0 + tl.sum(curvature, axis=0))
    # The root goes into the vector, which enters twice, so that the product is symmetric to the last bit.
    root = tl.where(weight >= 0.0, tl.sqrt_rn(tl.maximum(weight, 0.0)), float("inf"))
    tl.debug_barrier()

    greatest = tl.full((BLOCK,), 0.0, tl.float32)
    for start in range(0, length, BLOCK):
        at = start + lanes
        value = tl.load(products + at, mask=at < length, other=0.0) * root
        value = tl.where(at < length, value, 0.0)
        tl.store(products + at, value, mask=at < length)
        # A maximum alone would overlook a NaN.
        greatest = tl.where(tl.abs(value) < float("inf"), tl.maximum(greatest, tl.abs(value)), float("inf"))
    moves = tl.max(greatest, axis=0) < float("inf")
    if SEEN:
        moves = moves & (tl.load(seen + matrix) != 0)
    tl.store(taken + matrix, moves.to(tl.uint8))


@jit
def _move_kernel(
    table: tl.tensor,
    products: tl.tensor,
    taken: tl.tensor,
    length: tl.tensor,
    decay: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ELEMENT: tl.constexpr,
    ALIGNED: tl.constexpr,
) -> None:
    matrix = tl.program_id(2).to(tl.int64)
    if tl.load(taken + matrix) != 0:
        rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        columns = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
        first = tl.load(products + matrix * length + rows, mask=rows < length, other=0.0)
        second = tl.load(products + matrix * length + columns, mask=columns < length, other=0.0)
        place = _place(table, matrix, ELEMENT, ALIGNED) + rows[:, None] * length + columns[None, :]
        inside = (rows[:, None] < length) & (columns[None, :] < length)
        value = tl.load(place, mask=inside, other=0.0).to(tl.float32)
        on_diagonal = rows[:, None] == columns[None, :]
        moved = decay * value - first[:, None] * second[None, :] + tl.where(on_diagonal, 1.0 - decay, 0.0)
        tl.store(place, moved.to(ELEMENT), mask=inside)
