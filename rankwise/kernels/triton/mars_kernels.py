"""What MARS does to a tile, on the device."""

from __future__ import annotations

import triton.language as tl

from rankwise.kernels.triton.language import jit
from rankwise.kernels.triton.segments import read, wide, write
from rankwise.kernels.triton.steps import number, number_of

__all__ = ["norm_kernel", "update_kernel"]


@jit
def _corrected(
    row: tl.tensor,
    start: tl.tensor,
    inside: tl.tensor,
    k: tl.tensor,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
    FAST: tl.constexpr,
) -> tl.tensor:
    """``g + k (g - h)`` and ``g``; the gradient is field 0, the reference field H."""
    grad = read(row, 0, start, inside, BLOCK, FAST)
    return grad + k * (grad - read(row, H, start, inside, BLOCK, FAST)), grad


@jit
def norm_kernel(table: tl.tensor, tiles: tl.tensor, partials: tl.tensor, k: tl.tensor, BLOCK: tl.constexpr) -> None:
    """Squares of the corrected gradient, one partial sum per tile."""
    program = tl.program_id(0).to(tl.int64)
    row = table + tl.load(tiles + 2 * program) * 3
    start = tl.load(tiles + 2 * program + 1)
    length = tl.load(row + 2)
    if (start + BLOCK <= length) & wide(row, 2):
        _norm_tile(row, start, length, partials + program, k, BLOCK, True)
    else:
        _norm_tile(row, start, length, partials + program, k, BLOCK, False)


@jit
def _norm_tile(
    row: tl.tensor,
    start: tl.tensor,
    length: tl.tensor,
    partial: tl.tensor,
    k: tl.tensor,
    BLOCK: tl.constexpr,
    FAST: tl.constexpr,
) -> None:
    inside = start + tl.arange(0, BLOCK) < length
    corrected, grad = _corrected(row, start, inside, k, 1, BLOCK, FAST)
    corrected = corrected.to(tl.float64)
    tl.store(partial, tl.sum(corrected * corrected, axis=0))


@jit
def update_kernel(
    table: tl.tensor,
    tiles: tl.tensor,
    coefficients: tl.tensor,
    lr: tl.tensor,
    weight_decay: tl.tensor,
    k: tl.tensor,
    beta1: tl.tensor,
    share1: tl.tensor,
    beta2: tl.tensor,
    share2: tl.tensor,
    root_scale: tl.tensor,
    eps: tl.tensor,
    step_scale: tl.tensor,
    RULE: tl.constexpr,
    CORRECT: tl.constexpr,
    SCALED: tl.constexpr,
    ADVANCE: tl.constexpr,
    LR_ON_DEVICE: tl.constexpr,
    ROOTS_ON_DEVICE: tl.constexpr,
    STEPS_ON_DEVICE: tl.constexpr,
    FIELDS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """The update of one tile; RULE: 0 momentum only, 1 Lion, 2 AdamW."""
    program = tl.program_id(0).to(tl.int64)
    run = tl.load(tiles + 2 * program)
    row = table + run * (FIELDS + 1)
    start = tl.load(tiles + 2 * program + 1)
    length = tl.load(row + FIELDS)
    rate = number(lr, LR_ON_DEVICE)
    keep = 1.0 - rate * weight_decay
    rate = rate * number_of(step_scale, run, STEPS_ON_DEVICE)
    root = number_of(root_scale, run, ROOTS_ON_DEVICE)
    coefficient = 1.0
    if SCALED:
        coefficient = tl.load(coefficients + run)
    # fmt: off
    if (start + BLOCK <= length) & wide(row, FIELDS):
        _update_tile(row, start, length, coefficient, rate, keep, k, beta1, share1, beta2, share2, root, eps,
                     RULE, CORRECT, SCALED, ADVANCE, FIELDS, BLOCK, True)
    else:
        _update_tile(row, start, length, coefficient, rate, keep, k, beta1, share1, beta2, share2, root, eps,
                     RULE, CORRECT, SCALED, ADVANCE, FIELDS, BLOCK, False)
    # fmt: on


@jit
def _update_tile(
    row: tl.tensor,
    start: tl.tensor,
    length: tl.tensor,
    coefficient: tl.tensor,
    rate: tl.tensor,
    keep: tl.tensor,
    k: tl.tensor,
    beta1: tl.tensor,
    share1: tl.tensor,
    beta2: tl.tensor,
    share2: tl.tensor,
    root_scale: tl.tensor,
    eps: tl.tensor,
    RULE: tl.constexpr,
    CORRECT: tl.constexpr,
    SCALED: tl.constexpr,
    ADVANCE: tl.constexpr,
    FIELDS: tl.constexpr,
    BLOCK: tl.constexpr,
    FAST: tl.constexpr,
) -> None:
    """Fields: gradient, momentum, then weight, second moment (AdamW) and, last, reference, as far as there are."""
    inside = start + tl.arange(0, BLOCK) < length
    if CORRECT:
        value, grad = _corrected(row, start, inside, k, FIELDS - 1, BLOCK, FAST)
        if ADVANCE:
            write(row, FIELDS - 1, start, grad, inside, BLOCK, FAST)
    else:
        value = read(row, 0, start, inside, BLOCK, FAST)
    if SCALED:
        value = value * coefficient
    momentum = beta1 * read(row, 1, start, inside, BLOCK, FAST) + share1 * value
    write(row, 1, start, momentum, inside, BLOCK, FAST)
    if RULE == 1:
        sign = (momentum > 0.0).to(tl.float32) - (momentum < 0.0).to(tl.float32)
        weight = read(row, 2, start, inside, BLOCK, FAST)
        write(row, 2, start, weight * keep - rate * sign, inside, BLOCK, FAST)
    if RULE == 2:
        second = beta2 * read(row, 3, start, inside, BLOCK, FAST) + share2 * value * value
        write(row, 3, start, second, inside, BLOCK, FAST)
        # Rounded correctly: the fast root flushes denormal second moments to zero.
        direction = tl.div_rn(momentum, tl.sqrt_rn(second) * root_scale + eps)
        weight = read(row, 2, start, inside, BLOCK, FAST)
        write(row, 2, start, weight * keep - rate * direction, inside, BLOCK, FAST)
