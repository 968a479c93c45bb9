r"""LDAdam's low-dimensional block: rotation, moments and direction of a stack in one launch.

Bytes (fp32) per element of (b, r, n): 12 read and 12 written, plus re-reads of the old moments by the row tiles, which
the cache serves.

Products are in full fp32. ``precision="tf32x3"`` runs them on tensor cores in three parts, with nearly the same
accuracy.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from rankwise.kernels.triton.language import ceil_div, jit, launch
from rankwise.kernels.triton.segments import addresses

__all__ = ["low_rank_moments"]

# Rows, columns and summed-over entries of a tile.
BLOCK_ROWS, BLOCK_COLUMNS, BLOCK_DEPTH = 32, 64, 32
WARPS = 8


def low_rank_moments(
    projected: Tensor,
    rotation: Tensor,
    M_prev: Tensor,
    V_prev: Tensor,
    step: int,
    betas: tuple[float, float],
    eps: float,
    error_feedback: bool,
    written_beta1: float | None = None,
    *,
    precision: str = "ieee",
) -> tuple[Tensor, Tensor, Tensor]:
    r"""As :func:`rankwise.updates.ldadam.low_rank_moments`: rotation, moments and direction in one launch.

    Args:
        projected: ``U^T C``, (b, r, n) or of a single matrix without b, as the others.
        rotation: ``R`` (b, r, r); ignored at step 1.
        M_prev: First moment (b, r, n); ignored at step 1.
        V_prev: Second moment (b, r, n); ignored at step 1.
        step: Steps applied including this one.
        betas: Decays of the two moments.
        eps: Added to the root.
        error_feedback: Whether ``projected`` comes from ``C = G + F``.
        written_beta1: The ``beta1`` that ``F`` was written with; None: the present one.
        precision: Of the products: "ieee" or "tf32x3".

    Returns:
        ``M``, ``V`` and the direction ``D``, (b, r, n) each, new.

    Raises:
        ValueError: If ``step`` is below 1, a moment is not contiguous, a tensor is not fp32 or the shapes do not fit.
    """
    if projected.dim() == 2:
        one = (projected[None], rotation[None], M_prev[None], V_prev[None])
        found = low_rank_moments(*one, step, betas, eps, error_feedback, written_beta1, precision=precision)
        return found[0][0], found[1][0], found[2][0]
    # Coordinates of tall matrices come as the transposed result of a product.
    projected, rotation = projected.contiguous(), rotation.contiguous()
    batch, rank, length = projected.shape
    if step < 1:
        raise ValueError(f"step must be at least 1, got {step}; count the step being applied")
    if rotation.shape != (batch, rank, rank) or M_prev.shape != projected.shape or V_prev.shape != projected.shape:
        raise ValueError(f"rotation and moments do not fit projected {tuple(projected.shape)}; check the states")
    addresses([projected, rotation, M_prev, V_prev])
    moments = torch.empty(3, batch, rank, length, dtype=torch.float32, device=projected.device)
    beta1, beta2 = betas
    written = beta1 if written_beta1 is None else written_beta1
    # At step 1 nothing is carried over, and nothing is divided by these.
    bias1, bias2 = (1 - beta1 ** (step - 1), 1 - beta2 ** (step - 1)) if step > 1 else (1.0, 1.0)
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
        1.0 / bias1,
        1.0 / bias2,
        float(bias2),
        written / (1.0 - written) if error_feedback else 0.0,
        1.0 / (1 - beta1**step),
        1.0 / (1 - beta2**step),
        float(eps),
        FIRST=step == 1,
        PRECISION=precision,
        ROWS=BLOCK_ROWS,
        COLUMNS=BLOCK_COLUMNS,
        DEPTH=BLOCK_DEPTH,
        num_warps=WARPS,
    )
    return moments[0], moments[1], moments[2]


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
            mean = moment * unbias1
            rotated = tl.dot(turn, moment, rotated, input_precision=PRECISION)
            spread = tl.dot(turn * turn, square * unbias2 - mean * mean, spread, input_precision=PRECISION)
        mean = rotated * unbias1
        carried = bias2 * tl.abs(spread + mean * mean)
        gradient -= momentum_share * rotated
        first = beta1 * rotated + share1 * gradient
        second = beta2 * carried + share2 * gradient * gradient
    tl.store(new_first + place, first, mask=inside)
    tl.store(new_second + place, second, mask=inside)
    step = tl.div_rn(first * step_scale, tl.sqrt_rn(second * root_scale) + eps)
    tl.store(direction + place, step, mask=inside)
