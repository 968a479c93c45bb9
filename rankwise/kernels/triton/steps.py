"""Plain steps and norms of many runs: one launch each, whatever their number."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton.language as tl
from torch import Tensor

from rankwise.kernels.triton.language import device_scalar, jit, launch
from rankwise.kernels.triton.segments import Runs, read, run_sums, wide, write
from rankwise.updates.adamw import Scalar

__all__ = ["number", "number_of", "one_per_run", "scaled_step_", "squared_norms", "step_scale"]

TILE = 2048
WARPS = 4


def squared_norms(tensors: Sequence[Tensor]) -> Tensor:
    """Squared 2-norm of every run, in fp64, summed in a fixed order. Reads 4 bytes per element.

    Args:
        tensors: Contiguous fp32 runs.

    Returns:
        (n,) fp64 on their device.

    Raises:
        ValueError: If a tensor is of another kind.
    """
    if not tensors:
        return torch.empty(0, dtype=torch.float64)
    runs = Runs([tensors], TILE)
    partials = runs.partial_sums(1)
    launch(_norm_kernel, (runs.count,), runs.device, runs.table, runs.tiles, partials, BLOCK=TILE, num_warps=WARPS)
    return run_sums(runs, partials)[0]


def scaled_step_(
    params: Sequence[Tensor],
    directions: Sequence[Tensor],
    ratios: Tensor | None,
    *,
    lr: Scalar,
    weight_decay: float,
) -> None:
    """``p := (1 - lr wd) p - lr ratio_i d``. Reads 8 bytes per element, writes 4.

    Args:
        params: Weights, updated in place.
        directions: Directions, read only.
        ratios: (n,) one factor per run, or None for 1.
        lr: Learning rate, a float or a 0-d tensor.
        weight_decay: Decoupled decay rate.

    Raises:
        ValueError: If a tensor is not a contiguous fp32 run or the lists do not fit together.
    """
    if not params:
        return
    runs = Runs([params, directions], TILE)
    launch(
        _step_kernel,
        (runs.count,),
        runs.device,
        runs.table,
        runs.tiles,
        one_per_run(ratios, runs),
        device_scalar(lr, runs.device),
        float(weight_decay),
        SCALED=ratios is not None,
        LR_ON_DEVICE=isinstance(lr, Tensor),
        BLOCK=TILE,
        num_warps=WARPS,
    )


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
def _norm_kernel(table: tl.tensor, tiles: tl.tensor, partials: tl.tensor, BLOCK: tl.constexpr) -> None:
    program = tl.program_id(0).to(tl.int64)
    row = table + tl.load(tiles + 2 * program) * 2
    start = tl.load(tiles + 2 * program + 1)
    length = tl.load(row + 1)
    if (start + BLOCK <= length) & wide(row, 1):
        _norm_tile(row, start, length, partials + program, BLOCK, True)
    else:
        _norm_tile(row, start, length, partials + program, BLOCK, False)


@jit
def _norm_tile(
    row: tl.tensor, start: tl.tensor, length: tl.tensor, partial: tl.tensor, BLOCK: tl.constexpr, FAST: tl.constexpr
) -> None:
    inside = start + tl.arange(0, BLOCK) < length
    value = read(row, 0, start, inside, BLOCK, FAST).to(tl.float64)
    tl.store(partial, tl.sum(value * value, axis=0))


@jit
def _step_kernel(
    table: tl.tensor,
    tiles: tl.tensor,
    ratios: tl.tensor,
    lr: tl.tensor,
    weight_decay: tl.tensor,
    SCALED: tl.constexpr,
    LR_ON_DEVICE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    program = tl.program_id(0).to(tl.int64)
    run = tl.load(tiles + 2 * program)
    row = table + run * 3
    start = tl.load(tiles + 2 * program + 1)
    length = tl.load(row + 2)
    rate = number(lr, LR_ON_DEVICE)
    keep = 1.0 - rate * weight_decay
    if SCALED:
        rate = rate * tl.load(ratios + run)
    if (start + BLOCK <= length) & wide(row, 2):
        _step_tile(row, start, length, keep, rate, BLOCK, True)
    else:
        _step_tile(row, start, length, keep, rate, BLOCK, False)


@jit
def _step_tile(
    row: tl.tensor,
    start: tl.tensor,
    length: tl.tensor,
    keep: tl.tensor,
    rate: tl.tensor,
    BLOCK: tl.constexpr,
    FAST: tl.constexpr,
) -> None:
    inside = start + tl.arange(0, BLOCK) < length
    weight = read(row, 0, start, inside, BLOCK, FAST)
    direction = read(row, 1, start, inside, BLOCK, FAST)
    write(row, 0, start, weight * keep - direction * rate, inside, BLOCK, FAST)
