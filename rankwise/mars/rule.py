r"""MARS, line by line: "MARS: Unleashing the Power of Variance Reduction for Training Large Models", arXiv 2411.10438,
and "MARS-M: When Variance Reduction Meets Matrices", arXiv 2510.21800.

Algorithm 1's first lines are :func:`corrected_gradient`; :func:`mars_adamw_step` (Algorithm 2), :func:`mars_lion_step`
(3), :func:`mars_shampoo_step` (4) and :func:`mars_m_step` (the second paper's) take it in the place of a gradient.

==========================  ==========================================================================================
paper                       here
==========================  ==========================================================================================
x_t                         ``x``, the weights: a parameter, or one matrix of a stack
grad f(x_t, xi_t)           ``g``, after the global clip of gradients
grad f(x_{t-1}, xi_t)       ``h``: in exact mode that gradient, in approximate mode (the default) g of the step before;
                            zeros before the first step, as in the authors' code
c_t, clipped c_t            ``c``
m_t, v_t                    ``m``, ``v``, zeros before the first step
eta_t, lambda               ``lr``, ``weight_decay``
SVD of m_t                  five Newton-Schulz steps, as in the authors' code
==========================  ==========================================================================================

``beta1`` and ``betas`` are decay rates; ``gamma`` is the strength of the correction; ``clip`` is the largest norm of c,
None for no clip, as Algorithm 4 is printed; ``eps`` is added to the root of v, or to the norm of m. All functions
return the new weights and moments. Vectors, and under Shampoo and MARS-M embeddings and heads, take AdamW. What
differs from papers and code is listed in ``docs/deviations.md``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rankwise.mars import formulas
from rankwise.updates.adamw import adamw_update, bias_corrections, decoupled_step
from rankwise.updates.clipping import clip_coefficient
from rankwise.updates.newton_schulz import newton_schulz

__all__ = ["corrected_gradient", "mars_adamw_step", "mars_lion_step", "mars_m_step", "mars_shampoo_step"]


def correction_factor(gamma: float, beta1: float) -> float:
    """``gamma beta1 / (1 - beta1)``: how strongly the change of the gradient enters, 0.475 by default."""
    return gamma * beta1 / (1.0 - beta1)


def corrected_gradient(g: Tensor, h: Tensor, gamma: float, beta1: float, clip: float | None = None) -> Tensor:
    """``c``: the gradient with its change since the comparison gradient, clipped by its norm."""
    c = g + correction_factor(gamma, beta1) * (g - h)
    return c if clip is None else c * clip_coefficient(c.square().sum(), clip)


def momentum(m: Tensor, c: Tensor, beta1: float) -> Tensor:
    """``beta1 m + (1 - beta1) c``."""
    return torch.lerp(m, c, 1.0 - beta1)


def mars_adamw_step(
    x: Tensor,
    g: Tensor,
    h: Tensor,
    m: Tensor,
    v: Tensor,
    step: int,
    *,
    lr: float,
    betas: tuple[float, float] = (0.95, 0.99),
    gamma: float = 0.025,
    clip: float | None = 1.0,
    weight_decay: float = 0.0,
    eps: float = 1e-8,
) -> tuple[Tensor, Tensor, Tensor]:
    """MARS-AdamW at its step number ``step``, from 1: ``x``, ``m`` and ``v``."""
    c = corrected_gradient(g, h, gamma, betas[0], clip)
    m, v, direction = adamw_update(c, m, v, betas=betas, eps=eps, corrections=bias_corrections(betas, step))
    return decoupled_step(x, direction, lr, weight_decay), m, v


def mars_lion_step(
    x: Tensor,
    g: Tensor,
    h: Tensor,
    m: Tensor,
    *,
    lr: float,
    beta1: float = 0.95,
    gamma: float = 0.025,
    clip: float | None = 1.0,
    weight_decay: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """MARS-Lion: ``x`` and ``m``. Without a clip, Lion(b1, b2) is this with beta1 = b2 and gamma = (b2 - b1) / b2."""
    m = momentum(m, corrected_gradient(g, h, gamma, beta1, clip), beta1)
    return decoupled_step(x, m.sign(), lr, weight_decay), m


def mars_shampoo_step(
    x: Tensor,
    g: Tensor,
    h: Tensor,
    m: Tensor,
    *,
    lr: float,
    beta1: float = 0.95,
    gamma: float = 0.025,
    clip: float | None = 1.0,
    weight_decay: float = 0.0,
    eps: float = 1e-8,
    scale: formulas.Scale = "published",
) -> tuple[Tensor, Tensor]:
    """MARS-Shampoo: ``x`` and ``m``. The scale ``sqrt(max(1, rows / columns))`` is that of the authors' code."""
    m = momentum(m, corrected_gradient(g, h, gamma, beta1, clip), beta1)
    return decoupled_step(x, orthogonal_direction(m, "shampoo", beta1, eps, scale), lr, weight_decay), m


def mars_m_step(
    x: Tensor,
    g: Tensor,
    h: Tensor,
    m: Tensor,
    *,
    lr: float,
    beta1: float = 0.95,
    gamma: float = 0.025,
    clip: float | None = 1.0,
    weight_decay: float = 0.0,
    scale: formulas.Scale = "published",
) -> tuple[Tensor, Tensor]:
    """MARS-M: ``x`` and ``m``. The scale is ``0.2 sqrt(max(rows, columns))``."""
    m = momentum(m, corrected_gradient(g, h, gamma, beta1, clip), beta1)
    return decoupled_step(x, orthogonal_direction(m, "muon", beta1, scale=scale), lr, weight_decay), m


def orthogonal_direction(
    m: Tensor,
    variant: formulas.MatrixVariant,
    beta1: float,
    eps: float | None = None,
    scale: formulas.Scale = "published",
    steps: int = 5,
) -> Tensor:
    """The orthogonal factor of ``m`` (..., rows, columns), times a scale of the shape.

    The authors' Shampoo orthogonalises ``m / (1 - beta1)``. Newton-Schulz divides by norm + eps first, so that this is
    ``m`` with an eps of ``(1 - beta1) eps``, which ``norm_offset`` returns.
    """
    rows, columns = m.shape[-2:]
    orthogonal = newton_schulz(m, steps, eps=formulas.norm_offset(variant, beta1, eps))
    return orthogonal * formulas.shape_factor(variant, rows, columns, scale)
