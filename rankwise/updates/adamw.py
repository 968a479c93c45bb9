r"""AdamW is the first-order rule of parameters outside a matrix rule, and the inner rule of several others.

Source: "Decoupled Weight Decay Regularization", arXiv 1711.05101, Algorithm 2, with ``eps`` where
``torch.optim.AdamW`` has it.
"""

from __future__ import annotations

from typing import overload

import torch
from torch import Tensor

__all__ = ["Scalar", "Step", "adamw_update", "bias_corrections", "decoupled_step"]

Scalar = float | Tensor
"""A Python float, or a 0-d tensor of the dtype and device of the data (no recompilation when its value changes)."""

Step = int | Tensor
"""The number of a step, from 1; or a tensor of such numbers on the data's device, which the host does not read."""


@overload
def bias_corrections(betas: tuple[float, float], step: int) -> tuple[float, float]: ...


@overload
def bias_corrections(betas: tuple[float, float], step: Tensor) -> tuple[Tensor, Tensor]: ...


@overload
def bias_corrections(betas: tuple[float, float], step: Step) -> tuple[Scalar, Scalar]: ...


def bias_corrections(betas: tuple[float, float], step: Step) -> tuple[Scalar, Scalar]:
    r"""Return ``(1 - beta1^t, 1 - beta2^t)``; dividing by them undoes the zero start of the moments.

    Args:
        betas: Decay rates of the two moments, each in [0, 1).
        step: ``t``, counted from 1; a tensor gives tensors of its shape in fp64, computed where it lies.

    Raises:
        ValueError: ``step`` is a number below 1, for which moments would be divided by zero.
    """
    if isinstance(step, Tensor):
        count = step.double()
        return 1.0 - torch.pow(betas[0], count), 1.0 - torch.pow(betas[1], count)
    if step < 1:
        raise ValueError(f"step must be at least 1, got {step}; count the step before asking for its corrections")
    return 1.0 - betas[0] ** step, 1.0 - betas[1] ** step


def adamw_update(
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    betas: tuple[float, float],
    eps: float,
    corrections: tuple[Scalar, Scalar],
) -> tuple[Tensor, Tensor, Tensor]:
    r"""Advance Adam's moments by one step, and return the direction that they give.

    .. math:: m_t = \beta_1 m_{t-1} + (1 - \beta_1) g_t, \qquad v_t = \beta_2 v_{t-1} + (1 - \beta_2) g_t^2, \qquad
              d_t = \frac{m_t / (1 - \beta_1^t)}{\sqrt{v_t / (1 - \beta_2^t)} + \epsilon}

    All tensors have the same shape (...). Learning rate and decay belong to :func:`decoupled_step`.

    Args:
        grad: Gradient ``g``.
        exp_avg: First moment ``m`` before the step.
        exp_avg_sq: Second moment ``v`` before the step.
        betas: Decay rates of the two moments.
        eps: Number added to the root. With ``eps = 0`` an element whose gradients were all zero gives 0 / 0.
        corrections: ``(1 - beta1^t, 1 - beta2^t)`` of this step, from :func:`bias_corrections`.

    Returns:
        New ``m``, new ``v`` and the direction ``d``.
    """
    exp_avg = torch.lerp(exp_avg, grad, 1.0 - betas[0])
    exp_avg_sq = (exp_avg_sq * betas[1]).addcmul(grad, grad, value=1.0 - betas[1])
    root_correction = corrections[1] ** 0.5
    direction = exp_avg / (exp_avg_sq.sqrt() / root_correction + eps) / corrections[0]
    return exp_avg, exp_avg_sq, direction


def decoupled_step(param: Tensor, direction: Tensor, lr: Scalar, weight_decay: float) -> Tensor:
    r"""Return the weights after a step with decoupled decay: ``(1 - lr * weight_decay) x - lr * d``.

    Args:
        param: Weights ``x`` (...).
        direction: Direction ``d`` (...).
        lr: Learning rate.
        weight_decay: Decay rate, multiplied by ``lr``.
    """
    return param * (1.0 - lr * weight_decay) - direction * lr
