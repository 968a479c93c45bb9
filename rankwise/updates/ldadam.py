r"""LDAdam: Adam in a low-dimensional subspace that follows the gradient, with generalised error feedback.

Source: "LDAdam: Adaptive Optimization from Low-Dimensional Gradient Statistics", arXiv 2410.16103.

Matrices here are *side-normalised*: (..., m, n) with m <= n, where a tall parameter enters as its transposed view
(:func:`side_normalized`). ``U`` (..., m, r) are orthonormal columns; the moments ``M``, ``V`` and the direction ``D``
are (..., r, n). All matrices of one call share shape, rank and step.

Error feedback is kept in one buffer, ``F = E + k U M`` with ``k = beta1 / (1 - beta1)``, the error plus the momentum
in full space. With ``C = G + F`` the published step becomes

.. math:: M_t = (1 - \beta_1) U_t^T C_t, \qquad F_{t+1} = C_t - U_t M_t, \qquad W \leftarrow (1 - \eta\lambda) W
          - \eta\, U_t D_t ,

so a holder of any piece of the parameter needs only its piece of ``F`` and the small ``U``, ``M``, ``D``. Without
error feedback there is no ``F`` and the gradient itself takes the place of ``C``.

Where ``beta1`` changes from step to step (a schedule), ``C`` holds the ``k`` of the step that wrote ``F``, to be passed
as ``written_beta1``; with it the step is the published one, but for the momentum that the new basis drops, which enters
the error with the ``k`` of the step that made it. :func:`kept_factor` then takes the place of ``M`` in ``F``.

Matrix products must run in the full precision of their dtype (no TF32): the error buffer is a difference of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from rankwise.updates.adamw import Scalar, Step, bias_corrections
from rankwise.updates.orthonormal import cholesky_qr, cholesky_qr2, householder_qr, initial_basis

__all__ = [
    "MomentScales",
    "basis_coordinates",
    "basis_image",
    "basis_weights",
    "check_shapes",
    "effective_rank",
    "initial_basis",
    "kept_factor",
    "ldadam_step",
    "low_rank_moments",
    "low_rank_rows",
    "moment_scales",
    "momentum_share",
    "next_basis",
    "per_matrix",
    "project",
    "projects_right",
    "side_normalized",
    "subspace_step",
    "subtract_low_rank_",
    "subtract_product_",
    "try_next_basis",
    "worth_projecting",
]

BasisMethod = Literal["power", "svd"]
Fallback = Literal["branch", "always", "never"]
Moments = Callable[..., tuple[Tensor, Tensor, Tensor]]
"""A form of :func:`low_rank_moments`."""
Subtract = Callable[[Tensor, Tensor, Tensor], None]
"""A form of :func:`subtract_product_`."""


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
        ValueError: If ``step`` is a number below 2; the first basis comes from :func:`initial_basis`.
    """
    if not isinstance(step, Tensor) and step < 2:
        raise ValueError(f"step must be at least 2 to follow a basis, got {step}; use initial_basis() at step 1")
    contained = (1 - rho) * momentum_share(beta1, written_beta1) if error_feedback else 0.0
    return 1 - rho, rho / bias_corrections((beta1, beta1), step - 1)[0] - contained


def momentum_share(beta1: float, written_beta1: Scalar | None) -> Scalar:
    """The ``k`` of the momentum in ``F``."""
    written = beta1 if written_beta1 is None else written_beta1
    return written / (1 - written)


def kept_factor(matrix: Tensor, U: Tensor, M: Tensor, beta1: float) -> Tensor:
    r"""What ``F`` loses inside the subspace: ``F = C - U Z`` with ``Z`` this factor.

    .. math:: Z_t = U_t^T C_t - \frac{\beta_1}{1 - \beta_1} M_t,

    which is ``M`` itself if ``F`` was written with this ``beta1`` before.

    Args:
        matrix: ``C = G + F`` (..., m, n).
        U: New basis (..., m, r).
        M: New first moment (..., r, n).
        beta1: The present one.

    Returns:
        ``Z`` (..., r, n).
    """
    return _coordinates(matrix, U) - beta1 / (1 - beta1) * M


def _is_row_major(matrix: Tensor) -> bool:
    return matrix.stride(-1) == 1


def _coordinates(matrix: Tensor, U: Tensor) -> Tensor:
    """``U^T C`` (..., r, n), in the order that reads the matrix along its rows: about a third faster on CPUs."""
    return U.mT @ matrix if _is_row_major(matrix) else (matrix.mT @ U).mT


def basis_coordinates(matrix: Tensor, U: Tensor, M: Tensor, weight_matrix: float, weight_momentum: Scalar) -> Tensor:
    """First half of the power iteration, ``X = B^T U`` (..., n, r), without forming B.

    Long-side blocks of ``matrix`` and ``M`` give the same blocks of X. Short-side blocks of ``matrix`` and ``U`` give
    terms of a sum, in which ``M`` must enter once.
    """
    return weight_matrix * _coordinates(matrix, U).mT + weight_momentum * M.mT


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
    basis_method: BasisMethod = "power",
    fallback: Fallback = "branch",
) -> Tensor:
    r"""Moves the basis by one warm-started block power iteration on ``B B^T`` (arXiv 2410.16103, Algorithm 1).

    .. math:: B = w_C C + w_M U M, \quad X = B^T U, \quad \tilde X = \mathrm{orth}(X), \quad Y = B \tilde X,
              \quad U^{+} = \mathrm{orth}(Y)

    The published step has no ``orth(X)``. It changes ``Y`` by an upper triangular factor only, so ``U+`` is the same
    in exact arithmetic, and the condition number that the second orthonormalisation meets is that of B, not its
    square. Both run as column-scaled Cholesky QR. Where that fails (rank-deficient, zero or extremely graded
    matrices), the whole iteration is repeated with Householder QR for that matrix.

    Args:
        matrix: ``C = G + F`` with error feedback, ``G`` without; (..., m, n), m <= n.
        U: Previous basis (..., m, r), orthonormal columns.
        M: Previous first moment (..., r, n).
        weight_matrix: ``w_C`` of :func:`basis_weights`.
        weight_momentum: ``w_M`` of :func:`basis_weights`.
        basis_method: "power", or "svd" for the exact leading singular vectors of B, much slower.
        fallback: "branch" reads one flag per call on the host, which waits for the device, and repeats only the
            failed matrices. "always" computes Householder for all and selects on the device. "never" returns the
            Cholesky result; a failed matrix is then not orthonormal, possibly not finite.

    Returns:
        The next basis (..., m, r). With "power" every sign is such that R has a positive diagonal.

    Raises:
        ValueError: If shapes do not fit, or ``basis_method`` or ``fallback`` is unknown.
    """
    check_shapes(matrix, U, M)
    weights = (weight_matrix, weight_momentum)
    if basis_method == "svd":
        return initial_basis(weight_matrix * matrix + weight_momentum * (U @ M), U.shape[-1])
    if basis_method != "power":
        raise ValueError(f"basis_method must be 'power' or 'svd', got {basis_method!r}")
    if fallback not in ("branch", "always", "never"):
        raise ValueError(f"fallback must be 'branch', 'always' or 'never', got {fallback!r}")
    basis, failed = try_next_basis(matrix, U, M, *weights)
    if fallback == "never":
        return basis
    if fallback == "always":
        return torch.where(failed[..., None, None], _householder_basis(matrix, U, M, *weights), basis)
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
    return _coordinates(matrix, U), U.mT @ U_prev


class MomentScales(NamedTuple):
    """What :func:`low_rank_moments` takes from the step's number.

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
    """Bias corrections and the momentum's share; arguments as in :func:`low_rank_moments`.

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


def low_rank_moments(
    projected: Tensor,
    rotation: Tensor,
    M_prev: Tensor,
    V_prev: Tensor,
    step: Step,
    betas: tuple[float, float],
    eps: float,
    error_feedback: bool,
    written_beta1: Scalar | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    r"""Adam inside the subspace, its moments carried over from the previous basis.

    .. math::
        M' &= R M_{t-1}, \qquad a = U_t^T C_t - k M' \quad (a = U_t^T G_t \text{ without error feedback}) \\
        V' &= \delta_2 \left| R^{\circ 2} \left( V_{t-1} / \delta_2 - (M_{t-1} / \delta_1)^{\circ 2} \right)
              + (M' / \delta_1)^{\circ 2} \right|, \qquad \delta_i = 1 - \beta_i^{t-1} \\
        M_t &= \beta_1 M' + (1 - \beta_1) a, \qquad V_t = \beta_2 V' + (1 - \beta_2) a^{\circ 2} \\
        D_t &= \frac{M_t / (1 - \beta_1^t)}{\sqrt{V_t / (1 - \beta_2^t)} + \epsilon}

    The first term of ``V'`` is a variance, which a linear map of uncorrelated coordinates turns by the squares of its
    entries; the mean is rotated exactly. The estimate can be negative because the two decays differ, hence the
    absolute value of the whole bracket (not a clamp). Long-side blocks are independent of each other.

    Args:
        projected: ``U^T C`` (..., r, n).
        rotation: ``R = U^T U_prev`` (..., r, r).
        M_prev: First moment in the previous basis (..., r, n), not bias-corrected.
        V_prev: Second moment in the previous basis (..., r, n), not bias-corrected.
        step: Steps applied including this one, t >= 1. At t = 1 the previous moments and the rotation are ignored. Or
            tensors of such numbers, all above 1: (...), one for each matrix.
        betas: Decays of the two moments.
        eps: Added to the root after the bias correction.
        error_feedback: Whether ``projected`` comes from ``C = G + F`` rather than from ``G``.
        written_beta1: The ``beta1`` that ``F`` was written with, a number or as ``step``; None: the present one.

    Returns:
        ``M``, ``V`` and the direction ``D``, each (..., r, n).

    Raises:
        ValueError: If ``step`` is a number below 1.
    """
    scales = moment_scales(step, betas, error_feedback, written_beta1)
    bias1, bias2, share, correction1, correction2 = (per_matrix(scale, projected) for scale in scales)
    beta1, beta2 = betas
    if not isinstance(step, Tensor) and step == 1:
        M, V = (1 - beta1) * projected, (1 - beta2) * projected.square()
    else:
        rotated = rotation @ M_prev
        variance = V_prev / bias2 - (M_prev / bias1).square()
        carried = bias2 * (rotation.square() @ variance + (rotated / bias1).square()).abs()
        gradient = projected - share * rotated if error_feedback else projected
        M = beta1 * rotated + (1 - beta1) * gradient
        V = beta2 * carried + (1 - beta2) * gradient.square()
    D = M / correction1 / ((V / correction2).sqrt() + eps)
    return M, V, D


def per_matrix(value: Scalar, like: Tensor) -> Scalar:
    """A number, or (...) numbers in the type of the matrices ``like`` (..., m, n) and broadcast against them."""
    return value.to(like.dtype)[..., None, None] if isinstance(value, Tensor) else value


def subspace_step(
    matrix: Tensor,
    U_prev: Tensor,
    M_prev: Tensor,
    V_prev: Tensor,
    U: Tensor,
    step: int,
    betas: tuple[float, float] = (0.908, 0.99),
    eps: float = 1e-8,
    error_feedback: bool = True,
    written_beta1: float | None = None,
    moments: Moments | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Moments and direction in a given new basis: :func:`project`, then :func:`low_rank_moments`.

    Args:
        matrix: ``C = G + F`` with error feedback, ``G`` without; (..., m, n), m <= n.
        U_prev: Previous basis (..., m, r); ignored at step 1.
        M_prev: Previous first moment (..., r, n); ignored at step 1.
        V_prev: Previous second moment (..., r, n); ignored at step 1.
        U: New basis (..., m, r).
        step: Steps applied including this one.
        betas: Decays of the two moments.
        eps: Added to the root of the second moment.
        error_feedback: Which of the two ``matrix`` is.
        written_beta1: As in :func:`low_rank_moments`.
        moments: The form of :func:`low_rank_moments` to use; None: this one.

    Returns:
        ``M``, ``V``, ``D``, each (..., r, n).

    Raises:
        ValueError: If shapes do not fit or ``step`` < 1.
    """
    check_shapes(matrix, U, M_prev)
    projected, rotation = project(matrix, U_prev, U)
    compute = moments or low_rank_moments
    return compute(projected, rotation, M_prev, V_prev, step, betas, eps, error_feedback, written_beta1)


def ldadam_step(
    matrix: Tensor,
    U_prev: Tensor,
    M_prev: Tensor,
    V_prev: Tensor,
    step: int,
    betas: tuple[float, float] = (0.908, 0.99),
    rho: float = 0.908,
    eps: float = 1e-8,
    error_feedback: bool = True,
    basis_method: BasisMethod = "power",
    fallback: Fallback = "branch",
    written_beta1: float | None = None,
    moments: Moments | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One step of the matrix states: basis, moments and direction (arXiv 2410.16103, Algorithm 1).

    At step 1 the previous states carry only their shapes (zeros). Arguments as in :func:`next_basis` and
    :func:`subspace_step`; ``rho`` as in :func:`basis_weights`.

    Returns:
        ``U`` (..., m, r) and ``M``, ``V``, ``D`` (..., r, n). The parameter then takes ``W = (1 - lr wd) W - lr U D``
        and the buffer ``F = C - U M``, both on any piece through :func:`low_rank_rows`.

    Raises:
        ValueError: If shapes do not fit, ``step`` < 1 or a choice is unknown.
    """
    check_shapes(matrix, U_prev, M_prev)
    if step == 1:
        U = initial_basis(matrix, U_prev.shape[-1])
    else:
        weights = basis_weights(step, betas[0], rho, error_feedback, written_beta1)
        U = next_basis(matrix, U_prev, M_prev, *weights, basis_method=basis_method, fallback=fallback)
    M, V, D = subspace_step(matrix, U_prev, M_prev, V_prev, U, step, betas, eps, error_feedback, written_beta1, moments)
    return U, M, V, D


def subtract_product_(matrix: Tensor, left: Tensor, right: Tensor) -> None:
    """``matrix -= left right`` in place."""
    matrix.addmm_(left, right, alpha=-1)


def subtract_low_rank_(
    run: Tensor,
    U: Tensor,
    X: Tensor,
    start: int,
    end: int,
    rows: int,
    cols: int,
    right: bool,
    subtract: Subtract = subtract_product_,
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
        right: What :func:`projects_right` says for the parameter.
        subtract: For whole rows.
    """
    first, last = -(-start // cols), end // cols
    if first > last or start == end:
        _subtract_part_(run, U, X, start, rows, cols, right)
        return
    head, tail = first * cols - start, last * cols - start
    touched = slice(first, last)
    left, short = (X[:, touched].mT, U.mT) if right else (U[touched], X)
    subtract(run[head:tail].view(last - first, cols), left, short)
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
        right: What :func:`projects_right` says for the parameter.

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
