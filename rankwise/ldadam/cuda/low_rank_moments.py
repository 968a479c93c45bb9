r"""One launch rotates and advances LDAdam's moments where they lie, and writes directions, for many matrices.

Bytes (fp32) per element of (r, n): 12 read and 12 written, the rotation besides. A program has all rows of some
columns, so that nothing is written that another program still reads. Directions are written as halves, for the products
of the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import triton.language as tl
from torch import Tensor

from rankwise.kernels.triton.language import ceil_div, jit, launch
from rankwise.kernels.triton.segments import addresses
from rankwise.kernels.triton.tables import table_here
from rankwise.ldadam.cuda.halves import empty_halves, multiply, split
from rankwise.ldadam.formulas import moment_scales

__all__ = ["MAX_RANK", "advance_moments_"]

MAX_RANK = 512
"""Highest rank, as all rows of a tile lie in the registers of one program."""
_ELEMENTS, _LEAST, _DEPTH = 4096, 16, 32


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
) -> Sequence[Tensor]:
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
        Halves (2, r, n) of the directions.

    Raises:
        ValueError: The rank is above :data:`MAX_RANK`, or a moment is not contiguous fp32.
    """
    batch, rank, length = projected.shape
    if rank > MAX_RANK or step < 2:
        raise ValueError(f"moments of at most {MAX_RANK} rows advance in place, from step 2; got {rank} and {step}")
    scales = moment_scales(step, betas, error_feedback, None)
    places = tuple(chain.from_iterable(zip(addresses(firsts), addresses(seconds), strict=True)))
    rows = max(_LEAST, 1 << (rank - 1).bit_length())
    columns = max(_LEAST, min(64, _ELEMENTS // rows))
    (directions,) = empty_halves([projected.shape], projected.device)
    launch(
        _moments_kernel,
        (ceil_div(length, columns), batch),
        projected.device,
        table_here(places, projected.device),
        projected,
        rotation,
        directions,
        directions.stride(0),
        rank,
        length,
        float(betas[0]),
        1.0 - betas[0],
        float(betas[1]),
        1.0 - betas[1],
        float(1.0 / scales.bias1),
        float(1.0 / scales.bias2),
        float(scales.bias2),
        float(scales.share),
        float(1.0 / scales.correction1),
        float(1.0 / scales.correction2),
        float(eps),
        ROWS=rows,
        COLUMNS=columns,
        DEPTH=_DEPTH if rows <= 256 else _DEPTH // 2,  # what a program reads at once lies in registers, too
        num_warps=16 if rows > 256 else 8,
    )
    return directions.unbind(1)


@jit
def _moments_kernel(
    table: tl.tensor,
    projected: tl.tensor,
    rotation: tl.tensor,
    direction: tl.tensor,
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
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
) -> None:
    entry = tl.program_id(1).to(tl.int64)
    first_moment = tl.load(table + 2 * entry).to(tl.pointer_type(tl.float32))
    second_moment = tl.load(table + 2 * entry + 1).to(tl.pointer_type(tl.float32))
    rows = tl.arange(0, ROWS)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    rotated = tl.full((ROWS, COLUMNS), 0.0, tl.float32)
    spread = tl.full((ROWS, COLUMNS), 0.0, tl.float32)
    for start in range(0, rank, DEPTH):
        along = start + tl.arange(0, DEPTH)
        turn = tl.load(
            rotation + entry * rank * rank + (rows[:, None] * rank + along[None, :]),
            mask=(rows[:, None] < rank) & (along[None, :] < rank),
            other=0.0,
        )
        old = along[:, None] * length + columns[None, :]
        present = (along[:, None] < rank) & (columns[None, :] < length)
        moment = tl.load(first_moment + old, mask=present, other=0.0)
        square = tl.load(second_moment + old, mask=present, other=0.0)
        mean = moment * unbias1
        rotated = multiply(turn, moment, rotated)
        spread = multiply(turn * turn, square * unbias2 - mean * mean, spread)
    # Every thread has read before any thread writes.
    tl.debug_barrier()
    place = rows[:, None] * length + columns[None, :]
    inside = (rows[:, None] < rank) & (columns[None, :] < length)
    at_entry = entry * rank * length + place
    gradient = tl.load(projected + at_entry, mask=inside, other=0.0) - momentum_share * rotated
    mean = rotated * unbias1
    first = beta1 * rotated + share1 * gradient
    second = beta2 * (bias2 * tl.abs(spread + mean * mean)) + share2 * gradient * gradient
    tl.store(first_moment + place, first, mask=inside)
    tl.store(second_moment + place, second, mask=inside)
    high, rest = split(tl.div_rn(first * step_scale, tl.sqrt_rn(second * root_scale) + eps))
    tl.store(direction + at_entry, high, mask=inside)
    tl.store(direction + low + at_entry, rest, mask=inside)
