"""LDAdam's bases: how one follows the gradient, and what a matrix is in it.

Matrices are side-normalised, (..., m, n) with m <= n. Notation and source as in :mod:`rankwise.ldadam.rule`. Products
must run in the full precision of their type (no TF32), for the error is a difference of them.
"""

from __future__ import annotations

from torch import Tensor

from rankwise.updates.adamw import Scalar
from rankwise.updates.orthonormal import cholesky_qr, cholesky_qr2, householder_qr

__all__ = ["basis_coordinates", "basis_image", "check_shapes", "coordinates", "next_basis", "project", "try_next_basis"]


def _is_row_major(matrix: Tensor) -> bool:
    return matrix.stride(-1) == 1


def coordinates(matrix: Tensor, U: Tensor) -> Tensor:
    """``U^T C`` (..., r, n), in the order that reads the matrix along its rows: about a third faster on CPUs."""
    return U.mT @ matrix if _is_row_major(matrix) else (matrix.mT @ U).mT


def basis_coordinates(matrix: Tensor, U: Tensor, M: Tensor, weight_matrix: float, weight_momentum: Scalar) -> Tensor:
    """First half of the power iteration, ``X = B^T U`` (..., n, r), without forming B.

    Long-side blocks of ``matrix`` and ``M`` give the same blocks of X. Short-side blocks of ``matrix`` and ``U`` give
    terms of a sum, in which ``M`` must enter once.
    """
    return weight_matrix * coordinates(matrix, U).mT + weight_momentum * M.mT


def basis_image(
    matrix: Tensor, X: Tensor, U: Tensor, M: Tensor, weight_matrix: float, weight_momentum: Scalar
) -> Tensor:
    """Second half of the power iteration, ``Y = B X`` (..., m, r), without forming B.

    Short-side blocks of ``matrix`` and ``U`` give the same blocks of Y. Long-side blocks of ``matrix``, ``X`` and
    ``M`` give terms whose sum is Y.
    """
    # A tall parameter's transposed view is read along its rows.
    image = matrix @ X if _is_row_major(matrix) else (X.mT @ matrix.mT).mT
    return weight_matrix * image + weight_momentum * (U @ (M @ X))


def check_shapes(matrix: Tensor, U: Tensor, M: Tensor) -> None:
    """Raise ValueError unless a basis and coordinates fit side-normalised matrices."""
    (m, n), r = matrix.shape[-2:], U.shape[-1]
    if m > n:
        raise ValueError(f"matrix must be side-normalised (m <= n), got {m} x {n}; pass side_normalized(matrix)")
    if U.shape[-2] != m or tuple(M.shape[-2:]) != (r, n):
        raise ValueError(
            f"U and M must be (..., {m}, r) and (..., r, {n}) for {m} x {n} matrices, got {tuple(U.shape)} and "
            f"{tuple(M.shape)}; check that the states belong to this parameter"
        )


def _householder_basis(matrix: Tensor, U: Tensor, M: Tensor, weight_matrix: float, weight_momentum: Scalar) -> Tensor:
    X = householder_qr(basis_coordinates(matrix, U, M, weight_matrix, weight_momentum))
    return householder_qr(basis_image(matrix, X, U, M, weight_matrix, weight_momentum))


def next_basis(
    matrix: Tensor,
    U: Tensor,
    M: Tensor,
    weight_matrix: float,
    weight_momentum: Scalar,
) -> Tensor:
    r"""Moves the basis by one warm-started block power iteration on ``B B^T`` (arXiv 2410.16103, Algorithm 1).

    .. math:: B = w_C C + w_M U M, \quad X = B^T U, \quad \tilde X = \mathrm{orth}(X), \quad Y = B \tilde X,
              \quad U^{+} = \mathrm{orth}(Y)

    The published step has no ``orth(X)``. It changes ``Y`` by an upper triangular factor only, so ``U+`` is the same
    in exact arithmetic, and the condition number that the second orthonormalisation meets is that of B, not its
    square. Both run as column-scaled Cholesky QR. Where that fails (rank-deficient, zero or extremely graded
    matrices), the whole iteration is repeated with Householder QR for that matrix; the host waits to know it.

    Args:
        matrix: ``C = G + F`` with error feedback, ``G`` without; (..., m, n), m <= n.
        U: Previous basis (..., m, r), orthonormal columns.
        M: Previous first moment (..., r, n).
        weight_matrix: ``w_C`` of :func:`rankwise.ldadam.formulas.basis_weights`.
        weight_momentum: ``w_M`` of :func:`rankwise.ldadam.formulas.basis_weights`.

    Returns:
        The next basis (..., m, r), whose signs are such that R has a positive diagonal.

    Raises:
        ValueError: If shapes do not fit.
    """
    check_shapes(matrix, U, M)
    weights = (weight_matrix, weight_momentum)
    basis, failed = try_next_basis(matrix, U, M, *weights)
    if bool(failed.any()):
        basis[failed] = _householder_basis(matrix[failed], U[failed], M[failed], *weights)
    return basis


def try_next_basis(
    matrix: Tensor, U: Tensor, M: Tensor, weight_matrix: float, weight_momentum: Scalar
) -> tuple[Tensor, Tensor]:
    """:func:`next_basis` by power iteration, without its fallback; no host synchronisation.

    Args:
        matrix: ``C`` (..., m, n).
        U: Previous basis (..., m, r).
        M: Previous first moment (..., r, n).
        weight_matrix: ``w_C`` of :func:`rankwise.ldadam.formulas.basis_weights`.
        weight_momentum: ``w_M`` of it; a tensor must broadcast against ``M``, in its type.

    Returns:
        The next basis (..., m, r), and a boolean (...) that is true where it must not be used.
    """
    X, x_failed = cholesky_qr(basis_coordinates(matrix, U, M, weight_matrix, weight_momentum))
    basis, y_failed = cholesky_qr2(basis_image(matrix, X, U, M, weight_matrix, weight_momentum))
    return basis, x_failed | y_failed


def project(matrix: Tensor, U_prev: Tensor, U: Tensor) -> tuple[Tensor, Tensor]:
    """Coordinates in the new basis: ``U^T C`` (..., r, n) and the rotation ``R = U^T U_prev`` (..., r, r).

    Short-side blocks of ``matrix``, ``U_prev`` and ``U`` give terms whose sums are the two results.
    """
    return coordinates(matrix, U), U.mT @ U_prev
