r"""SONew, line by line: "A Computationally Efficient Sparsified Online Newton Method", arXiv 2311.10085.

The preconditioner is zero off a band, and its inverse agrees with the statistics on that band,

.. math:: X_t = \arg\min_{X \succ 0,\; X_{ij} = 0 \text{ off the band}} -\log\det X + \operatorname{tr}(X H_t)
              = L D L^T,

which has a closed form. (Of all matrices that agree with H_t on the band, X_t^{-1} has the largest determinant.) The
length b of ``edges`` makes it diagonal (0), tridiagonal (1) or banded. For b = 1 it is psi_j = H_{j,j+1} / H_{j+1,j+1}
and s_j = H_jj - psi_j H_{j,j+1}; for any b see :func:`rankwise.sonew.banded.banded_factors`.

================  ====================================================================================================
paper             here
================  ====================================================================================================
w_t, g_t          ``w``, ``g`` (..., n); a chain is the last dimension: the rows of a matrix (ours), or the flattened
                  tensor, which is the paper's single chain
H_t               its diagonal ``d`` and its off-diagonals ``edges``: ``edges[k - 1][..., i]`` is H_{i,i+k}, and 0 where
                  i + k is beyond the end; moving averages, where the paper has sums
m_t               ``m``, which is preconditioned in the place of the gradient
L, D              ``psi`` and ``s``: the column of L below its diagonal is -psi, and D = 1 / s
H_0 = epsilon I   ``eps``, added to the bias-corrected diagonal at every step, so that it does not decay
lambda_t          1; the norm of the graft sets the length of a step
gamma             ``gamma``, the tolerance of edges; here relative to the variance
a_t               ``a``, the graft: another rule's direction, whose norm the step takes
================  ====================================================================================================

What differs from the paper and from the published codes is listed in ``docs/deviations.md``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rankwise.sonew.banded import banded_factors
from rankwise.sonew.formulas import graft_direction, graft_ratio
from rankwise.updates.adamw import bias_corrections, decoupled_step

__all__ = ["Statistics", "apply_factors", "direction", "sonew_step", "statistics"]


class Statistics(NamedTuple):
    """The averages, all of the shape of the weights; zeros before the first step."""

    m: Tensor
    d: Tensor
    edges: Sequence[Tensor]


def sonew_step(
    w: Tensor,
    g: Tensor,
    averages: Statistics,
    step: int,
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.99),
    eps: float = 1e-8,
    gamma: float = 1e-2,
    graft: str = "adam",
    graft_eps: float = 1e-8,
    weight_decay: float = 0.0,
    q: Tensor | None = None,
) -> tuple[Tensor, Statistics, Tensor | None]:
    """Do one step of a whole parameter.

    Args:
        w: Weights (..., n).
        g: Gradient (..., n).
        averages: Averages that the step before returned.
        step: Number of this step, from 1.
        lr: Learning rate.
        betas: Decay rates of momentum and statistics.
        eps: Damping of the diagonal.
        gamma: Relative tolerance below which edges are dropped; 0 in the published code.
        graft: One of :data:`rankwise.sonew.formulas.GRAFTS`.
        graft_eps: Number that is added to the root of the graft.
        weight_decay: Decoupled decay rate.
        q: Second moment of the "rmsprop" graft, zeros before the first step.

    Returns:
        The new weights, averages and ``q``.
    """
    m, d, edges = averages = Statistics(*statistics(g, *averages, betas))
    correction1, correction2 = bias_corrections(betas, step)
    m_hat, d_hat, edges_hat = m / correction1, d / correction2, [edge / correction2 for edge in edges]
    u = direction(m_hat, d_hat, edges_hat, eps, gamma)
    a, q = graft_direction(graft, g, m_hat, d, d_hat, graft_eps, q, g.norm(), betas[1])
    if a is not None:
        u = u * graft_ratio(a.square().sum(), u.square().sum())
    return decoupled_step(w, u, lr, weight_decay), averages, q


def statistics(
    g: Tensor, m: Tensor, d: Tensor, edges: Sequence[Tensor] | Tensor, betas: tuple[float, float]
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Return the averages of g_i, g_i^2 and g_i g_{i+k}, without bias correction.

    They are written with products and sums only: fused forms round differently at the ends of a loop, and then the bits
    would depend on where a chain was cut. Edges that reach beyond the end of a chain stay zero.
    """
    beta1, beta2 = betas
    new_edges = [
        beta2 * edge + (g * F.pad(g, (0, k))[..., k:]) * (1.0 - beta2) for k, edge in enumerate(edges, start=1)
    ]
    return beta1 * m + g * (1.0 - beta1), beta2 * d + (g * g) * (1.0 - beta2), new_edges


def direction(
    m_hat: Tensor,
    d_hat: Tensor,
    edges_hat: Sequence[Tensor] | Tensor,
    eps: float | Tensor = 1e-8,
    gamma: float = 1e-2,
) -> Tensor:
    """Return ``u = X m``, of which an entry depends on the b neighbours on either side only.

    With c = 1 - beta^step, the averages as they are, and eps c_2 in the place of eps, give u c_1 / c_2: the engine uses
    this to save the passes for bias correction.
    """
    psi, s = banded_factors(d_hat + eps, edges_hat, gamma)
    return apply_factors(psi, s, m_hat)


def apply_factors(psi: Sequence[Tensor], s: Tensor, m: Tensor) -> Tensor:
    """``L D L^T m``: y_j = (m_j - sum_k psi^k_j m_{j+k}) / s_j, then u_i = y_i - sum_k psi^k_{i-k} y_{i-k}.

    ``y``, which is D L^T m, is ``whitened``. An s_j of 0 means that coordinate j and eps are 0: its y_j is 0.
    """
    residual = m.clone()
    for k, coefficient in enumerate(psi, start=1):
        residual[..., :-k] -= coefficient[..., :-k] * m[..., k:]
    whitened = torch.where(s == 0, torch.zeros_like(s), residual / s)
    u = whitened.clone()
    for k, coefficient in enumerate(psi, start=1):
        u[..., k:] -= coefficient[..., :-k] * whitened[..., :-k]
    return u
