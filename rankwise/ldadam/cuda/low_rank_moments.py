r"""One launch rotates the moments of many matrices, advances them, and writes LDAdam's directions.

Bytes (fp32) per element of (r, n): 12 read and 12 written, the rotation besides. Where the moments advance in place a
program has all rows of some columns, so that nothing is written that another program still reads, and directions and
new momenta are written as halves for the products of the step, which takes 4 bytes more.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch
import triton.language as tl
from torch import Tensor

from rankwise.kernels.triton.language import ceil_div, jit, launch
from rankwise.kernels.triton.segments import addresses
from rankwise.kernels.triton.steps import number_of
from rankwise.kernels.triton.tables import table_here
from rankwise.ldadam.cuda.halves import empty_halves, multiply, split
from rankwise.ldadam.formulas import MomentScales, moment_scales
from rankwise.updates.adamw import Scalar, Step

__all__ = ["MAX_RANK", "advance_moments_", "low_rank_moments"]

MAX_RANK = 512
"""Highest rank of moments that advance in place, as all rows of a tile lie in the registers of one program."""
_TILE, _LEAST, _DEPTH = (32, 64), 16, 32
_ELEMENTS = 4096


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

    Returns:
        ``M``, ``V`` and the direction ``D``, (b, r, n) each, new.

    Raises:
        ValueError: ``step`` is below 1, a moment is not contiguous, a tensor is not fp32 or the shapes do not fit.
    """
    if projected.dim() == 2:
        one = (projected[None], rotation[None], M_prev[None], V_prev[None])
        step = step[None] if isinstance(step, Tensor) else step
        written_beta1 = written_beta1[None] if isinstance(written_beta1, Tensor) else written_beta1
        moments_of_one = low_rank_moments(*one, step, betas, eps, error_feedback, written_beta1)
        return moments_of_one[0][0], moments_of_one[1][0], moments_of_one[2][0]
    # Coordinates of tall matrices come as the transposed result of a product.
    projected, rotation = projected.contiguous(), rotation.contiguous()
    scales = moment_scales(step, betas, error_feedback, written_beta1)
    batch, rank, _ = projected.shape
    if rotation.shape != (batch, rank, rank) or M_prev.shape != projected.shape or V_prev.shape != projected.shape:
        raise ValueError(f"rotation and moments do not fit projected {tuple(projected.shape)}; check the states")
    addresses([projected, rotation, M_prev, V_prev])
    moments = torch.empty(3, *projected.shape, dtype=torch.float32, device=projected.device)
    stacks = [stack.unbind() for stack in (M_prev, V_prev, moments[0], moments[1])]
    results = (moments[2], moments[2])
    _launch(stacks, projected, rotation, results, step, scales, betas, eps, _TILE)
    return moments[0], moments[1], moments[2]


def advance_moments_(
    projected: Tensor,
    rotation: Tensor,
    firsts: Sequence[Tensor],
    seconds: Sequence[Tensor],
    *,
    step: int,
    betas: tuple[float, float],
    eps: float,
    error_feedback: bool,
) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """Do :func:`rankwise.ldadam.rule.low_rank_moments` in place, from the second step on.

    Args:
        projected: ``U^T C`` (b, r, n), contiguous.
        rotation: ``R`` (b, r, r), contiguous.
        firsts: First moments (r, n), changed in place.
        seconds: Second moments (r, n), changed in place.
        step: Number of steps with this one, above 1.
        betas: Decays of the two moments.
        eps: Number added to the root.
        error_feedback: Whether ``projected`` comes from ``C = G + F``.

    Returns:
        Halves (2, r, n) of the directions and of the first moments.

    Raises:
        ValueError: The rank is above :data:`MAX_RANK`, or a moment is not contiguous fp32.
    """
    rank, device = projected.shape[1], projected.device
    if rank > MAX_RANK or step < 2:
        raise ValueError(f"moments of at most {MAX_RANK} rows advance in place, from step 2; got {rank} and {step}")
    rows = max(_LEAST, 1 << (rank - 1).bit_length())
    tile = rows, max(_LEAST, min(64, _ELEMENTS // rows))
    scales = moment_scales(step, betas, error_feedback, None)
    results = empty_halves([projected.shape] * 2, device)
    _launch((firsts, seconds, firsts, seconds), projected, rotation, results, step, scales, betas, eps, tile)
    return results[0].unbind(1), results[1].unbind(1)


def _launch(
    moments: Sequence[Sequence[Tensor]],
    projected: Tensor,
    rotation: Tensor,
    results: Sequence[Tensor],
    step: Step,
    scales: MomentScales,
    betas: tuple[float, float],
    eps: float,
    tile: tuple[int, int],
) -> None:
    batch, rank, length = projected.shape
    places = tuple(chain.from_iterable(zip(*map(addresses, moments), strict=True)))
    counted = isinstance(step, Tensor)
    launch(
        _moments_kernel,
        (ceil_div(length, tile[1]), ceil_div(rank, tile[0]), batch),
        projected.device,
        table_here(places, projected.device),
        projected,
        rotation,
        *results,
        results[0].stride(0),
        rank,
        length,
        float(betas[0]),
        1.0 - betas[0],
        float(betas[1]),
        1.0 - betas[1],
        *_kernel_scales(scales, batch),
        float(eps),
        FIRST=not counted and step == 1,
        STEPS_ON_DEVICE=counted,
        HALVED=results[0].dim() == 4,
        ROWS=tile[0],
        COLUMNS=tile[1],
        DEPTH=_DEPTH if tile[0] <= 256 else _DEPTH // 2,  # what a program reads at once lies in registers, too
        num_warps=16 if tile[0] > 256 else 8,
    )


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
    table: tl.tensor,
    projected: tl.tensor,
    rotation: tl.tensor,
    direction: tl.tensor,
    kept: tl.tensor,
    low: tl.tensor,
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
    HALVED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
) -> None:
    entry = tl.program_id(2).to(tl.int64)
    old_first = tl.load(table + 4 * entry).to(tl.pointer_type(tl.float32))
    old_second = tl.load(table + 4 * entry + 1).to(tl.pointer_type(tl.float32))
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (rows[:, None] < rank) & (columns[None, :] < length)
    place = rows[:, None] * length + columns[None, :]
    start = entry * rank * length
    rotated = tl.full((ROWS, COLUMNS), 0.0, tl.float32)
    spread = tl.full((ROWS, COLUMNS), 0.0, tl.float32)
    carried = tl.full((ROWS, COLUMNS), 0.0, tl.float32)
    if not FIRST:
        scale1 = number_of(unbias1, entry, STEPS_ON_DEVICE)
        scale2 = number_of(unbias2, entry, STEPS_ON_DEVICE)
        for first_row in range(0, rank, DEPTH):
            along = first_row + tl.arange(0, DEPTH)
            turn = tl.load(
                rotation + entry * rank * rank + (rows[:, None] * rank + along[None, :]),
                mask=(rows[:, None] < rank) & (along[None, :] < rank),
                other=0.0,
            )
            old = along[:, None] * length + columns[None, :]
            present = (along[:, None] < rank) & (columns[None, :] < length)
            moment = tl.load(old_first + old, mask=present, other=0.0)
            square = tl.load(old_second + old, mask=present, other=0.0)
            mean = moment * scale1
            rotated = multiply(turn, moment, rotated)
            spread = multiply(turn * turn, square * scale2 - mean * mean, spread)
        mean = rotated * scale1
        carried = number_of(bias2, entry, STEPS_ON_DEVICE) * tl.abs(spread + mean * mean)
        # Where moments advance in place, every thread has read before any thread writes.
        tl.debug_barrier()
    gradient = tl.load(projected + start + place, mask=inside, other=0.0)
    if not FIRST:
        gradient -= number_of(momentum_share, entry, STEPS_ON_DEVICE) * rotated
    first = beta1 * rotated + share1 * gradient
    second = beta2 * carried + share2 * gradient * gradient
    new_first = tl.load(table + 4 * entry + 2).to(tl.pointer_type(tl.float32))
    new_second = tl.load(table + 4 * entry + 3).to(tl.pointer_type(tl.float32))
    tl.store(new_first + place, first, mask=inside)
    tl.store(new_second + place, second, mask=inside)
    ahead = first * number_of(step_scale, entry, STEPS_ON_DEVICE)
    step = tl.div_rn(ahead, tl.sqrt_rn(second * number_of(root_scale, entry, STEPS_ON_DEVICE)) + eps)
    if HALVED:
        high, rest = split(step)
        tl.store(direction + start + place, high, mask=inside)
        tl.store(direction + low + start + place, rest, mask=inside)
        high, rest = split(first)
        tl.store(kept + start + place, high, mask=inside)
        tl.store(kept + low + start + place, rest, mask=inside)
    else:
        tl.store(direction + start + place, step, mask=inside)
