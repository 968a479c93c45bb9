r"""One launch rotates the moments of a stack, advances them, and writes LDAdam's directions.

Bytes (fp32) per element of (b, r, n): 12 read and 12 written; row tiles read the old moments again from the cache.

Products are in full fp32. ``precision="tf32x3"`` runs them on tensor cores in three parts, with nearly the same
accuracy.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from rankwise.kernels.triton.language import ceil_div, jit, launch
from rankwise.kernels.triton.segments import addresses
from rankwise.kernels.triton.steps import number_of
from rankwise.ldadam.formulas import MomentScales, moment_scales
from rankwise.updates.adamw import Scalar, Step

__all__ = ["low_rank_moments"]

# Rows, columns and summed-over entries of a tile.
BLOCK_ROWS, BLOCK_COLUMNS, BLOCK_DEPTH = 32, 64, 32
WARPS = 8


def low_rank_moments(
    projected: Tensor,
    rotation: Tensor,
    M_prev: Tensor,
    V_prev: Tensor,
    step: Step,
    betas: tuple[float, float],
    eps: float,
    error_feedback: bool,
    written_beta1: Scalar | None = None,
    *,
    precision: str = "ieee",
) -> tuple[Tensor, Tensor, Tensor]:
    r"""Compute what :func:`rankwise.ldadam.rule.low_rank_moments` does, in one launch.

    Args:
        projected: ``U^T C``, (b, r, n); for a single matrix this and the others have no dimension b.
        rotation: ``R`` (b, r, r); ignored at step 1.
        M_prev: First moment (b, r, n); ignored at step 1.
        V_prev: Second moment (b, r, n); ignored at step 1.
        step: Number of steps with this one; or (b,), a number for each matrix (0-d for a single one), all above 1.
        betas: Decays of the two moments.
        eps: Number added to the root.
        error_feedback: Whether ``projected`` comes from ``C = G + F``.
        written_beta1: The ``beta1`` that ``F`` was written with; None: the present one.
        precision: Precision of the products: "ieee" or "tf32x3".

    Returns:
        ``M``, ``V`` and the direction ``D``, (b, r, n) each, new.

    Raises:
        ValueError: ``step`` is below 1, a moment is not contiguous, a tensor is not fp32 or the shapes do not fit.
    """
    if projected.dim() == 2:
        one = (projected[None], rotation[None], M_prev[None], V_prev[None])
        step = step[None] if isinstance(step, Tensor) else step
        written_beta1 = written_beta1[None] if isinstance(written_beta1, Tensor) else written_beta1
        moments_of_one = low_rank_moments(*one, step, betas, eps, error_feedback, written_beta1, precision=precision)
        return moments_of_one[0][0], moments_of_one[1][0], moments_of_one[2][0]
    # Coordinates of tall matrices come as the transposed result of a product.
    projected, rotation = projected.contiguous(), rotation.contiguous()
    batch, rank, length = projected.shape
    scales = moment_scales(step, betas, error_feedback, written_beta1)
    if rotation.shape != (batch, rank, rank) or M_prev.shape != projected.shape or V_prev.shape != projected.shape:
        raise ValueError(f"rotation and moments do not fit projected {tuple(projected.shape)}; check the states")
    addresses([projected, rotation, M_prev, V_prev])
    moments = torch.empty(3, batch, rank, length, dtype=torch.float32, device=projected.device)
    beta1, beta2 = betas
    counted = isinstance(step, Tensor)
    launch(
        _moments_kernel,
        (ceil_div(length, BLOCK_COLUMNS), ceil_div(rank, BLOCK_ROWS), batch),
        projected.device,
        projected,
        rotation,
        M_prev,
        V_prev,
        *moments,
        rank,
        length,
        float(beta1),
        1.0 - beta1,
        float(beta2),
        1.0 - beta2,
        *_kernel_scales(scales, batch),
        float(eps),
        FIRST=not counted and step == 1,
        STEPS_ON_DEVICE=counted,
        PRECISION=precision,
        ROWS=BLOCK_ROWS,
        COLUMNS=BLOCK_COLUMNS,
        DEPTH=BLOCK_DEPTH,
        num_warps=WARPS,
    )
    return moments[0], moments[1], moments[2]


def _kernel_scales(scales: MomentScales, batch: int) -> list[Scalar]:
    """Return scales as the kernel takes them: floats, or tensors (b,)."""
    bias1, bias2, share, correction1, correction2 = scales
    factors = (1.0 / bias1, 1.0 / bias2, bias2, share, 1.0 / correction1, 1.0 / correction2)
    if not isinstance(bias1, Tensor):
        return [float(factor) for factor in factors]
    wide = [factor if isinstance(factor, Tensor) else torch.full_like(bias1, factor) for factor in factors]
    return list(torch.stack([factor.expand(batch) for factor in wide]).to(torch.float32).unbind())


@jit
def _moments_kernel(
    projected: tl.tensor,
    rotation: tl.tensor,
    old_first: tl.tensor,
    old_second: tl.tensor,
    new_first: tl.tensor,
    new_second: tl.tensor,
    direction: tl.tensor,
    rank: tl.tensor,
    length: tl.tensor,
    beta1: tl.tensor,
    share1: tl.tensor,
    beta2: tl.tensor,
    share2: tl.tensor,
    unbias1: tl.tensor,
    unbias2: tl.tensor,
    bias2: tl.tensor,
    momentum_share: tl.tensor,
    step_scale: tl.tensor,
    root_scale: tl.tensor,
    eps: tl.tensor,
    FIRST: tl.constexpr,
    STEPS_ON_DEVICE: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
) -> None:
    batch = tl.program_id(2).to(tl.int64)
    rows = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (rows[:, None] < rank) & (columns[None, :] < length)
    place = (batch * rank + rows[:, None]) * length + columns[None, :]
    gradient = tl.load(projected + place, mask=inside, other=0.0)
    first = share1 * gradient
    second = share2 * gradient * gradient
    if not FIRST:
        scale1 = number_of(unbias1, batch, STEPS_ON_DEVICE)
        scale2 = number_of(unbias2, batch, STEPS_ON_DEVICE)
        rotated = tl.full((ROWS, COLUMNS), 0.0, tl.float32)
        spread = tl.full((ROWS, COLUMNS), 0.0, tl.float32)
        for start in range(0, rank, DEPTH):
            along = start + tl.arange(0, DEPTH)
            turn = tl.load(
                rotation + (batch * rank + rows[:, None]) * rank + along[None, :],
                mask=(rows[:, None] < rank) & (along[None, :] < rank),
                other=0.0,
            )
            old = (batch * rank + along[:, None]) * length + columns[None, :]
            present = (along[:, None] < rank) & (columns[None, :] < length)
            moment = tl.load(old_first + old, mask=present, other=0.0)
            square = tl.load(old_second + old, mask=present, other=0.0)
            mean = moment * scale1
            rotated = tl.dot(turn, moment, rotated, input_precision=PRECISION)
            spread = tl.dot(turn * turn, square * scale2 - mean * mean, spread, input_precision=PRECISION)
        mean = rotated * scale1
        carried = number_of(bias2, batch, STEPS_ON_DEVICE) * tl.abs(spread + mean * mean)
        gradient -= number_of(momentum_share, batch, STEPS_ON_DEVICE) * rotated
        first = beta1 * rotated + share1 * gradient
        second = beta2 * carried + share2 * gradient * gradient
    tl.store(new_first + place, first, mask=inside)
    tl.store(new_second + place, second, mask=inside)
    ahead = first * number_of(step_scale, batch, STEPS_ON_DEVICE)
    step = tl.div_rn(ahead, tl.sqrt_rn(second * number_of(root_scale, batch, STEPS_ON_DEVICE)) + eps)
    tl.store(direction + place, step, mask=inside)
