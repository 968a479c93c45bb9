r"""LDAdam steps many whole matrices at once where they lie, and the host waits for nothing.

Kernels that serve all matrices of a shape in one launch read what is large where it is; the small problems of all
shapes, r x r, are solved together. A basis that cannot be factored stays as it was, and only the device knows it.

Bytes (fp32) per element: 12 for the sum with the gradient, 12 for three products, 16 for weight and error buffer, and
about 22 per element of (r, n).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rankwise.kernels.lists import add_, copy_
from rankwise.ldadam.cuda.grouped_moments import MAX_RANK, advance_moments_
from rankwise.ldadam.cuda.grouped_products import Operand, grouped_product_, keep_, places_of
from rankwise.ldadam.cuda.low_rank_step import Factors, low_rank_step_
from rankwise.ldadam.formulas import basis_weights
from rankwise.ldadam.in_place import InPlace, LowRankStep
from rankwise.ldadam.signature import ELEMENTS_AT_ONCE
from rankwise.updates.orthonormal import MIN_SECOND_DIAGONAL, triangular_factor

__all__ = ["ldadam_matrices_", "takes_matrices"]


def takes_matrices(rank: int, *tensors: Tensor, error: Tensor | None = None) -> bool:
    """Whether :func:`ldadam_matrices_` takes matrices of this rank, made of these tensors.

    Args:
        rank: Rank of the subspace.
        tensors: Weights, gradients, states: contiguous and float32.
        error: An error buffer outside the gradient's memory, contiguous, in float32 or bfloat16; None: there is none.
    """
    error_fits = error is None or (error.dtype in (torch.float32, torch.bfloat16) and error.is_contiguous())
    if not error_fits or rank > MAX_RANK:
        return False
    for tensor in tensors:
        if tensor.dtype != torch.float32 or not tensor.is_contiguous():
            return False
    return True


def ldadam_matrices_(jobs: Sequence[LowRankStep], precision: str) -> InPlace:
    """Step matrices.

    Args:
        jobs: Matrices whose tensors :func:`takes_matrices` accepts.
        precision: Precision of the products, in :func:`rankwise.ldadam.cuda.grouped_products.grouped_product_`'s words.
    """
    late = [job for job in jobs if job.gradient is not None]
    add_([job.source for job in late], [job.gradient for job in late if job.gradient is not None])
    rotations_and_kept = [_step_together(families, precision) for families in _calls(jobs)]
    rotation, kept = (torch.stack(list(values)).sum() for values in zip(*rotations_and_kept, strict=True))
    return InPlace([], rotation, kept)


def _calls(jobs: Sequence[LowRankStep]) -> Iterator[list[_Family]]:
    """Yield families of one rank that are computed together."""

    def sign(job: LowRankStep) -> tuple[Any, ...]:
        return job.state["basis"].shape[1], job.shape, job.step, id(job.group)

    together: list[_Family] = []
    elements = 0
    jobs_by_sign: dict[tuple[Any, ...], list[LowRankStep]] = {}
    for job in jobs:
        jobs_by_sign.setdefault(sign(job), []).append(job)
    for key in sorted(jobs_by_sign):
        same_sign = jobs_by_sign[key]
        rank, size = same_sign[0].state["basis"].shape[1], same_sign[0].state["exp_avg"].numel()
        chunk = max(1, ELEMENTS_AT_ONCE // size)
        for first in range(0, len(same_sign), chunk):
            family = _Family(same_sign[first : first + chunk])
            if together and (together[0].rank != rank or elements + family.elements > ELEMENTS_AT_ONCE):
                yield together
                together, elements = [], 0
            together.append(family)
            elements += family.elements
    if together:
        yield together


class _Family:
    """Matrices of one shape, param group and step.

    Attributes:
        rank: Rank r of the subspace.
        elements: Number of elements of all coordinates (r, n).
        place: Places of the matrices among those that are computed together.
    """

    def __init__(self, jobs: list[LowRankStep]) -> None:
        self.jobs, first = jobs, jobs[0]
        rows, columns = first.shape
        self.short, self.long = (columns, rows) if first.right else (rows, columns)
        self.rank = first.state["basis"].shape[1]
        self.elements = len(jobs) * self.rank * self.long
        self.place = slice(0, 0)
        group, self.step = first.group, first.step
        self.group: Mapping[str, Any] = group
        self.feedback: bool = group["error_feedback"]
        weights = basis_weights(self.step, group["betas"][0], group["rho"], self.feedback)
        self.weights = float(weights[0]), float(weights[1])
        # The operands C (m, n), U (m, r) and M (r, n) are read where they lie.
        strides = (1, self.short) if first.right else (self.long, 1)
        self.matrix = Operand(tuple(job.source.data_ptr() for job in jobs), strides)
        self.basis = Operand(tuple(job.state["basis"].data_ptr() for job in jobs), (self.rank, 1))
        self.momentum = Operand(tuple(job.state["exp_avg"].data_ptr() for job in jobs), (self.long, 1))

    def empty(self, *shape: int) -> Tensor:
        """Return an empty stack with a small matrix for each job."""
        return torch.empty(len(self.jobs), *shape, dtype=torch.float32, device=self.jobs[0].weight.device)


def _rows(stack: Tensor) -> Operand:
    """Return the entries of a stack, which a solver may have stored by columns, as an operand."""
    return Operand(places_of(stack), (stack.stride(-2), stack.stride(-1)))


def _step_together(families: Sequence[_Family], precision: str) -> tuple[Tensor, Tensor]:
    """Step families of one rank, and return the sum of their bases' rotations and how many bases stay as they were."""
    count = 0
    for family in families:
        family.place = slice(count, count + len(family.jobs))
        count += len(family.jobs)
    rank, device = families[0].rank, families[0].jobs[0].weight.device
    grams = torch.empty(count, rank, rank, dtype=torch.float32, device=device)
    coordinates = [_coordinates(family, precision) for family in families]
    lower, failed = _scaled_factor(families, coordinates, grams, _rows, -1, precision)
    images = [
        _image(family, _solved_across(lower[family.place], x), precision)
        for family, x in zip(families, coordinates, strict=True)
    ]
    del coordinates
    lower, failed_image = _scaled_factor(families, images, grams, lambda y: _rows(y).turned, -2, precision)
    bases = [_solved(lower[family.place], y) for family, y in zip(families, images, strict=True)]
    for family, candidate in zip(families, bases, strict=True):
        grouped_product_(
            grams[family.place], _rows(candidate).turned, _rows(candidate), family.short, precision=precision
        )
    lower, failed_again = triangular_factor(grams, MIN_SECOND_DIAGONAL)
    failed = failed | failed_image | failed_again
    rotations = grams  # The memory is used again, as nobody needs the products any more.
    for family, candidate in zip(families, bases, strict=True):
        _finish(
            family, _solved(lower[family.place], candidate), failed[family.place], rotations[family.place], precision
        )
    return count - rotations.square().sum() / rank, failed.sum()


def _coordinates(family: _Family, precision: str) -> Tensor:
    """Return ``X^T = w_C U^T C + w_M M`` (b, r, n)."""
    coordinates = family.empty(family.rank, family.long)
    alpha, beta = family.weights
    grouped_product_(
        coordinates,
        family.basis.turned,
        family.matrix,
        family.short,
        alpha=alpha,
        beta=beta,
        added=family.momentum.places,
        precision=precision,
    )
    return coordinates


def _image(family: _Family, x: Tensor, precision: str) -> Tensor:
    """Return ``Y = w_C C X + w_M U (M X)`` (b, m, r) for ``X^T`` (b, r, n)."""
    small, image = family.empty(family.rank, family.rank), family.empty(family.short, family.rank)
    alpha, beta = family.weights
    columns = _rows(x).turned
    grouped_product_(small, family.momentum, columns, family.long, precision=precision)
    grouped_product_(image, family.basis, _rows(small), family.rank, precision=precision)
    grouped_product_(
        image,
        family.matrix,
        columns,
        family.long,
        alpha=alpha,
        beta=beta,
        added=places_of(image),
        precision=precision,
    )
    return image


def _scaled_factor(
    families: Sequence[_Family], stacks: Sequence[Tensor], grams: Tensor, operand: Any, axis: int, precision: str
) -> tuple[Tensor, Tensor]:
    """Return Cholesky factors of the Gram matrices, and which of them failed.

    They are computed from scaled columns and scaled back. A largest entry of one keeps squares in range and makes
    graded columns harmless, as in :func:`rankwise.updates.orthonormal.cholesky_qr`.
    """
    peaks = torch.empty(grams.shape[:2], dtype=torch.float32, device=grams.device)
    for family, stack in zip(families, stacks, strict=True):
        torch.linalg.vector_norm(stack, ord=float("inf"), dim=axis, out=peaks[family.place])
    peaks = torch.where(peaks > 0, peaks, 1.0)
    scales = peaks.reciprocal()
    for family, stack in zip(families, stacks, strict=True):
        left, depth = operand(stack), family.long if axis == -1 else family.short
        grouped_product_(
            grams[family.place], left, left.turned, depth, scales=scales[family.place], precision=precision
        )
    lower, failed = triangular_factor(grams)
    return lower * peaks.unsqueeze(-1), failed


# Solvers work by columns. Operands that are passed transposed are not copied, and come back as they are needed.


def _solved(lower: Tensor, y: Tensor) -> Tensor:
    """Return ``Y L^-T`` (b, m, r)."""
    return torch.linalg.solve_triangular(lower, y.mT, upper=False).mT


def _solved_across(lower: Tensor, x: Tensor) -> Tensor:
    """Return ``L^-1 X^T`` in the transposed layout of ``x`` (b, r, n)."""
    return torch.linalg.solve_triangular(lower.mT, x.mT, upper=True, left=False).mT


def _finish(family: _Family, basis: Tensor, failed: Tensor, rotation: Tensor, precision: str) -> None:
    """Update moments, states, weights and error buffers with the new basis (b, m, r)."""
    jobs, group = family.jobs, family.group
    keep_(basis, family.basis.places, failed)
    new = _rows(basis).turned
    grouped_product_(rotation, new, family.basis, family.short, precision=precision)
    coordinates = family.empty(family.rank, family.long)
    grouped_product_(coordinates, new, family.matrix, family.short, precision=precision)
    momenta = [job.state["exp_avg"] for job in jobs]
    advance_moments_(
        coordinates,
        rotation,
        momenta,
        [job.state["exp_avg_sq"] for job in jobs],
        step=family.step,
        betas=group["betas"],
        eps=group["eps"],
        error_feedback=family.feedback,
        precision=precision,
    )
    bases = list(basis.unbind())
    copy_([job.state["basis"] for job in jobs], bases)
    kept = momenta if family.feedback else [None] * len(jobs)
    low_rank_step_(
        [job.weight for job in jobs],
        [Factors(0, *parts) for parts in zip(bases, coordinates.unbind(), kept, strict=True)],
        [job.source for job in jobs] if family.feedback else None,
        [job.source if job.error is None else job.error for job in jobs] if family.feedback else None,
        cols=jobs[0].shape[1],
        right=jobs[0].right,
        lr=group["lr"],
        weight_decay=0.0,  # weights have decayed already
    )
