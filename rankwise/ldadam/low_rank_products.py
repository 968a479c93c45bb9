"""Products of two thin factors on pieces of a matrix, wherever it was cut."""

from __future__ import annotations

from torch import Tensor

__all__ = ["low_rank_rows", "subtract_low_rank_"]


def subtract_low_rank_(
    run: Tensor, U: Tensor, X: Tensor, start: int, end: int, rows: int, cols: int, right: bool
) -> None:
    """Subtract a run of the product that :func:`low_rank_rows` gives, without forming it.

    Args:
        run: (end - start,), contiguous; changed in place.
        U: Basis (m, r), m = cols if ``right`` else rows.
        X: Coordinates (r, n), n = rows if ``right`` else cols.
        start: First flat index of the run in the parameter.
        end: One past the last flat index.
        rows: Rows of the parameter.
        cols: Columns of the parameter.
        right: What :func:`rankwise.ldadam.formulas.projects_right` says for the parameter.
    """
    first, last = -(-start // cols), end // cols
    if first > last or start == end:
        _subtract_part_(run, U, X, start, rows, cols, right)
        return
    head, tail = first * cols - start, last * cols - start
    touched = slice(first, last)
    left, short = (X[:, touched].mT, U.mT) if right else (U[touched], X)
    run[head:tail].view(last - first, cols).addmm_(left, short, alpha=-1)
    for part, offset in ((run[:head], start), (run[tail:], last * cols)):
        if part.numel():
            _subtract_part_(part, U, X, offset, rows, cols, right)


def _subtract_part_(part: Tensor, U: Tensor, X: Tensor, start: int, rows: int, cols: int, right: bool) -> None:
    """:func:`subtract_low_rank_` for a piece of a row."""
    part.sub_(low_rank_rows(U, X, start, start + part.numel(), rows, cols, right))


def low_rank_rows(U: Tensor, X: Tensor, start: int, end: int, rows: int, cols: int, right: bool) -> Tensor:
    """A run of the row-major flattened product of two factors, computing only the rows it touches.

    The full matrix is ``U X`` (rows, cols), or ``(U X)^T`` for a parameter projected from the right. Several products
    with one basis (``U M`` and ``U D``) are one call: stack the X's and let ``U`` broadcast.

    Args:
        U: Basis (..., m, r), m = cols if ``right`` else rows.
        X: Coordinates (..., r, n), n = rows if ``right`` else cols.
        start: First flat index of the run.
        end: One past the last flat index; ``start == end`` gives an empty result.
        rows: Rows of the parameter.
        cols: Columns of the parameter.
        right: What :func:`rankwise.ldadam.formulas.projects_right` says for the parameter.

    Returns:
        A new tensor (..., end - start).

    Raises:
        ValueError: If the run leaves the matrix, or the factors do not fit the parameter.
    """
    short, long = (cols, rows) if right else (rows, cols)
    if not 0 <= start <= end <= rows * cols:
        raise ValueError(f"start and end must satisfy 0 <= start <= end <= {rows * cols}, got {start} and {end}")
    if U.shape[-2] != short or X.shape[-1] != long:
        raise ValueError(
            f"factors must be (..., {short}, r) and (..., r, {long}) for a {rows} x {cols} parameter with "
            f"right={right}, got {tuple(U.shape)} and {tuple(X.shape)}"
        )
    first = start // cols
    touched = slice(first, -(-end // cols))
    product = X[..., touched].mT @ U.mT if right else U[..., touched, :] @ X
    return product.flatten(-2)[..., start - first * cols : end - first * cols]
