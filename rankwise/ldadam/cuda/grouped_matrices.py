r"""LDAdam steps many whole matrices at once where they lie, and the host waits for nothing.

Kernels that serve all matrices of a shape in one launch read what is large where it is; the small problems of all
shapes, r x r, are solved together, and what they give multiplies. A basis that cannot be factored stays as it was, and
only the device knows it.

Bytes (fp32) per element: 12 for the sum with the gradient, 12 for three products, 16 for weight and error buffer, and
about 30 per element of (r, n).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rankwise.ldadam.cuda.grouped_products import Operand, grouped_product_, judge_, operand_of, places_of
from rankwise.ldadam.cuda.halves import empty_halves, in_halves
from rankwise.ldadam.cuda.low_rank_moments import MAX_RANK, advance_moments_
from rankwise.ldadam.cuda.low_rank_step import Factors, low_rank_step_
from rankwise.ldadam.formulas import basis_weights
from rankwise.ldadam.in_place import InPlace, LowRankStep
from rankwise.ldadam.signature import calls_of
from rankwise.updates.orthonormal import MIN_DIAGONAL, MIN_SECOND_DIAGONAL

__all__ = ["ldadam_matrices_", "takes_matrices"]


def takes_matrices(rank: int, *tensors: Tensor, error: Tensor | None = None) -> bool:
    """Whether :func:`ldadam_matrices_` takes matrices of this rank, made of these tensors.

    Args:
        rank: Rank of the subspace.
        tensors: Weights, gradients, states: contiguous and float32.
        error: An error buffer outside the gradient's memory, contiguous, in float32 or bfloat16; None: there is none.
    """
    error_fits = error is None or (error.dtype in (torch.float32, torch.bfloat16) and error.is_contiguous())
    if not error_fits or rank > MAX_RANK or max(map(Tensor.numel, tensors)) >= 1 << 31:
        return False
    return {tensor.dtype for tensor in tensors} == {torch.float32} and all(map(Tensor.is_contiguous, tensors))


def ldadam_matrices_(jobs: Sequence[LowRankStep]) -> InPlace:
    """Step matrices.

    Args:
        jobs: Matrices whose tensors :func:`takes_matrices` accepts.
    """
    failed = torch.zeros(len(jobs), dtype=torch.uint8, device=jobs[0].weight.device)
    first, shares, ranks, identities = 0, [], [], {}
    for families in _calls(jobs):
        rank, count = families[0].rank, sum(len(family.jobs) for family in families)
        if rank not in identities:
            identities[rank] = torch.eye(rank, dtype=torch.float32, device=failed.device)
        shares.append(_step_together(families, _Solver(failed[first : first + count], identities[rank])))
        ranks.append(float(rank))
        first += count
    shared = torch.stack(torch._foreach_div(shares, ranks)).sum()
    return InPlace(len(jobs) - shared, failed.sum())


def _calls(jobs: Sequence[LowRankStep]) -> Iterator[list[_Family]]:
    """Yield families of one rank that are computed together."""
    jobs_by_sign: dict[tuple[Any, ...], list[LowRankStep]] = {}
    for job in jobs:
        sign = job.state["basis"].shape[1], job.shape, job.step, id(job.group)
        jobs_by_sign.setdefault(sign, []).append(job)
    sizes = {sign: (len(alike), sign[0] * sum(sign[1])) for sign, alike in jobs_by_sign.items()}
    for call in calls_of(sizes):
        yield [_Family(jobs_by_sign[sign][places.start : places.stop]) for sign, places in call]


class _Family:
    """Matrices of one shape, param group and step.

    Attributes:
        rank: Rank r of the subspace.
        place: Places of the matrices among those that are computed together.
        matrix: The operand C (m, n).
        basis: The operand U (m, r), halves.
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

    def read(self, bases: Sequence[Tensor]) -> None:
        """Read the states, and the bases in these halves, which live as long as this object."""
        self._read = bases
        turned = self.jobs[0].right
        self.matrix = operand_of([job.source for job in self.jobs], (1, self.short) if turned else (self.long, 1))
        self.basis = operand_of(bases, (self.rank, 1))
        self.momentum = operand_of([job.state["exp_avg"] for job in self.jobs], (self.long, 1))

    def empty(self, *shape: int) -> Tensor:
        """Return an empty stack with a small matrix for each job."""
        return torch.empty(len(self.jobs), *shape, dtype=torch.float32, device=self.jobs[0].weight.device)

    def halves(self, *shape: int) -> Tensor:
        """Return the memory of the halves of such a stack."""
        return empty_halves([(len(self.jobs), *shape)], self.jobs[0].weight.device)[0]


def _rows(stack: Tensor) -> Operand:
    """Return the entries of a stack, or of its halves, as an operand."""
    if stack.dim() == 3:
        return Operand(places_of(stack), (stack.stride(-2), stack.stride(-1)))
    return Operand(places_of(stack[0]), (stack.stride(-2), stack.stride(-1)), stack.stride(0))


def _step_together(families: Sequence[_Family], solver: _Solver) -> Tensor:
    """Step families of one rank, and return the sum of the squares of their bases' rotations."""
    jobs = [job for family in families for job in family.jobs]
    gradients = [job.gradient for job in jobs if job.gradient is not None]
    if gradients:
        torch._foreach_add_([job.source for job in jobs if job.gradient is not None], gradients)
    bases, first = in_halves([job.state["basis"] for job in jobs]), 0
    for family in families:
        family.place = slice(first, first := first + len(family.jobs))
        family.read(bases[family.place])
    columns = _scaled(families, [_coordinates(family) for family in families], solver)
    inverse = solver.inverse()
    images = [_image(family, inverse, columns.pop(0)) for family in families]
    columns = _scaled(families, images, solver)
    inverse = solver.inverse()
    # The second pass makes the columns orthonormal to what float32 has.
    candidates = [_candidate(family, inverse, columns.pop(0), solver) for family in families]
    inverse = solver.inverse(MIN_SECOND_DIAGONAL)
    for family in families:
        # The rotations take the memory of the products, which nobody needs any more.
        _finish(
            family, candidates.pop(0), inverse[family.place], solver.failed[family.place], solver.grams[family.place]
        )
    rotations = solver.grams.view(-1)
    return rotations.dot(rotations)


class _Solver:
    """Factors the (r, r) Gram matrices of all families at once.

    Args:
        failed: (count,) uint8, zeros; not 0 for those that a factorization has failed of.
        identity: (r, r).

    Attributes:
        grams: (count, r, r), to be overwritten.
    """

    def __init__(self, failed: Tensor, identity: Tensor) -> None:
        self.failed, self._identity = failed, identity.expand(len(failed), -1, -1)
        self.grams = torch.empty(self._identity.shape, dtype=identity.dtype, device=identity.device)

    def inverse(self, min_diagonal: float = MIN_DIAGONAL) -> Tensor:
        """Return the inverses ``L^-1`` of the Cholesky factors (count, r, r).

        Triangular systems with as many right sides as a long matrix has columns take ten times as long as a product.
        """
        lower, info = torch.linalg.cholesky_ex(self.grams)
        judge_(self.grams, lower, info, self.failed, min_diagonal)
        return torch.linalg.solve_triangular(lower, self._identity, upper=False)


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
        added=family.momentum.places,
    )
    return coordinates


def _scaled(families: Sequence[_Family], stacks: list[Tensor], solver: _Solver) -> list[Tensor]:
    """Return the halves (2, b, r, length) of scaled rows, of which the Gram matrices are formed.

    A largest entry of one keeps squares in range and makes graded columns harmless, as in
    :func:`rankwise.updates.orthonormal.cholesky_qr`. The stacks are used up.
    """
    rows = in_halves(stacks, scaled=True)
    stacks.clear()
    for family, halves in zip(families, rows, strict=True):
        grouped_product_(solver.grams[family.place], _rows(halves), _rows(halves).turned, halves.shape[-1])
    return rows


def _image(family: _Family, inverse: Tensor, x: Tensor) -> Tensor:
    """Return ``Y^T = w_C Q^T C^T + w_M (M Q)^T U^T`` (b, r, m) for the orthonormal ``Q^T = L^-1 X^T``."""
    across, small = family.halves(family.rank, family.long), family.halves(family.rank, family.rank)
    grouped_product_(across, _rows(inverse[family.place]), _rows(x), family.rank)
    grouped_product_(small, _rows(across), family.momentum.turned, family.long)
    image = family.empty(family.rank, family.short)
    grouped_product_(image, _rows(small), family.basis.turned, family.rank)
    grouped_product_(
        image,
        _rows(across),
        family.matrix.turned,
        family.long,
        alpha=family.weights[0],
        beta=family.weights[1],
        added=places_of(image),
    )
    return image


def _candidate(family: _Family, inverse: Tensor, y: Tensor, solver: _Solver) -> Tensor:
    """Return the first pass's basis ``Y L^-T`` (b, m, r), whose Gram matrices are formed."""
    candidate = family.empty(family.short, family.rank)
    grouped_product_(candidate, _rows(y).turned, _rows(inverse[family.place]).turned, family.rank)
    grouped_product_(solver.grams[family.place], _rows(candidate).turned, _rows(candidate), family.short)
    return candidate


def _finish(family: _Family, candidate: Tensor, inverse: Tensor, failed: Tensor, rotation: Tensor) -> None:
    """Update bases, moments, weights and error buffers; what has failed keeps its basis."""
    jobs, group = family.jobs, family.group
    basis = family.halves(family.short, family.rank)
    states = tuple(map(Tensor.data_ptr, [job.state["basis"] for job in jobs]))
    grouped_product_(basis, _rows(candidate), _rows(inverse).turned, family.rank, added=states, failed=failed)
    grouped_product_(rotation, _rows(basis).turned, family.basis, family.short)
    coordinates = family.empty(family.rank, family.long)
    grouped_product_(coordinates, _rows(basis).turned, family.matrix, family.short)
    momenta = [job.state["exp_avg"] for job in jobs]
    directions = advance_moments_(
        coordinates,
        rotation,
        momenta,
        [job.state["exp_avg_sq"] for job in jobs],
        step=family.step,
        betas=group["betas"],
        eps=group["eps"],
        error_feedback=family.feedback,
    )
    kept = momenta if family.feedback else [None] * len(jobs)
    low_rank_step_(
        [job.weight for job in jobs],
        [Factors(0, *parts) for parts in zip(basis.unbind(1), directions, kept, strict=True)],
        [job.source for job in jobs] if family.feedback else None,
        [job.source if job.error is None else job.error for job in jobs] if family.feedback else None,
        cols=jobs[0].shape[1],
        right=jobs[0].right,
        lr=group["lr"],
        weight_decay=0.0,  # weights have decayed already
    )
