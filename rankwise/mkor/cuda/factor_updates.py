"""MKOR's guarded rank-1 update changes factor inverses in place.

An element of a factor is read twice and written once in its storage type, stabilizer, finite check and rollback
included.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton.language as tl
from torch import Tensor

from rankwise.kernels.triton.language import ceil_div, jit, launch
from rankwise.kernels.triton.segments import addresses
from rankwise.kernels.triton.tables import table_of
from rankwise.mkor.formulas import FACTOR_NORMS, RULES

__all__ = ["update_factors_"]

ROWS, COLUMNS = 16, 128
_VECTOR = 1024
_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def update_factors_(
    inverses: Sequence[Tensor],
    vectors: Tensor,
    *,
    decay: float,
    rule: str = "official",
    stabilizer: tuple[float, float] | None = (2.0, 0.9),
    norm: str = "row_sum",
    seen: Tensor | None = None,
) -> Tensor:
    """Do one step of many factor inverses, :func:`rankwise.mkor.formulas.update_factor` on each, in place.

    A result is judged by its parts rather than by its entries: it also counts as not finite if the largest entry that
    it could have, from the norm of the old inverse and the rank-1 term, is beyond the range of the type. Where the
    stabilizer acts, its blend is not rounded to the storage type before the rank-1 term is added.

    Args:
        inverses: (d, d) each, contiguous, all of one type: float32, bfloat16 or float16.
        vectors: (n, d) float32, a statistics vector for each inverse.
        decay: Factor momentum.
        rule: One of :data:`rankwise.mkor.formulas.RULES`.
        stabilizer: Threshold and retention, or None.
        norm: One of :data:`rankwise.mkor.formulas.FACTOR_NORMS`.
        seen: (n,) bool, inverses that take part; others keep every bit. None: all take part.

    Returns:
        (n,) bool, which inverses took the update; False for those that take no part.

    Raises:
        ValueError: Shapes, types or options do not fit.
    """
    count, length = vectors.shape
    _check_factors(inverses, vectors, rule, norm, seen)
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
    products, sizes = torch.empty(2, count, length, dtype=torch.float32, device=device)
    choices = torch.empty(count, 4, dtype=torch.float32, device=device)
    shape = {"ROWS": ROWS, "COLUMNS": COLUMNS, "ELEMENT": _TYPES[dtype], "ALIGNED": aligned}
    grid = (ceil_div(length, ROWS), count)
    measured = {"ROW_SUM": norm == "row_sum", **shape}
    launch(_measure_kernel, grid, device, table, vectors, products, sizes, length, **measured)
    threshold, retention = stabilizer or (0.0, 1.0)
    launch(
        _decide_kernel,
        (count,),
        device,
        vectors,
        products,
        sizes,
        # Without a mask the kernel does not read this argument.
        vectors if seen is None else seen.view(torch.uint8),
        choices,
        ok.view(torch.uint8),
        length,
        float(threshold),
        float(retention),
        float(decay),
        float(torch.finfo(dtype).max),
        STABILIZE=stabilizer is not None,
        SEEN=seen is not None,
        RULE=RULES.index(rule),
        BLOCK=_VECTOR,
    )
    # Each rule has a factor of the old inverse, a sign of the rank-1 term, and a number added to the diagonal.
    terms = {
        "official": (decay, -1.0, 1.0 - decay),
        "ema": (1.0 / decay, -1.0, 0.0),
        "paper_literal": (decay, 1.0, 0.0),
    }
    blocks = (grid[0], ceil_div(length, COLUMNS), count)
    launch(_move_kernel, blocks, device, table, products, choices, length, *terms[rule], **shape)
    return ok


def _check_factors(inverses: Sequence[Tensor], vectors: Tensor, rule: str, norm: str, seen: Tensor | None) -> None:
    count, length = vectors.shape
    if rule not in RULES or norm not in FACTOR_NORMS:
        raise ValueError(f"rule={rule!r} and norm={norm!r} must be among {RULES} and {FACTOR_NORMS}")
    if len(inverses) != count or any(inverse.shape != (length, length) for inverse in inverses):
        raise ValueError(f"vectors {tuple(vectors.shape)} need {count} inverses of shape {(length, length)}")
    if any(inverse.dtype not in _TYPES for inverse in inverses):
        raise ValueError("factor inverses must be float32, bfloat16 or float16; use the plain functions for others")
    if seen is not None and (seen.shape != (count,) or seen.dtype != torch.bool):
        raise ValueError(f"seen must be ({count},) booleans, got {tuple(seen.shape)} {seen.dtype}")


@jit
def _finite(value: tl.tensor) -> tl.tensor:
    return tl.abs(value) < float("inf")


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
    sizes: tl.tensor,
    length: tl.tensor,
    ROW_SUM: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ELEMENT: tl.constexpr,
    ALIGNED: tl.constexpr,
) -> None:
    """Compute rows of ``J v``, and the norms of rows of ``J``, which are not finite where an entry is not."""
    matrix = tl.program_id(1).to(tl.int64)
    inverse = _place(table, matrix, ELEMENT, ALIGNED)
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    product = tl.full((ROWS, COLUMNS), 0.0, tl.float32)
    size = tl.full((ROWS, COLUMNS), 0.0, tl.float32)
    for start in range(0, length, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        vector = tl.load(vectors + matrix * length + columns, mask=columns < length, other=0.0)
        inside = (rows[:, None] < length) & (columns[None, :] < length)
        value = tl.load(inverse + rows[:, None] * length + columns[None, :], mask=inside, other=0.0).to(tl.float32)
        product += value * vector[None, :]
        value = tl.abs(value)
        if ROW_SUM:
            size += value
        else:
            # A maximum alone would overlook a NaN.
            size = tl.where(_finite(value), tl.maximum(size, value), float("inf"))
    here = matrix * length + rows
    tl.store(products + here, tl.sum(product, axis=1), mask=rows < length)
    if ROW_SUM:
        tl.store(sizes + here, tl.sum(size, axis=1), mask=rows < length)
    else:
        tl.store(sizes + here, tl.max(size, axis=1), mask=rows < length)


@jit
def _rank_one_weights(along: tl.tensor, decay: tl.tensor, RULE: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Return the factors of a rule's rank-1 term and of the old inverse; ``along`` is the curvature."""
    if RULE == 0:
        weight = 1.0 / (1.0 + along)
        keep = decay
    elif RULE == 1:
        weight = (1.0 - decay) / (decay * (decay + (1.0 - decay) * along))
        keep = 1.0 / decay
    else:
        weight = (1.0 - decay) / (decay * decay * (1.0 + decay * (1.0 - decay) * along))
        keep = decay
    return weight, keep


@jit
def _decide_kernel(
    vectors: tl.tensor,
    products: tl.tensor,
    sizes: tl.tensor,
    seen: tl.tensor,
    choices: tl.tensor,
    taken: tl.tensor,
    length: tl.tensor,
    threshold: tl.tensor,
    retention: tl.tensor,
    decay: tl.tensor,
    largest: tl.tensor,
    STABILIZE: tl.constexpr,
    SEEN: tl.constexpr,
    RULE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Decide how a matrix becomes ``p J + q I``, whether it moves, and by which vector, which goes to ``products``."""
    matrix = tl.program_id(0).to(tl.int64)
    vectors += matrix * length
    products += matrix * length
    lanes = tl.arange(0, BLOCK)
    size = tl.full((BLOCK,), 0.0, tl.float32)
    for start in range(0, length, BLOCK):
        at = start + lanes
        value = tl.load(sizes + matrix * length + at, mask=at < length, other=0.0)
        # A maximum alone would overlook a NaN.
        size = tl.where(_finite(value), tl.maximum(size, value), float("inf"))
    measured = tl.max(size, axis=0)
    finite = _finite(measured)
    kept = 1.0
    identity = 0.0
    if STABILIZE:
        blends = measured > threshold
        kept = tl.where(finite, tl.where(blends, retention, 1.0), 0.0)
        identity = tl.where(finite, tl.where(blends, 1.0 - retention, 0.0), 1.0)
        measured = tl.where(finite, kept * measured + identity, 1.0)
        finite = measured >= 0.0

    curvature = tl.full((BLOCK,), 0.0, tl.float32)
    for start in range(0, length, BLOCK):
        at = start + lanes
        vector = tl.load(vectors + at, mask=at < length, other=0.0)
        value = tl.load(products + at, mask=at < length, other=0.0)
        if STABILIZE:
            value = tl.where(kept == 0.0, 0.0, value * kept) + identity * vector
        if RULE == 0:
            value = decay * value + (1.0 - decay) * vector
        tl.store(products + at, value, mask=at < length)
        curvature += value * vector
    along = tl.sum(curvature, axis=0)
    weight, keep = _rank_one_weights(along, decay, RULE)
    # The root goes into the vector, which enters twice, so that the product is symmetric to the last bit.
    root = tl.where(weight >= 0.0, tl.sqrt_rn(tl.maximum(weight, 0.0)), float("inf"))
    tl.debug_barrier()

    greatest = tl.full((BLOCK,), 0.0, tl.float32)
    for start in range(0, length, BLOCK):
        at = start + lanes
        value = tl.load(products + at, mask=at < length, other=0.0) * root
        value = tl.where(at < length, value, 0.0)
        tl.store(products + at, value, mask=at < length)
        greatest = tl.where(_finite(value), tl.maximum(greatest, tl.abs(value)), float("inf"))
    peak = tl.max(greatest, axis=0)
    moves = finite & (keep * measured + peak * peak + 1.0 < largest)
    if SEEN:
        present = tl.load(seen + matrix) != 0
        moves = moves & present
        kept = tl.where(present, kept, 1.0)
        identity = tl.where(present, identity, 0.0)
    tl.store(choices + 4 * matrix, kept)
    tl.store(choices + 4 * matrix + 1, identity)
    tl.store(choices + 4 * matrix + 2, tl.where(moves, 1.0, 0.0))
    tl.store(taken + matrix, moves.to(tl.uint8))


@jit
def _move_kernel(
    table: tl.tensor,
    products: tl.tensor,
    choices: tl.tensor,
    length: tl.tensor,
    keep: tl.tensor,
    sign: tl.tensor,
    diagonal: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ELEMENT: tl.constexpr,
    ALIGNED: tl.constexpr,
) -> None:
    matrix = tl.program_id(2).to(tl.int64)
    kept = tl.load(choices + 4 * matrix)
    identity = tl.load(choices + 4 * matrix + 1)
    moves = tl.load(choices + 4 * matrix + 2) != 0.0
    if moves | (kept != 1.0):
        rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        columns = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
        first = tl.load(products + matrix * length + rows, mask=rows < length, other=0.0)
        second = tl.load(products + matrix * length + columns, mask=columns < length, other=0.0)
        place = _place(table, matrix, ELEMENT, ALIGNED) + rows[:, None] * length + columns[None, :]
        inside = (rows[:, None] < length) & (columns[None, :] < length)
        on_diagonal = rows[:, None] == columns[None, :]
        value = tl.load(place, mask=inside, other=0.0).to(tl.float32)
        value = tl.where(kept == 0.0, 0.0, value * kept) + tl.where(on_diagonal, identity, 0.0)
        moved = keep * value + sign * (first[:, None] * second[None, :]) + tl.where(on_diagonal, diagonal, 0.0)
        tl.store(place, tl.where(moves, moved, value).to(ELEMENT), mask=inside)
