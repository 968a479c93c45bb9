"""On CPUs MKOR updates factors and preconditions gradients one matrix after another, and in place.

Factors are read and converted some rows at a time. These functions read what they compute, norms for instance, and
decide in Python, which on other devices would make the host wait.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rankwise.mkor.formulas import product_dtype
from rankwise.mkor.workspace import Workspace

__all__ = ["precondition_into", "update_factors_"]

_BLOCK = 65536
"""Elements that a thread works on at a time; they and a few temporaries about fill the second-level cache."""
_CONVERTED = 2**20
"""Elements of a factor that are converted at a time, and stay in the cache until they are multiplied."""
_LEAST_SIDE = 256
"""With fewer rows or columns at a time, products are slower than one with the whole factor."""


class _Affine(NamedTuple):
    """The matrix ``scale * J + sign * w w^T + diagonal * I``; without a vector ``w`` it has two terms."""

    scale: float
    diagonal: float
    sign: float = 0.0
    vector: Tensor | None = None


class _Measured(NamedTuple):
    """Product of an inverse with the statistics vector, and the inverse's norm, not finite if one of its entries is."""

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
    """Do one step of many factor inverses, :func:`rankwise.mkor.formulas.update_factor` on each, in place.

    An inverse is read twice and written once. As :func:`rankwise.mkor.cuda.factor_updates.update_factors_` does, this
    judges a result by the largest entry that it could have rather than by its entries, and rounds what the stabilizer
    blends to the storage type only after the rank-1 term has been added.

    Args:
        inverses: (d, d) each, contiguous, of any floating-point type.
        vectors: (n, d), a statistics vector for each inverse.
        decay: Factor momentum.
        rule: One of :data:`rankwise.mkor.formulas.RULES`.
        stabilizer: Threshold and retention, or None.
        norm: One of :data:`rankwise.mkor.formulas.FACTOR_NORMS`.
        seen: (n,) bool, inverses that take part; others keep every bit. None: all take part.

    Returns:
        (n,) bool, which inverses took the update; False for those that take no part.
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
    return torch.tensor(taken, dtype=torch.bool, device="cpu")


def _blocks(matrix: Tensor, work: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield a few rows of a matrix at a time: their slice, the rows, and as many rows of the workspace."""
    for start in range(0, len(matrix), len(work)):
        rows = slice(start, min(start + len(work), len(matrix)))
        yield rows, matrix[rows], work[: rows.stop - rows.start]


def _workspace(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """Make a workspace of so many of a matrix's rows that two blocks stay in the cache."""
    rows, columns = matrix.shape
    few = min(rows, max(1, 2 * _BLOCK * torch.get_num_threads() // columns))
    return torch.empty(few, columns, dtype=dtype, device="cpu")


def _measure(inverse: Tensor, vector: Tensor, norm: str, work: Tensor) -> _Measured:
    product, sizes = torch.empty_like(vector), torch.empty_like(vector)
    for rows, block, space in _blocks(inverse, work):
        wide = block if block.dtype == space.dtype else space.copy_(block)
        torch.mv(wide, vector, out=product[rows])
        torch.abs(wide, out=space)
        torch.sum(space, 1, out=sizes[rows]) if norm == "row_sum" else torch.amax(space, 1, out=sizes[rows])
    return _Measured(product, float(sizes.max()))


def _stabilized(size: float, stabilizer: tuple[float, float] | None) -> tuple[_Affine, float]:
    """Return what the stabilizer makes of an inverse of this norm, and a bound of the result's norm."""
    if stabilizer is not None and not math.isfinite(size):
        return _Affine(0.0, 1.0), 1.0
    if stabilizer is not None and size > stabilizer[0]:
        retention = stabilizer[1]
        return _Affine(retention, 1.0 - retention), retention * size + (1.0 - retention)
    return _Affine(1.0, 0.0), size


def _moved(
    stable: _Affine, size: float, product: Tensor, vector: Tensor, decay: float, rule: str, largest: float
) -> _Affine | None:
    """Return a stabilized inverse with its rank-1 update; None where it might not be finite."""
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
    # The root goes into the vector, which enters twice, so that the product is symmetric to the last bit.
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
            # addr_ is not used, because its rounding depends on the place.
            wide.addcmul_(change.vector[rows, None], change.vector, value=change.sign)
        if change.diagonal:
            wide.diagonal(rows.start).add_(change.diagonal)
        if wide is not block:
            block.copy_(wide)


def precondition_into(
    out: Sequence[Tensor],
    parts: Sequence[Tensor],
    shape: tuple[int, int],
    left: Tensor | None,
    right: Tensor | None,
    space: Workspace,
    *,
    turned: bool = False,
    rescale: bool = True,
    product: torch.dtype | None = None,
) -> None:
    """Precondition one gradient as :func:`rankwise.mkor.formulas.precondition` does.

    A few passes over the whole matrix, each on all threads, lie between two products that take several times as long; a
    matrix stays in the last-level cache from one to the next.

    Args:
        out: Tensors for the results, with the lengths of ``parts`` and other memory.
        parts: Gradient of a weight, 1-D, and of its bias if that rides along; they do not change.
        shape: Rows and columns of the weight.
        left: Left factor inverse, with a row for each row of the matrix, or None.
        right: Right factor inverse, with a row for each column of the matrix, or None.
        space: Memory for operands of the products.
        turned: Whether the bias is the last row of the matrix and not the last column.
        rescale: Whether the result gets the Frobenius norm of the gradient.
        product: Type of the products; None for :func:`rankwise.mkor.formulas.product_dtype`.
    """
    rows, columns = shape
    rides = len(parts) > 1
    whole = (rows + (turned and rides), columns + (not turned and rides))
    sides = [side for side in (left, right) if side is not None]
    dtype = product or product_dtype(parts[0], *sides)
    # A gradient or result that is laid out as products need it is not copied.
    factor, target = (_in_place(tensors, whole, dtype) for tensors in (parts, out))
    if factor is None:
        factor = space.take("factor", whole, dtype)
        for place, part in zip(_places(factor, shape, turned), parts, strict=False):
            place.copy_(part.view_as(place))
    result = target if target is not None else space.take("factor" if len(sides) == 2 else "product", whole, dtype)
    if left is not None:
        between = result if right is None else space.take("product", whole, dtype)
        for lines, operand in _operands(left, dtype, space, 0):
            torch.mm(operand, factor, out=between[lines])
        factor = between
    if right is not None:
        for lines, operand in _operands(right, dtype, space, 1):
            torch.mm(factor, operand, out=result[:, lines])
    if target is None:
        for place, part in zip(_places(result if sides else factor, shape, turned), out, strict=False):
            part.view_as(place).copy_(place)
    if rescale:
        _rescale_(out, parts, columns)


def _in_place(parts: Sequence[Tensor], whole: tuple[int, int], dtype: torch.dtype) -> Tensor | None:
    """Return one part as the matrix if it is all of it and has the type of the products, else None."""
    return parts[0].view(whole) if len(parts) == 1 and parts[0].dtype == dtype else None


def _operands(factor: Tensor, dtype: torch.dtype, space: Workspace, dim: int) -> Iterator[tuple[slice, Tensor]]:
    """Yield a few rows (``dim`` 0) or columns (1) of a factor at a time, in the products' type, with their slice.

    A copy of the whole factor would be the largest tensor of a step, and hardly faster: converting takes a few
    hundredths of the product's time.
    """
    if factor.dtype == dtype:
        yield slice(None), factor
        return
    length = len(factor)
    blocks = -(-length // max(_LEAST_SIDE, _CONVERTED // length))
    for start in range(0, length, -(-length // blocks)):
        part = factor.narrow(dim, start, min(-(-length // blocks), length - start))
        yield slice(start, start + part.shape[dim]), space.take("operand", part.shape, dtype).copy_(part)


def _places(matrix: Tensor, shape: tuple[int, int], turned: bool) -> tuple[Tensor, Tensor]:
    """Return views of the weight and of the bias in the matrix."""
    rows, columns = shape
    return matrix[:rows, :columns], matrix[rows:] if turned else matrix[:, columns:]


def _rescale_(out: Sequence[Tensor], parts: Sequence[Tensor], columns: int) -> None:
    before, after = (_norm(tensors, columns) for tensors in (parts, out))
    if not 0.0 < after < math.inf:
        for result, part in zip(out, parts, strict=True):
            result.copy_(part)
    elif before != after:
        for result in out:
            result.mul_(before / after)


def _norm(parts: Sequence[Tensor], columns: int) -> float:
    """Return the Frobenius norm, summed row by row, which takes all threads and does not depend on their number."""
    norms = [torch.linalg.vector_norm(parts[0].view(-1, columns), dim=1), *map(torch.linalg.vector_norm, parts[1:])]
    return math.hypot(*(float(torch.linalg.vector_norm(norm, dtype=torch.float64)) for norm in norms))
