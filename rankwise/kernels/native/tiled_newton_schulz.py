"""Newton-Schulz iterations run in C++ on the matrix tiles of recent x86 processors (Intel AMX).

Libraries compute both halves of the symmetric products, and reach a fraction of the speed. The iteration works on the
matrices themselves, whatever the polynomials: on their Gram matrices it is not stable in bfloat16. It rounds to
bfloat16 where :func:`rankwise.updates.newton_schulz.newton_schulz` does, but sums in another order. The bits of a
matrix depend neither on its stack nor on the number of threads.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from rankwise.kernels.lists import decay_
from rankwise.kernels.native import squared_norms
from rankwise.kernels.native.arrays import address
from rankwise.kernels.native.products import products
from rankwise.kernels.orthogonal_step import OrthogonalStep
from rankwise.kernels.sizes import check_lengths
from rankwise.updates import newton_schulz as linalg
from rankwise.updates.polynomials import Quintic, quintics

__all__ = ["newton_schulz", "orthogonal_steps_", "takes"]


class _Orthogonal(ctypes.Structure):
    """``Orthogonal`` of ``newton_schulz.h``."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("rows", "columns")),
        ("from", ctypes.c_void_p),
        ("divisor", ctypes.c_double),
        ("to", ctypes.c_void_p),
        ("moves", ctypes.c_int64),
        *((name, ctypes.c_double) for name in ("factor", "lr")),
    ]


def takes(matrix: torch.dtype, product: torch.dtype) -> bool:
    """Whether there is a form for matrices of this type with products in this type, on this machine."""
    return matrix == torch.float32 and product == torch.bfloat16 and products() is not None


def newton_schulz(
    matrix: Tensor,
    steps: int = 5,
    dtype: torch.dtype | None = None,
    eps: float = 1e-7,
    coefficients: str = "published",
) -> Tensor:
    """Orthogonalise matrices as :func:`rankwise.updates.newton_schulz.newton_schulz` does.

    That function takes all but float32 matrices with products in bfloat16, and everything on machines without tiles.

    Args:
        matrix: (..., m, n).
        steps: Iterations, at least 1.
        dtype: Type of the products.
        eps: Number added to the norm.
        coefficients: Name of the polynomials.

    Returns:
        (..., m, n) in the dtype of ``matrix``.

    Raises:
        ValueError: There are fewer than two dimensions, a type is no floating-point one, or ``steps`` is below 1 or not
            among those of ``coefficients``.
    """
    is_valid = matrix.ndim >= 2 and matrix.numel() > 0 and steps >= 1
    if not is_valid or not takes(matrix.dtype, dtype or matrix.dtype):
        return linalg.newton_schulz(matrix, steps, dtype, eps, coefficients)
    table = quintics(coefficients, steps)
    rows, columns = matrix.shape[-2:]
    stack = matrix.reshape(-1, rows * columns).contiguous()
    result = torch.empty_like(stack)
    norms = _norms(list(stack))
    pairs = zip(stack, result, norms, strict=True)
    _run([_Orthogonal(rows, columns, address(a), norm + eps, address(b)) for a, b, norm in pairs], table)
    return result.view(matrix.shape)


def orthogonal_steps_(jobs: Sequence[OrthogonalStep]) -> None:
    """Step weights along the orthogonal factors of their momenta, as :func:`newton_schulz` computes them.

    Args:
        jobs: Steps of contiguous tensors of a type that :func:`takes` accepts; no step may be cautious.
    """
    for job in jobs:
        check_lengths([job.momentum], [job.weight])
    for rate, weight_decay in dict.fromkeys((job.lr, job.weight_decay) for job in jobs):
        decay_([job.weight for job in jobs if (job.lr, job.weight_decay) == (rate, weight_decay)], rate, weight_decay)
    for way in dict.fromkeys((job.coefficients, job.steps) for job in jobs):
        matrices = [
            (job, momentum, weight)
            for job in jobs
            if (job.coefficients, job.steps) == way
            for momentum, weight in job.matrices()
        ]
        norms = _norms([momentum for _, momentum, _ in matrices])
        described = [
            # The rate may be a 0-d tensor on the CPU, which ctypes takes for a float.
            _Orthogonal(*job.shape, address(momentum), norm + job.eps, address(weight), 1, job.factor, job.lr)
            for (job, momentum, weight), norm in zip(matrices, norms, strict=True)
        ]
        _run(described, quintics(*way))


def _norms(matrices: list[Tensor]) -> list[float]:
    norms: list[float] = squared_norms(matrices).sqrt_().tolist()
    return norms


def _run(matrices: Sequence[_Orthogonal], table: Sequence[Quintic]) -> None:
    compiled = products()
    assert compiled is not None
    rates = [rate for polynomial in table for rate in polynomial]
    compiled.newton_schulz(
        ctypes.c_int64(len(matrices)),
        (_Orthogonal * len(matrices))(*matrices),
        ctypes.c_int64(len(table)),
        (ctypes.c_float * len(rates))(*rates),
        torch.get_num_threads(),
    )
