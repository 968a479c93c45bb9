r"""LDAdam steps many whole matrices at once where they lie, and the host waits for nothing.

Kernels that serve all matrices of a shape in one launch read what is large where it is; the small problems of all
shapes, r x r, are solved together, and what they give multiplies. A basis that cannot be factored stays as it was, and
only the device knows it.

Bytes (fp32) per element: 16 for the sum with the gradient and its halves, 12 for three products, 16 for weight and
error buffer, and about 30 per element of (r, n).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rankwise.kernels.lists import add_, copy_
from rankwise.ldadam.cuda.grouped_products import Operand, grouped_product_, keep_, operand_of, places_of
from rankwise.ldadam.cuda.halves import empty_halves, in_halves, write_halves_
from rankwise.ldadam.cuda.low_rank_moments import MAX_RANK, advance_moments_
from rankwise.ldadam.cuda.low_rank_step import Factors, low_rank_step_
from rankwise.ldadam.formulas import basis_weights
from rankwise.ldadam.in_place import InPlace, LowRankStep
from rankwise.ldadam.signature import ELEMENTS_AT_ONCE, HALVED_AT_ONCE
from rankwise.updates.orthonormal import MIN_DIAGONAL, MIN_SECOND_DIAGONAL, triangular_factor

__all__ = ["ldadam_matrices_", "takes_matrices"]


def takes_matrices(rank: int, *tensors: Tensor, error: Tensor | None = None) -> bool:
    """Whether :func:`ldadam_matrices_` takes matrices of this rank, made of these tensors.

    Args:
        rank: Rank of the subspace.
        tensors: Weights, gradients, states: contiguous and float32.
        error: An error buffer outside the gradient's memory, contiguous, in float32 or bfloat16; None: there is none.
    """
    error_fits = error is None or (error.dtype in (torch.float32, torch.bfloat16) and error.is_contiguous())
    if not error_fits or rank > MAX_RANK or max(tensor.numel() for tensor in tensors) >= 1 << 31:
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
    rotations_and_kept = [_step_together(families, precision) for families in _calls(jobs)]
    rotation, kept = (torch.stack(list(values)).sum() for values in zip(*rotations_and_kept, strict=True))
    return InPlace([], rotation, kept)


def _calls(jobs: Sequence[LowRankStep]) -> Iterator[list[_Family]]:
    """Yield families of one rank that are computed together."""

    def sign(job: LowRankStep) -> tuple[Any, ...]:
        return job.state["basis"].shape[1], job.shape, job.step, id(job.group)

    together: list[_Family] = []
    share = 0.0
    jobs_by_sign: dict[tuple[Any, ...], list[LowRankStep]] = {}
    for job in jobs:
        jobs_by_sign.setdefault(sign(job), []).append(job)
    for key in sorted(jobs_by_sign):
        same_sign = jobs_by_sign[key]
        rank, chunk = same_sign[0].state["basis"].shape[1], max(1, int(1 / _share(same_sign[0])))
        for first in range(0, len(same_sign), chunk):
            family = _Family(same_sign[first : first + chunk])
            own = len(family.jobs) * _share(family.jobs[0])
            if together and (together[0].rank != rank or share + own > 1):
                yield together
                together, share = [], 0.0
            together.append(family)
            share += own
    if together:
        yield together


def _share(job: LowRankStep) -> float:
    """Return the share that a matrix has of what may be computed at once."""
    return max(job.state["exp_avg"].numel() / ELEMENTS_AT_ONCE, job.weight.numel() / HALVED_AT_ONCE)


class _Family:
    """Matrices of one shape, param group and step.

    Attributes:
        rank: Rank r of the subspace.
        place: Places of the matrices among those that are computed together.
        matrix: The operand C (m, n).
        basis: The operand U (m, r).
        momentum: The operand M (r, n).
    """

    def __init__(self, jobs: list[LowRankStep]) -> None:
        self.jobs, first = jobs, jobs[0]
        rows, columns = first.shape
        self.short, self.long = (columns, rows) if first.right else (rows, columns)
        self.rank = first.state["basis"].shape[1]
        self.place = slice(0, 0)
        group, self.step = first.group, first.step
        self.group: Mapping[str, Any] = group
        self.feedback: bool = group["error_feedback"]
        weights = basis_weights(self.step, group["betas"][0], group["rho"], self.feedback)
        self.weights = float(weights[0]), float(weights[1])
        self.read([job.source for job in jobs], [job.state["basis"] for job in jobs])
        self.momentum = operand_of([job.state["exp_avg"] for job in jobs], (self.long, 1))

    def read(self, matrices: Sequence[Tensor], bases: Sequence[Tensor]) -> None:
        """Read operands where these tensors lie, float32 or halves, which live as long as this object."""
        self._read = matrices, bases
        self.matrix = operand_of(matrices, (1, self.short) if self.jobs[0].right else (self.long, 1))
        self.basis = operand_of(bases, (self.rank, 1))

    def empty(self, *shape: int) -> Tensor:
        """Return an empty stack with a small matrix for each job."""
        return torch.empty(len(self.jobs), *shape, dtype=torch.float32, device=self.jobs[0].weight.device)


def _rows(stack: Tensor) -> Operand:
    """Return the entries of a stack, or of its halves, which a solver may have stored by columns, as an operand."""
    high = stack[0] if stack.dim() == 4 else stack
    return Operand(places_of(high), (high.stride(-2), high.stride(-1)), stack.stride(0) if stack.dim() == 4 else 0)


def _step_together(families: Sequence[_Family], precision: str) -> tuple[Tensor, Tensor]:
    """Step families of one rank, and return the sum of their bases' rotations and how many bases stay as they were."""
    count = 0
    for family in families:
        family.place = slice(count, count + len(family.jobs))
        count += len(family.jobs)
    rank, device = families[0].rank, families[0].jobs[0].weight.device
    _form(families, precision)
    grams = torch.empty(count, rank, rank, dtype=torch.float32, device=device)
    coordinates = [_coordinates(family, precision) for family in families]
    inverse, failed = _scaled_inverse(families, coordinates, grams, _rows, -1, precision)
    images = [_image(family, inverse, x, precision) for family, x in zip(families, coordinates, strict=True)]
    del coordinates
    inverse, failed_image = _scaled_inverse(families, images, grams, lambda y: _rows(y).turned, -2, precision)
    bases = [_solved(family, inverse, y, precision) for family, y in zip(families, images, strict=True)]
    # The second pass makes the columns orthonormal to what float32 has.
    for family, candidate in zip(families, bases, strict=True):
        grouped_product_(grams[family.place], _rows(candidate).turned, _rows(candidate), family.short)
    inverse, failed_again = _inverse(grams, MIN_SECOND_DIAGONAL)
    failed = failed | failed_image | failed_again
    rotations = grams  # The memory is used again, as nobody needs the products any more.
    for family, candidate in zip(families, bases, strict=True):
        basis = _solved(family, inverse, candidate, "ieee")
        _finish(family, basis, failed[family.place], rotations[family.place], precision)
    return count - rotations.square().sum() / rank, failed.sum()


def _form(families: Sequence[_Family], precision: str) -> None:
    """Add gradients to their sources, and halve these and the old bases."""
    jobs = [job for family in families for job in family.jobs]
    ready, late = ([job for job in jobs if (job.gradient is None) == known] for known in (True, False))
    gradients = [job.gradient for job in late if job.gradient is not None]
    if precision == "ieee":
        add_([job.source for job in late], gradients)
        return
    bases = in_halves([job.state["basis"] for job in jobs])
    matrices = empty_halves([job.source.shape for job in jobs], jobs[0].weight.device)
    halves = {id(job): half for job, half in zip(jobs, matrices, strict=True)}
    write_halves_([job.source for job in late], [halves[id(job)] for job in late], gradients)
    write_halves_([job.source for job in ready], [halves[id(job)] for job in ready])
    for family in families:
        family.read(matrices[family.place], bases[family.place])


def _coordinates(family: _Family, precision: str) -> Tensor:
    """Return ``X^T = w_C U^T C + w_M M`` (b, r, n)."""
    coordinates = family.empty(family.rank, family.long)
    grouped_product_(
        coordinates,
        family.basis.turned,
        family.matrix,
        family.short,
        alpha=family.weights[0],
        beta=family.weights[1],
        added=family.momentum.places,
        precision=precision,
    )
    return coordinates


def _image(family: _Family, inverse: Tensor, x: Tensor, precision: str) -> Tensor:
    """Return ``Y = w_C C Q + w_M U (M Q)`` (b, m, r) for the orthonormal ``Q^T = L^-1 X^T``."""
    small, image = family.empty(family.rank, family.rank), family.empty(family.short, family.rank)
    if precision == "ieee":
        across = torch.empty_like(x)
    else:
        (across,) = empty_halves([x.shape], x.device)
    grouped_product_(across, _rows(inverse[family.place]), _rows(x), family.rank, precision=precision)
    columns = _rows(across).turned
    grouped_product_(small, family.momentum, columns, family.long, precision=precision)
    grouped_product_(image, family.basis, _rows(small), family.rank, precision=precision)
    grouped_product_(
        image,
        family.matrix,
        columns,
        family.long,
        alpha=family.weights[0],
        beta=family.weights[1],
        added=places_of(image),
        precision=precision,
    )
    return image


def _scaled_inverse(
    families: Sequence[_Family], stacks: Sequence[Tensor], grams: Tensor, operand: Any, axis: int, precision: str
) -> tuple[Tensor, Tensor]:
    """Return inverses ``L^-1`` of the Cholesky factors of the Gram matrices, and which of them failed.

    They are computed from scaled columns and scaled back. A largest entry of one keeps squares in range and makes
    graded columns harmless, as in :func:`rankwise.updates.orthonormal.cholesky_qr`.
    """
    peaks = torch.empty(grams.shape[:2], dtype=torch.float32, device=grams.device)
    for family, stack in zip(families, stacks, strict=True):
        torch.linalg.vector_norm(stack, ord=float("inf"), dim=axis, out=peaks[family.place])
    scales = torch.where(peaks > 0, peaks, 1.0).reciprocal()
    for family, stack in zip(families, stacks, strict=True):
        left, depth = operand(stack), family.long if axis == -1 else family.short
        grouped_product_(
            grams[family.place], left, left.turned, depth, scales=scales[family.place], precision=precision
        )
    inverse, failed = _inverse(grams)
    return inverse * scales.unsqueeze(-2), failed


def _inverse(grams: Tensor, min_diagonal: float = MIN_DIAGONAL) -> tuple[Tensor, Tensor]:
    """Return inverses of the Cholesky factors (b, r, r), and which of them failed.

    Triangular systems with as many right sides as a long matrix has columns take ten times as long as a product.
    """
    lower, failed = triangular_factor(grams, min_diagonal)
    identity = torch.eye(grams.shape[-1], dtype=grams.dtype, device=grams.device)
    return torch.linalg.solve_triangular(lower, identity.expand_as(lower), upper=False), failed


def _solved(family: _Family, inverse: Tensor, y: Tensor, precision: str) -> Tensor:
    """Return ``Y L^-T`` (b, m, r)."""
    columns = torch.empty_like(y)
    grouped_product_(columns, _rows(y), _rows(inverse[family.place]).turned, family.rank, precision=precision)
    return columns


def _finish(family: _Family, basis: Tensor, failed: Tensor, rotation: Tensor, precision: str) -> None:
    """Update moments, states, weights and error buffers with the new basis (b, m, r)."""
    jobs, group = family.jobs, family.group
    states = [job.state["basis"] for job in jobs]
    keep_(basis, [state.data_ptr() for state in states], failed)
    halves = None if precision == "ieee" else in_halves([basis])[0]
    new = _rows(basis if halves is None else halves).turned
    grouped_product_(rotation, new, family.basis, family.short, precision=precision)
    coordinates = family.empty(family.rank, family.long)
    grouped_product_(coordinates, new, family.matrix, family.short, precision=precision)
    directions, momenta = advance_moments_(
        coordinates,
        rotation,
        [job.state["exp_avg"] for job in jobs],
        [job.state["exp_avg_sq"] for job in jobs],
        step=family.step,
        betas=group["betas"],
        eps=group["eps"],
        error_feedback=family.feedback,
        precision=precision,
    )
    copy_(states, list(basis.unbind()))
    bases = basis.unbind() if halves is None else halves.unbind(1)
    kept = momenta if family.feedback else [None] * len(jobs)
    low_rank_step_(
        [job.weight for job in jobs],
        [Factors(0, *parts) for parts in zip(bases, directions, kept, strict=True)],
        [job.source for job in jobs] if family.feedback else None,
        [job.source if job.error is None else job.error for job in jobs] if family.feedback else None,
        cols=jobs[0].shape[1],
        right=jobs[0].right,
        lr=group["lr"],
        weight_decay=0.0,  # weights have decayed already
        precision=precision,
    )
