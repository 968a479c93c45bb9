"""MKOR for CPUs: matrix by matrix and in place, factors a block of rows at a time, products in the factors' type.

They read what they compute, norms for instance, and decide in Python: elsewhere that would make the host wait.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rankwise.kernels.blocked import block_size
from rankwise.updates.mkor import product_dtype

__all__ = ["precondition_", "update_factors_"]


class _Affine(NamedTuple):
    """The matrix ``scale * J + sign * w w^T + diagonal * I``; without ``w``, no such term."""

    scale: float
    diagonal: float
    sign: float = 0.0
    vector: Tensor | None = None


class _Measured(NamedTuple):
    """Of an inverse: its product with the statistics vector, and its norm, not finite if an entry is not."""

    product: Tensor
    size: float


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
    """One step of many factor inverses: :func:`rankwise.updates.mkor.update_factor` on each, in place.

    Each is read twice and written once. As in :func:`rankwise.kernels.triton.update_factors_`, a result is judged by
    the largest entry it could have rather than by its entries, and what the stabilizer blends is rounded to the storage
    type only once the rank-1 term has been added.

    Args:
        inverses: (d, d) each, contiguous, of any floating-point type.
        vectors: (n, d).
        decay: Factor momentum.
        rule: One of :data:`rankwise.updates.mkor.RULES`.
        stabilizer: Threshold and retention, or None.
        norm: One of :data:`rankwise.updates.mkor.FACTOR_NORMS`.
        seen: (n,) bool: inverses that take part; the others keep every bit. None: all.

    Returns:
        (n,) bool: which inverses took the update; False for those not seen.
    """
    taken = [False] * len(inverses)
    for index, inverse in enumerate(inverses):
        if seen is not None and not seen[index]:
            continue
        wide = torch.float64 if torch.float64 in (inverse.dtype, vectors.dtype) else torch.float32
        vector = vectors[index].to(wide)
        work = _workspace(inverse, wide)
        measured = _measure(inverse, vector, norm, work)
        stable, size = _stabilized(measured.size, stabilizer)
        moved = _moved(stable, size, measured.product, vector, decay, rule, float(torch.finfo(inverse.dtype).max))
        taken[index] = moved is not None
        _apply(inverse, moved or stable, work)
    return torch.tensor(taken, dtype=torch.bool)


def _blocks(matrix: Tensor, work: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Its rows a few at a time: which, they themselves, and as many rows of the workspace."""
    for start in range(0, len(matrix), len(work)):
        rows = slice(start, min(start + len(work), len(matrix)))
        yield rows, matrix[rows], work[: rows.stop - rows.start]


def _workspace(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """For so many of its rows as keep two blocks in the cache."""
    rows, columns = matrix.shape
    return torch.empty(min(rows, max(1, 2 * block_size() // columns)), columns, dtype=dtype)


def _norm(matrix: Tensor, dtype: torch.dtype) -> float:
    """Frobenius norm, with squares in this type."""
    work = _workspace(matrix, dtype)
    blocks = ((block, space) for _, block, space in _blocks(matrix, work))
    wide = (block if block.dtype == dtype else space.copy_(block) for block, space in blocks)
    return math.hypot(*(float(torch.linalg.vector_norm(block)) for block in wide))


def _measure(inverse: Tensor, vector: Tensor, norm: str, work: Tensor) -> _Measured:
    product, sizes = torch.empty_like(vector), torch.empty_like(vector)
    for rows, block, space in _blocks(inverse, work):
        wide = block if block.dtype == space.dtype else space.copy_(block)
        torch.mv(wide, vector, out=product[rows])
        torch.abs(wide, out=space)
        torch.sum(space, 1, out=sizes[rows]) if norm == "row_sum" else torch.amax(space, 1, out=sizes[rows])
    return _Measured(product, float(sizes.max()))


def _stabilized(size: float, stabilizer: tuple[float, float] | None) -> tuple[_Affine, float]:
    """What the stabilizer makes of an inverse of this norm, and a bound of the norm of that."""
    if stabilizer is not None and not math.isfinite(size):
        return _Affine(0.0, 1.0), 1.0
    if stabilizer is not None and size > stabilizer[0]:
        retention = stabilizer[1]
        return _Affine(retention, 1.0 - retention), retention * size + (1.0 - retention)
    return _Affine(1.0, 0.0), size


def _moved(
    stable: _Affine, size: float, product: Tensor, vector: Tensor, decay: float, rule: str, largest: float
) -> _Affine | None:
    """The rank-1 update of a stabilized inverse; None where it might not be finite."""
    direction = stable.diagonal * vector
    if stable.scale:
        direction.add_(product, alpha=stable.scale)
    if rule == "official":
        direction.mul_(decay).add_(vector, alpha=1.0 - decay)
    curvature = float(direction.dot(vector))
    if rule == "official":
        keep, sign, above, below = decay, -1.0, 1.0, 1.0 + curvature
    elif rule == "ema":
        keep, sign, above, below = 1.0 / decay, -1.0, 1.0 - decay, decay * (decay + (1.0 - decay) * curvature)
    else:
        below = decay**2 * (1.0 + decay * (1.0 - decay) * curvature)
        keep, sign, above = decay, 1.0, 1.0 - decay
    if not below > 0.0:
        return None
    # The root goes into the vector, which enters twice: the product is symmetric to the last bit.
    direction.mul_(math.sqrt(above / below))
    peak = float(direction.abs().max())
    if not keep * size + peak * peak + 1.0 < largest:
        return None
    added = 1.0 - decay if rule == "official" else 0.0
    return _Affine(keep * stable.scale, keep * stable.diagonal + added, sign, direction)


def _apply(inverse: Tensor, change: _Affine, work: Tensor) -> None:
    if change == _Affine(1.0, 0.0):
        return
    for rows, block, space in _blocks(inverse, work):
        wide = block if block.dtype == space.dtype else space.copy_(block)
        if change.scale:
            wide.mul_(change.scale)
        else:
            wide.zero_()
        if change.vector is not None:
            # Not addr_, whose rounding depends on the place.
            wide.addcmul_(change.vector[rows, None], change.vector, value=change.sign)
        if change.diagonal:
            wide.diagonal(rows.start).add_(change.diagonal)
        if wide is not block:
            block.copy_(wide)


def precondition_(
    grads: Tensor,
    shape: tuple[int, int],
    left: Sequence[Tensor] | None,
    right: Sequence[Tensor] | None,
    rescale: bool = True,
) -> None:
    """Precondition a batch of gradients in place: :func:`rankwise.updates.mkor.precondition` on each.

    Args:
        grads: (n, elements): each a flattened matrix of this shape, followed by one more column if there is more.
        shape: Rows and columns.
        left: Their left factor inverses, (rows, rows) each, or None.
        right: Their right ones, of as many rows and columns as there are columns, or None.
        rescale: Give each the Frobenius norm it had.
    """
    rows, columns = shape
    more = grads.shape[1] > rows * columns
    factors = [side for side in (left, right) if side is not None]
    dtype = product_dtype(grads, *(side[0] for side in factors))
    factor, product = torch.empty(2, rows, columns + more, dtype=dtype)
    for index, grad in enumerate(grads):
        parts = [(slice(0, columns), grad[: rows * columns].view(shape))]
        if more:
            parts.append((slice(columns, None), grad[rows * columns :].view(rows, 1)))
        for span, part in parts:
            factor[:, span].copy_(part)
        # Summed in the order of the product's norm where nothing was rounded: identities then give a ratio of one.
        before = _norm(factor if dtype == grads.dtype else grad.view(rows, -1), grads.dtype) if rescale else 1.0
        if left is not None:
            torch.mm(left[index].to(dtype), factor, out=product)
            factor, product = product, factor
        if right is not None:
            torch.mm(factor, right[index].to(dtype), out=product)
            factor, product = product, factor
        after = _norm(factor, grads.dtype) if rescale else 1.0
        if 0.0 < after < math.inf:
            for span, part in parts:
                part.copy_(factor[:, span])
            if before != after:
                grad.mul_(before / after)
