r"""Newton-Schulz iterations do half the work of the symmetric products ``X X^T`` and ``b A + c A^2``.

Only the tiles on and below the diagonal are computed, and the others mirrored: a step takes ``3 m^2 n + m^3``
operations rather than ``4 m^2 n + 2 m^3``. Offsets have 64 bits, so that a stack may have more than 2^31 elements.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from rankwise.kernels.triton.chosen_products import chosen
from rankwise.kernels.triton.language import ceil_div, jit, launch
from rankwise.updates.polynomial_steps import Products, orthogonalise
from rankwise.updates.polynomials import quintics

__all__ = ["HALVED", "newton_schulz", "symmetric_polynomial", "symmetric_product"]

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
    """Orthogonalise as :func:`rankwise.updates.newton_schulz.newton_schulz` does, with two of three products halved.

    Args:
        matrix: (..., m, n).
        steps: Iterations, at least 1.
        dtype: Type of the products, which are accumulated in float32; None: the type of ``matrix``.
        eps: Number added to the norm.
        coefficients: Name of the polynomials.
        timed: Whether the products may be timed, as :func:`.chosen_products.chosen` says.

    Returns:
        (..., m, n) in the dtype of ``matrix``.

    Raises:
        ValueError: There are fewer than two dimensions, the type of the products is none of bfloat16, float16 and
            float32, or ``steps`` is below 1 or not among those of ``coefficients``.
    """
    dtype = matrix.dtype if dtype is None else dtype
    if matrix.ndim < 2 or dtype not in _DTYPES or steps < 1:
        raise ValueError(
            f"newton_schulz takes (..., m, n), products in {', '.join(map(str, _DTYPES))} and at least one step, got "
            f"{tuple(matrix.shape)}, {dtype} and {steps}; use rankwise.updates.newton_schulz for others"
        )
    table = quintics(coefficients, steps)
    if matrix.numel() == 0:
        return torch.empty_like(matrix)
    tall = matrix.shape[-2] > matrix.shape[-1]
    stack = matrix.reshape(-1, *matrix.shape[-2:])
    wide_enough = stack if stack.dtype in (torch.float32, torch.float64) else stack.float()
    norm = torch.linalg.vector_norm(wide_enough, dim=(-2, -1), keepdim=True)
    # The list is emptied below, so that only the iteration holds its start, and its memory is freed sooner.
    start = [(wide_enough / (norm + eps)).to(dtype).contiguous()]
    products = chosen(HALVED, start[0], tall, timed)
    return orthogonalise(start.pop(), table, products, tall).to(matrix.dtype).reshape(matrix.shape)


def symmetric_product(x: Tensor) -> Tensor:
    """Return ``X X^T`` of every matrix of a stack, exactly symmetric.

    Args:
        x: (b, m, n), any strides, bfloat16, float16 or float32.

    Returns:
        (b, m, m) in the same type, accumulated in float32.
    """
    return _product(x, None, 1.0, 0.0)


def symmetric_polynomial(gram: Tensor, linear: float, square: float) -> Tensor:
    """Return ``linear A + square A^2`` of symmetric matrices, exactly symmetric.

    Args:
        gram: ``A`` (b, m, m), contiguous.
        linear: Factor of ``A``.
        square: Factor of its square.

    Returns:
        (b, m, m) in the same type, accumulated in float32.
    """
    return _product(gram, gram.contiguous(), square, linear)


HALVED = Products(symmetric_product, symmetric_polynomial, 0.5)
"""Products that take half the work."""


def _product(x: Tensor, addend: Tensor | None, alpha: float, beta: float) -> Tensor:
    batch, rows, columns = x.shape
    out = torch.empty(batch, rows, rows, dtype=x.dtype, device=x.device)
    single = x.dtype == torch.float32
    # Products in float32 run without tensor cores, and their accumulators fill the registers sooner.
    block, depth, warps, stages = (64, 32, 4, 3) if single else (128, 64, 8, 3)
    tiles = ceil_div(rows, block)
    launch(
        _symmetric_kernel,
        (tiles, tiles, batch),
        x.device,
        x,
        out if addend is None else addend,
        out,
        rows,
        columns,
        *x.stride(),
        float(alpha),
        float(beta),
        ADD=addend is not None,
        PRECISION="ieee",
        BLOCK=block,
        DEPTH=depth,
        num_warps=warps,
        num_stages=stages,
    )
    return out


@jit
def _symmetric_kernel(
    x: tl.tensor,
    addend: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    stride_batch: tl.tensor,
    stride_row: tl.tensor,
    stride_column: tl.tensor,
    alpha: tl.tensor,
    beta: tl.tensor,
    ADD: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPTH: tl.constexpr,
) -> None:
    below = tl.program_id(0)
    beside = tl.program_id(1)
    if beside <= below:
        batch = tl.program_id(2).to(tl.int64)
        first = (below * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
        second = (beside * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
        along = tl.arange(0, DEPTH).to(tl.int64)
        x += batch * stride_batch
        left = x + first[:, None] * stride_row + along[None, :] * stride_column
        right = x + second[None, :] * stride_row + along[:, None] * stride_column
        total = tl.full((BLOCK, BLOCK), 0.0, tl.float32)
        for start in range(0, columns, DEPTH):
            in_left = (first[:, None] < rows) & (start + along[None, :] < columns)
            in_right = (second[None, :] < rows) & (start + along[:, None] < columns)
            a = tl.load(left, mask=in_left, other=0.0)
            b = tl.load(right, mask=in_right, other=0.0)
            total = tl.dot(a, b, total, input_precision=PRECISION)
            left += DEPTH * stride_column
            right += DEPTH * stride_column
        value = total * alpha
        place = batch * rows * rows + first[:, None] * rows + second[None, :]
        inside = (first[:, None] < rows) & (second[None, :] < rows)
        if ADD:
            value += beta * tl.load(addend + place, mask=inside, other=0.0).to(tl.float32)
        value = value.to(out.dtype.element_ty)
        if beside == below:
            # A tile on the diagonal is made exactly symmetric, whatever the order of its sums.
            value = tl.where(first[:, None] >= second[None, :], value, tl.trans(value))
        tl.store(out + place, value, mask=inside)
        if beside < below:
            mirrored = batch * rows * rows + second[:, None] * rows + first[None, :]
            inside = (second[:, None] < rows) & (first[None, :] < rows)
            tl.store(out + mirrored, tl.trans(value), mask=inside)
