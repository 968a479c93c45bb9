r"""Weights step along orthogonalised momenta in stacks of equal shapes, without copies in fp32 in between.

Bytes per element, outside the products: 6 for the normalised copy in bfloat16, 10 for the weight, and 4 for the norms
that the passes over the momenta have not measured. Tall matrices are not transposed in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from rankwise.kernels.orthogonal_step import Momentum, OrthogonalStep
from rankwise.kernels.passes import Pass, Scalars
from rankwise.kernels.triton import steps
from rankwise.kernels.triton.chosen_products import chosen
from rankwise.kernels.triton.language import ELEMENTS, jit, launch
from rankwise.kernels.triton.segments import Runs, lanes_of, place_of, read, wide, write
from rankwise.kernels.triton.symmetric_newton_schulz import HALVED
from rankwise.updates.polynomial_steps import SCRATCH, orthogonalise, scratch
from rankwise.updates.polynomials import quintics

__all__ = ["orthogonal_steps_", "takes"]

_MOST = (1 << 16) - 1
"""Matrices of a stack, which CUDA's third dimension of a grid limits."""
TILE = 2048


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
    for job, matrices in _stacks(jobs, product):
        _step_together(job, matrices, job.product or product, timed)


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


def _step_together(job: OrthogonalStep, matrices: Sequence[Momentum], product: torch.dtype, timed: bool) -> None:
    momenta, weights, vectors, places = map(list, zip(*matrices, strict=True))
    squares = vectors[0]
    if squares is None or any(vector is not squares for vector in vectors):
        squares, places = steps.squared_norms(momenta, None, 0.0), list(range(len(momenta)))
    rows, columns = job.shape
    # The list is emptied below, so that only the iteration holds its start, and its memory is freed sooner.
    start = [_normalised(momenta, job, squares, places, product)]
    products = chosen(HALVED, start[0], rows > columns, timed)
    factors = orthogonalise(start.pop(), quintics(job.coefficients, job.steps), products, rows > columns)
    directions = list(factors.view(len(momenta), -1).unbind())
    scalars = Scalars(lr=job.lr, weight_decay=job.weight_decay, cautious=job.cautious)
    steps.run(Pass("step", {"grad": directions, "param": weights}, scalars), scale=job.factor)


def _normalised(
    momenta: list[Tensor], job: OrthogonalStep, squares: Tensor, places: list[int], dtype: torch.dtype
) -> Tensor:
    """Return a stack of momenta divided by their norms, whose squares are at these places."""
    stack = torch.empty(len(momenta), *job.shape, dtype=dtype, device=squares.device)
    runs = Runs([momenta, stack.view(len(momenta), -1).unbind()], TILE, [places], [torch.float32, dtype])
    launch(
        normalise_kernel,
        (runs.count,),
        runs.device,
        runs.table,
        runs.tiles,
        squares,
        float(job.eps),
        ELEMENT=ELEMENTS[dtype],
        BLOCK=TILE,
        num_warps=4,
    )
    return stack


@jit
def normalise_kernel(
    table: tl.tensor,
    tiles: tl.tensor,
    squares: tl.tensor,
    eps: tl.tensor,
    ELEMENT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Write a tile of a matrix, divided by the matrix's norm, to a stack."""
    program = tl.program_id(0).to(tl.int64)
    run = tl.load(tiles + 2 * program)
    row = table + run * 4
    start = tl.load(tiles + 2 * program + 1)
    length = tl.load(row + 2)
    divisor = tl.sqrt(tl.load(squares + tl.load(row + 3))).to(tl.float32) + eps
    if (start + BLOCK <= length) & wide(row, 2):
        _normalise_tile(row, start, length, divisor, ELEMENT, BLOCK, True)
    else:
        _normalise_tile(row, start, length, divisor, ELEMENT, BLOCK, False)


@jit
def _normalise_tile(
    row: tl.tensor,
    start: tl.tensor,
    length: tl.tensor,
    divisor: tl.tensor,
    ELEMENT: tl.constexpr,
    BLOCK: tl.constexpr,
    FAST: tl.constexpr,
) -> None:
    lanes = lanes_of(BLOCK)
    inside = start + lanes < length
    value = tl.div_rn(read(place_of(row, 0, start, FAST), lanes, inside, FAST), divisor)
    write(place_of(row, 1, start, FAST, ELEMENT), value, lanes, inside, FAST)
