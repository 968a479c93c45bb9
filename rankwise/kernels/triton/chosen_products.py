"""This module chooses for a shape between the kernel that computes half a symmetric product and the library's product.

The kernel breaks even where it runs at half the library's rate, which depends on the shape, the device and the versions
of both. By default the shape decides, so that a run that is repeated, or resumed from a checkpoint, has the same bits.
On request both are timed at the first use of a shape. The shape still decides where torch is to be deterministic, in a
capture before both were timed, and where there is no memory for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from rankwise.kernels import graphs
from rankwise.updates.polynomial_steps import PLAIN, Products

__all__ = ["Shape", "by_shape", "chosen", "forget_times"]

_ALIGNED = 16  # Where it does not divide the rows, results are written two bytes at a time, and registers are spilled.
_ONE_TILE = 128  # Matrices with a side up to this lie in one tile, and nothing is mirrored.
_ROUNDS = 3
_GAIN = 0.95  # A form that takes more than this share of the other's time counts as equally fast.

_faster: dict[Shape, bool] = {}
"""Whether the kernel was faster, for each shape that was timed."""


class Shape(NamedTuple):
    """A shape, with all that the time of a product depends on.

    Attributes:
        kind: "square" or "polynomial".
        batch: Number of matrices.
        rows: Rows of each matrix.
        columns: Columns of each matrix.
        turned: Whether the matrices lie transposed.
        dtype: Type of the matrices.
        device: Where the matrices lie.
    """

    kind: str
    batch: int
    rows: int
    columns: int
    turned: bool
    dtype: torch.dtype
    device: torch.device


def chosen(halved: Products, x: Tensor, turned: bool = False, timed: bool = False) -> Products:
    """Choose the products of a Newton-Schulz iteration on a stack.

    Args:
        halved: The kernel's products, which compete with the library's.
        x: (b, m, n) with m <= n; (b, n, m) where the matrices are turned.
        turned: Whether the matrices lie transposed.
        timed: Whether both may be timed on ``x`` if they have not been; the host waits then. The two round sums
            differently, and another rank may choose the other one: no two ranks may compute the same matrices.
    """
    if x.device.type == "cpu":
        return halved  # in Triton's interpreter, which is there for the kernel
    wide = x.mT if turned else x
    batch, rows, columns = wide.shape
    shape = Shape("square", batch, rows, columns, turned, x.dtype, x.device)
    small = shape._replace(kind="polynomial", columns=rows, turned=False)
    square, step = (_takes(product, halved, wide, timed) for product in (shape, small))
    return Products(
        (halved if square else PLAIN).square,
        (halved if step else PLAIN).step,
        (halved if step else PLAIN).both,
        halved.symmetric if square and step else PLAIN.symmetric,
    )


def by_shape(shape: Shape) -> bool:
    """Whether the shape decides for the kernel: it needs several tiles and an aligned number of rows.

    Where the columns are not aligned, both are slow, the kernel less so.
    """
    return shape.rows > _ONE_TILE and shape.rows % _ALIGNED == 0


def forget_times() -> None:
    """Forget the times, so that every shape is timed anew."""
    _faster.clear()


def _takes(shape: Shape, halved: Products, wide: Tensor, timed: bool) -> bool:
    if not timed or not _has_clock(shape.device) or torch.are_deterministic_algorithms_enabled():
        return by_shape(shape)
    if shape in _faster:
        return _faster[shape]
    if graphs.is_capturing(shape.device):
        return by_shape(shape)
    try:
        _faster[shape] = _is_faster(shape, _times(shape.device, *_calls(shape.kind, halved, wide)))
    except torch.OutOfMemoryError:
        _faster[shape] = by_shape(shape)  # Another try at every step would empty the allocator's caches each time.
    return _faster[shape]


def _has_clock(device: torch.device) -> bool:
    return device.type == "cuda"


def _calls(kind: str, halved: Products, wide: Tensor) -> list[Callable[[], object]]:
    """Return calls of the kernel's product and of the library's."""
    if kind == "square":
        return [lambda: halved.square(wide), lambda: PLAIN.square(wide)]
    gram = PLAIN.square(wide)
    return [partial(products.step, gram, gram, gram, -4.775, 2.0315) for products in (halved, PLAIN)]


def _is_faster(shape: Shape, times: Sequence[float]) -> bool:
    """Whether the kernel is faster by the times of both; the shape decides where they hardly differ."""
    kernel, library = times
    return by_shape(shape) if kernel > _GAIN * library and library > _GAIN * kernel else kernel < library


def _times(device: torch.device, *calls: Callable[[], object]) -> list[float]:
    """Return milliseconds of each call, the least of several rounds in which the calls take turns."""
    for call in calls:
        call()  # The first call compiles and loads.
    with torch.cuda.device(device):
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2 * _ROUNDS)] for _ in calls]
        for index in range(0, 2 * _ROUNDS, 2):
            for call, ticks in zip(calls, events, strict=True):
                ticks[index].record()
                call()
                ticks[index + 1].record()
        events[-1][-1].synchronize()
    return [
        min(begin.elapsed_time(end) for begin, end in zip(ticks[::2], ticks[1::2], strict=True)) for ticks in events
    ]
