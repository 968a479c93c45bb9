r"""Weights step along orthogonalised momenta in stacks of equal shapes, without copies in fp32 in between.

Bytes per element, outside the products: 6 for the normalised copy in bfloat16, 10 for the weight, and 4 for the norms
that the passes over the momenta have not measured. One launch steps the weights of a stack and normalises the momenta
of the next one. Tall matrices are not transposed in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from rankwise.kernels.orthogonal_step import Momentum, OrthogonalStep
from rankwise.kernels.triton import steps
from rankwise.kernels.triton.chosen_products import chosen
from rankwise.kernels.triton.language import ELEMENTS, device_scalar, jit, launch
from rankwise.kernels.triton.segments import Runs, lanes_of, moved, place_of, read, wide, write
from rankwise.kernels.triton.steps import kept, number
from rankwise.kernels.triton.symmetric_newton_schulz import HALVED
from rankwise.updates.polynomial_steps import SCRATCH, orthogonalise, scratch
from rankwise.updates.polynomials import quintics

__all__ = ["orthogonal_steps_", "takes"]

_MOST = (1 << 15) - 1
"""Matrices of a stack; a product takes two for each, and a grid of CUDA's has less than 2^16 in that direction."""


def takes(dtype: torch.dtype, product: torch.dtype) -> bool:
    """Whether there is a form for matrices of this type with products in this type."""
    return dtype == torch.float32 and product in ELEMENTS


def orthogonal_steps_(jobs: Sequence[OrthogonalStep], product: torch.dtype, timed: bool = False) -> None:
    """Step weights along the orthogonal factors of their momenta.

    Args:
        jobs: Steps whose tensors are contiguous fp32 runs.
        product: Type of the products of jobs that name none.
        timed: Whether the products may be timed, as :func:`.chosen_products.chosen` says.

    Raises:
        ValueError: A tensor is not a contiguous fp32 run.
    """
    ended: list[_Stack] = []
    for job, matrices in _stacks(jobs, product):
        momenta, weights, vectors, places = map(list, zip(*matrices, strict=True))
        squares = vectors[0]
        if squares is None or len(set(map(id, vectors))) > 1:
            squares, places = steps.squared_norms(momenta, None, 0.0), list(range(len(momenta)))
        # Lists are emptied: only the iteration holds its start, and nothing holds what has ended.
        start = [torch.empty(len(momenta), *job.shape, dtype=job.product or product, device=squares.device)]
        if ended and ended[0].stack.itemsize != start[0].itemsize:
            _step_and_normalise([ended.pop()])
        _step_and_normalise([*ended, _Stack(job, momenta, start[0], places, squares)])
        ended.clear()
        turned, table = job.shape[0] > job.shape[1], quintics(job.coefficients, job.steps)
        products = chosen(HALVED, start[0], turned, timed)
        ended.append(
            _Stack(job, weights, orthogonalise(start.pop(), table, products, turned), [-1] * len(weights), squares)
        )
    if ended:
        _step_and_normalise(ended)


class _Stack(NamedTuple):
    """A stack that begins or has ended.

    Attributes:
        job: A job with the numbers that are common to the matrices.
        runs: Momenta of a stack that begins, weights of one that has ended.
        stack: Where the normalised momenta go, or the orthogonal factors.
        places: Places of the momenta's squared norms; -1 where weights are to step.
        squares: Squared norms.
    """

    job: OrthogonalStep
    runs: list[Tensor]
    stack: Tensor
    places: list[int]
    squares: Tensor


def _stacks(jobs: Sequence[OrthogonalStep], product: torch.dtype) -> Iterator[tuple[OrthogonalStep, list[Momentum]]]:
    """Yield matrices that are computed together, each time with a job that has their common numbers."""

    def sign(job: OrthogonalStep) -> tuple[Any, ...]:
        rate = id(job.lr) if isinstance(job.lr, Tensor) else job.lr
        numbers = job.eps, job.factor, rate, job.weight_decay, job.cautious, job.steps, job.coefficients
        return job.shape, str(job.product), *numbers

    for _, group in groupby(sorted(jobs, key=sign), sign):
        stacked = list(group)
        matrices = [matrix for job in stacked for matrix in job.matrices()]
        short, long = sorted(stacked[0].shape)
        table = quintics(stacked[0].coefficients, stacked[0].steps)
        own = stacked[0].product or product
        at_once = SCRATCH // (own.itemsize * scratch(short, long, own, table))
        at_once = min(max(1, at_once), _MOST)
        for first in range(0, len(matrices), at_once):
            yield stacked[0], matrices[first : first + at_once]


def _step_and_normalise(stacks: Sequence[_Stack]) -> None:
    """Do in one launch what is left to do for a stack that has ended, and what comes first for one that begins."""
    old, new = stacks[0], stacks[-1]
    wide_runs = [run for each in stacks for run in each.runs]
    # The types of both have as many bits, and only the kernel reads them.
    narrow_runs = [run for each in stacks for run in each.stack.view(new.stack.dtype).view(len(each.runs), -1).unbind()]
    places = [place for each in stacks for place in each.places]
    runs = Runs([wide_runs, narrow_runs], steps.TILES * steps.PASS_TILE, [places], [torch.float32, new.stack.dtype])
    launch(
        step_and_normalise_kernel,
        (runs.count,),
        runs.device,
        runs.table,
        runs.tiles,
        new.squares,
        float(new.job.eps),
        device_scalar(old.job.lr, runs.device),
        float(old.job.weight_decay),
        float(old.job.factor),
        OLD=ELEMENTS[old.stack.dtype],
        NEW=ELEMENTS[new.stack.dtype],
        CAUTIOUS=old.job.cautious and old.job.weight_decay != 0.0,
        LR_ON_DEVICE=isinstance(old.job.lr, Tensor),
        BLOCK=steps.PASS_TILE,
        TILES=steps.TILES,
        num_warps=4 if torch.version.hip is None else 2,  # a thread takes four neighbours of either
        enable_fp_fusion=False,
    )


# fmt: off
@jit
def step_and_normalise_kernel(
    table: tl.tensor, tiles: tl.tensor, squares: tl.tensor, eps: tl.tensor, lr: tl.tensor, weight_decay: tl.tensor,
    scale: tl.tensor, OLD: tl.constexpr, NEW: tl.constexpr, CAUTIOUS: tl.constexpr, LR_ON_DEVICE: tl.constexpr,
    BLOCK: tl.constexpr, TILES: tl.constexpr,
) -> None:
    """Step some tiles of a weight along a factor, or write those of a momentum, divided by its norm, to a stack."""
    program = tl.program_id(0).to(tl.int64)
    row = table + tl.load(tiles + 2 * program) * 4
    start = tl.load(tiles + 2 * program + 1)
    length = tl.load(row + 2)
    place = tl.load(row + 3)
    fast = (start + TILES * BLOCK <= length) & wide(row, 2)
    if place < 0:
        rate = number(lr, LR_ON_DEVICE)
        keep = 1.0 - rate * weight_decay
        if fast:
            _tiles(row, start, length, keep, rate * scale, True, OLD, CAUTIOUS, BLOCK, TILES, True)
        else:
            _tiles(row, start, length, keep, rate * scale, True, OLD, CAUTIOUS, BLOCK, TILES, False)
    else:
        divisor = tl.sqrt(tl.load(squares + place)).to(tl.float32) + eps
        if fast:
            _tiles(row, start, length, divisor, 0.0, False, NEW, CAUTIOUS, BLOCK, TILES, True)
        else:
            _tiles(row, start, length, divisor, 0.0, False, NEW, CAUTIOUS, BLOCK, TILES, False)


@jit
def _tiles(
    row: tl.tensor, start: tl.tensor, length: tl.tensor, share: tl.tensor, rate: tl.tensor, STEP: tl.constexpr,
    ELEMENT: tl.constexpr, CAUTIOUS: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr, FAST: tl.constexpr,
) -> None:
    """Go through tiles of a run; ``share`` is what decay leaves of a weight, or a momentum's divisor."""
    lanes = lanes_of(BLOCK)
    runs, stack = place_of(row, 0, start, FAST), place_of(row, 1, start, FAST, ELEMENT)
    end = tl.minimum(length - start, TILES * BLOCK).to(tl.int32)
    for offset in range(0, end, BLOCK):
        inside = start + offset + lanes < length
        value = read(moved(runs, offset, FAST), lanes, inside, FAST)
        if STEP:
            direction = read(moved(stack, offset, FAST), lanes, inside, FAST).to(tl.float32)
            value = kept(value, direction, share, CAUTIOUS) - direction * rate
            write(moved(runs, offset, FAST), value, lanes, inside, FAST)
        else:
            write(moved(stack, offset, FAST), tl.div_rn(value, share), lanes, inside, FAST)
# fmt: on
