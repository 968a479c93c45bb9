"""LDAdam's step on whole matrices in C++.

Products with a few columns run in libraries at a fraction of the speed of memory, and the low-dimensional part is a
hundred small operations. The results are those of :mod:`rankwise.ldadam.rule` but for rounding; a matrix has the
same bits wherever it lies and however many threads there are.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from rankwise.kernels.native.arrays import address
from rankwise.kernels.native.building import FAST, library
from rankwise.kernels.sizes import check_shapes
from rankwise.ldadam import low_rank_products, rule
from rankwise.ldadam.formulas import basis_weights, check_basis, momentum_share
from rankwise.ldadam.in_place import InPlace, LowRankStep
from rankwise.updates.orthonormal import MIN_DIAGONAL, MIN_SECOND_DIAGONAL

__all__ = ["ldadam_steps_", "ldadam_steps_in_place", "subspace_step", "subtract_product_", "takes"]

_SOURCE = Path(__file__).with_name("ldadam.cpp")
_LANES = 16
_MAX_RANK = 32
"""Libraries are faster above it."""


class _Matrix(ctypes.Structure):
    """As in the source."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("rows", "columns", "rank", "right")),
        *((name, ctypes.c_void_p) for name in ("added", "matrix", "weight", "basis", "first", "second", "direction")),
        ("feedback", ctypes.c_int64),
        *((name, ctypes.c_double) for name in ("lr", "weight_matrix", "weight_momentum")),
        *((name, ctypes.c_double) for name in ("beta1", "beta2", "past1", "past2", "present1", "present2")),
        *((name, ctypes.c_double) for name in ("eps", "share", "kept")),
        ("done", ctypes.c_int64),
    ]


def takes(rank: int, *tensors: Tensor, error: Tensor | None = None) -> bool:
    """Whether there is a form for matrices of this rank, made of these tensors.

    Args:
        rank: Rank of the subspace: 16 or 32.
        tensors: Weights, gradients, states: contiguous and float32.
        error: There is none for those with a buffer besides the source.
    """
    known = error is None and rank % _LANES == 0 and 0 < rank <= _MAX_RANK
    return (
        known
        and all(tensor.dtype == torch.float32 and tensor.is_contiguous() for tensor in tensors)
        and library(_SOURCE, FAST) is not None
    )


def ldadam_steps_(jobs: Sequence[LowRankStep]) -> list[float | None]:
    """Step matrices, each by one thread if there are many.

    Args:
        jobs: The matrices; :func:`takes` must say yes to the tensors of each.

    Returns:
        For each, the share of its old subspace that lies in the new one; None where Cholesky failed: then only the
        gradient has been added to its source.
    """
    described = [_described(job) for job in jobs]
    for matrix, job in zip(described, jobs, strict=True):
        size = (job.shape[0] * job.shape[1],)
        check_shapes(gradient=(job.gradient, size), source=(job.source, size), weight=(job.weight, size))
        matrix.added = None if job.gradient is None else address(job.gradient)
        matrix.matrix, matrix.weight = address(job.source), address(job.weight)
        matrix.feedback, matrix.lr = int(job.group["error_feedback"]), float(job.group["lr"])
    return _run(described)


def ldadam_steps_in_place(jobs: Sequence[LowRankStep]) -> InPlace:
    """:func:`ldadam_steps_` as :class:`rankwise.ldadam.in_place.StepsInPlace` has it."""
    shares = ldadam_steps_(jobs)
    done = [share for share in shares if share is not None]
    return InPlace([place for place, share in enumerate(shares) if share is None], len(done) - sum(done), 0.0)


def subspace_step(
    matrix: Tensor,
    U_prev: Tensor,
    M_prev: Tensor,
    V_prev: Tensor,
    step: int,
    betas: tuple[float, float],
    rho: float,
    eps: float,
    error_feedback: bool,
    written_beta1: float | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As :func:`rankwise.ldadam.rule.subspace_step`, which takes what there is no form for here.

    That is: stacks of matrices, the first step, and what :func:`takes` says no to.
    """
    right = matrix.stride(-1) != 1
    rows = matrix.mT if right else matrix
    hyper = {"betas": betas, "rho": rho, "eps": eps, "error_feedback": error_feedback}
    if matrix.dim() == 2 and step > 1 and takes(U_prev.shape[-1], rows, U_prev, M_prev, V_prev):
        check_basis(matrix, U_prev, M_prev)
        names = ("basis", "exp_avg", "exp_avg_sq")
        state = {name: old.clone() for name, old in zip(names, (U_prev, M_prev, V_prev), strict=True)}
        job = LowRankStep((rows.shape[0], rows.shape[1]), right, None, rows, rows, state, step, hyper)
        described = _described(job, written_beta1)
        direction = torch.empty_like(M_prev)
        described.matrix, described.direction = address(rows), address(direction)
        if _run([described])[0] is not None:
            return state["basis"], state["exp_avg"], state["exp_avg_sq"], direction
    return rule.subspace_step(
        matrix, U_prev, M_prev, V_prev, step, betas, rho, eps, error_feedback, written_beta1=written_beta1
    )


def _described(job: LowRankStep, written_beta1: float | None = None) -> _Matrix:
    """Everything but what is to be done with the matrix and its weight."""
    betas, feedback = job.group["betas"], job.group["error_feedback"]
    (short, long), rank = job.shape[:: -1 if job.right else 1], job.state["basis"].shape[-1]
    states = {"basis": (short, rank), "exp_avg": (rank, long), "exp_avg_sq": (rank, long)}
    check_shapes(**{name: (job.state[name], shape) for name, shape in states.items()})
    past, present = ([1 - beta**count for beta in betas] for count in (job.step - 1, job.step))
    weights = basis_weights(job.step, betas[0], job.group["rho"], feedback, written_beta1)
    share = momentum_share(betas[0], written_beta1) if feedback else 0.0
    rates = dict(
        zip(("beta1", "beta2", "past1", "past2", "present1", "present2"), (*betas, *past, *present), strict=True)
    )
    return _Matrix(
        rows=job.shape[0],
        columns=job.shape[1],
        rank=job.state["basis"].shape[1],
        right=int(job.right),
        basis=address(job.state["basis"]),
        first=address(job.state["exp_avg"]),
        second=address(job.state["exp_avg_sq"]),
        weight_matrix=weights[0],
        weight_momentum=weights[1],
        eps=job.group["eps"],
        share=share,
        **rates,
    )


def _run(matrices: Sequence[_Matrix]) -> list[float | None]:
    own = library(_SOURCE, FAST)
    assert own is not None
    array = (_Matrix * len(matrices))(*matrices)
    limits = (ctypes.c_double(MIN_DIAGONAL), ctypes.c_double(MIN_SECOND_DIAGONAL))
    own.ldadam_steps(ctypes.c_int64(len(array)), array, *limits, torch.get_num_threads())
    return [matrix.kept if matrix.done else None for matrix in array]


def subtract_product_(matrix: Tensor, left: Tensor, right: Tensor) -> None:
    """``matrix -= left right``: :func:`rankwise.ldadam.low_rank_products.subtract_product_`, which takes other types.

    Args:
        matrix: (rows, columns), changed in place.
        left: (rows, r).
        right: (r, columns).
    """
    left, right = left.contiguous(), right.contiguous()
    if not takes(left.shape[1], matrix, left, right):
        return low_rank_products.subtract_product_(matrix, left, right)
    check_shapes(left=(left, (matrix.shape[0], left.shape[1])), right=(right, (left.shape[1], matrix.shape[1])))
    own = library(_SOURCE, FAST)
    assert own is not None
    own.subtract_rows_product(
        ctypes.c_void_p(address(matrix)),
        ctypes.c_int64(matrix.shape[0]),
        ctypes.c_int64(matrix.shape[1]),
        ctypes.c_void_p(address(left)),
        ctypes.c_int64(left.shape[1]),
        ctypes.c_void_p(address(right)),
        torch.get_num_threads(),
    )
