r"""Element-wise updates on ``torch._foreach_*``: a few launches for many shards, on every device and type.

The plain form of a pass (:mod:`rankwise.kernels.passes`), and operations on lists that several rules need besides. It
does to every tensor of its lists what the pure functions in ``rankwise.updates`` do to one. No function synchronises
with the host. Temporaries are as large as one list, or two where ``lr`` is a tensor: split very long lists over several
calls.
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
"""Whether a step's number may be a tensor on the device, one entry per shard, which the host never reads."""

Coefficients = Sequence[Tensor] | Tensor
"""One factor per shard: 0-d tensors, or one 1-D tensor of that many entries."""


def run(update: Pass) -> None:
    """Do a pass, in place."""
    if not update.grads:
        return
    if update.is_narrow:
        run_opened(update, run)
        return
    found, fields, scalars = gradients(update), {name: update.wide(name) for name in update.fields}, update.scalars
    if update.rule == "step":
        _decoupled_step_(fields["param"], found, scalars)
        return
    torch._foreach_lerp_(fields["exp_avg"], found, 1.0 - scalars.betas[0])
    if update.rule == "nesterov":
        copy_(fields["param"], _ahead(update, found))
    if update.rule == "lion":
        signs = list(torch._foreach_sign(_ahead(update, found)))
        _decoupled_step_(fields["param"], signs, scalars)
    if update.rule == "adamw":
        _adamw_(update, found)


def gradients(update: Pass) -> Tensors:
    """What takes the gradients' place in a pass, whose references move on."""
    grads, references, k = update.grads, update.references, update.scalars.k
    found = grads if references is None else corrected(grads, references, k)
    if update.factors is not None:
        if found is grads and update.rule != "step":
            found = [grad.clone() for grad in grads]
        scale_by_(found, update.factors)
    if references is not None and update.scalars.advance:
        # A copy: frameworks reuse their gradient buffers, and a reference would compare g with itself.
        copy_(references, grads)
    return found


def squared_norms(tensors: Tensors, references: Field | None = None, k: float = 0.0) -> Tensor:
    """Squared 2-norm of every tensor, in fp64 so that partial sums can be added over ranks.

    Args:
        tensors: Gradients ``g``, or whatever is to be measured.
        references: Comparison gradients ``h``: the norms are those of ``g + k (g - h)``.
        k: As in a pass.

    Returns:
        (tensors,) fp64.
    """
    if not tensors:
        return torch.zeros(0, dtype=torch.float64, device="cpu")
    if isinstance(references, LowPrecisionRuns):
        return norms_with_opened(tensors, references, k, squared_norms)
    found = tensors if references is None else corrected(tensors, references, k)
    return torch.stack(torch._foreach_norm(found, 2, dtype=torch.float64)).square()


def decay_(params: Tensors, lr: Scalar, weight_decay: float) -> None:
    """Decoupled weight decay: multiplies the weights by ``1 - lr * weight_decay``. Call it before the step."""
    if params and weight_decay != 0.0:
        torch._foreach_mul_(params, 1.0 - lr * weight_decay)


def subtract_scaled_(params: Tensors, directions: Tensors, lr: Scalar) -> None:
    """``params -= lr * directions``, the product rounded first, however the tensors are cut; scales ``directions``."""
    if params:
        torch._foreach_mul_(directions, lr)
        torch._foreach_sub_(params, directions)


def add_(tensors: Tensors, others: Tensors) -> None:
    """``tensors += others``."""
    if tensors:
        torch._foreach_add_(tensors, others)


def copy_(destinations: Tensors, sources: Tensors) -> None:
    """Copies values, never references: a framework reuses its gradient buffers for the next step."""
    if destinations:
        torch._foreach_copy_(destinations, sources)


def scale_by_(tensors: Tensors, coefficients: Coefficients) -> None:
    """Multiplies every tensor by its own coefficient, which stays on the device."""
    factors = list(coefficients.unbind()) if isinstance(coefficients, Tensor) else list(coefficients)
    if len(factors) != len(tensors):
        raise ValueError(f"coefficients has {len(factors)} entries for {len(tensors)} tensors; pass one for each")
    if tensors:
        torch._foreach_mul_(tensors, factors)


def corrected(grads: Tensors, references: Tensors, k: float) -> Tensors:
    """``g + k (g - h)`` as new tensors."""
    corrected = list(torch._foreach_sub(grads, references))
    torch._foreach_mul_(corrected, k)
    torch._foreach_add_(corrected, grads)
    return corrected


def _ahead(update: Pass, grads: Tensors) -> Tensors:
    """The momenta of a pass, with its share of the gradients."""
    exp_avgs, share = update.wide("exp_avg"), update.scalars.nesterov
    return list(torch._foreach_lerp(exp_avgs, grads, share)) if share else exp_avgs


def _decoupled_step_(params: Tensors, directions: Tensors, scalars: Scalars) -> None:
    """``(1 - lr * weight_decay) x - lr * d``; overwrites ``directions`` if ``lr`` is a tensor."""
    _decay_along_(params, directions, scalars)
    if isinstance(scalars.lr, Tensor):
        subtract_scaled_(params, directions, scalars.lr)
    else:
        torch._foreach_add_(params, directions, alpha=-scalars.lr)


def _decay_along_(params: Tensors, directions: Tensors, scalars: Scalars) -> None:
    """The decay of a pass, before the step along ``directions``, of which the signs alone count."""
    if not scalars.cautious or scalars.weight_decay == 0.0:
        decay_(params, scalars.lr, scalars.weight_decay)
        return
    # Signs, not products, which underflow: 0 where they are opposed, else 1.
    shares = list(torch._foreach_sign(directions))
    torch._foreach_mul_(shares, torch._foreach_sign(params))
    torch._foreach_add_(shares, 1.0)
    torch._foreach_clamp_max_(shares, 1.0)
    torch._foreach_mul_(shares, -scalars.lr * scalars.weight_decay)
    torch._foreach_add_(shares, 1.0)
    torch._foreach_mul_(params, shares)


def _adamw_(update: Pass, grads: Tensors) -> None:
    """What follows the momentum in :func:`rankwise.updates.adamw.adamw_update`, and a decoupled step."""
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
