"""Passes and norms on many runs, on the device: one launch for a pass whatever the number of runs, two for norms.

Bytes per element (fp32): a pass reads and writes the fields of its rule once (:data:`rankwise.kernels.passes.FIELDS`,
the gradient and a reference that does not advance read only). Narrow states are opened and kept again in registers:
what goes through memory are their codes.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from rankwise.kernels.narrow_runs import BLOCK, NarrowRuns
from rankwise.kernels.opened_passes import norms_with_opened, run_opened
from rankwise.kernels.passes import Field, Pass, Rule, Tensors
from rankwise.kernels.triton.codes import opened, store
from rankwise.kernels.triton.language import device_scalar, jit, launch
from rankwise.kernels.triton.pass_fields import PassFields, are_alike
from rankwise.kernels.triton.segments import Runs, read, run_sums, wide, write
from rankwise.updates.adamw import Scalar

__all__ = ["number", "number_of", "one_per_run", "run", "squared_norms", "step_scale"]

TILE = 2048
WARPS = 4
_WARPS_OF_RULES = 8
_SHARED: tl.constexpr = tl.constexpr(BLOCK)
_RULES: dict[Rule, int] = {"momentum": 0, "lion": 1, "adamw": 2, "step": 3, "nesterov": 4}


def run(update: Pass, scale: float = 1.0) -> None:
    """Do a pass, in place.

    Args:
        update: Its tensors are contiguous fp32 runs; gradients may be narrower, states and references narrow.
        scale: Of a "step": what its directions are multiplied by.

    Raises:
        ValueError: One is of another kind, or the lists do not fit together.
    """
    if not are_alike(update.fields):
        run_opened(update, run)
        return
    scalars, fields = update.scalars, PassFields(update.fields, TILE, ("grad", "reference"))
    runs = fields.runs
    own_scale, root = update.corrections() if update.rule == "adamw" else (scale, 1.0)
    launch(
        update_kernel,
        (runs.count,),
        runs.device,
        runs.table,
        runs.tiles,
        one_per_run(update.factors, runs),
        device_scalar(scalars.lr, runs.device),
        float(scalars.weight_decay),
        float(scalars.k),
        float(scalars.nesterov),
        float(scalars.betas[0]),
        1.0 - scalars.betas[0],
        float(scalars.betas[1]),
        1.0 - scalars.betas[1],
        step_scale(1.0 / root, runs),
        float(scalars.eps),
        step_scale(own_scale, runs),
        fields.count,
        RULE=_RULES[update.rule],
        CORRECT="reference" in update.fields,
        SCALED=update.factors is not None,
        ADVANCE=scalars.advance,
        CAUTIOUS=update.is_cautious,
        LR_ON_DEVICE=isinstance(scalars.lr, Tensor),
        STEPS_ON_DEVICE=isinstance(own_scale, Tensor),
        GRAD=fields.types["grad"],
        **fields.constants,
        FIELDS=len(update.fields),
        BLOCK=TILE,
        num_warps=WARPS if update.rule == "step" else _WARPS_OF_RULES,
    )


def squared_norms(tensors: Tensors, references: Field | None, k: float) -> Tensor:
    """Squared 2-norm of every run, or of ``g + k (g - h)``, in fp64, summed in a fixed order.

    Args:
        tensors: Contiguous fp32 runs, at least one.
        references: ``h``, if any; in fp32, or narrow.
        k: As in a pass.

    Returns:
        (n,) fp64 on their device.

    Raises:
        ValueError: If a tensor is of another kind.
    """
    lists: dict[str, Field] = {"grad": tensors}
    if references is not None:
        lists["reference"] = references
    if isinstance(references, NarrowRuns) and not are_alike(lists):
        return norms_with_opened(tensors, references, k, squared_norms)
    fields = PassFields(lists, TILE, ("reference",))
    runs = fields.runs
    partials = runs.partial_sums(1)
    launch(
        norm_kernel,
        (runs.count,),
        runs.device,
        runs.table,
        runs.tiles,
        partials,
        float(k),
        **{name: fields.constants[name] for name in ("REFERENCE", "REFERENCE_AT", "EXTRAS")},
        FIELDS=len(lists),
        BLOCK=TILE,
        num_warps=WARPS if references is None else _WARPS_OF_RULES,
    )
    return run_sums(runs, partials)[0]


def one_per_run(values: Tensor | None, runs: Runs) -> Tensor:
    """Factors of the runs as a kernel reads them; something to point to where there are none.

    Raises:
        ValueError: If there is not one factor per run.
    """
    if values is None:
        return runs.table
    if values.shape != (runs.runs,):
        raise ValueError(f"there are factors of shape {tuple(values.shape)} for {runs.runs} runs; pass one for each")
    return values.to(device=runs.device, dtype=torch.float32).contiguous()


def step_scale(value: Scalar, runs: Runs) -> float | Tensor:
    """What a kernel takes for a number that follows from the step's: a float, or one for each run.

    Raises:
        ValueError: If there is not one number per run.
    """
    return one_per_run(value, runs) if isinstance(value, Tensor) else float(value)


@jit
def number(value: tl.tensor, ON_DEVICE: tl.constexpr) -> tl.tensor:
    """A float argument, or what lies at the address if it is a tensor."""
    if ON_DEVICE:
        return tl.load(value)
    else:
        return value


@jit
def number_of(value: tl.tensor, index: tl.tensor, ON_DEVICE: tl.constexpr) -> tl.tensor:
    """A float argument, or the number of a run or matrix if it is a tensor of them."""
    if ON_DEVICE:
        return tl.load(value + index)
    else:
        return value


@jit
def _gradient(
    row: tl.tensor,
    start: tl.tensor,
    blocks: tl.tensor,
    inside: tl.tensor,
    k: tl.tensor,
    GRAD: tl.constexpr,
    REFERENCE: tl.constexpr,
    REFERENCE_AT: tl.constexpr,
    FIELDS: tl.constexpr,
    CORRECT: tl.constexpr,
    BLOCK: tl.constexpr,
    FAST: tl.constexpr,
) -> tl.tensor:
    """``g + k (g - h)``, or ``g`` itself, and ``g``; the gradient is the first field, the reference the last."""
    grad = read(row, 0, start, inside, BLOCK, FAST, GRAD).to(tl.float32)
    if CORRECT:
        at = start // _SHARED
        reference = opened(row, FIELDS - 1, start, at, blocks, inside, BLOCK, FAST, REFERENCE, REFERENCE_AT)
        return grad + k * (grad - reference), grad
    else:
        return grad, grad


@jit
def norm_kernel(
    table: tl.tensor,
    tiles: tl.tensor,
    partials: tl.tensor,
    k: tl.tensor,
    REFERENCE: tl.constexpr,
    REFERENCE_AT: tl.constexpr,
    EXTRAS: tl.constexpr,
    FIELDS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Squares of the gradient, or of the corrected one where there are two fields; one partial sum per tile."""
    program = tl.program_id(0).to(tl.int64)
    row = table + tl.load(tiles + 2 * program) * (FIELDS + 1 + EXTRAS)
    start = tl.load(tiles + 2 * program + 1)
    length = tl.load(row + FIELDS)
    if (start + BLOCK <= length) & wide(row, FIELDS):
        _norm_tile(row, start, length, partials + program, k, REFERENCE, REFERENCE_AT, FIELDS, BLOCK, True)
    else:
        _norm_tile(row, start, length, partials + program, k, REFERENCE, REFERENCE_AT, FIELDS, BLOCK, False)


@jit
def _norm_tile(
    row: tl.tensor,
    start: tl.tensor,
    length: tl.tensor,
    partial: tl.tensor,
    k: tl.tensor,
    REFERENCE: tl.constexpr,
    REFERENCE_AT: tl.constexpr,
    FIELDS: tl.constexpr,
    BLOCK: tl.constexpr,
    FAST: tl.constexpr,
) -> None:
    inside = start + tl.arange(0, BLOCK) < length
    blocks = _blocks(start, length, BLOCK)
    value, grad = _gradient(
        row, start, blocks, inside, k, tl.float32, REFERENCE, REFERENCE_AT, FIELDS, FIELDS == 2, BLOCK, FAST
    )
    value = value.to(tl.float64)
    tl.store(partial, tl.sum(value * value, axis=0))


@jit
def _blocks(start: tl.tensor, length: tl.tensor, LANES: tl.constexpr) -> tl.tensor:
    """Which blocks of a tile the run has."""
    return start + _SHARED * tl.arange(0, LANES // _SHARED) < length


@jit
def _kept(weight: tl.tensor, direction: tl.tensor, keep: tl.tensor, CAUTIOUS: tl.constexpr) -> tl.tensor:
    """What decay leaves of a weight; cautious decay spares those that step away from zero."""
    if CAUTIOUS:
        opposed = ((direction < 0.0) & (weight > 0.0)) | ((direction > 0.0) & (weight < 0.0))
        return tl.where(opposed, weight, weight * keep)
    else:
        return weight * keep


@jit
def update_kernel(
    table: tl.tensor,
    tiles: tl.tensor,
    factors: tl.tensor,
    lr: tl.tensor,
    weight_decay: tl.tensor,
    k: tl.tensor,
    share: tl.tensor,
    beta1: tl.tensor,
    share1: tl.tensor,
    beta2: tl.tensor,
    share2: tl.tensor,
    root_scale: tl.tensor,
    eps: tl.tensor,
    step_scale: tl.tensor,
    count: tl.tensor,
    RULE: tl.constexpr,
    CORRECT: tl.constexpr,
    SCALED: tl.constexpr,
    ADVANCE: tl.constexpr,
    CAUTIOUS: tl.constexpr,
    LR_ON_DEVICE: tl.constexpr,
    STEPS_ON_DEVICE: tl.constexpr,
    GRAD: tl.constexpr,
    EXP_AVG: tl.constexpr,
    EXP_AVG_AT: tl.constexpr,
    EXP_AVG_RANDOM: tl.constexpr,
    EXP_AVG_SQ: tl.constexpr,
    EXP_AVG_SQ_AT: tl.constexpr,
    EXP_AVG_SQ_RANDOM: tl.constexpr,
    REFERENCE: tl.constexpr,
    REFERENCE_AT: tl.constexpr,
    REFERENCE_RANDOM: tl.constexpr,
    COUNTS: tl.constexpr,
    EXTRAS: tl.constexpr,
    FIELDS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """The update of one tile; RULE: 0 momentum only, 1 Lion, 2 AdamW, 3 a step along the gradient, 4 Nesterov's."""
    program = tl.program_id(0).to(tl.int64)
    run = tl.load(tiles + 2 * program)
    row = table + run * (FIELDS + 1 + EXTRAS)
    start = tl.load(tiles + 2 * program + 1)
    length = tl.load(row + FIELDS)
    rate = number(lr, LR_ON_DEVICE)
    keep = 1.0 - rate * weight_decay
    rate = rate * number_of(step_scale, run, STEPS_ON_DEVICE)
    root = number_of(root_scale, run, STEPS_ON_DEVICE)
    factor = 1.0
    if SCALED:
        factor = tl.load(factors + run)
    if COUNTS:
        count = tl.load(count + run)
    # fmt: off
    if (start + BLOCK <= length) & wide(row, FIELDS):
        _update_tile(row, start, length, factor, rate, keep, k, share, beta1, share1, beta2, share2, root, eps,
                     count, RULE, CORRECT, SCALED, ADVANCE, CAUTIOUS, GRAD, EXP_AVG, EXP_AVG_AT, EXP_AVG_RANDOM,
                     EXP_AVG_SQ, EXP_AVG_SQ_AT, EXP_AVG_SQ_RANDOM, REFERENCE, REFERENCE_AT, REFERENCE_RANDOM,
                     FIELDS, BLOCK, True)
    else:
        _update_tile(row, start, length, factor, rate, keep, k, share, beta1, share1, beta2, share2, root, eps,
                     count, RULE, CORRECT, SCALED, ADVANCE, CAUTIOUS, GRAD, EXP_AVG, EXP_AVG_AT, EXP_AVG_RANDOM,
                     EXP_AVG_SQ, EXP_AVG_SQ_AT, EXP_AVG_SQ_RANDOM, REFERENCE, REFERENCE_AT, REFERENCE_RANDOM,
                     FIELDS, BLOCK, False)
    # fmt: on


@jit
def _update_tile(
    row: tl.tensor,
    start: tl.tensor,
    length: tl.tensor,
    factor: tl.tensor,
    rate: tl.tensor,
    keep: tl.tensor,
    k: tl.tensor,
    share: tl.tensor,
    beta1: tl.tensor,
    share1: tl.tensor,
    beta2: tl.tensor,
    share2: tl.tensor,
    root_scale: tl.tensor,
    eps: tl.tensor,
    count: tl.tensor,
    RULE: tl.constexpr,
    CORRECT: tl.constexpr,
    SCALED: tl.constexpr,
    ADVANCE: tl.constexpr,
    CAUTIOUS: tl.constexpr,
    GRAD: tl.constexpr,
    EXP_AVG: tl.constexpr,
    EXP_AVG_AT: tl.constexpr,
    EXP_AVG_RANDOM: tl.constexpr,
    EXP_AVG_SQ: tl.constexpr,
    EXP_AVG_SQ_AT: tl.constexpr,
    EXP_AVG_SQ_RANDOM: tl.constexpr,
    REFERENCE: tl.constexpr,
    REFERENCE_AT: tl.constexpr,
    REFERENCE_RANDOM: tl.constexpr,
    FIELDS: tl.constexpr,
    BLOCK: tl.constexpr,
    FAST: tl.constexpr,
) -> None:
    """Fields: gradient, momentum, then weight or what is written, second moment (AdamW), reference, as there are."""
    inside = start + tl.arange(0, BLOCK) < length
    at, blocks = start // _SHARED, _blocks(start, length, BLOCK)
    value, grad = _gradient(row, start, blocks, inside, k, GRAD, REFERENCE, REFERENCE_AT, FIELDS, CORRECT, BLOCK, FAST)
    # fmt: off
    if CORRECT and ADVANCE:
        store(row, FIELDS - 1, start, at, blocks, grad, inside, count, row, BLOCK, FAST,
             REFERENCE, REFERENCE_AT, REFERENCE_RANDOM)
    if RULE == 3:
        direction = value
        if SCALED:
            rate = rate * factor
            direction = value * factor
        weight = read(row, 1, start, inside, BLOCK, FAST)
        write(row, 1, start, _kept(weight, direction, keep, CAUTIOUS) - value * rate, inside, BLOCK, FAST)
    else:
        if SCALED:
            value = value * factor
        momentum = opened(row, 1, start, at, blocks, inside, BLOCK, FAST, EXP_AVG, EXP_AVG_AT)
        momentum = beta1 * momentum + share1 * value
        store(row, 1, start, at, blocks, momentum, inside, count, row, BLOCK, FAST, EXP_AVG, EXP_AVG_AT, EXP_AVG_RANDOM)
        if RULE == 1 or RULE == 4:
            # Of a share of 0 the momentum itself, infinite or not.
            momentum = tl.where(share == 0.0, momentum, momentum + share * (value - momentum))
        if RULE == 4:
            write(row, 2, start, momentum, inside, BLOCK, FAST)
        if RULE == 1:
            sign = (momentum > 0.0).to(tl.float32) - (momentum < 0.0).to(tl.float32)
            weight = read(row, 2, start, inside, BLOCK, FAST)
            write(row, 2, start, _kept(weight, momentum, keep, CAUTIOUS) - rate * sign, inside, BLOCK, FAST)
        if RULE == 2:
            second = opened(row, 3, start, at, blocks, inside, BLOCK, FAST, EXP_AVG_SQ, EXP_AVG_SQ_AT)
            second = beta2 * second + share2 * value * value
            store(row, 3, start, at, blocks, second, inside, count, row, BLOCK, FAST,
                 EXP_AVG_SQ, EXP_AVG_SQ_AT, EXP_AVG_SQ_RANDOM)
            # Rounded correctly: the fast root flushes denormal second moments to zero.
            direction = tl.div_rn(momentum, tl.sqrt_rn(second) * root_scale + eps)
            weight = read(row, 2, start, inside, BLOCK, FAST)
            write(row, 2, start, _kept(weight, momentum, keep, CAUTIOUS) - rate * direction, inside, BLOCK, FAST)
    # fmt: on
