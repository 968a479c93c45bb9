"""On CPUs MKOR updates factors and preconditions gradients one matrix after another, and in place.

Factors are read and converted some rows at a time. These functions read what they compute, norms for instance, and
decide in Python, which on other devices would make the host wait.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from rankwise.mkor.formulas import product_dtype
from rankwise.mkor.vector_windows import Factor, Window, multiply_
from rankwise.mkor.workspace import Workspace

__all__ = ["precondition_into", "update_factors_"]

_BLOCK = 65536
"""Elements that a thread works on at a time; they and a few temporaries about fill the second-level cache."""
_CONVERTED = 2**20
"""Elements of a factor that are converted at a time, and stay in the cache until they are multiplied."""
_LEAST_SIDE = 256
"""With fewer rows or columns at a time, products are slower than one with the whole factor."""


def update_factors_(inverses: Sequence[Tensor], vectors: Tensor, *, decay: float, seen: Tensor | None = None) -> Tensor:
    """Do :func:`rankwise.mkor.rule.rank1_inverse_update` of the official rule on many dense inverses, in place.

    An inverse is read twice and written once. A result is judged by its rank-1 term, which is not finite where an entry
    of the inverse is not.

    Args:
        inverses: (d, d) each, contiguous, of any floating-point type.
        vectors: (n, d), a vector for each inverse.
        decay: Factor momentum.
        seen: (n,) bool, inverses that take part; others keep every bit. None: all take part.

    Returns:
        (n,) bool, which inverses took the update; False for those that take no part.
    """
    taken = [False] * len(inverses)
    for index, inverse in enumerate(inverses):
        if seen is None or seen[index]:
            wide = torch.float64 if torch.float64 in (inverse.dtype, vectors.dtype) else torch.float32
            taken[index] = _update_(inverse, vectors[index].to(wide), decay)
    return torch.tensor(taken, dtype=torch.bool, device="cpu")


def _update_(inverse: Tensor, vector: Tensor, decay: float) -> bool:
    work, root = _workspace(inverse, vector.dtype), torch.empty_like(vector)
    for rows, block, space in _blocks(inverse, work):
        torch.mv(block if block.dtype == space.dtype else space.copy_(block), vector, out=root[rows])
    root.mul_(decay).add_(vector, alpha=1.0 - decay)
    below = 1.0 + float(root.dot(vector))
    # The root goes into the vector, which enters twice, so that the product is symmetric to the last bit.
    if not below > 0.0 or not root.div_(math.sqrt(below)).isfinite().all():
        return False
    for rows, block, space in _blocks(inverse, work):
        wide = block if block.dtype == space.dtype else space.copy_(block)
        # addr_ is not used, because its rounding depends on the place.
        wide.mul_(decay).addcmul_(root[rows, None], root, value=-1.0)
        wide.diagonal(rows.start).add_(1.0 - decay)
        if wide is not block:
            block.copy_(wide)
    return True


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


def precondition_into(
    out: Sequence[Tensor],
    parts: Sequence[Tensor],
    shape: tuple[int, int],
    left: Factor | None,
    right: Factor | None,
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
    sides: list[Any] = [side for side in (left, right) if side is not None]
    windows = [side for side in sides if isinstance(side, Window)]
    dtype = product or product_dtype(parts[0], *([side.vectors for side in windows] or sides))
    # A gradient or result that is laid out as products need it is not copied; windows multiply the result in place.
    factor, target = (_in_place(tensors, whole, dtype) for tensors in (parts, out))
    if factor is None or windows:
        factor = target if windows and target is not None else space.take("factor", whole, dtype)
        for place, part in zip(_places(factor, shape, turned), parts, strict=False):
            place.copy_(part.view_as(place))
    multiplied = _by_windows if windows else _by_factors
    result = multiplied(factor, left, right, target, space)
    if target is None:
        for place, part in zip(_places(result, shape, turned), out, strict=False):
            part.view_as(place).copy_(place)
    if rescale:
        _rescale_(out, parts, columns)


def _by_windows(factor: Tensor, left: Any, right: Any, target: Tensor | None, space: Workspace) -> Tensor:
    return multiply_(factor, left, right)


def _by_factors(factor: Tensor, left: Any, right: Any, target: Tensor | None, space: Workspace) -> Tensor:
    """Multiply a matrix by dense factors, where the result is to be, or in the workspace."""
    whole, dtype = factor.shape, factor.dtype
    both = left is not None and right is not None
    result = space.take("factor" if both else "product", whole, dtype) if target is None else target
    if left is not None:
        between = result if right is None else space.take("product", whole, dtype)
        for lines, operand in _operands(left, dtype, space, 0):
            torch.mm(operand, factor, out=between[lines])
        factor = between
    if right is not None:
        for lines, operand in _operands(right, dtype, space, 1):
            torch.mm(factor, operand, out=result[:, lines])
        factor = result
    return factor


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
