r"""Element-wise updates on ``torch._foreach_*`` take a few launches for many shards, on every device and type.

The module has the plain form of a pass (:mod:`rankwise.kernels.passes`), and operations on lists that several rules
need. They do to every tensor of a list what the pure functions in ``rankwise.updates`` do to one. No function
synchronises with the host. Temporaries are as large as one list, or two where ``lr`` is a tensor: split very long lists
over several calls.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rankwise.kernels.low_precision_runs import LowPrecisionRuns
from rankwise.kernels.opened_passes import norms_with_opened, run_opened
from rankwise.kernels.passes import Field, Pass, Scalars, Tensors
from rankwise.updates.adamw import Scalar

__all__ = ["add_", "copy_", "corrected", "decay_", "gradients", "run", "scale_by_", "squared_norms", "subtract_scaled_"]

STEPS_ON_DEVICE = True
"""Whether the number of a step may be a tensor on the device with an entry per shard, which the host never reads."""

Coefficients = Sequence[Tensor] | Tensor
"""One factor per shard: 0-d tensors, or one 1-D tensor of that many entries."""


def run(update: Pass) -> None:
    """Do a pass, in place."""
    if not update.grads:
        return
    if update.is_narrow:
        run_opened(update, run)
        return
    grads, fields, scalars = gradients(update), {name: update.wide(name) for name in update.fields}, update.scalars
    if update.rule == "step":
        _decoupled_step_(fields["param"], grads, scalars)
        return
    torch._foreach_lerp_(fields["exp_avg"], grads, 1.0 - scalars.betas[0])
    if update.rule == "nesterov":
        copy_(fields["param"], _ahead(update, grads))
    if update.rule == "lion":
        signs = list(torch._foreach_sign(_ahead(update, grads)))
        _decoupled_step_(fields["param"], signs, scalars)
    if update.rule == "adamw":
        _adamw_(update, grads)


def gradients(update: Pass) -> Tensors:
    """Return the gradients of a pass, corrected and scaled as it says, and let the references advance."""
    grads, references, k = update.grads, update.references, update.scalars.k
    result = grads if references is None else corrected(grads, references, k)
    coefficients = update.coefficients
    if coefficients is not None:
        if result is grads and update.rule != "step":
            result = [grad.clone() for grad in grads]
        scale_by_(result, coefficients)
    if references is not None and update.scalars.advance:
        # A copy: frameworks reuse their gradient buffers, and a reference would compare g with itself.
        copy_(references, grads)
    return result


def squared_norms(tensors: Tensors, references: Field | None = None, k: float = 0.0) -> Tensor:
    """Squared 2-norm of every tensor, in fp64 so that partial sums can be added over ranks.

    Args:
        tensors: Tensors to be measured, for example gradients ``g``.
        references: Gradients ``h`` to compare with; then ``g + k (g - h)`` is measured.
        k: Factor of the change since the reference.

    Returns:
        (tensors,) fp64.
    """
    if not tensors:
        return torch.zeros(0, dtype=torch.float64, device="cpu")
    if isinstance(references, LowPrecisionRuns):
        return norms_with_opened(tensors, references, k, squared_norms)
    measured = tensors if references is None else corrected(tensors, references, k)
    return torch.stack(torch._foreach_norm(measured, 2, dtype=torch.float64)).square()


def decay_(params: Tensors, lr: Scalar, weight_decay: float) -> None:
    """Multiply the weights by ``1 - lr * weight_decay``, which is decoupled decay if it comes before the step."""
    if params and weight_decay != 0.0:
        torch._foreach_mul_(params, 1.0 - lr * weight_decay)


def subtract_scaled_(params: Tensors, directions: Tensors, lr: Scalar) -> None:
    """Compute ``params -= lr * directions`` and overwrite ``directions`` with the product, which is rounded first."""
    if params:
        torch._foreach_mul_(directions, lr)
        torch._foreach_sub_(params, directions)


def add_(tensors: Tensors, others: Tensors) -> None:
    """Add ``others`` to ``tensors``."""
    if tensors:
        torch._foreach_add_(tensors, others)


def copy_(destinations: Tensors, sources: Tensors) -> None:
    """Copy values, never references: a framework reuses its gradient buffers for the next step."""
    if destinations:
        torch._foreach_copy_(destinations, sources)


def scale_by_(tensors: Tensors, coefficients: Coefficients) -> None:
    """Multiply every tensor by its own coefficient, which stays on the device."""
    factors = list(coefficients.unbind()) if isinstance(coefficients, Tensor) else list(coefficients)
    if len(factors) != len(tensors):
        raise ValueError(f"coefficients has {len(factors)} entries for {len(tensors)} tensors; pass one for each")
    if tensors:
        torch._foreach_mul_(tensors, factors)


def corrected(grads: Tensors, references: Tensors, k: float) -> Tensors:
    """Return ``g + k (g - h)`` as new tensors."""
    corrected = list(torch._foreach_sub(grads, references))
    torch._foreach_mul_(corrected, k)
    torch._foreach_add_(corrected, grads)
    return corrected


def _ahead(update: Pass, grads: Tensors) -> Tensors:
    """Return the momenta of a pass, mixed with its ``nesterov`` share of the gradients."""
    exp_avgs, share = update.wide("exp_avg"), update.scalars.nesterov
    return list(torch._foreach_lerp(exp_avgs, grads, share)) if share else exp_avgs


def _decoupled_step_(params: Tensors, directions: Tensors, scalars: Scalars) -> None:
    """Set weights to ``(1 - lr * weight_decay) x - lr * d``, and overwrite ``directions`` if ``lr`` is a tensor."""
    _decay_along_(params, directions, scalars)
    if isinstance(scalars.lr, Tensor):
        subtract_scaled_(params, directions, scalars.lr)
    else:
        torch._foreach_add_(params, directions, alpha=-scalars.lr)


def _decay_along_(params: Tensors, directions: Tensors, scalars: Scalars) -> None:
    """Decay weights before the step along ``directions``, of which cautious decay needs the signs."""
    if not scalars.cautious or scalars.weight_decay == 0.0:
        decay_(params, scalars.lr, scalars.weight_decay)
        return
    # A share is 0 where the signs are opposed, else 1. Products of the values themselves would underflow.
    shares = list(torch._foreach_sign(directions))
    torch._foreach_mul_(shares, torch._foreach_sign(params))
    torch._foreach_add_(shares, 1.0)
    torch._foreach_clamp_max_(shares, 1.0)
    torch._foreach_mul_(shares, -scalars.lr * scalars.weight_decay)
    torch._foreach_add_(shares, 1.0)
    torch._foreach_mul_(params, shares)


def _adamw_(update: Pass, grads: Tensors) -> None:
    """Update second moments, and step as :func:`rankwise.updates.adamw.adamw_update` says; momenta are up to date."""
    scalars, (scale, root) = update.scalars, update.corrections()
    params, exp_avgs, exp_avg_sqs = map(update.wide, ("param", "exp_avg", "exp_avg_sq"))
    torch._foreach_mul_(exp_avg_sqs, scalars.betas[1])
    torch._foreach_addcmul_(exp_avg_sqs, grads, grads, 1.0 - scalars.betas[1])

    denominators = list(torch._foreach_sqrt(exp_avg_sqs))
    torch._foreach_div_(denominators, list(root.unbind()) if isinstance(root, Tensor) else root)
    torch._foreach_add_(denominators, scalars.eps)
    _decay_along_(params, exp_avgs, scalars)
    rate = scalars.lr * scale
    if not isinstance(rate, Tensor):
        torch._foreach_addcdiv_(params, exp_avgs, denominators, -rate)
        return
    directions = list(torch._foreach_div(exp_avgs, denominators))
    if rate.dim():
        scale_by_(directions, rate)
        torch._foreach_sub_(params, directions)
    else:
        subtract_scaled_(params, directions, rate)
