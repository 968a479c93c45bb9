r"""Newton-Schulz iterations do half the work of their symmetric products: ``X X^T`` and ``a O + c L R``.

Only the tiles on and below the diagonal are computed, and the others mirrored: a step takes ``3 m^2 n + m^3``
operations rather than ``4 m^2 n + 2 m^3``. Offsets inside a matrix have 32 bits where it is small enough; a stack may
have more than 2^31 elements. From sm_90 on tiles are copied by descriptors (TMA), which take no registers.
"""

from __future__ import annotations

from functools import cache, partial
from importlib.util import find_spec
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from rankwise.kernels.triton.chosen_products import chosen
from rankwise.kernels.triton.language import ceil_div, jit, launch
from rankwise.updates import newton_schulz as linalg
from rankwise.updates.polynomial_steps import Products

__all__ = ["HALVED", "newton_schulz", "symmetric_product", "symmetric_step"]

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def newton_schulz(
    matrix: Tensor,
    steps: int = 5,
    dtype: torch.dtype | None = None,
    eps: float = 1e-7,
    coefficients: str = "published",
    *,
    timed: bool = False,
) -> Tensor:
    """Orthogonalise as :func:`rankwise.updates.newton_schulz.newton_schulz` does, symmetric products being halved.

    Products are in bfloat16, float16 or float32; ``timed`` says whether they may be timed (:mod:`.chosen_products`).
    """
    if matrix.ndim >= 2 and (dtype or matrix.dtype) not in _DTYPES:
        raise ValueError(
            f"products must be in {', '.join(map(str, _DTYPES))}, got {dtype or matrix.dtype}; use "
            "rankwise.updates.newton_schulz for others"
        )
    choose = partial(chosen, HALVED, timed=timed)
    return linalg.newton_schulz(matrix, steps, dtype, eps, coefficients, choose)


def symmetric_product(x: Tensor) -> Tensor:
    """Return ``X X^T`` of every matrix of a stack, exactly symmetric.

    Args:
        x: (b, m, n), any strides, bfloat16, float16 or float32.

    Returns:
        (b, m, m) in the same type, accumulated in float32.
    """
    return symmetric_step(x, x, None)


def symmetric_step(
    left: Tensor,
    right: Tensor,
    own: Tensor | None,
    share: float = 0.0,
    factor: float = 1.0,
    shifted: Tensor | None = None,
    shift: float = 0.0,
    out: Tensor | None = None,
) -> Tensor:
    """Return ``share O + factor L R^T``, exactly symmetric, where that is symmetric but for rounding.

    Args:
        left: ``L`` (b, m, n), any strides.
        right: ``R`` (b, m, n), any strides; or several such stacks one after another, each multiplied by all of ``L``.
        own: ``O``, as many as there are ``R``, (..., m, m), contiguous; None: nothing is added.
        share: Factor of ``O``.
        factor: Factor of the product.
        shifted: Gets the result and ``shift I``, contiguous; None: nothing does.
        shift: Number added to the diagonal there.
        out: Gets the result, contiguous; None: new memory does.

    Returns:
        As many matrices as there are ``R``, (..., m, m) in the same type, accumulated in float32.
    """
    batch, rows, columns = right.shape
    out = left.new_empty(batch, rows, rows) if out is None else out
    single = left.dtype == torch.float32
    # Products in float32 run without tensor cores, and their accumulators fill the registers sooner.
    block, depth, warps, stages = (64, 32, 4, 3) if single else (128, 64, 8, 3)
    tiles = ceil_div(rows, block)
    turned = left.stride(1) == 1 and right.stride(1) == 1 and columns > 1
    operands = (left, right)
    described = not single and _has_descriptors(out.device) and all(_fits_descriptor(x, turned) for x in operands)
    spans = (
        sum((size - 1) * stride for size, stride in zip(x.shape[1:], x.stride()[1:], strict=True)) for x in operands
    )
    launch(
        _symmetric_kernel,
        (tiles * (tiles + 1) // 2, batch),
        out.device,
        *((_descriptor(x, turned, block, depth) if described else x) for x in operands),
        out if own is None else own,
        out,
        out if shifted is None else shifted,
        rows,
        columns,
        *left.stride(),
        *right.stride(),
        left.shape[0],
        float(factor),
        float(share),
        float(shift),
        ADD=own is not None,
        SHIFT=shifted is not None,
        DESCRIBED=described,
        TURNED=turned,
        LARGE=max(rows * rows, *spans) >= 1 << 31,
        PRECISION="ieee",
        BLOCK=block,
        DEPTH=depth,
        num_warps=warps,
        num_stages=stages + (described and own is not None),
    )
    return out


def _both(left: Tensor, pair: Tensor, share: float) -> tuple[Tensor, ...]:
    stacks = pair.flatten(0, 1)
    return symmetric_step(left, stacks, stacks, share).chunk(2)


HALVED = Products(symmetric_product, symmetric_step, _both, 0.5)
"""Products that take half the work."""


@cache
def _has_descriptors(device: torch.device) -> bool:
    """Whether the device copies tiles by descriptors (TMA, since sm_90), and Triton makes them on the host (3.4)."""
    if device.type != "cuda" or torch.version.hip is not None or torch.cuda.get_device_capability(device) < (9, 0):
        return False
    return find_spec("triton.tools.tensor_descriptor") is not None


def _fits_descriptor(x: Tensor, turned: bool) -> bool:
    """Whether rows, of the transposed matrix if that lies in memory, begin at multiples of 16 bytes."""
    inner, outer = (1, 2) if turned else (2, 1)
    aligned = all(x.stride(axis) * x.itemsize % 16 == 0 for axis in (0, outer)) and x.data_ptr() % 16 == 0
    return aligned and x.stride(inner) == 1


def _descriptor(x: Tensor, turned: bool, block: int, depth: int) -> Any:
    from triton.tools.tensor_descriptor import TensorDescriptor

    lying = x.mT if turned else x
    sides = [depth, block] if turned else [block, depth]
    return TensorDescriptor(lying, list(lying.shape), list(lying.stride()), [1, *sides])


# fmt: off
@jit
def _symmetric_kernel(
    x: tl.tensor, y: tl.tensor, addend: tl.tensor, out: tl.tensor, shifted: tl.tensor, rows: tl.tensor,
    columns: tl.tensor, x_batch: tl.tensor, x_row: tl.tensor, x_column: tl.tensor, y_batch: tl.tensor,
    y_row: tl.tensor, y_column: tl.tensor, count: tl.tensor, alpha: tl.tensor, beta: tl.tensor, shift: tl.tensor,
    ADD: tl.constexpr, SHIFT: tl.constexpr, DESCRIBED: tl.constexpr, TURNED: tl.constexpr, LARGE: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, DEPTH: tl.constexpr,
) -> None:
    # Programs go through the triangle row by row: 0; 1, 2; 3, 4, 5. The root may be rounded to a neighbour.
    tile = tl.program_id(0)
    below = ((tl.sqrt(8.0 * tile.to(tl.float32) + 1.0) - 1.0) * 0.5).to(tl.int32)
    below -= (below * (below + 1) // 2 > tile).to(tl.int32)
    below += ((below + 1) * (below + 2) // 2 <= tile).to(tl.int32)
    beside = tile - below * (below + 1) // 2
    batch = tl.program_id(1)
    x_place = batch % count
    first = below * BLOCK + tl.arange(0, BLOCK)
    second = beside * BLOCK + tl.arange(0, BLOCK)
    along = tl.arange(0, DEPTH)
    if LARGE:
        first, second, along = first.to(tl.int64), second.to(tl.int64), along.to(tl.int64)
    total = tl.full((BLOCK, BLOCK), 0.0, tl.float32)
    if DESCRIBED:
        for start in range(0, columns, DEPTH):
            if TURNED:
                a = tl.trans(tl.reshape(x.load([x_place, start, below * BLOCK]), (DEPTH, BLOCK)))
                b = tl.reshape(y.load([batch, start, beside * BLOCK]), (DEPTH, BLOCK))
            else:
                a = tl.reshape(x.load([x_place, below * BLOCK, start]), (BLOCK, DEPTH))
                b = tl.trans(tl.reshape(y.load([batch, beside * BLOCK, start]), (BLOCK, DEPTH)))
            total = tl.dot(a, b, total)
    else:
        left = x + x_place.to(tl.int64) * x_batch + (first[:, None] * x_row + along[None, :] * x_column)
        right = y + batch.to(tl.int64) * y_batch + (second[None, :] * y_row + along[:, None] * y_column)
        for start in range(0, columns, DEPTH):
            in_left = (first[:, None] < rows) & (start + along[None, :] < columns)
            in_right = (second[None, :] < rows) & (start + along[:, None] < columns)
            a = tl.load(left, mask=in_left, other=0.0)
            b = tl.load(right, mask=in_right, other=0.0)
            total = tl.dot(a, b, total, input_precision=PRECISION)
            left += DEPTH * x_column
            right += DEPTH * y_column
    value = total * alpha
    start_of_matrix = batch.to(tl.int64) * rows * rows
    place = start_of_matrix + (first[:, None] * rows + second[None, :])
    inside = (first[:, None] < rows) & (second[None, :] < rows)
    if ADD:
        value += beta * tl.load(addend + place, mask=inside, other=0.0).to(tl.float32)
    value = value.to(out.dtype.element_ty)
    if beside == below:
        # A tile on the diagonal is made exactly symmetric, whatever the order of its sums.
        value = tl.where(first[:, None] >= second[None, :], value, tl.trans(value))
    tl.store(out + place, value, mask=inside)
    if SHIFT:
        sums = (value.to(tl.float32) + shift).to(out.dtype.element_ty)
        tl.store(shifted + place, tl.where(first[:, None] == second[None, :], sums, value), mask=inside)
    if beside < below:
        mirrored = start_of_matrix + (second[:, None] * rows + first[None, :])
        inside = (second[:, None] < rows) & (first[None, :] < rows)
        value = tl.trans(value)
        tl.store(out + mirrored, value, mask=inside)
        if SHIFT:
            tl.store(shifted + mirrored, value, mask=inside)
# fmt: on
