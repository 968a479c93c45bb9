"""These functions compute orthonormal bases of batches of tall, skinny matrices.

The QR functions return the *ordered* (Gram-Schmidt) basis, whose first ``k`` columns span the first ``k`` columns of
the input, without host synchronisation. An optimizer that runs Adam inside a subspace depends on that basis itself and
not only on its span: with a polar factor or an unordered eigenbasis it would be a different optimizer.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = [
    "MIN_DIAGONAL",
    "MIN_SECOND_DIAGONAL",
    "Gather",
    "cholesky_qr",
    "cholesky_qr2",
    "householder_qr",
    "initial_basis",
    "row_block_cholesky_qr",
    "row_block_cholesky_qr2",
    "triangular_factor",
]

Gather = Callable[[Tensor], Tensor]
"""Stacks the tensors that the holders of row blocks pass, (holders, ...); every holder gets the whole stack."""

# A column is rounding if its part outside the span of its predecessors, relative to its length, is smaller than this.
MIN_DIAGONAL = 1e-6
# The second pass of CholeskyQR2 starts from columns that should already be orthonormal. If one of them still loses
# more than half of its length, the first pass has failed, and the second leaves an error well above rounding.
MIN_SECOND_DIAGONAL = 0.5
# A Gram matrix is summed over so many columns at a time, converted to double, which bounds the workspace.
_GRAM_BLOCK = 4096


def _scale_columns(matrix: Tensor) -> Tensor:
    """Return (..., n, r) with a largest entry of one in every non-zero column; zero columns stay zero."""
    # The squares in the Gram matrix stay inside the range of the dtype, whatever the units and the grading.
    peak = torch.linalg.vector_norm(matrix, ord=float("inf"), dim=-2, keepdim=True)
    return matrix / torch.where(peak > 0, peak, 1.0)


def triangular_factor(gram: Tensor, min_diagonal: float = MIN_DIAGONAL) -> tuple[Tensor, Tensor]:
    """Factor Gram matrices and say, on the device, which of them cannot be trusted.

    Args:
        gram: Symmetric positive semi-definite matrices (..., r, r).
        min_diagonal: Smallest diagonal entry of the factor that is accepted, relative to the length of its column:
            the sine of the angle between a column and the span of those before it.

    Returns:
        The lower triangular factor (..., r, r), and a boolean (...) that is true where the factorisation failed, a
        diagonal entry is below ``min_diagonal`` or an entry is not a number.
    """
    factor, info = torch.linalg.cholesky_ex(gram)
    lengths = gram.diagonal(dim1=-2, dim2=-1).sqrt()
    accepted = (factor.diagonal(dim1=-2, dim2=-1) >= min_diagonal * lengths).all(dim=-1)
    return factor, (info != 0) | ~accepted


def _solve(columns: Tensor, factor: Tensor) -> Tensor:
    return torch.linalg.solve_triangular(factor.mT, columns, upper=True, left=False)


def cholesky_qr(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Do one column-scaled pass of CholeskyQR, which gives well conditioned, nearly orthonormal columns.

    It takes two matrix products and an r x r Cholesky factorisation. The columns are orthonormal to about
    ``eps * cond**2`` only: use it to improve conditioning, and :func:`cholesky_qr2` for a basis.

    Args:
        matrix: (..., n, r) with r <= n.

    Returns:
        ``Q`` (..., n, r), which is ``matrix`` times an upper triangular matrix, and a boolean (...) that is true where
        ``Q`` must not be used (see :func:`triangular_factor`).
    """
    columns = _scale_columns(matrix)
    factor, failed = triangular_factor(columns.mT @ columns)
    return _solve(columns, factor), failed


def cholesky_qr2(matrix: Tensor) -> tuple[Tensor, Tensor]:
    r"""Compute the Q factor of a QR decomposition with positive diagonal by column-scaled CholeskyQR2.

    .. math:: Q_1 = (Y S) L_1^{-T}, \quad L_1 L_1^T = (Y S)^T (Y S), \qquad
              Q = Q_1 L_2^{-T}, \quad L_2 L_2^T = Q_1^T Q_1

    with ``S`` the diagonal matrix that gives the columns of ``Y`` a largest entry of one. Scaling makes graded columns
    (a warm-started power iteration) harmless, and the second pass brings orthonormality to rounding.

    Args:
        matrix: ``Y`` (..., n, r) with r <= n.

    Returns:
        ``Q`` (..., n, r) and a boolean (...) that is true where it must not be used: the input is numerically rank
        deficient, or not finite. :func:`householder_qr` gives the same ``Q``, at any condition number.
    """
    first, first_failed = cholesky_qr(matrix)
    factor, second_failed = triangular_factor(first.mT @ first, MIN_SECOND_DIAGONAL)
    return _solve(first, factor), first_failed | second_failed


def row_block_cholesky_qr(rows: Tensor, gather: Gather) -> tuple[Tensor, Tensor]:
    """Do what :func:`cholesky_qr` does, for a matrix of which every caller has some rows.

    Args:
        rows: Rows of this caller, (..., n_i, r).
        gather: Collective, called once with (..., 1 + r, r).

    Returns:
        The caller's rows of ``Q``, and the boolean, which is equal for all callers.
    """
    peak = torch.linalg.vector_norm(rows, ord=float("inf"), dim=-2, keepdim=True)
    columns = _scale_columns(rows)
    parts = gather(torch.cat((peak, columns.mT @ columns), dim=-2))
    peaks = parts[..., :1, :]
    highest = peaks.amax(dim=0)
    highest = torch.where(highest > 0, highest, 1.0)
    shares = peaks / highest
    factor, failed = triangular_factor((shares.mT * parts[..., 1:, :] * shares).sum(dim=0))
    return _solve(rows / highest, factor), failed


def row_block_cholesky_qr2(rows: Tensor, gather: Gather) -> tuple[Tensor, Tensor]:
    """Do what :func:`cholesky_qr2` does, for a matrix of which every caller has some rows.

    Args:
        rows: Rows of this caller, (..., n_i, r).
        gather: Collective, called twice, with (..., 1 + r, r) and (..., r, r).

    Returns:
        The caller's rows of ``Q``, and the boolean, which is equal for all callers.
    """
    first, first_failed = row_block_cholesky_qr(rows, gather)
    factor, second_failed = triangular_factor(gather(first.mT @ first).sum(dim=0), MIN_SECOND_DIAGONAL)
    return _solve(first, factor), first_failed | second_failed


def householder_qr(matrix: Tensor) -> Tensor:
    """Return the Q factor (..., n, r) of (..., n, r), r <= n, by Householder reflections, with positive diagonal of R.

    It is orthonormal for any finite input: directions that a rank-deficient matrix leaves open are completed. It is
    slow on GPUs, which work off a batch almost serially.
    """
    basis, upper = torch.linalg.qr(matrix, mode="reduced")
    diagonal = upper.diagonal(dim1=-2, dim2=-1)
    return basis * torch.where(diagonal < 0, -1.0, 1.0).to(basis.dtype).unsqueeze(-2)


def _short_gram(matrix: Tensor) -> Tensor:
    """Return ``A A^T`` (..., m, m) of (..., m, n) in double precision, with ``A`` scaled to a largest entry of one."""
    peak = torch.linalg.vector_norm(matrix, ord=float("inf"), dim=(-2, -1), keepdim=True).double()
    peak = torch.where(peak > 0, peak, 1.0)
    m = matrix.shape[-2]
    gram = torch.zeros(*matrix.shape[:-1], m, dtype=torch.float64, device=matrix.device)
    for block in matrix.split(_GRAM_BLOCK, dim=-1):
        scaled = block.double() / peak
        gram = gram + scaled @ scaled.mT
    return gram


def initial_basis(matrix: Tensor, rank: int) -> Tensor:
    """Return the first ``rank`` left singular vectors, in descending order of the singular values.

    They come from a symmetric eigendecomposition of the m x m Gram matrices in double precision: in single precision
    these could not resolve singular values below about 3e-4 of the largest. No random numbers are used. The result is
    orthonormal for zero and rank-deficient input, too. A matrix that is not finite gets some orthonormal basis, because
    the eigensolver would raise for the whole batch. It synchronises with the host, and is meant for the first step.

    Args:
        matrix: (..., m, n), float32 or float64.
        rank: Number of vectors, 1 <= rank <= m.

    Returns:
        Orthonormal columns (..., m, rank) in the dtype of ``matrix``; each sign is arbitrary.

    Raises:
        ValueError: ``rank`` is outside 1..m.
    """
    m = matrix.shape[-2]
    if not 1 <= rank <= m:
        raise ValueError(f"rank must lie in 1..{m} for matrices with {m} rows, got {rank}; use effective_rank()")
    gram = _short_gram(matrix)
    finite = gram.isfinite().flatten(-2).all(dim=-1)[..., None, None]
    _, vectors = torch.linalg.eigh(torch.where(finite, gram, 0.0))
    return vectors[..., m - rank :].flip(-1).to(matrix.dtype)
