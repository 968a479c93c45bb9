r"""The Newton-Schulz iteration, on matrices themselves and on their Gram matrices.

All factors are polynomials of :math:`R = X X^T`, which commute. Instead of long matrices, their Gram matrices and the
product of the factors can be carried along, and the long ones be multiplied once:

.. math:: Z = b R + c R^2, \qquad Q \leftarrow (a I + Z) Q, \qquad R \leftarrow (a I + Z) R (a I + Z), \qquad
          X \leftarrow Q X.

What rounding leaves of ``R`` where it should be zero may be negative, which no Gram matrix is: it is multiplied by up
to 70 a step, then faster. Hence ``X`` is formed, and ``R`` of it, every :data:`RESTART` steps. With those, measured on
spectra from flat to rank one, errors are 2 to 6 times those of the iteration on ``X`` in float64, float32 and float16,
and singular values keep its bounds. In bfloat16 they do not: three steps end at up to 2.3 where 1.13 is the bound,
and restarts every two steps leave little of the saving. Matrices of that type are iterated on as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rankwise.updates.polynomials import Quintic

__all__ = ["PLAIN", "RESTART", "Products", "iterate", "iterate_on_gram", "operations", "orthogonalise", "scratch"]

RESTART = 3
"""Steps on a Gram matrix before another is formed."""
_STABLE = (torch.float64, torch.float32, torch.float16)
"""Types whose digits suffice for as many."""


class Products(NamedTuple):
    """The two symmetric products.

    Attributes:
        square: ``X X^T`` of (b, m, n).
        polynomial: ``b A + c A^2`` of symmetric ``A`` (b, m, m), ``b`` and ``c``.
        symmetric: Share of the operations of a product that they take: 0.5 where the upper half is mirrored.
    """

    square: Callable[[Tensor], Tensor]
    polynomial: Callable[[Tensor, float, float], Tensor]
    symmetric: float


def _square(x: Tensor) -> Tensor:
    if len(x) == 1 and x.dtype == torch.bfloat16 and x.device.type == "cpu":
        # The library's product of two dimensions takes the transpose as it lies, that of stacks copies it: the same
        # bits, a quarter faster.
        single = x[0].contiguous()
        return torch.mm(single, single.mT)[None]
    return x @ x.mT


def _polynomial(gram: Tensor, linear: float, square: float) -> Tensor:
    return torch.baddbmm(gram, gram, gram, beta=linear, alpha=square)


PLAIN = Products(_square, _polynomial, 1.0)
"""The library's."""


def orthogonalise(x: Tensor, table: Sequence[Quintic], products: Products = PLAIN, turned: bool = False) -> Tensor:
    """Whichever form is less work, where both are as stable.

    One polynomial over and over, as published, is applied to the matrices themselves always: trajectories of it have
    been recorded to the bit.

    Args:
        x: (b, m, n), m <= n, of norms at most one; (b, n, m) where they are turned. Its memory is free from the second
            step on if the caller does not keep it.
        table: The polynomial of each step.
        products: What multiplies.
        turned: Whether the matrices lie transposed, and the results are to.
    """
    short, long = sorted(x.shape[-2:])
    less = operations(short, long, len(table), products.symmetric, True) < operations(
        short, long, len(table), products.symmetric, False
    )
    form = iterate_on_gram if less and _may_be_on_gram(x.dtype, table) else iterate
    start = [x]
    del x
    return form(start.pop(), table, products, turned)


SCRATCH = 640 << 20
"""Bytes that a stack of matrices takes on a device, unless one alone takes more: a few products of them fill it."""


def scratch(short: int, long: int, dtype: torch.dtype, table: Sequence[Quintic]) -> int:
    """Elements that :func:`orthogonalise` has at once for one matrix, the start among them, at most.

    Args:
        short: m.
        long: n.
        dtype: Type of the matrix.
        table: The polynomial of each step.
    """
    # Two of the matrix and a factor; or, on Gram matrices, what makes the next factors of the last ones.
    return short * (2 * long + (4 if _may_be_on_gram(dtype, table) else 1) * short)


def _may_be_on_gram(dtype: torch.dtype, table: Sequence[Quintic]) -> bool:
    return dtype in _STABLE and len(set(table)) > 1


def operations(short: int, long: int, steps: int, symmetric: float, on_gram: bool) -> float:
    """Floating-point operations of one matrix.

    Args:
        short: m.
        long: n.
        steps: Steps of the iteration.
        symmetric: See :class:`Products`.
        on_gram: Which of the two forms.
    """
    square, cube = 2.0 * short * short * long, 2.0 * short**3
    if not on_gram:
        return steps * (symmetric * (square + cube) + square)
    runs = -(-steps // RESTART)
    # A run of k steps: k polynomials, and k - 1 times one product for Q and two for R.
    return runs * (symmetric + 1.0) * square + (symmetric * steps + 3.0 * (steps - runs)) * cube


def iterate(x: Tensor, table: Sequence[Quintic], products: Products = PLAIN, turned: bool = False) -> Tensor:
    """``X <- a X + (b A + c A^2) X`` with ``A = X X^T``, step by step.

    Args:
        x: (b, m, n), m <= n.
        table: ``(a, b, c)`` of each step.
        products: What multiplies.
        turned: As for :func:`orthogonalise`.
    """
    for a, b, c in table:
        factor = products.polynomial(products.square(x.mT if turned else x), b, c)
        x = torch.baddbmm(x, *((x, factor) if turned else (factor, x)), beta=a)
        del factor
    return x


def iterate_on_gram(x: Tensor, table: Sequence[Quintic], products: Products = PLAIN, turned: bool = False) -> Tensor:
    """The same polynomials of the same singular values; rounded otherwise.

    Args:
        x: (b, m, n), m <= n.
        table: ``(a, b, c)`` of each step.
        products: What multiplies.
        turned: As for :func:`orthogonalise`.
    """
    for start in range(0, len(table), RESTART):
        x = _few_steps(x, table[start : start + RESTART], products, turned)
    return x


def _few_steps(x: Tensor, table: Sequence[Quintic], products: Products, turned: bool) -> Tensor:
    (a, b, c), *others = table
    if not others:
        return iterate(x, table, products, turned)
    gram = products.square(x.mT if turned else x)
    z = products.polynomial(gram, b, c)
    factor = z.clone()
    factor.diagonal(dim1=-2, dim2=-1).add_(a)
    for following in others:
        between = torch.baddbmm(gram, z, gram, beta=a)
        gram = torch.baddbmm(between, between, z, beta=a)
        a, b, c = following
        z = products.polynomial(gram, b, c)
        factor = torch.baddbmm(factor, z, factor, beta=a)
    return x @ factor.mT if turned else factor @ x
