r"""LDAdam, line by line: "LDAdam: Adaptive Optimization from Low-Dimensional Gradient Statistics", arXiv 2410.16103,
Algorithm 1. Start with :func:`ldadam_step`.

==================  ==============================================================================================
paper               here
==================  ==============================================================================================
W_t, G_t            ``W``, ``G`` (m, n) with m <= n; a tall matrix enters as its transpose
U_t                 ``U`` (m, r), the basis, whose columns are orthonormal
R_t                 ``rotation`` (r, r), U_t^T U_{t-1}
M_t, V_t            ``M``, ``V`` (r, n), the moments in the basis, without bias correction; ``D`` is their direction
E_t                 ``F`` = E_t + k U_{t-1} M_{t-1} with k = beta1 / (1 - beta1), the error with the momentum
A_t = G_t + E_t     ``C`` = G + F, which is A_t + k U_{t-1} M_{t-1}; without error feedback the gradient itself
a_t = U_t^T A_t     ``gradient``, from ``projected`` = U_t^T C
B_t                 rho U_{t-1} M_{t-1} / (1 - beta1^(t-1)) + (1 - rho) A_t: ``basis_weights`` of C and U M
==================  ==============================================================================================

``F`` in the place of ``E`` is ours. It turns the error's line, E <- A - U a + k (U_{t-1} M_{t-1} - U R M_{t-1}), into
F <- C - U M (``kept_factor`` for M where beta1 has changed), on the same trajectory; see ``docs/deviations.md``.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from rankwise.ldadam.formulas import basis_weights, kept_factor, moment_scales, next_basis, per_matrix, project
from rankwise.updates.adamw import Scalar, Step, decoupled_step
from rankwise.updates.orthonormal import initial_basis

__all__ = ["Subspace", "followed_basis", "ldadam_step", "low_rank_moments", "subspace_step"]


class Subspace(NamedTuple):
    """What a matrix keeps beside its error; zeros before the first step."""

    U: Tensor
    M: Tensor
    V: Tensor


def ldadam_step(
    W: Tensor,
    G: Tensor,
    F: Tensor,
    subspace: Subspace,
    step: int,
    *,
    lr: float,
    betas: tuple[float, float] = (0.908, 0.99),
    rho: float = 0.908,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    error_feedback: bool = True,
    written_beta1: float | None = None,
) -> tuple[Tensor, Tensor, Subspace]:
    """One step, t = ``step``, counted from 1.

    Args:
        W: Weights (m, n).
        G: Gradient (m, n).
        F: Error with the momentum (m, n), zeros before the first step.
        subspace: What the step before has returned.
        step: Number of this step.
        lr: Learning rate.
        betas: Decay rates of the moments.
        rho: Share of the momentum in what the basis follows.
        eps: Number that is added to the root of the second moment.
        weight_decay: Decoupled decay rate.
        error_feedback: Whether the gradient's part outside the basis is added to the next gradient.
        written_beta1: The ``beta1`` of the step before, where a schedule changes it.

    Returns:
        The new weights, error and subspace.
    """
    C = G + F if error_feedback else G
    U, M, V, D = subspace_step(C, *subspace, step, betas, rho, eps, error_feedback, written_beta1)
    if error_feedback:
        changed = step > 1 and written_beta1 not in (None, betas[0])
        F = C - U @ (kept_factor(U.mT @ C, M, betas[0]) if changed else M)
    return decoupled_step(W, U @ D, lr, weight_decay), F, Subspace(U, M, V)


def subspace_step(
    matrix: Tensor,
    U_prev: Tensor,
    M_prev: Tensor,
    V_prev: Tensor,
    step: int,
    betas: tuple[float, float],
    rho: float,
    eps: float,
    error_feedback: bool,
    written_beta1: float | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The new ``U``, ``M``, ``V`` and ``D`` of ``matrix``, which is ``C`` (..., m, n); see :func:`ldadam_step`."""
    U = followed_basis(matrix, U_prev, M_prev, step, betas[0], rho, error_feedback, written_beta1)
    projected, rotation = project(matrix, U_prev, U)
    moments = low_rank_moments(projected, rotation, M_prev, V_prev, step, betas, eps, error_feedback, written_beta1)
    return U, *moments


def followed_basis(
    matrix: Tensor,
    U_prev: Tensor,
    M_prev: Tensor,
    step: int,
    beta1: float,
    rho: float,
    error_feedback: bool,
    written_beta1: float | None = None,
) -> Tensor:
    """``U``: qr(B B^T U_{t-1}); at step 1 the first left singular vectors of the gradient."""
    if step == 1:
        return initial_basis(matrix, U_prev.shape[-1])
    return next_basis(matrix, U_prev, M_prev, *basis_weights(step, beta1, rho, error_feedback, written_beta1))


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
    """Adam inside the subspace: ``M``, ``V`` and ``D``, the old moments having been turned into the new basis.

    ``projected`` is U_t^T C, ``rotation`` R_t, ``past`` 1 - beta^(t - 1), ``now`` 1 - beta^t, ``k`` that of ``F``.
    Variances of uncorrelated coordinates are turned by the squares of the rotation. Since the two decays differ an
    estimate can be negative, hence the absolute value. ``step`` and ``written_beta1`` may be tensors, one number (above
    1) for each matrix.
    """
    (beta1, beta2), scales = betas, moment_scales(step, betas, error_feedback, written_beta1)
    past1, past2, k, now1, now2 = (per_matrix(scale, projected) for scale in scales)
    if not isinstance(step, Tensor) and step == 1:
        M, V = (1 - beta1) * projected, (1 - beta2) * projected.square()
    else:
        M_turned = rotation @ M_prev
        variance = V_prev / past2 - (M_prev / past1).square()
        V_turned = past2 * (rotation.square() @ variance + (M_turned / past1).square()).abs()
        gradient = projected - k * M_turned if error_feedback else projected
        M = beta1 * M_turned + (1 - beta1) * gradient
        V = beta2 * V_turned + (1 - beta2) * gradient.square()
    D = M / now1 / ((V / now2).sqrt() + eps)
    return M, V, D
