"""Stochastic gradient descent with momentum, in the conventions of ``torch.optim.SGD``."""

from __future__ import annotations

from torch import Tensor

__all__ = ["sgd_direction"]


def sgd_direction(
    grad: Tensor,
    momentum_buffer: Tensor | None,
    param: Tensor,
    momentum: float = 0.0,
    dampening: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
) -> tuple[Tensor, Tensor]:
    r"""Return the direction that a step multiplies by the learning rate and subtracts from the weights.

    .. math::
        d = g + \lambda w, \quad b' = \mu b + (1-\tau) d \;(b' = d \text{ on the first step}), \quad
        r = d + \mu b' \text{ (Nesterov) or } b'

    The function is element-wise: it takes any shape, and any shard of a tensor.

    Args:
        grad: gradient ``g``.
        momentum_buffer: ``b``, shape of ``grad``, or None on the first step, which takes the gradient undamped.
        param: weights ``w``, shape of ``grad``.
        momentum: :math:`\mu`, not negative; 0 switches the buffer off.
        dampening: :math:`\tau`.
        nesterov: whether to look ahead along the momentum.
        weight_decay: :math:`\lambda`, added to the gradient.

    Returns:
        The new buffer ``b'`` and the direction ``r``; without momentum they are equal in value.

    Raises:
        ValueError: ``momentum`` is negative, or ``nesterov`` comes without momentum or with dampening.
    """
    if momentum < 0.0:
        raise ValueError(f"momentum={momentum} must be at least 0; use 0.9, or 0.0 for none")
    if nesterov and (momentum == 0.0 or dampening != 0.0):
        raise ValueError(
            f"nesterov=True with momentum={momentum} and dampening={dampening} is not defined: it needs a positive "
            "momentum and no dampening; set dampening=0.0 and for example momentum=0.9"
        )
    direction = grad + weight_decay * param if weight_decay else grad.clone()
    if momentum == 0.0 or momentum_buffer is None:
        buffer = direction.clone()
    else:
        buffer = momentum * momentum_buffer + (1.0 - dampening) * direction
    if nesterov:
        return buffer, direction + momentum * buffer
    return buffer, buffer.clone()
