"""The gradient that MKOR's factor inverses precondition, and its norm; see :mod:`rankwise.mkor.formulas`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from rankwise.mkor.inverses import check_choice, compute_dtype
from rankwise.mkor.product_groups import GradientForm

__all__ = [
    "AT_ONCE",
    "RESCALES",
    "Gradient",
    "Preconditioned",
    "Rescale",
    "apply_inverses",
    "gradient_norm",
    "precondition",
    "product_dtype",
    "rescale_to_norm",
    "scratch_of",
]

AT_ONCE = 12 << 24
"""Elements that are preconditioned together on a device at most, but for a larger matrix: as many in the type of the
products, and those of its largest matrix once more, are all the scratch memory."""

Rescale = Literal["joint", "sum_of_norms"]

RESCALES: tuple[str, ...] = ("joint", "sum_of_norms")


@dataclass(frozen=True)
class Gradient:
    """The gradient of one matrix, as it lies in memory, with its factor inverses.

    Attributes:
        rows: Rows of the weight as it lies.
        columns: Columns of it.
        weights: Its elements in order, in one or several 1-D runs.
        biases: The bias's, alike, where it rides along.
        turned: Whether the bias is one more row; otherwise it is one more column.
        left: (d, d) for the rows, or None for the identity.
        right: (d, d) for the columns, alike.
    """

    rows: int
    columns: int
    weights: Sequence[Tensor]
    biases: Sequence[Tensor]
    turned: bool
    left: Tensor | None
    right: Tensor | None

    @property
    def form(self) -> GradientForm:
        """What is known of it without its values."""
        weights, biases = (tuple(run.numel() for run in runs) for runs in (self.weights, self.biases))
        sides = (side is not None for side in (self.left, self.right))
        return GradientForm(self.rows, self.columns, weights, biases, self.turned, *sides)

    @property
    def runs(self) -> list[Tensor]:
        """Of the weight, and of the bias."""
        return [*self.weights, *self.biases]

    @property
    def numel(self) -> int:
        """Elements of all runs."""
        return sum(run.numel() for run in self.runs)


class Preconditioned(NamedTuple):
    """What has become of some gradients.

    Attributes:
        runs: 1-D, in the type of the products.
        factors: (runs,) fp32, what they are yet to be multiplied by; None: by nothing.
    """

    runs: list[Tensor]
    factors: Tensor | None


def scratch_of(sizes: Sequence[int]) -> int:
    """Bytes that matrices of these sizes take on a device, with products in bfloat16."""
    largest = max(sizes, default=0)
    return 2 * (min(sum(sizes), max(AT_ONCE, largest)) + largest)


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
    is not. Where ``U`` has a norm of zero or one that is not
    finite, the gradient itself is returned.

    Args:
        grad: gradient ``D``, ``(..., o, i)``; with ``has_bias`` its last column is the bias gradient.
        left_inverse: ``(..., o, o)``, or None for the identity.
        right_inverse: ``(..., i, i)``, or None for the identity.
        rescale: one of `RESCALES`, or None to return ``U``.
        has_bias: whether the last column is the bias gradient; matters to ``sum_of_norms`` only.

    Returns:
        A new tensor ``(..., o, i)`` in the type of ``grad``.

    Raises:
        ValueError: if ``rescale`` is unknown.
    """
    if rescale is not None:
        check_choice("rescale", rescale, RESCALES)
    update = apply_inverses(grad, left_inverse, right_inverse)
    if rescale is not None:
        split = has_bias and rescale == "sum_of_norms"
        norms = gradient_norm(update, split), gradient_norm(grad.to(update.dtype), split)
        update = rescale_to_norm(update, grad, *norms)
    return update.to(grad.dtype)


def product_dtype(grad: Tensor, *inverses: Tensor) -> torch.dtype:
    """Type of the operands of a preconditioning product; the sums are at least float32.

    Args:
        grad: the gradient.
        inverses: the factor inverses it is multiplied by.

    Returns:
        float64 for a gradient of that type; bfloat16 if all inverses are stored in it; otherwise float32. Never
        float16, in which gradients vanish.
    """
    if grad.dtype != torch.float64 and inverses and all(inverse.dtype == torch.bfloat16 for inverse in inverses):
        return torch.bfloat16
    return compute_dtype(grad)


def apply_inverses(
    grad: Tensor, left_inverse: Tensor | None, right_inverse: Tensor | None, dtype: torch.dtype | None = None
) -> Tensor:
    """Product of the left factor inverse, the gradient and the right factor inverse; None stands for the identity.

    Args:
        grad: ``(..., o, i)``; rounded to ``dtype``, as are the two products.
        left_inverse: ``(..., o, o)`` or None.
        right_inverse: ``(..., i, i)`` or None.
        dtype: of the products; None for `product_dtype`.

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
    return update.to(compute_dtype(grad)) if inverses else update.clone()


def gradient_norm(grad: Tensor, split_bias: bool = False) -> Tensor:
    """Frobenius norm of a gradient, or the sum of those of its weight part and of its bias column.

    Args:
        grad: ``(..., o, i)``.
        split_bias: take the last column for itself.

    Returns:
        ``(...)``.
    """
    if not split_bias:
        return torch.linalg.matrix_norm(grad)
    return torch.linalg.matrix_norm(grad[..., :-1]) + torch.linalg.matrix_norm(grad[..., -1:])


def rescale_to_norm(update: Tensor, grad: Tensor, update_norm: Tensor, grad_norm: Tensor) -> Tensor:
    """Scale a preconditioned gradient to a norm, falling back to the gradient where its own norm is 0 or not finite.

    Args:
        update: preconditioned gradient or a shard of it, ``(..., o, i)``.
        grad: the gradient or the same shard of it, ``(..., o, i)``.
        update_norm: norm of the whole preconditioned gradient, ``(...)``.
        grad_norm: norm of the whole gradient, ``(...)``.

    Returns:
        A new tensor ``(..., o, i)`` in the type of ``update``.
    """
    usable = (update_norm > 0) & update_norm.isfinite()
    ratio = grad_norm / torch.where(usable, update_norm, 1.0)
    return torch.where(usable[..., None, None], update * ratio[..., None, None], grad.to(update.dtype))
