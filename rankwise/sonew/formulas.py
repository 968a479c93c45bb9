"""SONew: a Newton direction for a preconditioner whose inverse is known only on a band (arXiv 2311.10085).

A *chain* is the last dimension of every tensor here; leading dimensions are independent chains. The caller decides
what a chain is: the rows of a matrix as it stands, or a whole tensor flattened to one dimension.

An *edge* joins the coordinates ``i`` and ``i + k`` of one chain, ``1 <= k <= b``. Its statistic is stored at entry
``i`` of a tensor of the parameter's shape, so the last ``k`` entries of a chain are zero.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from rankwise.sonew.banded import apply_factors, banded_factors, check_chain, check_edges

__all__ = [
    "GRAFTS",
    "direction",
    "graft_direction",
    "graft_ratio",
    "statistics",
]

GRAFTS = ("adam", "adam_official", "rmsprop", "sgd", "momentum", "none")

# The constant the published torch code adds in its Adam graft, whatever the damping is.
_OFFICIAL_GRAFT_EPS = 1e-8
# Keeps the published normalised RMSprop graft from dividing by the norm of a zero gradient.
_NORM_FLOOR = 1e-16


def statistics(
    grad: Tensor,
    momentum: Tensor,
    diagonal: Tensor,
    covariances: Sequence[Tensor] | Tensor,
    betas: tuple[float, float],
) -> tuple[Tensor, Tensor, list[Tensor]]:
    r"""Moving averages of the gradient and of the products of gradients inside the band.

    .. math::
        m_i' = \beta_1 m_i + (1-\beta_1) g_i, \quad
        d_i' = \beta_2 d_i + (1-\beta_2) g_i^2, \quad
        e^{k\prime}_i = \beta_2 e^k_i + (1-\beta_2) g_i g_{i+k}

    The averages start at zero and are not bias-corrected. Source: arXiv 2311.10085, with the sum
    over steps replaced by an average as in the published code.

    A shard ``[lo, hi)`` of a chain needs the gradients of the next ``b`` elements, ``[hi, hi + b)``, for its edges.

    Args:
        grad: gradient ``g``, (..., n).
        momentum: ``m``, (..., n).
        diagonal: ``d``, (..., n).
        covariances: ``b`` edge tensors ``e^1 .. e^b``, each (..., n): a sequence or a stack along dimension 0; empty
            for the diagonal method.
        betas: :math:`(\beta_1, \beta_2)`.

    Returns:
        The new ``m``, ``d`` and list of ``e^k``. Entries whose edge would leave the chain only decay: zero stays zero.

    Raises:
        ValueError: if ``grad`` has no dimension or an edge tensor has another shape than ``diagonal``.
    """
    check_chain("grad", grad)
    edges = check_edges(diagonal, covariances)
    beta1, beta2 = betas
    # Written with products and sums only: fused forms round differently in the vector body and the tail of a loop,
    # and then the bits would depend on where a chain was cut.
    new_edges = [
        beta2 * edge + (grad * F.pad(grad, (0, distance))[..., distance:]) * (1.0 - beta2)
        for distance, edge in enumerate(edges, start=1)
    ]
    new_momentum = beta1 * momentum + grad * (1.0 - beta1)
    new_diagonal = beta2 * diagonal + (grad * grad) * (1.0 - beta2)
    return new_momentum, new_diagonal, new_edges


def direction(
    momentum_hat: Tensor,
    diagonal_hat: Tensor,
    covariances_hat: Sequence[Tensor] | Tensor,
    eps: float | Tensor = 1e-8,
    tolerance: float = 1e-2,
    relative_damping: float = 0.0,
) -> Tensor:
    r"""Preconditioned direction ``u = X m``.

    .. math::
        X = \arg\min_{X \succ 0,\; X_{ij} = 0 \text{ off the band}} -\log\det X + \operatorname{tr}(X H), \quad
        H_{ii} = (1 + \delta) d_i + \epsilon, \quad H_{i,i+k} = e^k_i

    ``b = 0`` gives ``u = m / (d + eps)``. Source: arXiv 2311.10085; the factors of ``X`` are those of
    :func:`rankwise.sonew.banded.banded_factors`.

    ``u_i`` depends on the elements ``i - b .. i + b`` only, so a shard with ``b`` more elements on either side gets
    the unsharded result, whatever lies farther away. Where ``H_ii`` is 0 (``eps = 0``, no gradient yet) ``u_i`` is 0.

    The averages need not be bias-corrected first: with ``c_1 = 1 - beta1^t``, ``c_2 = 1 - beta2^t`` the direction of
    the corrected averages is ``direction(m, d, e, eps * c_2, ...) * (c_2 / c_1)``, which saves passes over memory.

    Args:
        momentum_hat: ``m``, (..., n).
        diagonal_hat: ``d``, (..., n).
        covariances_hat: ``b`` edge tensors ``e^k``, (..., n), as in :func:`statistics`.
        eps: absolute damping, at least 0, or a tensor that broadcasts against ``diagonal_hat``.
        tolerance: relative edge tolerance of :func:`rankwise.sonew.banded.banded_factors`; 0 in the published code.
        relative_damping: :math:`\delta`, at least 0; no conditional variance is below :math:`\delta d_j` then.

    Returns:
        ``u``, (..., n).

    Raises:
        ValueError: if a number is out of range, the shapes differ, or there is no dimension.
    """
    if momentum_hat.shape != diagonal_hat.shape:
        raise ValueError(
            f"momentum_hat has shape {tuple(momentum_hat.shape)} and diagonal_hat {tuple(diagonal_hat.shape)}; "
            "both must have the parameter's shape"
        )
    if not isinstance(eps, Tensor) and not eps >= 0.0:
        raise ValueError(f"eps={eps} must be at least 0; use 1e-8, or 0.0 for no damping")
    if not relative_damping >= 0.0:
        raise ValueError(f"relative_damping={relative_damping} must be at least 0; use 0.0 for none")
    damped = diagonal_hat * (1.0 + relative_damping) + eps if relative_damping else diagonal_hat + eps
    coefficients, schur = banded_factors(damped, covariances_hat, tolerance)
    return apply_factors(coefficients, schur, momentum_hat)


def graft_direction(
    kind: str,
    grad: Tensor,
    momentum_hat: Tensor,
    diagonal: Tensor,
    diagonal_hat: Tensor,
    eps: float = 1e-8,
    rms: Tensor | None = None,
    grad_norm: Tensor | None = None,
    beta2: float = 0.99,
) -> tuple[Tensor | None, Tensor | None]:
    r"""Direction ``a`` whose norm the update takes over (grafting).

    .. math::
        \text{adam: } \frac{\hat m}{\sqrt{\hat d} + \epsilon_g}, \quad
        \text{adam\_official: } \frac{\hat m}{\sqrt{d} + 10^{-8}}, \quad
        \text{rmsprop: } \frac{\bar g}{\sqrt{q'} + \epsilon_g},\;
        \bar g = \frac{g}{\|g\| + 10^{-16}},\; q' = \beta_2 q + (1-\beta_2) \bar g^2

    ``sgd`` takes ``g``, ``momentum`` takes :math:`\hat m`, ``none`` nothing. ``adam_official`` is the published torch
    code: its second moment is not bias-corrected, which inflates the first steps by :math:`1/\sqrt{1-\beta_2^t}`.
    ``rmsprop`` is graft type 4 of the authors' JAX code. Element-wise: any shard of a tensor.

    Args:
        kind: one of :data:`GRAFTS`.
        grad: gradient ``g``.
        momentum_hat: bias-corrected momentum.
        diagonal: second moment ``d`` as averaged, undamped.
        diagonal_hat: second moment, bias-corrected, undamped.
        eps: :math:`\epsilon_g`.
        rms: ``q``, the extra state of ``rmsprop``, shape of ``grad``.
        grad_norm: norm of the *whole* tensor's gradient, 0-d or broadcastable, for ``rmsprop``.
        beta2: :math:`\beta_2`, for ``rmsprop``.

    Returns:
        ``a`` (None for ``none``) and the new ``q`` (``rms`` unchanged for every other kind than ``rmsprop``).

    Raises:
        ValueError: if ``kind`` is unknown, or ``rmsprop`` lacks ``rms`` or ``grad_norm``.
    """
    if kind == "adam":
        return momentum_hat / (diagonal_hat.sqrt() + eps), rms
    if kind == "adam_official":
        return momentum_hat / (diagonal.sqrt() + _OFFICIAL_GRAFT_EPS), rms
    if kind == "sgd":
        return grad.clone(), rms
    if kind == "momentum":
        return momentum_hat.clone(), rms
    if kind == "none":
        return None, rms
    if kind != "rmsprop":
        raise ValueError(f"kind={kind!r} must be one of {', '.join(GRAFTS)}; use 'adam'")
    if rms is None or grad_norm is None:
        missing = "rms" if rms is None else "grad_norm"
        raise ValueError(
            f"{missing}=None, but kind='rmsprop' needs both rms (zeros at the first step) and grad_norm (the norm of "
            "the whole tensor's gradient); pass them or use kind='adam'"
        )
    unit = grad / (grad_norm + _NORM_FLOOR)
    new_rms = beta2 * rms + (unit * unit) * (1.0 - beta2)
    return unit / (new_rms.sqrt() + eps), new_rms


def graft_ratio(norm_sq_graft: Tensor, norm_sq_update: Tensor, tiny: float = 0.0) -> Tensor:
    r"""Factor that gives the update the norm of the graft direction, :math:`\|a\| / (\|u\| + \text{tiny})`.

    Both squared norms are those of whole tensors, summed over all shards. An update of norm zero gets the ratio 0, so
    a parameter without a gradient stays where it is; the published torch code divides 0 by 0 there.

    Args:
        norm_sq_graft: :math:`\|a\|^2`, any shape.
        norm_sq_update: :math:`\|u\|^2`, same shape.
        tiny: added to the norm of the update; 1e-12 and 1e-16 in the authors' JAX code.

    Returns:
        The ratio, same shape; no host synchronisation.
    """
    graft, norm = torch._foreach_sqrt([norm_sq_graft, norm_sq_update])
    ratio = graft / (norm + tiny if tiny else norm)
    return ratio.masked_fill(norm_sq_update == 0, 0.0)
