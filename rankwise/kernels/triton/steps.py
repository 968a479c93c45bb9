"""A pass over many runs takes one launch on the device, and norms take two, whatever the number of runs; the momenta of
a pass are measured by one launch more.

A pass reads and writes the fields of its rule (:data:`rankwise.kernels.passes.FIELDS`) once, and only reads the
gradient and a reference that does not advance. Narrow states are opened and encoded again in registers: only their
codes go through memory.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from rankwise.kernels.low_precision_runs import BLOCK
from rankwise.kernels.passes import Field, Pass, Rule, Tensors
from rankwise.kernels.triton.codes import blocks_inside, exponents_at, noise_of, opened, seeds_of, store
from rankwise.kernels.triton.language import device_scalar, jit, launch
from rankwise.kernels.triton.pass_fields import PassFields
from rankwise.kernels.triton.segments import Runs, lanes_of, moved, place_of, read, run_sums, wide, write
from rankwise.updates.adamw import Scalar

__all__ = ["kept", "number", "number_of", "one_per_run", "run", "squared_norms", "step_scale"]

TILE = 2048
PASS_TILE, TILES = 512, 16
"""Elements of a tile of a pass, and tiles of a program, which reads the tables once for all of them."""

_WARPS = 4
_SHARED: tl.constexpr = tl.constexpr(BLOCK)
_RULES: dict[Rule, int] = {"momentum": 0, "lion": 1, "adamw": 2, "step": 3, "nesterov": 4}


def run(update: Pass) -> Tensor | None:
    """Do a pass, in place.

    Args:
        update: Pass over contiguous fp32 runs; gradients may be bfloat16 or float16, states and references narrow.

    Returns:
        (shards,) fp64, the squared norms of what is to be measured; None where nothing is.

    Raises:
        ValueError: A tensor is of another kind, or the lists do not fit together.
    """
    scalars, fields = update.scalars, PassFields(update.fields, TILES * PASS_TILE, ("grad", "reference"))
    runs = fields.runs
    own_scale, root = update.corrections() if update.rule == "adamw" else (1.0, 1.0)
    partials = runs.partial_sums(1) if update.measured else runs.table
    launch(
        update_kernel,
        (runs.count,),
        runs.device,
        runs.table,
        runs.tiles,
        partials,
        one_per_run(update.factors, runs, torch.float32 if scalars.clip is None else torch.float64),
        float(scalars.clip or 0.0),
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
        CLIPPED=scalars.clip is not None,
        MEASURED=update.measured,
        ADVANCE=scalars.advance,
        CAUTIOUS=update.is_cautious,
        LR_ON_DEVICE=isinstance(scalars.lr, Tensor),
        STEPS_ON_DEVICE=isinstance(own_scale, Tensor),
        GRAD=fields.types["grad"],
        **fields.constants,
        FIELDS=len(update.fields),
        BLOCK=PASS_TILE,
        TILES=TILES,
        num_warps=_WARPS,
        # With fused multiplications a pass over codes would not round like a pass over what they stand for.
        enable_fp_fusion=False,
    )
    return run_sums(runs, partials)[0] if update.measured else None


def squared_norms(tensors: Tensors, references: Field | None, k: float) -> Tensor:
    """Squared 2-norm of every run, or of ``g + k (g - h)``, in fp64, summed in a fixed order.

    Args:
        tensors: Contiguous fp32 runs ``g``, at least one.
        references: Runs ``h`` to compare with, in fp32 or narrow; or None.
        k: Factor of the change since the reference.

    Returns:
        (n,) fp64 on the device of the runs.

    Raises:
        ValueError: A tensor is of another kind.
    """
    lists: dict[str, Field] = {"grad": tensors}
    if references is not None:
        lists["reference"] = references
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
        num_warps=_WARPS,
    )
    return run_sums(runs, partials)[0]


def one_per_run(values: Tensor | None, runs: Runs, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return factors of the runs as a kernel reads them; where there are none, a tensor that it will not read.

    Raises:
        ValueError: There is not one factor per run.
    """
    if values is None:
        return runs.table
    if values.shape != (runs.runs,):
        raise ValueError(f"there are factors of shape {tuple(values.shape)} for {runs.runs} runs; pass one for each")
    return values.to(device=runs.device, dtype=dtype).contiguous()


def step_scale(value: Scalar, runs: Runs) -> float | Tensor:
    """Return a kernel's argument for a number that depends on the step: a float, or a tensor with one for each run.

    Raises:
        ValueError: There is not one number per run.
    """
    return one_per_run(value, runs) if isinstance(value, Tensor) else float(value)


@jit
def number(value: tl.tensor, ON_DEVICE: tl.constexpr) -> tl.tensor:
    """Return a float argument, or the element of a 0-d tensor."""
    if ON_DEVICE:
        return tl.load(value)
    else:
        return value


@jit
def number_of(value: tl.tensor, index: tl.tensor, ON_DEVICE: tl.constexpr) -> tl.tensor:
    """Return a float argument, or the element for a run or matrix of a tensor."""
    if ON_DEVICE:
        return tl.load(value + index)
    else:
        return value


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
    """Sum the squares of a tile of the gradient, which is corrected where there is a reference."""
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
    lanes = lanes_of(BLOCK)
    inside, blocks = start + lanes < length, blocks_inside(start, length, lanes)
    value = read(place_of(row, 0, start, FAST), lanes, inside, FAST)
    if FIELDS == 2:
        codes, exponents = place_of(row, 1, start, FAST, REFERENCE), exponents_at(row, REFERENCE_AT, start // _SHARED)
        value += k * (value - opened(codes, exponents, blocks, lanes, inside, FAST, REFERENCE, REFERENCE_AT))
    value = value.to(tl.float64)
    tl.store(partial, tl.sum(tl.sum(value * value, axis=1), axis=0))


@jit
def kept(weight: tl.tensor, direction: tl.tensor, keep: tl.tensor, CAUTIOUS: tl.constexpr) -> tl.tensor:
    """Return what decay leaves of a weight; cautious decay spares weights that step away from zero."""
    if CAUTIOUS:
        opposed = ((direction < 0.0) & (weight > 0.0)) | ((direction > 0.0) & (weight < 0.0))
        return tl.where(opposed, weight, weight * keep)
    else:
        return weight * keep


@jit
def update_kernel(
    table: tl.tensor,
    tiles: tl.tensor,
    partials: tl.tensor,
    factors: tl.tensor,
    clip: tl.tensor,
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
    CLIPPED: tl.constexpr,
    MEASURED: tl.constexpr,
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
    TILES: tl.constexpr,
) -> None:
    """Update some tiles; RULE is 0 momentum only, 1 Lion, 2 AdamW, 3 a step along the gradient, 4 Nesterov's."""
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
        if CLIPPED:
            # A norm that is NaN is above no clip, and below none.
            factor = tl.where(tl.sqrt(factor) <= clip, 1.0, clip / tl.sqrt(factor)).to(tl.float32)
    if COUNTS:
        count = tl.load(count + run)
    # fmt: off
    if (start + TILES * BLOCK <= length) & wide(row, FIELDS):
        _update_tiles(row, start, length, partials + program, factor, rate, keep, k, share, beta1, share1, beta2,
                      share2, root, eps, count, RULE, CORRECT, SCALED, MEASURED, ADVANCE, CAUTIOUS, GRAD, EXP_AVG,
                      EXP_AVG_AT, EXP_AVG_RANDOM, EXP_AVG_SQ, EXP_AVG_SQ_AT, EXP_AVG_SQ_RANDOM, REFERENCE,
                      REFERENCE_AT, REFERENCE_RANDOM, FIELDS, BLOCK, TILES, True)
    else:
        _update_tiles(row, start, length, partials + program, factor, rate, keep, k, share, beta1, share1, beta2,
                      share2, root, eps, count, RULE, CORRECT, SCALED, MEASURED, ADVANCE, CAUTIOUS, GRAD, EXP_AVG,
                      EXP_AVG_AT, EXP_AVG_RANDOM, EXP_AVG_SQ, EXP_AVG_SQ_AT, EXP_AVG_SQ_RANDOM, REFERENCE,
                      REFERENCE_AT, REFERENCE_RANDOM, FIELDS, BLOCK, TILES, False)
    # fmt: on


# fmt: off
@jit
def _update_tiles(
    row: tl.tensor, start: tl.tensor, length: tl.tensor, partial: tl.tensor, factor: tl.tensor, rate: tl.tensor,
    keep: tl.tensor, k: tl.tensor, share: tl.tensor, beta1: tl.tensor, share1: tl.tensor, beta2: tl.tensor,
    share2: tl.tensor, root_scale: tl.tensor, eps: tl.tensor, count: tl.tensor, RULE: tl.constexpr,
    CORRECT: tl.constexpr, SCALED: tl.constexpr, MEASURED: tl.constexpr, ADVANCE: tl.constexpr, CAUTIOUS: tl.constexpr,
    GRAD: tl.constexpr, EXP_AVG: tl.constexpr, EXP_AVG_AT: tl.constexpr, EXP_AVG_RANDOM: tl.constexpr,
    EXP_AVG_SQ: tl.constexpr, EXP_AVG_SQ_AT: tl.constexpr, EXP_AVG_SQ_RANDOM: tl.constexpr, REFERENCE: tl.constexpr,
    REFERENCE_AT: tl.constexpr, REFERENCE_RANDOM: tl.constexpr, FIELDS: tl.constexpr, BLOCK: tl.constexpr,
    TILES: tl.constexpr, FAST: tl.constexpr,
) -> None:
    """Update tiles of a run; its fields are gradient, momentum, weight, second moment, reference, or some of these."""
    lanes = lanes_of(BLOCK)
    # Addresses are read before the loop, because no store of it overwrites them.
    grads, first_block = place_of(row, 0, start, FAST, GRAD), start // _SHARED
    weights = place_of(row, 1 if RULE == 3 else 2, start, FAST)  # a step has no momentum
    momenta = place_of(row, 1, start, FAST, EXP_AVG)
    seconds = place_of(row, 3 if RULE == 2 else 0, start, FAST, EXP_AVG_SQ)
    references = place_of(row, FIELDS - 1, start, FAST, REFERENCE)
    exponents1 = exponents_at(row, EXP_AVG_AT, first_block)
    exponents2 = exponents_at(row, EXP_AVG_SQ_AT, first_block)
    exponents3 = exponents_at(row, REFERENCE_AT, first_block)
    low1, here1, above1 = seeds_of(row, EXP_AVG_AT, count, start, EXP_AVG_RANDOM)
    low2, here2, above2 = seeds_of(row, EXP_AVG_SQ_AT, count, start, EXP_AVG_SQ_RANDOM)
    low3, here3, above3 = seeds_of(row, REFERENCE_AT, count, start, REFERENCE_RANDOM)
    end = tl.minimum(length - start, TILES * BLOCK).to(tl.int32)
    total = tl.full((BLOCK // 4,), 0.0, tl.float64)
    for offset in range(0, end, BLOCK):
        here = start + offset
        inside, blocks, block = here + lanes < length, blocks_inside(here, length, lanes), offset // _SHARED
        # Everything is read before anything is written, so that no load waits behind a store.
        value = read(moved(grads, offset, FAST), lanes, inside, FAST).to(tl.float32)
        if CORRECT:
            grad = value
            reference = opened(moved(references, offset, FAST), exponents3 + block, blocks, lanes, inside, FAST,
                               REFERENCE, REFERENCE_AT)
            value += k * (value - reference)
        if RULE != 3:
            momentum = opened(moved(momenta, offset, FAST), exponents1 + block, blocks, lanes, inside, FAST,
                              EXP_AVG, EXP_AVG_AT)
        if RULE >= 1 and RULE <= 3:
            weight = read(moved(weights, offset, FAST), lanes, inside, FAST)
        if RULE == 2:
            second = opened(moved(seconds, offset, FAST), exponents2 + block, blocks, lanes, inside, FAST,
                            EXP_AVG_SQ, EXP_AVG_SQ_AT)
        if CORRECT and ADVANCE:
            noise = noise_of(low3, here3, above3, offset + lanes, REFERENCE_RANDOM)
            store(moved(references, offset, FAST), exponents3 + block, blocks, grad, lanes, inside, noise, FAST,
                  REFERENCE, REFERENCE_AT, REFERENCE_RANDOM)
        if RULE == 3:
            direction = value * factor
            value = value * (rate * factor)
        else:
            if SCALED:
                value = value * factor
            momentum = beta1 * momentum + share1 * value
            noise = noise_of(low1, here1, above1, offset + lanes, EXP_AVG_RANDOM)
            store(moved(momenta, offset, FAST), exponents1 + block, blocks, momentum, lanes, inside, noise, FAST,
                  EXP_AVG, EXP_AVG_AT, EXP_AVG_RANDOM)
            if RULE == 1 or RULE == 4:
                # A share of 0 leaves the momentum as it is; 0 times an infinite difference would be NaN.
                momentum = tl.where(share == 0.0, momentum, momentum + share * (value - momentum))
            direction = momentum
            if MEASURED:
                total += tl.sum(direction.to(tl.float64) * direction.to(tl.float64), axis=1)
            if RULE == 1:
                value = rate * ((momentum > 0.0).to(tl.float32) - (momentum < 0.0).to(tl.float32))
            if RULE == 2:
                second = beta2 * second + share2 * value * value
                noise = noise_of(low2, here2, above2, offset + lanes, EXP_AVG_SQ_RANDOM)
                store(moved(seconds, offset, FAST), exponents2 + block, blocks, second, lanes, inside, noise, FAST,
                      EXP_AVG_SQ, EXP_AVG_SQ_AT, EXP_AVG_SQ_RANDOM)
                # The root is rounded correctly, because the fast one flushes denormal second moments to zero.
                value = rate * tl.div_rn(momentum, tl.sqrt_rn(second) * root_scale + eps)
        if RULE == 4:
            write(moved(weights, offset, FAST), direction, lanes, inside, FAST)
        if RULE >= 1 and RULE <= 3:
            weight = kept(weight, direction, keep, CAUTIOUS) - value
            write(moved(weights, offset, FAST), weight, lanes, inside, FAST)
    if MEASURED:
        tl.store(partial, tl.sum(total, axis=0))
# fmt: on
