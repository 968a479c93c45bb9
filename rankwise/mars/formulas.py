r"""MARS: variance reduction in front of AdamW, Lion and orthogonalised momentum.

Sources: "MARS: Unleashing the Power of Variance Reduction for Training Large Models", arXiv 2411.10438, and "MARS-M:
When Variance Reduction Meets Matrices", arXiv 2510.21800.

Every step mixes the gradient with a comparison gradient ``h`` and clips the result by norm,

.. math:: c_t = g_t + k\,(g_t - h_t), \quad k = \frac{\gamma \beta_1}{1 - \beta_1}, \qquad
          \tilde c_t = c_t \min(1, \mathrm{clip} / \lVert c_t \rVert),

and then gives :math:`\tilde c` to one of the rules below in the place of a gradient. ``h`` is the previous gradient
(approximate mode), or the gradient of the present batch at the previous weights (exact mode); before the first step it
is zero. The norm is that of the whole parameter, or of one matrix of a stack, so that on a sharded parameter it is a
sum over ranks: hence the split into small functions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import Tensor

from rankwise.updates.newton_schulz import newton_schulz

__all__ = [
    "MatrixVariant",
    "Scale",
    "clip_coefficient",
    "correction_factor",
    "orthogonal_direction",
    "shape_factor",
]

MatrixVariant = Literal["shampoo", "muon"]
"""``"shampoo"``: MARS-Shampoo of the first paper. ``"muon"``: MARS-M of the second. Both use Newton-Schulz."""

Scale = Literal["published", "rms", "spectral", "unit_rms_norm", "shape_scaling"]
"""``"published"``: as the variant's paper has it. ``"rms"``: as large as AdamW's updates. The others: by the
usual names of Muon's scale modes."""

_SHAMPOO_EPS = 1e-8
_MUON_EPS = 1e-7


def correction_factor(gamma: float, beta1: float) -> float:
    r"""``k = gamma * beta1 / (1 - beta1)``: how strongly the change of the gradient enters (0.475 by default).

    Args:
        gamma: Variance reduction strength. 0 is plain momentum, ``1 - beta1`` in approximate mode Nesterov's, 1 in
            exact mode STORM.
        beta1: Decay rate of the momentum, in [0, 1).

    Raises:
        ValueError: If ``beta1`` is outside [0, 1).
    """
    if not 0.0 <= beta1 < 1.0:
        raise ValueError(f"beta1 must lie in [0, 1), got {beta1}; 0.95 is the published value")
    return gamma * beta1 / (1.0 - beta1)


def clip_coefficient(squared_norm: Tensor, clip: float) -> Tensor:
    r"""``min(1, clip / norm)``, on the device, and 1 for a zero norm.

    Args:
        squared_norm: Squared norms (...), summed over all ranks that hold a piece.
        clip: Largest norm that passes unchanged; 1 as published. No clip at all is the caller's case.

    Returns:
        (...); not a number where the norm is not a number.

    Raises:
        ValueError: If ``clip`` is not positive.
    """
    if not clip > 0.0:
        raise ValueError(f"clip must be positive, got {clip}; use None to switch the clip off")
    return clip / squared_norm.sqrt().clamp(min=clip)


def shape_factor(variant: MatrixVariant, rows: int, cols: int, scale: Scale = "published") -> float:
    r"""What the orthogonal factor of a (rows, cols) matrix is multiplied by.

    ``"shampoo"``: :math:`\sqrt{\max(1, rows / cols)}`, as in the authors' code (the paper has none). ``"muon"``, and
    either with the scale ``"rms"``: :math:`0.2 \sqrt{\max(rows, cols)}` (arXiv 2502.16982, section 2.2). The entries of
    an orthogonal factor have the root mean square :math:`1 / \sqrt{\max(rows, cols)}`: it becomes 0.2, about that of
    AdamW's updates. ``"spectral"`` makes it 1, by :math:`\sqrt{\max(rows, cols)}`; ``"unit_rms_norm"``,
    :math:`\sqrt{rows / cols}`, lets inputs and outputs of any width change alike (the operator norm between root mean
    squares is 1), which learning rates that are carried to other widths rest on; ``"shape_scaling"`` is
    :math:`\sqrt{\max(1, rows / cols)}`.

    Args:
        variant: Which of the two rules.
        rows: Rows of the logical matrix: before any sharding, and before any transposition for the computation.
        cols: Columns of the logical matrix.
        scale: A value of the option "scale", see :class:`rankwise.mars.options.MARSOptions`.

    Raises:
        ValueError: If ``variant`` or ``scale`` is none of those known, or a side is below 1.
    """
    if rows < 1 or cols < 1:
        raise ValueError(
            f"rows and cols must be at least 1, got ({rows}, {cols}); pass the logical shape of one matrix"
        )
    if variant not in get_args(MatrixVariant):
        raise ValueError(
            f"variant must be 'shampoo' or 'muon', got {variant!r}; 'adamw' and 'lion' are not matrix rules"
        )
    if scale not in get_args(Scale):
        known = ", ".join(map(repr, get_args(Scale)))
        raise ValueError(f"scale must be one of {known}, got {scale!r}; 'published' is the default")
    if scale == "published":
        scale = "shape_scaling" if variant == "shampoo" else "rms"
    if scale == "shape_scaling":
        return math.sqrt(max(1.0, rows / cols))
    if scale == "unit_rms_norm":
        return math.sqrt(rows / cols)
    return (0.2 if scale == "rms" else 1.0) * math.sqrt(max(rows, cols))


def norm_offset(variant: MatrixVariant, beta1: float, eps: float | None = None) -> float:
    """What is added to the Frobenius norm of the momentum before its orthogonalisation.

    Args:
        variant: Which of the two rules.
        beta1: Decay rate of the momentum. ``"shampoo"`` orthogonalises ``m / (1 - beta1)``, which is the same as ``m``
            with an ``eps`` smaller by that factor.
        eps: The rule's own; ``None``: as published, 1e-8 for ``"shampoo"`` and 1e-7 for ``"muon"``.
    """
    if variant == "shampoo":
        return (_SHAMPOO_EPS if eps is None else eps) * (1.0 - beta1)
    return _MUON_EPS if eps is None else eps


def orthogonal_direction(
    exp_avg: Tensor,
    variant: MatrixVariant,
    rows: int,
    cols: int,
    *,
    beta1: float,
    scale: Scale = "published",
    eps: float | None = None,
    ns_steps: int = 5,
    ns_dtype: torch.dtype | None = None,
    ns_coefficients: str = "published",
    orthogonalise: Callable[[Tensor, int, torch.dtype | None, float, str], Tensor] = newton_schulz,
) -> Tensor:
    r"""Direction of the two matrix rules from the momentum: its orthogonal factor, scaled by the shape.

    Source: arXiv 2411.10438, Algorithm 4 (Newton-Schulz for the SVD, and the factor, as in the authors' code); arXiv
    2510.21800 for ``"muon"``.

    Args:
        exp_avg: Whole momentum matrices (..., m, n), after the step's update of the momentum.
        variant: Which of the two rules.
        rows: Rows of the logical matrix, for :func:`shape_factor`.
        cols: Columns of the logical matrix.
        beta1: Decay rate of the momentum, for :func:`norm_offset`.
        scale: As for :func:`shape_factor`.
        eps: As there.
        ns_steps: Newton-Schulz iterations.
        ns_dtype: Type of their products; ``torch.bfloat16`` as published, ``None`` that of ``exp_avg``.
        ns_coefficients: Name of their polynomials.
        orthogonalise: What runs them: :func:`rankwise.updates.newton_schulz.newton_schulz` or a faster form of it.

    Returns:
        (..., m, n) in the dtype of ``exp_avg``.

    Raises:
        ValueError: As :func:`shape_factor` and :func:`rankwise.updates.newton_schulz.newton_schulz`.
    """
    factor, norm_eps = shape_factor(variant, rows, cols, scale), norm_offset(variant, beta1, eps)
    return orthogonalise(exp_avg, ns_steps, ns_dtype, norm_eps, ns_coefficients) * factor
