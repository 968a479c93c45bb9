"""Symmetric products by the kernel with half the work, or whole ones by the library: whichever is faster for a shape.

The kernel breaks even where it runs at half the library's rate, which depends on the shape, the device and the versions
of both. The shape decides, so that a run that is done again, or goes on from a checkpoint, has the same bits. Who asks
for it has both timed at the first use of a shape; not so where torch is to be deterministic, in a capture of what has
not been timed before, and where there is no memory for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rankwise.kernels import graphs
from rankwise.updates.polynomial_steps import PLAIN, Products

__all__ = ["Shape", "by_shape", "chosen", "forget_times"]

_ALIGNED = 16  # With another number of rows results are written two bytes at a time, and registers spilled.
_ONE_TILE = 128  # Of a side up to that nothing is mirrored.
_ROUNDS = 3
_GAIN = 0.95  # Of the other's time: what takes more than that is as fast.

_faster: dict[Shape, bool] = {}
"""Whether the kernel has been faster, by what was timed."""


class Shape(NamedTuple):
    """What a product's time depends on.

    Attributes:
        kind: "square" or "polynomial".
        batch: Matrices.
        rows: Rows of each.
        columns: Columns of each.
        turned: Whether they lie transposed.
        dtype: Type of them.
        device: Where they lie.
    """

    kind: str
    batch: int
    rows: int
    columns: int
    turned: bool
    dtype: torch.dtype
    device: torch.device


def chosen(halved: Products, x: Tensor, turned: bool = False, timed: bool = False) -> Products:
    """The products for a Newton-Schulz iteration on a stack.

    Args:
        halved: The kernel's; the others are the library's.
        x: (b, m, n), m <= n; (b, n, m) where they are turned.
        turned: Whether the matrices lie transposed.
        timed: Whether both may be timed, on ``x`` itself, where that has not been done. The host waits then. Sums are
            rounded otherwise after another answer, so that nobody else may compute the same matrices.
    """
    if x.device.type == "cpu":
        return halved  # in Triton's interpreter, which is there for the kernel
    wide = x.mT if turned else x
    batch, rows, columns = wide.shape
    shape = Shape("square", batch, rows, columns, turned, x.dtype, x.device)
    small = shape._replace(kind="polynomial", columns=rows, turned=False)
    square, polynomial = (_takes(each, halved, wide, timed) for each in (shape, small))
    return Products(
        (halved if square else PLAIN).square,
        (halved if polynomial else PLAIN).polynomial,
        halved.symmetric if square and polynomial else PLAIN.symmetric,
    )


def by_shape(shape: Shape) -> bool:
    """Whether the kernel is taken where nothing is timed: for several tiles, of an aligned number of rows.

    Where the columns are not aligned both are slow, the kernel less so.
    """
    return shape.rows > _ONE_TILE and shape.rows % _ALIGNED == 0


def forget_times() -> None:
    """Time every shape anew."""
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
        _faster[shape] = by_shape(shape)  # Not tried at every step: the allocator would empty its caches each time.
    return _faster[shape]


def _has_clock(device: torch.device) -> bool:
    return device.type == "cuda"


def _calls(kind: str, halved: Products, wide: Tensor) -> list[Callable[[], object]]:
    """The kernel's product and the library's."""
    if kind == "square":
        return [lambda: halved.square(wide), lambda: PLAIN.square(wide)]
    gram = PLAIN.square(wide)
    return [lambda: halved.polynomial(gram, -4.775, 2.0315), lambda: PLAIN.polynomial(gram, -4.775, 2.0315)]


def _is_faster(shape: Shape, times: Sequence[float]) -> bool:
    """Whether the kernel is, by the times of both; within the noise of a few calls the shape decides."""
    kernel, library = times
    return by_shape(shape) if kernel > _GAIN * library and library > _GAIN * kernel else kernel < library


def _times(device: torch.device, *calls: Callable[[], object]) -> list[float]:
    """Milliseconds of each, the least of some in turns."""
    for call in calls:
        call()  # The first one compiles and loads.
    with torch.cuda.device(device):
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2 * _ROUNDS)] for _ in calls]
        for index in range(0, 2 * _ROUNDS, 2):
            for call, own in zip(calls, events, strict=True):
                own[index].record()
                call()
                own[index + 1].record()
        events[-1][-1].synchronize()
    return [min(begin.elapsed_time(end) for begin, end in zip(own[::2], own[1::2], strict=True)) for own in events]
