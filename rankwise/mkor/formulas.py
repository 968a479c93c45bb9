"""These functions apply MKOR's rule to factors of any storage type, with arithmetic in float32 or float64.

:mod:`rankwise.mkor.rule` has the notation. All functions work on batches of matrices.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from rankwise.mkor import rule as plain
from rankwise.mkor.rule import FactorNorm, Rule, guarded, rescale_to_norm

__all__ = [
    "FACTOR_NORMS",
    "RESCALES",
    "RULES",
    "Rescale",
    "apply_inverses",
    "gradient_norm",
    "precondition",
    "product_dtype",
    "rank1_inverse_update",
    "stabilize",
    "update_factor",
]

Rescale = Literal["joint", "sum_of_norms"]

RULES: tuple[str, ...] = ("official", "ema", "paper_literal")
FACTOR_NORMS: tuple[str, ...] = ("row_sum", "max_entry")
RESCALES: tuple[str, ...] = ("joint", "sum_of_norms")


def rank1_inverse_update(inverse: Tensor, vector: Tensor, decay: float, rule: Rule = "official") -> Tensor:
    """Do :func:`rankwise.mkor.rule.rank1_inverse_update`; a symmetric ``inverse`` gives an exactly symmetric result.

    ``official`` keeps J between 0 and the identity. A J so damaged that the denominator is not positive gives NaN.

    Args:
        inverse: Factor inverse, symmetric positive definite, ``(..., d, d)``.
        vector: Mean input or virtual-bias gradient, ``(..., d)``.
        decay: Factor momentum, in (0, 1].
        rule: One of `RULES`.

    Returns:
        A new tensor ``(..., d, d)`` in the type of ``inverse``.
    """
    dtype = _compute_dtype(inverse, vector)
    return plain.rank1_inverse_update(inverse.to(dtype), vector.to(dtype), decay, rule).to(inverse.dtype)


def stabilize(inverse: Tensor, threshold: float, retention: float, norm: FactorNorm = "row_sum") -> Tensor:
    """Do :func:`rankwise.mkor.rule.stabilize`.

    Args:
        inverse: Factor inverse, ``(..., d, d)``.
        threshold: Norm above which the stabilizer acts, not negative.
        retention: Share of such an inverse that it keeps, in [0, 1].
        norm: One of `FACTOR_NORMS`.

    Returns:
        A new tensor ``(..., d, d)`` in the type of ``inverse``.
    """
    return plain.stabilize(inverse.to(_compute_dtype(inverse)), threshold, retention, norm).to(inverse.dtype)


def update_factor(
    inverse: Tensor,
    vector: Tensor,
    decay: float,
    rule: Rule = "official",
    threshold: float = 2.0,
    retention: float = 0.9,
    norm: FactorNorm = "row_sum",
) -> tuple[Tensor, Tensor]:
    """Do :func:`rankwise.mkor.rule.factor_step`, rounding to the storage type after each part of it.

    A non-finite vector leaves the stabilized inverse in place; a non-finite inverse is first reset to the identity.
    Neither touches the other matrices of the batch. :func:`rank1_inverse_update` and :func:`stabilize` have the
    arguments.

    Returns:
        The new inverse ``(..., d, d)`` in the type of ``inverse``, and the mask ``(...)`` of those updated.
    """
    stable = stabilize(inverse, threshold, retention, norm)
    return guarded(rank1_inverse_update(stable, vector, decay, rule), stable)


# --- gradients -------------------------------------------------------------------------------------------------------


def precondition(
    grad: Tensor,
    left_inverse: Tensor | None,
    right_inverse: Tensor | None,
    rescale: Rescale | None = "joint",
    has_bias: bool = False,
) -> Tensor:
    r"""Multiply a gradient by its factor inverses and give the product the gradient's norm back.

    .. math::
        U = J_L D J_R, \qquad V = \frac{\|D\|}{\|U\|} U

    With ``joint``, :math:`\|\cdot\|` is the Frobenius norm of the whole matrix, so that the global gradient norm does
    not change. ``sum_of_norms`` adds the norms of the weight part and of the bias column, as the authors' code does.
    With two identity factors the gradient comes back bit for bit, unless they are bfloat16 (see `product_dtype`) and it
    is not. Where ``U`` has a norm of zero or one that is not finite, the gradient itself is returned.

    Args:
        grad: Gradient ``D``, ``(..., o, i)``; with ``has_bias`` its last column is the bias gradient.
        left_inverse: ``(..., o, o)``, or None for the identity.
        right_inverse: ``(..., i, i)``, or None for the identity.
        rescale: One of `RESCALES`, or None to return ``U``.
        has_bias: Whether the last column is the bias gradient; only ``sum_of_norms`` asks.

    Returns:
        A new tensor ``(..., o, i)`` in the type of ``grad``.
    """
    update = apply_inverses(grad, left_inverse, right_inverse)
    if rescale is not None:
        split = has_bias and rescale == "sum_of_norms"
        norms = gradient_norm(update, split), gradient_norm(grad.to(update.dtype), split)
        update = rescale_to_norm(update, grad, *norms)
    return update.to(grad.dtype)


def product_dtype(grad: Tensor, *inverses: Tensor) -> torch.dtype:
    """Return the type of the operands of a preconditioning product; the sums are at least float32.

    Args:
        grad: Gradient.
        inverses: Factor inverses that the gradient is multiplied by.

    Returns:
        float64 for a gradient of that type; bfloat16 if all inverses are stored in it; otherwise float32. Never
        float16, in which gradients vanish.
    """
    if grad.dtype != torch.float64 and inverses and all(inverse.dtype == torch.bfloat16 for inverse in inverses):
        return torch.bfloat16
    return _compute_dtype(grad)


def apply_inverses(
    grad: Tensor, left_inverse: Tensor | None, right_inverse: Tensor | None, dtype: torch.dtype | None = None
) -> Tensor:
    """Multiply the left factor inverse, the gradient and the right factor inverse; None stands for the identity.

    Args:
        grad: ``(..., o, i)``, rounded to ``dtype``, as are the two products.
        left_inverse: ``(..., o, o)`` or None.
        right_inverse: ``(..., i, i)`` or None.
        dtype: Type of the products; None for `product_dtype`.

    Returns:
        A new tensor ``(..., o, i)`` in float32, or in float64 if ``grad`` is.
    """
    inverses = [inverse for inverse in (left_inverse, right_inverse) if inverse is not None]
    dtype = dtype or product_dtype(grad, *inverses)
    update = grad.to(dtype)
    if left_inverse is not None:
        update = left_inverse.to(dtype) @ update
    if right_inverse is not None:
        update = update @ right_inverse.to(dtype)
    return update.to(_compute_dtype(grad)) if inverses else update.clone()


def gradient_norm(grad: Tensor, split_bias: bool = False) -> Tensor:
    """Return the Frobenius norm of a gradient, or the sum of the norms of its weight part and its bias column.

    Args:
        grad: ``(..., o, i)``.
        split_bias: Whether the last column has a norm of its own.

    Returns:
        ``(...)``.
    """
    if not split_bias:
        return torch.linalg.matrix_norm(grad)
    return torch.linalg.matrix_norm(grad[..., :-1]) + torch.linalg.matrix_norm(grad[..., -1:])


# --- types -----------------------------------------------------------------------------------------------------------


def _compute_dtype(*tensors: Tensor) -> torch.dtype:
    """Return float64 if one of the tensors is, else float32: the type of all arithmetic outside the products."""
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32
