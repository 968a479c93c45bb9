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

from rankwise.kernels.lists import copy_
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


def ldadam_matrices_(jobs: Sequence[LowRankStep]) -> InPlace:
    """Step matrices.

    Args:
        jobs: Matrices whose tensors :func:`takes_matrices` accepts.
    """
    rotations_and_kept = [_step_together(families) for families in _calls(jobs)]
    rotation, kept = (torch.stack(list(values)).sum() for values in zip(*rotations_and_kept, strict=True))
    return InPlace(rotation, kept)


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

    def read(self, matrices: Sequence[Tensor], bases: Sequence[Tensor], momenta: Sequence[Tensor]) -> None:
        """Read operands in these halves, which live as long as this object."""
        self._read = matrices, bases, momenta
        self.matrix = operand_of(matrices, (1, self.short) if self.jobs[0].right else (self.long, 1))
        self.basis = operand_of(bases, (self.rank, 1))
        self.momentum = operand_of(momenta, (self.long, 1))

    def empty(self, *shape: int) -> Tensor:
        """Return an empty stack with a small matrix for each job."""
        return torch.empty(len(self.jobs), *shape, dtype=torch.float32, device=self.jobs[0].weight.device)


def _rows(stack: Tensor) -> Operand:
    """Return the entries of a stack, or of its halves, as an operand."""
    if stack.dim() == 3:
        return Operand(places_of(stack), (stack.stride(-2), stack.stride(-1)))
    return Operand(places_of(stack[0]), (stack.stride(-2), stack.stride(-1)), stack.stride(0))


def _step_together(families: Sequence[_Family]) -> tuple[Tensor, Tensor]:
    """Step families of one rank, and return the sum of their bases' rotations and how many bases stay as they were."""
    count = 0
    for family in families:
        family.place = slice(count, count + len(family.jobs))
        count += len(family.jobs)
    rank, device = families[0].rank, families[0].jobs[0].weight.device
    _form(families)
    grams = torch.empty(count, rank, rank, dtype=torch.float32, device=device)
    coordinates, inverse, failed = _factored(families, [_coordinates(family) for family in families], grams, -1)
    images = [_image(family, inverse, x) for family, x in zip(families, coordinates, strict=True)]
    del coordinates
    images, inverse, failed_image = _factored(families, images, grams, -2)
    bases = []
    # The second pass makes the columns orthonormal to what float32 has.
    for family, y in zip(families, images, strict=True):
        basis = family.empty(family.short, rank)
        grouped_product_(basis, _rows(y), _rows(inverse[:, family.place]).turned, rank)
        grouped_product_(grams[family.place], _rows(basis).turned, _rows(basis), family.short)
        bases.append(basis)
    inverse, failed_again = _inverse(grams, MIN_SECOND_DIAGONAL)
    failed = failed | failed_image | failed_again
    rotations = grams  # The memory is used again, as nobody needs the products any more.
    for family, candidate in zip(families, bases, strict=True):
        basis = torch.empty_like(candidate)
        grouped_product_(basis, _rows(candidate), _rows(inverse[family.place]).turned, rank)
        _finish(family, basis, failed[family.place], rotations[family.place])
    return count - rotations.square().sum() / rank, failed.sum()


def _form(families: Sequence[_Family]) -> None:
    """Add gradients to their sources, and halve these and the old states."""
    jobs = [job for family in families for job in family.jobs]
    bases, momenta = (in_halves([job.state[name] for job in jobs]) for name in ("basis", "exp_avg"))
    matrices = empty_halves([job.source.shape for job in jobs], jobs[0].weight.device)
    for late in (True, False):
        some = [(job, half) for job, half in zip(jobs, matrices, strict=True) if (job.gradient is not None) == late]
        gradients = [job.gradient for job, _ in some if job.gradient is not None]
        write_halves_([job.source for job, _ in some], [half for _, half in some], gradients if late else None)
    for family in families:
        family.read(matrices[family.place], bases[family.place], momenta[family.place])


def _coordinates(family: _Family) -> Tensor:
    """Return ``X^T = w_C U^T C + w_M M`` (b, r, n)."""
    coordinates = family.empty(family.rank, family.long)
    grouped_product_(
        coordinates,
        family.basis.turned,
        family.matrix,
        family.short,
        alpha=family.weights[0],
        beta=family.weights[1],
        added=tuple(job.state["exp_avg"].data_ptr() for job in family.jobs),
    )
    return coordinates


def _factored(
    families: Sequence[_Family], stacks: Sequence[Tensor], grams: Tensor, axis: int
) -> tuple[list[Tensor], Tensor, Tensor]:
    """Return the halves of scaled columns, those of the inverses ``L^-1`` of their triangular factors, what failed.

    A largest entry of one keeps squares in range and makes graded columns harmless, as in
    :func:`rankwise.updates.orthonormal.cholesky_qr`.

    Args:
        families: Families.
        stacks: For each, (b, r, n) or (b, n, r), float32, scaled in place.
        grams: (count, r, r), overwritten.
        axis: The one along which a column lies, -1 or -2.
    """
    for stack in stacks:
        peaks = torch.linalg.vector_norm(stack, ord=float("inf"), dim=axis, keepdim=True)
        stack.div_(peaks.clamp_min_(torch.finfo(torch.float32).tiny))  # columns of zeros stay zeros
    columns = in_halves(stacks)
    for family, stack in zip(families, columns, strict=True):
        across = _rows(stack) if axis == -1 else _rows(stack).turned
        grouped_product_(grams[family.place], across, across.turned, stack.shape[axis])
    inverse, failed = _inverse(grams)
    return columns, in_halves([inverse])[0], failed


def _inverse(grams: Tensor, min_diagonal: float = MIN_DIAGONAL) -> tuple[Tensor, Tensor]:
    """Return inverses of the Cholesky factors (b, r, r), and which of them failed.

    Triangular systems with as many right sides as a long matrix has columns take ten times as long as a product.
    """
    lower, failed = triangular_factor(grams, min_diagonal)
    identity = torch.eye(grams.shape[-1], dtype=grams.dtype, device=grams.device)
    return torch.linalg.solve_triangular(lower, identity.expand_as(lower), upper=False).contiguous(), failed


def _image(family: _Family, inverse: Tensor, x: Tensor) -> Tensor:
    """Return ``Y = w_C C Q + w_M U (M Q)`` (b, m, r) for the orthonormal ``Q^T = L^-1 X^T``, of halves."""
    small, image = family.empty(family.rank, family.rank), family.empty(family.short, family.rank)
    (across,) = empty_halves([x.shape[1:]], x.device)
    grouped_product_(across, _rows(inverse[:, family.place]), _rows(x), family.rank)
    columns = _rows(across).turned
    grouped_product_(small, family.momentum, columns, family.long)
    (halves,) = in_halves([small])  # Operands are addresses, and keep nothing.
    grouped_product_(image, family.basis, _rows(halves), family.rank)
    grouped_product_(
        image,
        family.matrix,
        columns,
        family.long,
        alpha=family.weights[0],
        beta=family.weights[1],
        added=places_of(image),
    )
    return image


def _finish(family: _Family, basis: Tensor, failed: Tensor, rotation: Tensor) -> None:
    """Update moments, states, weights and error buffers with the new basis (b, m, r)."""
    jobs, group = family.jobs, family.group
    states = [job.state["basis"] for job in jobs]
    keep_(basis, [state.data_ptr() for state in states], failed)
    (halves,) = in_halves([basis])
    grouped_product_(rotation, _rows(halves).turned, family.basis, family.short)
    coordinates = family.empty(family.rank, family.long)
    grouped_product_(coordinates, _rows(halves).turned, family.matrix, family.short)
    directions, momenta = advance_moments_(
        coordinates,
        rotation,
        [job.state["exp_avg"] for job in jobs],
        [job.state["exp_avg_sq"] for job in jobs],
        step=family.step,
        betas=group["betas"],
        eps=group["eps"],
        error_feedback=family.feedback,
    )
    copy_(states, list(basis.unbind()))
    kept = momenta if family.feedback else [None] * len(jobs)
    low_rank_step_(
        [job.weight for job in jobs],
        [Factors(0, *parts) for parts in zip(halves.unbind(1), directions, kept, strict=True)],
        [job.source for job in jobs] if family.feedback else None,
        [job.source if job.error is None else job.error for job in jobs] if family.feedback else None,
        cols=jobs[0].shape[1],
        right=jobs[0].right,
        lr=group["lr"],
        weight_decay=0.0,  # weights have decayed already
    )
