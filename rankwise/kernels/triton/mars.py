r"""MARS on many runs: a norm pass and one fused update pass, and AdamW without the correction.

Bytes per element (fp32, everything on the fly): norms 8 read. Update of AdamW 20 read and 12 written, of Lion 16 and
8, of the momentum 12 and 4, each plus 4 written where the reference advances. Plain AdamW 16 and 12.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from rankwise.kernels.triton.language import device_scalar, launch
from rankwise.kernels.triton.mars_kernels import norm_kernel, update_kernel
from rankwise.kernels.triton.segments import Runs, run_sums
from rankwise.kernels.triton.steps import one_per_run, step_scale
from rankwise.updates.adamw import Scalar, Step, bias_corrections

__all__ = ["adamw_", "mars_adamw_", "mars_lion_", "mars_momentum_", "mars_squared_norms"]

TILE = 2048
WARPS = 8

_MOMENTUM, _LION, _ADAMW = 0, 1, 2


def mars_squared_norms(grads: Sequence[Tensor], references: Sequence[Tensor], k: float) -> Tensor:
    """``|g + k (g - h)|^2`` of every run, in fp64, summed in a fixed order.

    Args:
        grads: Gradients ``g``.
        references: Comparison gradients ``h``.
        k: From :func:`rankwise.mars.formulas.correction_factor`.

    Returns:
        (n,) fp64 on their device.

    Raises:
        ValueError: If a tensor is not a contiguous fp32 run or the lists do not fit together.
    """
    if not grads:
        return torch.empty(0, dtype=torch.float64)
    runs = Runs([grads, references], TILE)
    partials = runs.partial_sums(1)
    launch(
        norm_kernel,
        (runs.count,),
        runs.device,
        runs.table,
        runs.tiles,
        partials,
        float(k),
        BLOCK=TILE,
        num_warps=WARPS,
    )
    return run_sums(runs, partials)[0]


def mars_adamw_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    references: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
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
    """MARS-AdamW: AdamW with ``c = coefficient (g + k (g - h))`` in the gradient's place.

    Arguments as for :func:`rankwise.kernels.lists.mars_adamw_`, all runs fp32.

    Raises:
        ValueError: As there, or a tensor is not a contiguous fp32 run, or the lists do not fit together.
    """
    scales = _adamw_scales(betas, step, eps, correct_eps=True)
    fields = [grads, exp_avgs, params, exp_avg_sqs, references]
    _update(_ADAMW, fields, betas, k, coefficients, lr, weight_decay, advance, scales)


def adamw_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    *,
    lr: Scalar,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    step: Step,
    correct_eps: bool = True,
) -> None:
    """AdamW.

    Arguments as for :func:`rankwise.kernels.lists.adamw_`, all runs fp32.

    Raises:
        ValueError: As there, or a tensor is not a contiguous fp32 run, or the lists do not fit together.
    """
    scales = _adamw_scales(betas, step, eps, correct_eps)
    _update(_ADAMW, [grads, exp_avgs, params, exp_avg_sqs], betas, None, None, lr, weight_decay, False, scales)


def mars_lion_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    references: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    *,
    k: float,
    coefficients: Tensor | None,
    lr: Scalar,
    beta1: float,
    weight_decay: float,
    advance: bool,
) -> None:
    """MARS-Lion.

    Arguments as for :func:`rankwise.kernels.lists.mars_lion_`, all runs fp32.

    Raises:
        ValueError: As there, or a tensor is not a contiguous fp32 run, or the lists do not fit together.
    """
    fields = [grads, exp_avgs, params, references]
    _update(_LION, fields, (beta1, 0.0), k, coefficients, lr, weight_decay, advance)


def mars_momentum_(
    grads: Sequence[Tensor],
    references: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    *,
    k: float,
    coefficients: Tensor | None,
    beta1: float,
    advance: bool,
) -> None:
    """Momentum of the matrix rules, ``m := beta1 m + (1 - beta1) c``.

    Arguments as for :func:`rankwise.kernels.lists.mars_momentum_`, all runs fp32.

    Raises:
        ValueError: As there, or a tensor is not a contiguous fp32 run, or the lists do not fit together.
    """
    _update(_MOMENTUM, [grads, exp_avgs, references], (beta1, 0.0), k, coefficients, 0.0, 0.0, advance)


_Scales = tuple[Scalar, float, Scalar]


def _adamw_scales(betas: tuple[float, float], step: Step, eps: float, correct_eps: bool) -> _Scales:
    """What the root is multiplied by, what is added to it, and what the step is multiplied by."""
    correction1, correction2 = bias_corrections(betas, step)
    root = correction2.sqrt() if isinstance(correction2, Tensor) else math.sqrt(correction2)
    return (1.0 / root, eps, 1.0 / correction1) if correct_eps else (1.0, eps, root / correction1)


def _update(
    rule: int,
    fields: Sequence[Sequence[Tensor]],
    betas: tuple[float, float],
    k: float | None,
    coefficients: Tensor | None,
    lr: Scalar,
    weight_decay: float,
    advance: bool,
    scales: _Scales = (1.0, 0.0, 1.0),
) -> None:
    if not fields[0]:
        return
    runs = Runs(fields, TILE)
    root_scale, eps, own_scale = scales
    launch(
        update_kernel,
        (runs.count,),
        runs.device,
        runs.table,
        runs.tiles,
        one_per_run(coefficients, runs),
        device_scalar(lr, runs.device),
        float(weight_decay),
        0.0 if k is None else float(k),
        float(betas[0]),
        1.0 - betas[0],
        float(betas[1]),
        1.0 - betas[1],
        step_scale(root_scale, runs),
        float(eps),
        step_scale(own_scale, runs),
        RULE=rule,
        CORRECT=k is not None,
        SCALED=coefficients is not None,
        ADVANCE=advance,
        LR_ON_DEVICE=isinstance(lr, Tensor),
        ROOTS_ON_DEVICE=isinstance(root_scale, Tensor),
        STEPS_ON_DEVICE=isinstance(own_scale, Tensor),
        FIELDS=len(fields),
        BLOCK=TILE,
        num_warps=WARPS,
    )
