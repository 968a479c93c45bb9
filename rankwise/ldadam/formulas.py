"""LDAdam's formulas: which side of a matrix is projected, what a step's number and betas make, how a basis follows.

Notation and source as in :mod:`rankwise.ldadam.rule`. Matrices of bases are side-normalised, (..., m, n) with m <= n.
Their products must run in the full precision of their type (no TF32), for the error is a difference of them.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from rankwise.updates.adamw import Scalar, Step, bias_corrections
from rankwise.updates.orthonormal import cholesky_qr, cholesky_qr2, householder_qr

__all__ = [
    "MomentScales",
    "basis_coordinates",
    "basis_image",
    "basis_weights",
    "check_basis",
    "coordinates",
    "effective_rank",
    "kept_factor",
    "moment_scales",
    "momentum_share",
    "next_basis",
    "per_matrix",
    "project",
    "projects_right",
    "side_normalized",
    "try_next_basis",
    "worth_projecting",
]


def projects_right(rows: int, cols: int) -> bool:
    """Whether a (rows, cols) parameter is projected from the right: only if it is tall. Square goes left.

    Decide it from the logical shape of the parameter, never from the shape of a shard.
    """
    return rows > cols


def side_normalized(matrix: Tensor) -> Tensor:
    """A view (..., m, n) with m <= n of (..., rows, cols): transposed if tall, as it is otherwise."""
    return matrix.mT if projects_right(matrix.shape[-2], matrix.shape[-1]) else matrix


def effective_rank(rank: int, rows: int, cols: int) -> int:
    """The rank that a (rows, cols) matrix can carry: ``min(rank, rows, cols)``.

    Raises:
        ValueError: If ``rank`` is not positive.
    """
    if rank < 1:
        raise ValueError(f"rank must be a positive integer, got {rank}; 16 is the default")
    return min(rank, rows, cols)


def worth_projecting(rank: int, rows: int, cols: int, error_feedback: bool, error_cost: float = 1.0) -> bool:
    """Whether low-rank states are smaller than the two full moments of AdamW; if not, use AdamW.

    Compares ``m r + 2 r n`` (basis and moments), plus ``m n`` for the error buffer, with ``2 m n``.

    Args:
        rank: Requested rank; the effective rank is used.
        rows: Rows of the parameter.
        cols: Columns of the parameter.
        error_feedback: Whether an error buffer of the parameter's size is kept.
        error_cost: Bytes of one element of the error buffer over bytes of one element of the other states (0.5 for
            bfloat16 beside float32).

    Raises:
        ValueError: If ``rank`` is not positive.
    """
    short, long = min(rows, cols), max(rows, cols)
    r = effective_rank(rank, rows, cols)
    states = short * r + 2 * r * long + (error_cost * short * long if error_feedback else 0)
    return states < 2 * short * long


def basis_weights(
    step: Step, beta1: float, rho: float, error_feedback: bool, written_beta1: Scalar | None = None
) -> tuple[float, Scalar]:
    r"""Weights of the matrix and of the momentum in the matrix that the basis follows.

    .. math:: B_t = \rho\, U_{t-1} M_{t-1} / (1 - \beta_1^{t-1}) + (1 - \rho) (G_t + E_t)
                  = w_C\, C_t + w_M\, U_{t-1} M_{t-1}

    Args:
        step: Steps applied including this one, t >= 2; or tensors of such numbers, any shape.
        beta1: Decay of the first moment.
        rho: Share of the momentum in ``B``.
        error_feedback: Whether the matrix is ``C = G + F``, which contains ``k U M`` already, or plain ``G``.
        written_beta1: The ``beta1`` that ``F`` was written with, a number or as ``step``; None: the present one.

    Returns:
        ``(w_C, w_M)``. With error feedback and ``rho = beta1`` the second tends to zero; in fp64 where ``step`` is a
        tensor.

    Raises:
        ValueError: If ``step`` is a number below 2; the first basis comes from
            :func:`rankwise.updates.orthonormal.initial_basis`.
    """
    if not isinstance(step, Tensor) and step < 2:
        raise ValueError(f"step must be at least 2 to follow a basis, got {step}; use initial_basis() at step 1")
    contained = (1 - rho) * momentum_share(beta1, written_beta1) if error_feedback else 0.0
    return 1 - rho, rho / bias_corrections((beta1, beta1), step - 1)[0] - contained


def momentum_share(beta1: float, written_beta1: Scalar | None) -> Scalar:
    """Return the factor ``k`` with which the error buffer ``F`` contains the momentum."""
    written = beta1 if written_beta1 is None else written_beta1
    return written / (1 - written)


class MomentScales(NamedTuple):
    """What :func:`rankwise.ldadam.rule.low_rank_moments` takes from the step's number.

    Attributes:
        bias1: ``1 - beta1^(t - 1)``; 1 at t = 1, where nothing is carried over.
        bias2: ``1 - beta2^(t - 1)``; the same.
        share: ``k`` of the momentum in ``F``; 0 without error feedback.
        correction1: ``1 - beta1^t``.
        correction2: ``1 - beta2^t``.
    """

    bias1: Scalar
    bias2: Scalar
    share: Scalar
    correction1: Scalar
    correction2: Scalar


def moment_scales(
    step: Step, betas: tuple[float, float], error_feedback: bool, written_beta1: Scalar | None
) -> MomentScales:
    """Bias corrections and the momentum's share.

    Args:
        step: Number of the step, from 1; or tensors of such numbers, all above 1: (...), one for each matrix.
        betas: Decay rates of the two moments.
        error_feedback: Whether ``projected`` comes from ``C = G + F`` rather than from ``G``.
        written_beta1: The ``beta1`` that ``F`` was written with, a number or as ``step``; None: the present one.

    Returns:
        Numbers; in fp64 and of the shape of ``step`` where it is a tensor.

    Raises:
        ValueError: If ``step`` is a number below 1.
    """
    if not isinstance(step, Tensor) and step < 1:
        raise ValueError(f"step must be at least 1, got {step}; count the step being applied")
    first = not isinstance(step, Tensor) and step == 1
    biases: tuple[Scalar, Scalar] = (1.0, 1.0) if first else bias_corrections(betas, step - 1)
    share = momentum_share(betas[0], written_beta1) if error_feedback else 0.0
    return MomentScales(*biases, share, *bias_corrections(betas, step))


def per_matrix(value: Scalar, like: Tensor) -> Scalar:
    """A number, or (...) numbers in the type of the matrices ``like`` (..., m, n) and broadcast against them."""
    return value.to(like.dtype)[..., None, None] if isinstance(value, Tensor) else value


def kept_factor(projected: Tensor, M: Tensor, beta1: float) -> Tensor:
    r"""What ``F`` loses inside the subspace where ``beta1`` has changed: ``F = C - U Z`` with ``Z`` this factor.

    .. math:: Z_t = U_t^T C_t - \frac{\beta_1}{1 - \beta_1} M_t,

    which is ``M`` itself if ``F`` was written with this ``beta1`` before.

    Args:
        projected: ``U^T C`` (..., r, n).
        M: New first moment (..., r, n).
        beta1: The present one.
    """
    return projected - beta1 / (1 - beta1) * M


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


def check_basis(matrix: Tensor, U: Tensor, M: Tensor) -> None:
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
        weight_matrix: ``w_C`` of :func:`basis_weights`.
        weight_momentum: ``w_M`` of :func:`basis_weights`.

    Returns:
        The next basis (..., m, r), whose signs are such that R has a positive diagonal.

    Raises:
        ValueError: If shapes do not fit.
    """
    check_basis(matrix, U, M)
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
        weight_matrix: ``w_C`` of :func:`basis_weights`.
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
