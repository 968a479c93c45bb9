"""Preconditioned gradients of MKOR's forms for CPUs against dense products in fp64."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rankwise.mkor import cpu as mkor_cpu
from rankwise.mkor.preconditioning import Gradient, Preconditioned
from rankwise.mkor.product_groups import ProductGroups
from rankwise.mkor.workspace import Workspace

BF16 = torch.bfloat16
UNIT = {dtype: torch.finfo(dtype).eps / 2 for dtype in (torch.float64, torch.float32, BF16, torch.float16)}
"""Relative error of one rounding."""


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def inverses(count: int, length: int, seed: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Symmetric positive definite matrices."""
    roots = torch.randn(count, length, length, generator=generator(seed), dtype=torch.float64) / length**0.5
    product = roots @ roots.mT / 4
    # Symmetric to the last bit, which a product is on some processors only.
    return list((product + product.mT).mul(0.5).add(torch.eye(length), alpha=0.5).to(dtype))


def problem(
    bias: bool, dtype: torch.dtype, shape: tuple[int, int] = (12, 9)
) -> tuple[Tensor, Tensor, list[Tensor], list[Tensor]]:
    """Gradients as matrices in fp64, the same as a batch in fp32, and factors that the type can hold."""
    rows, columns = shape
    matrices = torch.randn(3, rows, columns + bias, generator=generator(6)).double() * 1e-6
    flat = torch.cat([matrices[..., :columns].flatten(1), matrices[..., columns:].flatten(1)], dim=1).float()
    return matrices, flat, inverses(3, rows, 7, dtype), inverses(3, columns + bias, 8, dtype)


def preconditioned(
    grads: Tensor,
    shape: tuple[int, int],
    left: list[Tensor] | None,
    right: list[Tensor] | None,
    rescale: bool = True,
    turned: bool = False,
    into: Callable[..., None] = mkor_cpu.precondition_into,
) -> Tensor:
    """Flattened gradients one after the other in one workspace, each from and to tensors of its own."""
    space, results = Workspace(), torch.full_like(grads, torch.nan)
    for index, (grad, result) in enumerate(zip(grads, results, strict=True)):
        sizes = [n for n in (shape[0] * shape[1], grad.numel() - shape[0] * shape[1]) if n]
        parts, out = ([part.clone() for part in whole.split(sizes)] for whole in (grad, result))
        own = (None if side is None else side[index] for side in (left, right))
        into(out, parts, shape, *own, space, turned=turned, rescale=rescale)
        assert torch.equal(torch.cat(parts), grad), "gradients are only read"
        torch.cat(out, out=result)
    return results


def dense(matrix: Tensor, left: Tensor | None, right: Tensor | None, rescale: bool) -> Tensor:
    product = matrix if left is None else left.double() @ matrix
    product = product if right is None else product @ right.double()
    return product * (matrix.norm() / product.norm()) if rescale else product


def frobenius_error(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


def assert_rounded_as_promised(
    dtype: torch.dtype,
    shape: tuple[int, int],
    *,
    rescale: bool,
    bias: bool,
    turned: bool,
    sides: str,
    into: Callable[..., None] = mkor_cpu.precondition_into,
) -> None:
    """In bfloat16 the gradient and each product are rounded once; elsewhere nothing is, beyond float32.

    A rounding before a product grows by no more than the condition of the factors that follow, in the Frobenius norm.
    """
    rows, columns = shape
    matrices, flat, left, right = problem(bias, dtype, shape)
    lefts, rights = (None if sides == "right" else left), (None if sides == "left" else right)
    if turned:
        weights = matrices[..., :columns].mT.flatten(1).float()
        grads = torch.cat([weights, flat[:, rows * columns :]], dim=1)
        found_turned = preconditioned(grads, (columns, rows), rights, lefts, rescale, turned=True, into=into)
        untwisted = found_turned[:, : rows * columns].view(-1, columns, rows).mT.flatten(1)
        results = torch.cat([untwisted, found_turned[:, rows * columns :]], dim=1)
    else:
        results = preconditioned(flat, shape, lefts, rights, rescale, into=into)
    for index, (matrix, found) in enumerate(zip(matrices, results, strict=True)):
        own = [None if side is None else side[index] for side in (lefts, rights)]
        wanted = dense(matrix, own[0], own[1], rescale)
        conditions = [1.0 if side is None else float(torch.linalg.cond(side.double())) for side in own]
        used = [side for side in own if side is not None]
        # The second factor lets the rounding of the first product grow; of a turned matrix it is the left one.
        second = conditions[0 if turned else 1] if len(used) == 2 else 0.0
        growth = conditions[0] * conditions[1] + second + 1.0
        unit = UNIT[BF16] if dtype == BF16 else 20 * UNIT[torch.float32]
        wanted = torch.cat([wanted[:, :columns].flatten(), wanted[:, columns:].flatten()])
        error = frobenius_error(found, wanted)
        # The rescaling moves a result by no more than its error once more.
        assert error <= 1.01 * unit * growth * (2 if rescale else 1)
        assert (error > 1e-4) == (dtype == BF16), "roundings to bfloat16 are there to be seen"


def preconditioned_together(gradients: Sequence[Gradient], product: torch.dtype, rescale: bool) -> Preconditioned:
    """What a device's form makes of gradients."""
    from rankwise.mkor.cuda.preconditioning_together import preconditioned_as

    runs = [run for gradient in gradients for run in gradient.runs]
    sides = [gradient.left for gradient in gradients], [gradient.right for gradient in gradients]
    return preconditioned_as(ProductGroups([each.form for each in gradients]), runs, *sides, product, rescale)
