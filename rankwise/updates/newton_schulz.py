r"""Newton-Schulz iterations orthogonalise batches of matrices without host synchronisation.

The iteration costs ``steps * (4 m^2 n + 2 m^3)`` floating-point operations for m <= n, all of them matrix products;
on the Gram matrices of long matrices (:mod:`.polynomial_steps`) it costs less.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rankwise.updates.polynomial_steps import Products, orthogonalise
from rankwise.updates.polynomials import quintics

__all__ = ["newton_schulz"]


def newton_schulz(
    matrix: Tensor,
    steps: int = 5,
    dtype: torch.dtype | None = None,
    eps: float = 1e-7,
    coefficients: str = "published",
    choose: Callable[[Tensor, bool], Products] | None = None,
) -> Tensor:
    r"""Return the nearly orthogonal factor of every matrix of a stack, by quintic Newton-Schulz iteration.

    .. math:: X_0 = \frac{M}{\lVert M \rVert_F + \epsilon}, \qquad A = X X^T, \qquad
              X \leftarrow a X + (b A + c A^2) X

    The singular vectors of ``M`` stay and each singular value goes through the same odd polynomials. With five steps of
    the published one, singular values of at least 0.002 of the Frobenius norm end between 0.68 and 1.21; smaller ones
    are multiplied by at most 485. The zero matrix gives zero. Each matrix has its own norm, however many are stacked.

    Source: MARS, arXiv 2411.10438 (a surrogate for the SVD of its Algorithm 4), with the coefficients of Muon. The
    product order is the cheap one of MARS-M, arXiv 2510.21800; that of MARS-Shampoo differs from it by rounding only.

    Args:
        matrix: ``M`` (..., m, n), of any floating-point dtype and any orientation. Tall matrices are iterated on
            transposed, so that the Gram matrix has the smaller side.
        steps: Number of iterations, at least 1.
        dtype: Type of the products; ``torch.bfloat16`` leaves a relative error of 1 to 2 %. ``None`` keeps the
            dtype of ``matrix``, in full precision unless TF32 was switched on for the process; in a step it never is.
        eps: Number added to the norm, which is taken in the dtype of ``matrix``, or in float32 if that is narrower.
        coefficients: Name of the polynomials, one of :data:`rankwise.updates.polynomials.COEFFICIENT_SETS`.
        choose: Chooses products for a stack, and whether its matrices lie transposed; None: the library's.

    Returns:
        (..., m, n) in the dtype of ``matrix``.

    Raises:
        ValueError: ``matrix`` has fewer than two dimensions, it or ``dtype`` is not floating point, or ``steps`` is
            below 1 or not among those of ``coefficients``.
    """
    _require_matrix(matrix)
    dtype = matrix.dtype if dtype is None else dtype
    if not (matrix.is_floating_point() and dtype.is_floating_point):
        raise ValueError(f"newton_schulz needs floating-point dtypes, got matrix {matrix.dtype} and dtype {dtype}")
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}; 5 is the published number")
    table = quintics(coefficients, steps)
    if matrix.numel() == 0:
        return torch.empty_like(matrix)
    tall = matrix.shape[-2] > matrix.shape[-1]
    stack = matrix.reshape(-1, *matrix.shape[-2:])
    # Nothing but the iteration holds its start, so that its memory is freed sooner.
    if choose is not None:
        start = [_normalized(stack, eps).to(dtype).contiguous()]
        products = choose(start[0], tall)
        return orthogonalise(start.pop(), table, products, tall).to(matrix.dtype).reshape(matrix.shape)
    result = orthogonalise(_normalized(stack.mT if tall else stack, eps).to(dtype), table).to(matrix.dtype)
    return (result.mT if tall else result).reshape(matrix.shape)


def _normalized(matrix: Tensor, eps: float) -> Tensor:
    """Divide (b, m, n) by its norms, in float32 at least, as sums of squares in bfloat16 lose the small terms."""
    wide_enough = matrix if matrix.dtype in (torch.float32, torch.float64) else matrix.float()
    norm = torch.linalg.vector_norm(wide_enough, dim=(-2, -1), keepdim=True)
    return wide_enough / (norm + eps)


def _require_matrix(matrix: Tensor) -> None:
    if matrix.ndim < 2:
        raise ValueError(
            f"matrix must be (..., m, n), got shape {tuple(matrix.shape)}; reshape it to its logical shape"
        )
