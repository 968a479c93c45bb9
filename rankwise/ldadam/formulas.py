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
from typing import NamedTuple

from torch import Tensor

from rankwise.ldadam.basis import (
    BasisMethod,
    Fallback,
    basis_coordinates,
    basis_image,
    basis_weights,
    check_shapes,
    effective_rank,
    kept_factor,
    momentum_share,
    next_basis,
    project,
    projects_right,
    side_normalized,
    try_next_basis,
    worth_projecting,
)
from rankwise.ldadam.low_rank_products import Subtract, low_rank_rows, subtract_low_rank_, subtract_product_
from rankwise.updates.adamw import Scalar, Step, bias_corrections
from rankwise.updates.orthonormal import initial_basis

__all__ = [
    "MomentScales",
    "Moments",
    "Subtract",
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

Moments = Callable[..., tuple[Tensor, Tensor, Tensor]]
"""A form of :func:`low_rank_moments`."""


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
