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
from typing import Literal

import torch
from torch import Tensor

from rankwise.updates import adamw
from rankwise.updates.adamw import Scalar
from rankwise.updates.newton_schulz import newton_schulz

__all__ = [
    "MatrixVariant",
    "adamw_update",
    "clip_coefficient",
    "corrected_gradient",
    "corrected_squared_norm",
    "correction_factor",
    "lion_update",
    "momentum_update",
    "orthogonal_direction",
    "orthogonal_update",
    "shape_factor",
    "single_buffer_momentum",
]

MatrixVariant = Literal["shampoo", "muon"]
"""``"shampoo"``: MARS-Shampoo of the first paper. ``"muon"``: MARS-M of the second. Both use Newton-Schulz."""

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


def corrected_gradient(grad: Tensor, reference: Tensor, gamma: float, beta1: float) -> Tensor:
    r"""The corrected gradient ``c = g + k (g - h)``, before the clip.

    Source: arXiv 2411.10438, Algorithm 1.

    Args:
        grad: Gradient ``g`` (...) as the optimizer gets it: reduced, unscaled and globally clipped.
        reference: Comparison gradient ``h`` (...), treated alike. Zeros at the first step, as in the authors' code;
            the paper's own start is ``h = g``.
        gamma: See :func:`correction_factor`.
        beta1: See :func:`correction_factor`.

    Raises:
        ValueError: If ``beta1`` is outside [0, 1).
    """
    return torch.add(grad, grad - reference, alpha=correction_factor(gamma, beta1))


def corrected_squared_norm(
    grad_squared: Tensor, inner: Tensor, reference_squared: Tensor, k: float, grad_scale: Scalar = 1.0
) -> Tensor:
    r"""Squared norm of the corrected gradient from sums over its two parts, without forming it.

    .. math:: \lVert c \rVert^2 = s^2 (1+k)^2 G - 2 s k (1+k) S + k^2 L

    with ``G = |g|^2``, ``S = <g, h>`` and ``L = |h|^2``. The three sums of all parameters travel in one collective,
    and ``G`` gives the global gradient norm as well, so that a global clip ``s`` needs no second round. Keep the sums
    in float64 when ``k`` is large: the terms cancel if ``h`` is near ``g (1 + k) / k``.

    Args:
        grad_squared: ``G`` (...), of the raw gradient.
        inner: ``S`` (...).
        reference_squared: ``L`` (...).
        k: From :func:`correction_factor`.
        grad_scale: ``s``, what the raw gradient is multiplied by before it is used. The reference is used as stored.

    Returns:
        (...), never negative.
    """
    own = grad_scale * (1.0 + k)
    return (own * own * grad_squared - 2.0 * k * own * inner + k * k * reference_squared).clamp(min=0.0)


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


def momentum_update(corrected: Tensor, exp_avg: Tensor, beta1: float) -> Tensor:
    """The momentum ``beta1 * m + (1 - beta1) * c`` (...), not bias corrected."""
    return torch.lerp(exp_avg, corrected, 1.0 - beta1)


def single_buffer_momentum(grad: Tensor, buffer: Tensor, gamma: float, beta1: float) -> tuple[Tensor, Tensor]:
    r"""Momentum of the approximate mode without a clip, from one buffer in the place of two.

    .. math:: b_t = \beta b_{t-1} + \frac{(1 - \gamma)(1 - \beta)}{\beta} g_t, \qquad m_t = \beta b_t + \gamma g_t

    The same ``m`` as :func:`corrected_gradient` and :func:`momentum_update` give. For the rules that read nothing else
    (Lion, Shampoo, Muon) the previous gradient need not be kept then.

    Args:
        grad: Gradient ``g`` (...).
        buffer: ``b`` (...), zeros before the first step.
        gamma: See :func:`correction_factor`.
        beta1: ``beta``, in (0, 1).

    Returns:
        New ``b``, which is the state, and ``m``, which is not.

    Raises:
        ValueError: If ``beta1`` is outside (0, 1).
    """
    if not 0.0 < beta1 < 1.0:
        raise ValueError(
            f"beta1 must lie in (0, 1) for the single-buffer form, got {beta1}; 0.95 is the published value"
        )
    buffer = torch.add(buffer * beta1, grad, alpha=(1.0 - gamma) * (1.0 - beta1) / beta1)
    return buffer, torch.add(buffer * beta1, grad, alpha=gamma)


def adamw_update(
    clipped: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    betas: tuple[float, float],
    eps: float,
    corrections: tuple[Scalar, Scalar],
) -> tuple[Tensor, Tensor, Tensor]:
    r"""MARS-AdamW: AdamW with the clipped corrected gradient in both moments.

    Source: arXiv 2411.10438, Algorithm 2.

    Args:
        clipped: :math:`\tilde c` (...).
        exp_avg: First moment (...).
        exp_avg_sq: Second moment (...).
        betas: Decay rates of the two moments.
        eps: Added to the bias-corrected root.
        corrections: From :func:`rankwise.updates.adamw.bias_corrections`.

    Returns:
        New moments and the direction, as :func:`rankwise.updates.adamw.adamw_update`.
    """
    return adamw.adamw_update(clipped, exp_avg, exp_avg_sq, betas=betas, eps=eps, corrections=corrections)


def lion_update(clipped: Tensor, exp_avg: Tensor, beta1: float) -> tuple[Tensor, Tensor]:
    r"""MARS-Lion: the sign of the momentum.

    Source: arXiv 2411.10438, Algorithm 3. One decay rate only: Lion's rule ``(b1, b2)`` is
    ``beta1 = b2, gamma = (b2 - b1) / b2`` here, in approximate mode and without the clip.

    Args:
        clipped: :math:`\tilde c` (...).
        exp_avg: Momentum (...).
        beta1: Its decay rate.

    Returns:
        New momentum and the direction, of entries -1, 0 and 1.
    """
    exp_avg = momentum_update(clipped, exp_avg, beta1)
    return exp_avg, exp_avg.sign()


def shape_factor(variant: MatrixVariant, rows: int, cols: int) -> float:
    r"""What the orthogonal factor of a (rows, cols) matrix is multiplied by.

    ``"shampoo"``: :math:`\sqrt{\max(1, rows / cols)}`, as in the authors' code (the paper has none). ``"muon"``:
    :math:`0.2 \sqrt{\max(rows, cols)}`, which brings the root mean square of the update to that of AdamW.

    Args:
        variant: Which of the two rules.
        rows: Rows of the logical matrix: before any sharding, and before any transposition for the computation.
        cols: Columns of the logical matrix.

    Raises:
        ValueError: If ``variant`` is neither of the two, or a side is below 1.
    """
    if rows < 1 or cols < 1:
        raise ValueError(
            f"rows and cols must be at least 1, got ({rows}, {cols}); pass the logical shape of one matrix"
        )
    if variant == "shampoo":
        return math.sqrt(max(1.0, rows / cols))
    if variant == "muon":
        return 0.2 * math.sqrt(max(rows, cols))
    raise ValueError(f"variant must be 'shampoo' or 'muon', got {variant!r}; 'adamw' and 'lion' are not matrix rules")


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
    eps: float | None = None,
    ns_steps: int = 5,
    ns_dtype: torch.dtype | None = None,
    orthogonalise: Callable[[Tensor, int, torch.dtype | None, float], Tensor] = newton_schulz,
) -> Tensor:
    r"""Direction of the two matrix rules from the momentum: its orthogonal factor, scaled by the shape.

    Source: arXiv 2411.10438, Algorithm 4 (Newton-Schulz for the SVD, and the factor, as in the authors' code); arXiv
    2510.21800 for ``"muon"``.

    Args:
        exp_avg: Whole momentum matrices (..., m, n), after the step's :func:`momentum_update`.
        variant: Which of the two rules.
        rows: Rows of the logical matrix, for :func:`shape_factor`.
        cols: Columns of the logical matrix.
        beta1: Decay rate of the momentum, for :func:`norm_offset`.
        eps: As there.
        ns_steps: Newton-Schulz iterations.
        ns_dtype: Dtype of their products; ``torch.bfloat16`` as published, ``None`` that of ``exp_avg``.
        orthogonalise: What runs them: :func:`rankwise.updates.newton_schulz.newton_schulz` or a faster form of it.

    Returns:
        (..., m, n) in the dtype of ``exp_avg``.

    Raises:
        ValueError: As :func:`shape_factor` and :func:`rankwise.updates.newton_schulz.newton_schulz`.
    """
    factor, norm_eps = shape_factor(variant, rows, cols), norm_offset(variant, beta1, eps)
    return orthogonalise(exp_avg, ns_steps, ns_dtype, norm_eps) * factor


def orthogonal_update(
    clipped: Tensor,
    exp_avg: Tensor,
    variant: MatrixVariant,
    rows: int,
    cols: int,
    *,
    beta1: float,
    eps: float | None = None,
    ns_steps: int = 5,
    ns_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    r"""MARS-Shampoo and MARS-M on whole matrices: momentum, then :func:`orthogonal_direction`.

    Args:
        clipped: :math:`\tilde c` (..., m, n).
        exp_avg: Momentum (..., m, n) before the step.
        variant: As for :func:`orthogonal_direction`, like the rest.
        rows: Rows of the logical matrix.
        cols: Columns of the logical matrix.
        beta1: Decay rate of the momentum.
        eps: Added to the Frobenius norm, or ``None``.
        ns_steps: Newton-Schulz iterations.
        ns_dtype: Dtype of their products.

    Returns:
        New momentum and the direction.

    Raises:
        ValueError: As :func:`orthogonal_direction`.
    """
    exp_avg = momentum_update(clipped, exp_avg, beta1)
    direction = orthogonal_direction(
        exp_avg, variant, rows, cols, beta1=beta1, eps=eps, ns_steps=ns_steps, ns_dtype=ns_dtype
    )
    return exp_avg, direction
