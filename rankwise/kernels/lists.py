r"""In-place list forms of the element-wise updates, on ``torch._foreach_*``: a few launches for many fragments.

Each function does to every tensor of its lists what the pure function of the same rule in ``rankwise.updates`` does to
one. The lists of a call have one entry per fragment, all of one length, and the fragments of a position the same shape
and dtype; any list may be empty. No function synchronises with the host. Temporaries are as large as one list, or two
where ``lr`` is a tensor: split very long lists over several calls.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from rankwise.updates.adamw import Scalar, Step, bias_corrections

__all__ = [
    "adamw_",
    "add_",
    "copy_",
    "decay_",
    "decoupled_step_",
    "lion_",
    "mars_adamw_",
    "mars_corrected",
    "mars_lion_",
    "mars_momentum_",
    "mars_squared_norms",
    "momentum_",
    "scale_by_",
    "scaled_step_",
    "squared_norms",
    "subtract_scaled_",
]

STEPS_ON_DEVICE = True
"""Whether a step's number may be a tensor on the device, one entry per fragment, which the host never reads."""

Tensors = list[Tensor]
Coefficients = Sequence[Tensor] | Tensor
"""One factor per fragment: 0-d tensors, or one 1-D tensor of that many entries."""


def decay_(params: Tensors, lr: Scalar, weight_decay: float) -> None:
    """Decoupled weight decay: multiplies the weights by ``1 - lr * weight_decay``. Call it before the step."""
    if params and weight_decay != 0.0:
        torch._foreach_mul_(params, 1.0 - lr * weight_decay)


def _descend_(params: Tensors, directions: Tensors, lr: Scalar) -> None:
    """``params -= lr * directions``; overwrites ``directions`` if ``lr`` is a tensor."""
    if isinstance(lr, Tensor):
        torch._foreach_mul_(directions, lr)
        torch._foreach_sub_(params, directions)
    else:
        torch._foreach_add_(params, directions, alpha=-lr)


def decoupled_step_(params: Tensors, directions: Tensors, lr: Scalar, weight_decay: float) -> None:
    """:func:`rankwise.updates.adamw.decoupled_step`; overwrites ``directions`` if ``lr`` is a tensor."""
    decay_(params, lr, weight_decay)
    if params:
        _descend_(params, directions, lr)


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


def squared_norms(tensors: Tensors) -> Tensor:
    """Squared 2-norm of every tensor, (tensors,) in fp64 so that partial sums can be added over ranks."""
    if not tensors:
        return torch.zeros(0, dtype=torch.float64)
    return torch.stack(torch._foreach_norm(tensors, 2, dtype=torch.float64)).square()


def scaled_step_(
    params: Tensors, directions: Tensors, ratios: Tensor | None, *, lr: Scalar, weight_decay: float
) -> None:
    """``(1 - lr * weight_decay) x - lr * ratio * d``, with a ratio for every fragment; overwrites ``directions``.

    Args:
        params: Weights, updated in place.
        directions: Directions ``d``.
        ratios: (fragments,), or None for 1.
        lr: Learning rate, a float or a 0-d tensor.
        weight_decay: Decoupled decay rate.
    """
    if ratios is not None:
        scale_by_(directions, ratios)
    decoupled_step_(params, directions, lr, weight_decay)


def momentum_(exp_avgs: Tensors, grads: Tensors, beta1: float) -> None:
    """:func:`rankwise.mars.formulas.momentum_update`, into ``exp_avgs``."""
    if exp_avgs:
        torch._foreach_lerp_(exp_avgs, grads, 1.0 - beta1)


def _check_step(step: Step, fragments: int) -> None:
    """Refuse a wrong step before anything moves on."""
    if isinstance(step, Tensor):
        if step.shape != (fragments,):
            raise ValueError(f"step is {tuple(step.shape)} for {fragments} fragments; pass one number, or one for each")
    elif step < 1:
        raise ValueError(f"step must be at least 1, got {step}; count the step before applying it")


def adamw_(
    params: Tensors,
    grads: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    *,
    lr: Scalar,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    step: Step,
    correct_eps: bool = True,
) -> None:
    """AdamW: :func:`rankwise.updates.adamw.adamw_update` and a decoupled step.

    Args:
        params: Weights, updated in place.
        grads: Gradients, read only.
        exp_avgs: First moments, updated in place.
        exp_avg_sqs: Second moments, updated in place.
        lr: Learning rate, a float or a 0-d tensor.
        betas: Decay rates of the two moments.
        eps: Added to the root.
        weight_decay: Decoupled decay rate.
        step: Number of this step, from 1, the same for the whole list; or (fragments,), a number for each.
        correct_eps: Where ``eps`` is added, see the pure function.

    Raises:
        ValueError: If ``step`` is a number below 1, or has not one entry per fragment.
    """
    _check_step(step, len(params))
    if not params:
        return
    correction1, correction2 = bias_corrections(betas, step)
    momentum_(exp_avgs, grads, betas[0])
    torch._foreach_mul_(exp_avg_sqs, betas[1])
    torch._foreach_addcmul_(exp_avg_sqs, grads, grads, 1.0 - betas[1])

    root = correction2.sqrt() if isinstance(correction2, Tensor) else math.sqrt(correction2)
    denominators = list(torch._foreach_sqrt(exp_avg_sqs))
    if correct_eps:
        torch._foreach_div_(denominators, list(root.unbind()) if isinstance(root, Tensor) else root)
    torch._foreach_add_(denominators, eps)
    step_scale = (1.0 if correct_eps else root) / correction1

    decay_(params, lr, weight_decay)
    if isinstance(step_scale, Tensor):
        directions = list(torch._foreach_div(exp_avgs, denominators))
        scale_by_(directions, lr * step_scale)
        torch._foreach_sub_(params, directions)
    elif isinstance(lr, Tensor):
        directions = list(torch._foreach_div(exp_avgs, denominators))
        _descend_(params, directions, lr * step_scale)
    else:
        torch._foreach_addcdiv_(params, exp_avgs, denominators, -lr * step_scale)


def lion_(params: Tensors, grads: Tensors, exp_avgs: Tensors, *, lr: Scalar, beta1: float, weight_decay: float) -> None:
    """Sign of the momentum: :func:`rankwise.mars.formulas.lion_update` and a decoupled step.

    Args:
        params: Weights, updated in place.
        grads: Gradients, in MARS-Lion the clipped corrected ones; read only.
        exp_avgs: Momenta, updated in place.
        lr: Learning rate, a float or a 0-d tensor.
        beta1: Decay rate of the momentum.
        weight_decay: Decoupled decay rate.
    """
    if not params:
        return
    momentum_(exp_avgs, grads, beta1)
    decoupled_step_(params, list(torch._foreach_sign(exp_avgs)), lr, weight_decay)


def mars_corrected(grads: Tensors, references: Tensors, k: float) -> Tensors:
    """Corrected gradients ``g + k (g - h)``, before the clip, as new tensors.

    Args:
        grads: Gradients ``g``, read only.
        references: Comparison gradients ``h``, read only.
        k: From :func:`rankwise.mars.formulas.correction_factor`.
    """
    if not grads:
        return []
    corrected = list(torch._foreach_sub(grads, references))
    torch._foreach_mul_(corrected, k)
    torch._foreach_add_(corrected, grads)
    return corrected


def mars_squared_norms(grads: Tensors, references: Tensors, k: float) -> Tensor:
    """Squared norms of the corrected gradients, (fragments,) in fp64; arguments as for :func:`mars_corrected`."""
    return squared_norms(mars_corrected(grads, references, k))


def _clipped(grads: Tensors, references: Tensors, k: float, coefficients: Tensor | None, advance: bool) -> Tensors:
    corrected = mars_corrected(grads, references, k)
    if coefficients is not None:
        scale_by_(corrected, coefficients)
    if advance:
        # A copy: frameworks reuse their gradient buffers, and a reference would compare g with itself.
        copy_(references, grads)
    return corrected


def mars_adamw_(
    params: Tensors,
    grads: Tensors,
    references: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    *,
    k: float,
    coefficients: Tensor | None,
    lr: Scalar,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    step: Step,
    advance: bool,
) -> None:
    """MARS-AdamW from raw gradients, with clip coefficients that are known already.

    Args:
        params: Weights, updated in place.
        grads: Gradients, read only.
        references: Comparison gradients.
        exp_avgs: First moments, updated in place.
        exp_avg_sqs: Second moments, updated in place.
        k: Correction factor, from :func:`rankwise.mars.formulas.correction_factor`.
        coefficients: (fragments,), from :func:`rankwise.mars.formulas.clip_coefficient`, that of the whole parameter
            for each of its fragments; ``None`` does not clip.
        lr: Learning rate, a float or a 0-d tensor.
        betas: Decay rates of the two moments.
        eps: Added to the bias-corrected root.
        weight_decay: Decoupled decay rate.
        step: Number of this step, from 1; or (fragments,), a number for each.
        advance: Whether the gradients become the references, as in approximate mode.

    Raises:
        ValueError: If ``step`` is a number below 1, or there is not one coefficient, or number, per fragment.
    """
    _check_step(step, len(params))
    clipped = _clipped(grads, references, k, coefficients, advance)
    adamw_(params, clipped, exp_avgs, exp_avg_sqs, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, step=step)


def mars_lion_(
    params: Tensors,
    grads: Tensors,
    references: Tensors,
    exp_avgs: Tensors,
    *,
    k: float,
    coefficients: Tensor | None,
    lr: Scalar,
    beta1: float,
    weight_decay: float,
    advance: bool,
) -> None:
    """MARS-Lion from raw gradients; arguments as for :func:`mars_adamw_` and :func:`lion_`.

    Args:
        params: Weights, updated in place.
        grads: Gradients, read only.
        references: Comparison gradients.
        exp_avgs: Momenta, updated in place.
        k: Correction factor.
        coefficients: Clip coefficient of each fragment, or ``None``.
        lr: Learning rate, a float or a 0-d tensor.
        beta1: Decay rate of the momentum.
        weight_decay: Decoupled decay rate.
        advance: Whether the gradients become the references.

    Raises:
        ValueError: If there is not one coefficient per fragment.
    """
    clipped = _clipped(grads, references, k, coefficients, advance)
    lion_(params, clipped, exp_avgs, lr=lr, beta1=beta1, weight_decay=weight_decay)


def mars_momentum_(
    grads: Tensors,
    references: Tensors,
    exp_avgs: Tensors,
    *,
    k: float,
    coefficients: Tensor | None,
    beta1: float,
    advance: bool,
) -> None:
    """Momentum of the clipped corrected gradients, which the matrix rules orthogonalise.

    Args:
        grads: Gradients, read only.
        references: Comparison gradients.
        exp_avgs: Momenta, updated in place.
        k: Correction factor.
        coefficients: Clip coefficient of each fragment, or ``None``.
        beta1: Decay rate of the momentum.
        advance: Whether the gradients become the references.

    Raises:
        ValueError: If there is not one coefficient per fragment.
    """
    momentum_(exp_avgs, _clipped(grads, references, k, coefficients, advance), beta1)
