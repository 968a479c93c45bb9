r"""LDAdam of a matrix that several holders compute together, each on its slice: messages linear in the width.

The formulas are those of :mod:`rankwise.ldadam.formulas` with the sums over an index that is cut taken over the
holders. Matrices are side-normalised, (..., m, n) with the basis on the side of m, by the shape of the whole matrix: a
slice may be taller than wide.

Along the *long* side a holder has columns of the matrix and of ``M``, ``V`` and ``D``, and all of ``U``; the holders
exchange a Gram matrix, of r x r, and ``Y``, of m x r. Along the *short* side it has rows of the matrix and of ``U``,
and all of ``M``, ``V`` and ``D``; they exchange ``X`` and ``a``, of n x r, and Gram matrices.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor, cat

from rankwise.comm.slice_holders import Holders
from rankwise.ldadam.formulas import basis_coordinates, basis_image, project
from rankwise.updates.adamw import Scalar
from rankwise.updates.orthonormal import (
    cholesky_qr,
    cholesky_qr2,
    row_block_cholesky_qr,
    row_block_cholesky_qr2,
)

__all__ = ["Cut", "exchanged", "next_basis_of_slices", "project_slices"]

Cut = Literal["long", "short"]


def exchanged(cut: Cut, short: int, long: int, rank: int) -> tuple[tuple[int, bool], ...]:
    """Elements of one matrix in each message of a step after the first, and whether it is a gather, in order.

    Args:
        cut: The side that is cut.
        short: m of the whole matrix.
        long: n of the whole matrix.
        rank: r.
    """
    gram = (1 + rank) * rank
    if cut == "long":
        return (gram, True), (short * rank, False)
    return (long * rank, False), (gram, True), (rank * rank, True), ((long + rank) * rank, False)


def next_basis_of_slices(
    matrix: Tensor,
    U: Tensor,
    M: Tensor,
    weight_matrix: float,
    weight_momentum: Scalar,
    cut: Cut,
    holders: Holders,
) -> tuple[Tensor, Tensor]:
    """:func:`rankwise.ldadam.formulas.next_basis` by power iteration, without its fallback.

    Args:
        matrix: A slice of ``C``: (..., m, n_i) or (..., m_i, n).
        U: Previous basis, (..., m, r) or the same rows of it.
        M: Previous first moment, the same columns of it or (..., r, n).
        weight_matrix: ``w_C`` of :func:`rankwise.ldadam.formulas.basis_weights`.
        weight_momentum: ``w_M`` of it.
        cut: The side that is cut.
        holders: Holders of the matrix.

    Returns:
        The next basis, or the same rows of it, and a boolean (...), alike for all holders, that is true where it must
        not be used.
    """
    weights = (weight_matrix, weight_momentum)
    if cut == "long":
        X, x_failed = row_block_cholesky_qr(basis_coordinates(matrix, U, M, *weights), holders.gather)
        basis, y_failed = cholesky_qr2(holders.add(basis_image(matrix, X, U, M, *weights)))
    else:
        # The momentum enters once, whoever adds it.
        partial = holders.add(basis_coordinates(matrix, U, M, weight_matrix, 0.0))
        X, x_failed = cholesky_qr(partial + weight_momentum * M.mT)
        basis, y_failed = row_block_cholesky_qr2(basis_image(matrix, X, U, M, *weights), holders.gather)
    return basis, x_failed | y_failed


def project_slices(matrix: Tensor, U_prev: Tensor, U: Tensor, cut: Cut, holders: Holders) -> tuple[Tensor, Tensor]:
    """:func:`rankwise.ldadam.formulas.project`: the holder's columns of ``U^T C``, or all of it, and all of ``R``."""
    projected, rotation = project(matrix, U_prev, U)
    if cut == "short":
        long = projected.shape[-1]
        joined = holders.add(cat((projected, rotation), dim=-1))
        projected, rotation = joined[..., :long], joined[..., long:]
    return projected, rotation
