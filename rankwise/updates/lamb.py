"""LAMB is divided here into functions, so that norms of tensors can be summed over ranks between them.

Reference: You et al., Large Batch Optimization for Deep Learning: Training BERT in 76 minutes, arXiv:1904.00962.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rankwise.updates.adamw import Scalar, adamw_update

__all__ = ["lamb_direction", "trust_ratio"]


def lamb_direction(
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    param: Tensor,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-6,
    weight_decay: float = 0.0,
    corrections: tuple[Scalar, Scalar] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    r"""Return Adam's direction with the weight decay inside, which is LAMB's update before its trust ratio.

    .. math::
        m' = \beta_1 m + (1-\beta_1) g, \quad v' = \beta_2 v + (1-\beta_2) g^2, \quad
        r = \frac{m' / c_1}{\sqrt{v' / c_2} + \epsilon} + \lambda w

    (Algorithm 2.) The function is element-wise: it takes any shape, and any shard of a tensor.

    Args:
        grad: gradient ``g``.
        exp_avg: first moment ``m``, shape of ``grad``.
        exp_avg_sq: second moment ``v``, shape of ``grad``.
        param: weights ``w``, shape of ``grad``.
        betas: decay of the two moments.
        eps: number added to the root of the second moment.
        weight_decay: :math:`\lambda`.
        corrections: :math:`(c_1, c_2) = (1 - \beta_1^t, 1 - \beta_2^t)`, or None for uncorrected moments, as in
            the LAMB of MKOR's authors.

    Returns:
        The new first moment, the new second moment and the direction ``r``, each of the shape of ``grad``.
    """
    exp_avg, exp_avg_sq, direction = adamw_update(
        grad, exp_avg, exp_avg_sq, betas=betas, eps=eps, corrections=corrections or (1.0, 1.0)
    )
    if weight_decay:
        direction = direction + weight_decay * param
    return exp_avg, exp_avg_sq, direction


def trust_ratio(weight_norm: Tensor, update_norm: Tensor, max_weight_norm: float | None = 10.0) -> Tensor:
    r"""Return LAMB's layer-wise step size: the norm of the weights over that of their update.

    .. math::
        \phi(\|w\|) / \|r\|, \quad \phi(z) = \min(z, z_{\max})

    (Algorithm 2.) It is 1 where either norm is zero, so that a tensor that starts at zero can leave it.

    Args:
        weight_norm: norms of the whole tensors, any shape.
        update_norm: norms of their directions from `lamb_direction`, same shape.
        max_weight_norm: :math:`z_{\max}`, or None for no bound (:math:`\phi(z) = z`).

    Returns:
        Factors for the learning rate, shape of the norms.

    Raises:
        ValueError: ``max_weight_norm`` is not positive.
    """
    if max_weight_norm is not None and not max_weight_norm > 0.0:
        raise ValueError(f"max_weight_norm={max_weight_norm} must be positive; use 10.0, or None for no bound")
    usable = (weight_norm > 0) & (update_norm > 0)
    bounded = weight_norm if max_weight_norm is None else weight_norm.clamp(max=max_weight_norm)
    return torch.where(usable, bounded / torch.where(usable, update_norm, 1.0), 1.0)
