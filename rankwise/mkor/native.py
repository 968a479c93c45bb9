"""MKOR's products run in C++ on the matrix tiles of recent x86 processors (Intel AMX)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from rankwise.kernels.native.arrays import address
from rankwise.kernels.native.products import SIDE, products
from rankwise.kernels.sizes import check_shapes
from rankwise.mkor import cpu
from rankwise.mkor.vector_windows import Factor, Window
from rankwise.mkor.workspace import Workspace

__all__ = ["precondition_into"]


class _Gradient(ctypes.Structure):
    """``Gradient`` of ``precondition.h``."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("rows", "columns", "turned")),
        *((name, ctypes.c_void_p) for name in ("weight", "bias")),
    ]


def precondition_into(
    out: Sequence[Tensor],
    parts: Sequence[Tensor],
    shape: tuple[int, int],
    left: Factor | None,
    right: Factor | None,
    space: Workspace,
    *,
    turned: bool = False,
    rescale: bool = True,
    product: torch.dtype | None = None,
) -> None:
    """Precondition one gradient as :func:`rankwise.mkor.cpu.precondition_into` does, which has the arguments.

    That function takes all but bfloat16 products of float32 gradients and bfloat16 factors, and everything on machines
    without tiles. The factors must be symmetric, as :func:`rankwise.mkor.cpu.update_factors_` leaves them. The two
    functions round to bfloat16 at equal places, but sum in different orders. No bit depends on the number of threads.
    """
    # The types are checked first, so that nothing is compiled in vain.
    has_form = product in (None, torch.bfloat16) and _is_known(out, parts, left, right)
    compiled = products() if has_form else None
    if compiled is None or isinstance(left, Window) or isinstance(right, Window):
        options = {"turned": turned, "rescale": rescale, "product": product}
        cpu.precondition_into(out, parts, shape, left, right, space, **options)  # type: ignore[arg-type]
        return
    rows, columns = shape
    rides = len(parts) > 1
    height, width = rows + (rides and turned), columns + (rides and not turned)
    check_shapes(left=(left, (height, height)), right=(right, (width, width)))
    for weight, *bias in (parts, out):
        check_shapes(weight=(weight, (rows * columns,)))
        if rides:
            check_shapes(bias=(bias[0], (columns if turned else rows,)))
    gradient = _Gradient(rows, columns, turned, address(parts[0]), address(parts[1]) if rides else None)
    blocks = -(-height // SIDE) * -(-width // SIDE)
    memory = space.take("blocks", (2 * blocks * SIDE**2,), torch.bfloat16)
    tensors = (out[0], out[1] if rides else None)
    compiled.precondition(
        ctypes.byref(gradient),
        *(ctypes.c_void_p(None if side is None else address(side)) for side in (left, right)),
        int(rescale),
        *(ctypes.c_void_p(None if tensor is None else address(tensor)) for tensor in tensors),
        ctypes.c_void_p(address(memory)),
        torch.get_num_threads(),
    )


def _is_known(out: Sequence[Tensor], parts: Sequence[Tensor], left: Factor | None, right: Factor | None) -> bool:
    sides = [side for side in (left, right) if isinstance(side, Tensor)]
    return bool(sides) and all(
        tensor.dtype == dtype and tensor.is_contiguous()
        for dtype, tensors in ((torch.float32, (*out, *parts)), (torch.bfloat16, sides))
        for tensor in tensors
    )
