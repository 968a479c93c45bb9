r"""The official rule's factor inverses as a window of vectors, which is linear in a layer's width.

With ``u = H v / sqrt(1 + v^T H v)`` and ``H = gamma J + (1 - gamma) I`` the rule (:mod:`rankwise.mkor.rule`) is

.. math::
    J = I - \sum_k w_k u_k u_k^T

whose weights ``w`` begin at 1, shrink by ``gamma`` with every vector that follows, and by ``zeta`` where the stabilizer
blends J with the identity. What has shrunk below the rounding of the storage type is given up: the new vector takes the
place of the one with the least weight. Nothing of the size of J is ever kept, and K vectors for either side multiply an
(m, n) gradient in 8 K m n operations, where J itself takes 2 m n (m + n).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rankwise.mkor.rule import FactorNorm

__all__ = [
    "MOST_VECTORS",
    "Factor",
    "Window",
    "factor_of",
    "is_identity",
    "multiply_",
    "names_of",
    "resized",
    "update_windows_",
    "window_length",
    "window_norms",
]

MOST_VECTORS = 8192
"""Longer windows are refused: no side is so long that such a form would be short."""
_MULTIPLE = 16
"""Windows have a multiple of so many vectors, which products take without padding."""
_TILE = {"cpu": 1 << 19}
"""Elements of J that are there at a time while its norm is taken, by type of device; on others `_TILE_ELSEWHERE`."""
_TILE_ELSEWHERE = 1 << 27
_AT_ONCE = {"cpu": 1}
"""Elements of windows that are moved together, unless a single one has more, by type of device."""
_AT_ONCE_ELSEWHERE = 3 << 24


class Window(NamedTuple):
    """A factor inverse, or several of one shape.

    Attributes:
        vectors: (..., K, d), ``u``; rows of zeros where there are fewer so far.
        weights: (..., K), ``w``; float32, or float64 if the vectors are.
    """

    vectors: Tensor
    weights: Tensor

    @classmethod
    def of(cls, windows: Sequence[Window]) -> Window:
        """Stack windows of one shape, (windows, ...)."""
        return cls(*(torch.stack(parts) if len(parts) > 1 else parts[0][None] for parts in zip(*windows, strict=True)))

    def factored(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return P and Q, (..., K, d) in the type of products, with which J is the identity less ``P^T Q``."""
        # The weights are on one side only, so that the other one is not rounded once more.
        weighted = torch.empty_like(self.vectors, dtype=dtype)
        return self.vectors.to(dtype), torch.mul(self.vectors, self.weights[..., None], out=weighted)


Factor = Tensor | Window
"""A factor inverse: dense, (d, d), or a window."""
Sums = tuple[Callable[[Tensor], Tensor] | None, Callable[[Tensor], Tensor] | None]
Norms = Callable[[Sequence[Window], FactorNorm, torch.dtype | None], Tensor]


def window_length(decay: float, dtype: torch.dtype) -> int:
    """Return K: older vectors weigh less than half of a rounding of their type, 2^-9 in bfloat16."""
    least = torch.finfo(dtype).eps / 4
    return _MULTIPLE * max(1, math.ceil(math.log(least) / math.log(decay) / _MULTIPLE))


@cache
def names_of(side: str) -> tuple[str, str]:
    """Return the names of the states that are the window of a side, which may be the side of a block: ``left[q]``."""
    name, bracket, block = side.partition("[")
    return f"{name}_vectors{bracket}{block}", f"{name}_weights{bracket}{block}"


def factor_of(state: Mapping[str, Tensor], side: str | None) -> Factor | None:
    """Return a side's factor inverse among a matrix's states; None where it has none."""
    if side is None or side in state:
        return None if side is None else state[side]
    vectors, weights = names_of(side)
    return Window(state[vectors], state[weights]) if vectors in state else None


def is_identity(name: str, value: Tensor) -> bool:
    """Whether a state of a matrix, by its name, is that of a factor which has not moved; others never have."""
    if name.startswith(("left", "right")) and "_" not in name:
        return torch.equal(value, torch.eye(len(value), dtype=value.dtype, device=value.device))
    return "_weights" not in name or not value.any()


def resized(window: Window, length: int) -> Window:
    """Return a window of another length: those of its vectors that weigh most, or rows of zeros besides."""
    order = window.weights.argsort(descending=True, stable=True)[:length]
    vectors, weights = window.vectors[order], window.weights[order]
    missing = length - len(order)
    pad = torch.nn.functional.pad
    return Window(pad(vectors, (0, 0, 0, missing)), pad(weights, (0, missing)))


# --- gradients -------------------------------------------------------------------------------------------------------


def multiply_(matrix: Tensor, left: Window | None, right: Window | None, add: Sums = (None, None)) -> Tensor:
    """Multiply a gradient by its factor inverses in place, and return it.

    Args:
        matrix: (..., m, n), in the type of the products; each of the two products is rounded to it.
        left: Windows of the rows, (..., K, m), or None for the identity.
        right: Windows of the columns, or None for the identity.
        add: Where the matrix is a slice, what sums products over its rows, and over its columns, with those of the
            others: those of the axis that is cut.
    """
    of_rows, of_columns = add
    if left is not None:
        vectors, weighted = left.factored(matrix.dtype)
        product = weighted @ matrix
        _subtract_(matrix, vectors.mT, product if of_rows is None else of_rows(product))
    if right is not None:
        vectors, weighted = right.factored(matrix.dtype)
        product = matrix @ weighted.mT
        _subtract_(matrix, product if of_columns is None else of_columns(product), vectors)
    return matrix


def _subtract_(matrix: Tensor, first: Tensor, second: Tensor) -> None:
    if matrix.dim() == 2:
        matrix.addmm_(first, second, alpha=-1.0)
    else:
        matrix.baddbmm_(first, second, alpha=-1.0)


# --- factors ---------------------------------------------------------------------------------------------------------


def update_windows_(
    windows: Sequence[Window],
    vectors: Tensor,
    *,
    decay: float,
    stabilizer: tuple[float, float] | None = (2.0, 0.9),
    norm: FactorNorm = "row_sum",
    product: torch.dtype | None = None,
    seen: Tensor | None = None,
    norms: Norms | None = None,
) -> Tensor:
    """Do :func:`rankwise.mkor.rule.factor_step` of the official rule on many windows, in place.

    A vector that is not finite leaves the stabilized factor; a damaged window is first reset to the identity.

    Args:
        windows: Windows of one shape.
        vectors: (n, d), a statistics vector for each.
        decay: Factor momentum.
        stabilizer: Threshold and retention, or None.
        norm: Norm of the stabilizer, of :data:`rankwise.mkor.formulas.FACTOR_NORMS`.
        product: Type of the products in this norm; None for that of all other arithmetic here.
        seen: (n,) bool, windows that take part; others keep every bit. None: all take part.
        norms: What measures all of them at once, in the place of :func:`window_norms`.

    Returns:
        (n,) bool, which windows took their vector; False for those that take no part.
    """
    seen = torch.ones(len(windows), dtype=torch.bool, device=vectors.device) if seen is None else seen
    options: Any = {"decay": decay, "stabilizer": stabilizer, "norm": norm, "product": product}
    sizes = None if norms is None or stabilizer is None else norms(windows, norm, product)
    taken = [
        _update_together_(windows[part], vectors[part], seen[part], None if sizes is None else sizes[part], **options)
        for part in _portions(windows)
    ]
    return torch.cat(taken)


def _portions(windows: Sequence[Window]) -> Iterator[slice]:
    """Yield which of some windows of one shape are computed together."""
    most = max(1, _AT_ONCE.get(windows[0].vectors.device.type, _AT_ONCE_ELSEWHERE) // windows[0].vectors.numel())
    return (slice(first, first + most) for first in range(0, len(windows), most))


def _update_together_(
    windows: Sequence[Window],
    vectors: Tensor,
    seen: Tensor,
    size: Tensor | None,
    *,
    decay: float,
    stabilizer: tuple[float, float] | None,
    norm: FactorNorm,
    product: torch.dtype | None,
) -> Tensor:
    before, dtype = Window.of(windows), windows[0].vectors.dtype
    wide = torch.float64 if torch.float64 in (dtype, vectors.dtype) else torch.float32
    weights = old = before.weights.to(wide)
    if stabilizer is not None and size is None:
        size = window_norm(before.vectors, old, norm, product or wide)
    # What is not a copy yet becomes one, as it is changed in place.
    kept, v = before.vectors.to(wide, copy=len(windows) == 1), vectors.to(wide)
    del before
    if stabilizer is not None and size is not None:
        damaged = ~(size < math.inf)
        weights = torch.where((size > stabilizer[0])[:, None], stabilizer[1] * weights, weights)
        weights = weights.masked_fill(damaged[:, None], 0.0)
        kept.masked_fill_((damaged & seen)[:, None, None], 0.0)
    shrunk = decay * weights
    coordinates = shrunk * (kept @ v[..., None])[..., 0]
    u = v - (kept.mT @ coordinates[..., None])[..., 0]
    curvature = (u * v).sum(-1, keepdim=True)
    u = u / (1.0 + curvature).sqrt()
    taken = seen & (torch.linalg.vector_norm(u.to(dtype), math.inf, dim=-1) < math.inf)
    # All weights shrink alike, so that the least one is the oldest.
    place = shrunk.argmin(-1, keepdim=True)
    weights = torch.where(taken[:, None], shrunk.scatter(-1, place, 1.0), weights)
    weights = torch.where(seen[:, None], weights, old)
    rows = place[..., None].expand(-1, -1, u.shape[-1])
    kept.scatter_(-2, rows, torch.where(taken[:, None, None], u[:, None], kept.gather(-2, rows)))
    for targets, values in zip(zip(*windows, strict=True), (kept, weights), strict=True):
        torch._foreach_copy_(list(targets), list(values))
    return taken


def window_norms(
    windows: Sequence[Window], norm: FactorNorm, product: torch.dtype | None, own: range | None = None
) -> Tensor:
    """Return :func:`window_norm` (n,) of many windows of one shape, measured in the type of products if it is wider.

    Args:
        windows: Windows of one shape.
        norm: Which norm.
        product: Type of the products; None for that of all other arithmetic.
        own: The rows of every J to look at; None: all.
    """
    stored = torch.promote_types(windows[0].vectors.dtype, torch.float32)
    wide = torch.promote_types(stored, product or torch.float32)
    sizes = []
    for part in _portions(windows):
        vectors, weights = Window.of(windows[part])
        sizes.append(window_norm(vectors, weights.to(wide), norm, product or wide, own))
    return torch.cat(sizes)


def window_norm(
    vectors: Tensor, weights: Tensor, norm: FactorNorm, product: torch.dtype, own: range | None = None
) -> Tensor:
    """Return the norms (n,) of factors, given (n, K, d) and (n, K): some rows of J are there at a time.

    Args:
        vectors: Vectors of the windows.
        weights: Weights of the windows.
        norm: Which norm.
        product: Type of the products; norms are in that of the weights.
        own: The rows of J to look at; None: all.
    """
    count, _, side = vectors.shape
    vectors, weighted = Window(vectors, weights).factored(product)
    rows = max(1, _TILE.get(vectors.device.type, _TILE_ELSEWHERE) // (count * side))
    sizes = []
    own = range(side) if own is None else own
    for first in own[::rows]:
        tile = weighted[..., first : min(first + rows, own.stop)].mT @ vectors
        tile.diagonal(first, -2, -1).sub_(1.0)
        sizes.append(torch.linalg.vector_norm(tile, 1 if norm == "row_sum" else math.inf, dim=-1, dtype=weights.dtype))
        del tile  # before there is another one
    return torch.cat(sizes, dim=-1).amax(-1) if sizes else weights.new_zeros(count)
