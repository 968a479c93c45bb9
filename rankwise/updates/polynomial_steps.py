r"""The Newton-Schulz iteration runs on matrices themselves, or on their Gram matrices.

All factors are polynomials of :math:`R = X X^T`, and so commute. The iteration may carry along the Gram matrices and
the product of the factors instead of long matrices, and multiply the long ones once:

.. math:: Z = b R + c R^2, \qquad Q \leftarrow (a I + Z) Q, \qquad R \leftarrow (a I + Z) R (a I + Z), \qquad
          X \leftarrow Q X.

Where eigenvalues of ``R`` should be zero, rounding may leave negative ones, which no Gram matrix has: these are
multiplied by up to 70 in a step, then faster. Hence ``X``, and ``R`` from it, are formed anew every :data:`RESTART`
steps. Then errors, measured on spectra from flat to rank one, are 2 to 6 times those of the iteration on ``X`` in
float64, float32 and float16, and singular values keep its bounds. In bfloat16 they do not: three steps end at up to 2.3
where 1.13 is the bound, and restarts every two steps save little. Matrices of that type are iterated on as they are.

All products but the first and the last of a run are symmetric, and may take half of their operations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rankwise.updates.polynomials import Quintic

__all__ = [
    "LONG",
    "PLAIN",
    "RESTART",
    "Products",
    "iterate",
    "iterate_on_gram",
    "operations",
    "operations_on_devices",
    "orthogonalise",
    "scratch",
]

RESTART = 3
"""Steps on a Gram matrix before a new one is formed."""
LONG = 1.5
"""Sides' ratio from which matrices may be iterated on by their Gram matrices."""
_STABLE = (torch.float64, torch.float32, torch.float16)
"""Types whose digits suffice for so many steps."""


class Products(NamedTuple):
    """The symmetric products.

    Attributes:
        square: ``X X^T`` of (b, m, n).
        step: ``a O + c L R`` of symmetric ``L``, ``R`` and ``O`` (b, m, m) that commute, ``a`` and ``c``, 1 by default.
            Three more arguments are a tensor that gets the result and ``d I``, ``d``, and one that gets the result.
        both: ``a O + L O`` of either half of a pair ``O`` (2, b, m, m), with ``L`` and ``a``.
        symmetric: Share of a full product's operations that they take: 0.5 where the upper half is mirrored.
    """

    square: Callable[[Tensor], Tensor]
    step: Callable[..., Tensor]
    both: Callable[[Tensor, Tensor, float], tuple[Tensor, ...]]
    symmetric: float


def _square(x: Tensor) -> Tensor:
    if len(x) == 1 and x.dtype == torch.bfloat16 and x.device.type == "cpu":
        # A product of two matrices reads the transpose where it lies, one of stacks copies it: this is a quarter faster
        # and has the same bits.
        single = x[0].contiguous()
        return torch.mm(single, single.mT)[None]
    return x @ x.mT


def _step(
    left: Tensor,
    right: Tensor,
    own: Tensor,
    share: float,
    factor: float = 1.0,
    shifted: Tensor | None = None,
    shift: float = 0.0,
    out: Tensor | None = None,
) -> Tensor:
    found = torch.baddbmm(own, left, right, beta=share, alpha=factor, out=out)
    if shifted is not None:
        shifted.copy_(found).diagonal(dim1=-2, dim2=-1).add_(shift)
    return found


def _both(left: Tensor, pair: Tensor, share: float) -> tuple[Tensor, ...]:
    return tuple(_step(left, half, half, share) for half in pair)


PLAIN = Products(_square, _step, _both, 1.0)
"""The products of torch's library."""


def orthogonalise(x: Tensor, table: Sequence[Quintic], products: Products = PLAIN, turned: bool = False) -> Tensor:
    """Iterate in the form that takes less work, if both are equally stable.

    A polynomial that is repeated, as published, is applied to the matrices themselves but in float16: its trajectories
    have been recorded to the bit.

    Args:
        x: (b, m, n) with m <= n and norms at most one; (b, n, m) where the matrices are turned. Its memory is free from
            the second step on if the caller does not keep it.
        table: Polynomial of each step.
        products: Symmetric products to use.
        turned: Whether the matrices lie transposed, as the results then do.
    """
    short, long = sorted(x.shape[-2:])
    less = operations(short, long, len(table), products.symmetric, True) < operations(
        short, long, len(table), products.symmetric, False
    )
    form = iterate_on_gram if less and _may_be_on_gram(short, long, x.dtype, table) else iterate
    start = [x]
    del x
    return form(start.pop(), table, products, turned)


SCRATCH = 640 << 20
"""Bytes that a stack of matrices may take, unless a single matrix takes more; a few of its products fill a device."""


def scratch(short: int, long: int, dtype: torch.dtype, table: Sequence[Quintic]) -> int:
    """Return an upper bound of the elements that :func:`orthogonalise` holds at once for one matrix, with its start.

    Args:
        short: Shorter side m.
        long: Longer side n.
        dtype: Type of the matrix.
        table: Polynomial of each step.
    """
    # The matrix twice, and a factor; or, on Gram matrices, the matrix and four that give the next factor.
    on_gram = long + 5 * short if _may_be_on_gram(short, long, dtype, table) else 0
    return short * max(2 * long + short, on_gram)


def _may_be_on_gram(short: int, long: int, dtype: torch.dtype, table: Sequence[Quintic]) -> bool:
    is_stable = dtype == torch.float16 or (dtype in _STABLE and len(set(table)) > 1)
    return is_stable and long >= LONG * short


def operations(short: int, long: int, steps: int, symmetric: float, on_gram: bool) -> float:
    """Return the floating-point operations of one matrix.

    Args:
        short: Shorter side m.
        long: Longer side n.
        steps: Steps of the iteration.
        symmetric: Share of a full product's operations that a symmetric one takes.
        on_gram: Whether the iteration runs on Gram matrices.
    """
    square, cube = 2.0 * short * short * long, 2.0 * short**3
    if not on_gram:
        return steps * (symmetric * (square + cube) + square)
    runs = -(-steps // RESTART)
    # A run of k steps has k polynomials, and k - 1 times one product for Q and two for R, all symmetric.
    return runs * (symmetric + 1.0) * square + symmetric * (steps + 3.0 * (steps - runs)) * cube


def operations_on_devices(short: int, long: int, steps: int) -> float:
    """Return the operations of one matrix where symmetric products take half, and long matrices their Gram form."""
    on_x, on_gram = (operations(short, long, steps, 0.5, way) for way in (False, True))
    return min(on_x, on_gram) if long >= LONG * short else on_x


def iterate(x: Tensor, table: Sequence[Quintic], products: Products = PLAIN, turned: bool = False) -> Tensor:
    """Apply ``X <- a X + (b A + c A^2) X`` with ``A = X X^T``, step by step.

    Args:
        x: (b, m, n) with m <= n; (b, n, m) where the matrices are turned.
        table: ``(a, b, c)`` of each step.
        products: Symmetric products to use.
        turned: Whether the matrices lie transposed.
    """
    for a, b, c in table:
        gram = products.square(x.mT if turned else x)
        factor = products.step(gram, gram, gram, b, c)
        del gram
        x = torch.baddbmm(x, *((x, factor) if turned else (factor, x)), beta=a)
        del factor
    return x


def iterate_on_gram(x: Tensor, table: Sequence[Quintic], products: Products = PLAIN, turned: bool = False) -> Tensor:
    """Apply what :func:`iterate` does by way of Gram matrices, with other roundings.

    Args:
        x: (b, m, n) with m <= n; (b, n, m) where the matrices are turned.
        table: ``(a, b, c)`` of each step.
        products: Symmetric products to use.
        turned: Whether the matrices lie transposed.
    """
    for start in range(0, len(table), RESTART):
        x = _few_steps(x, table[start : start + RESTART], products, turned)
    return x


def _few_steps(x: Tensor, table: Sequence[Quintic], products: Products, turned: bool) -> Tensor:
    if len(table) == 1:
        return iterate(x, table, products, turned)
    (a, b, c), following, *later = table
    gram = products.square(x.mT if turned else x)
    pair = gram.new_empty(2, *gram.shape)  # the second Gram matrix beside the first factor
    z = products.step(gram, gram, gram, b, c, pair[1], a)
    between = products.step(z, gram, gram, a)
    del gram
    products.step(between, z, between, a, out=pair[0])
    gram, factor = pair
    a, b, c = following
    between = z = products.step(gram, gram, gram, b, c)  # nor is the product before needed any more
    while later:
        between, factor = products.both(z, pair, a)
        del gram, pair
        gram = products.step(between, z, between, a)
        (a, b, c), *later = later
        z = products.step(gram, gram, gram, b, c)
        pair = torch.stack((gram, factor)) if later else gram  # not before the fourth step
    factor = products.step(z, factor, factor, a)
    del gram, pair, z, between  # only the factor is needed beside the long matrices
    return x @ factor.mT if turned else factor @ x
