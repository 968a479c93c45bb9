"""SONew's grafts are directions of other rules, whose norm a step takes; :mod:`rankwise.sonew.rule` has the symbols."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["GRAFTS", "graft_direction", "graft_ratio"]

GRAFTS = ("adam", "adam_official", "rmsprop", "sgd", "momentum", "none")

# The constant the published torch code adds in its Adam graft, whatever the damping is.
_OFFICIAL_GRAFT_EPS = 1e-8
# This keeps the published normalised RMSprop graft from dividing by the norm of a zero gradient.
_NORM_FLOOR = 1e-16


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
    r"""Return the direction ``a`` whose norm the update takes over (grafting).

    .. math::
        \text{adam: } \frac{\hat m}{\sqrt{\hat d} + \epsilon_g}, \quad
        \text{adam\_official: } \frac{\hat m}{\sqrt{d} + 10^{-8}}, \quad
        \text{rmsprop: } \frac{\bar g}{\sqrt{q'} + \epsilon_g},\;
        \bar g = \frac{g}{\|g\| + 10^{-16}},\; q' = \beta_2 q + (1-\beta_2) \bar g^2

    ``sgd`` takes ``g``, ``momentum`` takes :math:`\hat m`, ``none`` nothing. ``adam_official`` is the published torch
    code: its second moment is not bias-corrected, which inflates the first steps by :math:`1/\sqrt{1-\beta_2^t}`.
    ``rmsprop`` is graft type 4 of the authors' JAX code. The function is element-wise, and takes any shard of a tensor.

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
        ValueError: ``kind`` is unknown.
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
    assert rms is not None and grad_norm is not None
    unit = grad / (grad_norm + _NORM_FLOOR)
    new_rms = beta2 * rms + (unit * unit) * (1.0 - beta2)
    return unit / (new_rms.sqrt() + eps), new_rms


def graft_ratio(norm_sq_graft: Tensor, norm_sq_update: Tensor) -> Tensor:
    r"""Return the factor that gives the update the norm of the graft direction, :math:`\|a\| / \|u\|`.

    Both squared norms are those of whole tensors, of any one shape. An update of norm zero gets the ratio 0, so that a
    parameter without a gradient stays where it is; the published torch code divides 0 by 0 there.
    """
    graft, norm = torch._foreach_sqrt([norm_sq_graft, norm_sq_update])
    return (graft / norm).masked_fill(norm_sq_update == 0, 0.0)
