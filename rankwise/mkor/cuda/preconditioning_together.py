"""MKOR preconditions the gradients of many matrices together on the device.

It takes two products a matrix, and a few passes over all matrices (:mod:`.gradient_passes`), in memory whose layout
comes from :mod:`rankwise.mkor.product_groups`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from rankwise.kernels.triton.language import ELEMENTS
from rankwise.mkor.cuda.gradient_passes import GradientPasses
from rankwise.mkor.preconditioning import AT_ONCE, Gradient, Preconditioned
from rankwise.mkor.product_groups import ProductForm, ProductGroup, ProductGroups, aligned
from rankwise.mkor.vector_windows import Factor, Window, multiply_

__all__ = ["AT_ONCE", "precondition_into", "preconditioned_as", "takes"]


def takes(dtype: torch.dtype, product: torch.dtype) -> bool:
    """Whether there is a form for gradients of this type with products in this type."""
    return dtype == torch.float32 and product in ELEMENTS


def preconditioned_as(
    arrangement: ProductGroups,
    runs: Sequence[Tensor],
    lefts: Sequence[Factor | None],
    rights: Sequence[Factor | None],
    product: torch.dtype,
    rescale: bool,
) -> Preconditioned:
    """Multiply gradients by their factor inverses, as :func:`rankwise.mkor.formulas.precondition` does.

    Args:
        arrangement: Places of the gradients, and which are multiplied together.
        runs: Contiguous fp32 runs of all gradients, in order.
        lefts: Factor inverses for the rows of every gradient; None for the identity.
        rights: Factor inverses for the columns of every gradient; None for the identity.
        product: Type of the products, and of the results.
        rescale: Whether the results get the norms of the gradients, by factors that remain to be multiplied. A result
            whose norm is 0 or not finite becomes the gradient, rounded to the type of the products.

    Returns:
        The results, in the order of the gradients and of their runs.

    Raises:
        ValueError: A run is no contiguous fp32 run.
    """
    work = _Work(arrangement, runs, lefts, rights, product)
    passes = work.multiply(rescale)
    if not rescale:
        return Preconditioned(work.results, None)
    choices = passes.choose()
    passes.finish(choices)
    return Preconditioned(work.results, choices[0])


def precondition_into(
    out: Sequence[Sequence[Tensor]], gradients: Sequence[Gradient], product: torch.dtype, rescale: bool
) -> None:
    """Write what :func:`preconditioned_as` computes in fp32, some of the gradients at a time.

    Args:
        out: Contiguous fp32 runs for the results, as many and as long as the runs of each gradient.
        gradients: Gradients of contiguous fp32 runs.
        product: Type of the products.
        rescale: Whether the results get the norms of the gradients. A result whose norm is 0 or not finite becomes the
            gradient itself.

    Raises:
        ValueError: A run is no contiguous fp32 run, or a gradient has no factor.
    """
    for places in _at_once(gradients):
        chosen = [gradients[place] for place in places]
        runs = [run for gradient in chosen for run in gradient.runs]
        work = _Work(_arranged(chosen), runs, *_sides(chosen), product)
        passes = work.multiply(rescale, [run for place in places for run in out[place]])
        passes.finish(passes.choose() if rescale else None)


def _at_once(gradients: Sequence[Gradient]) -> Iterator[list[int]]:
    places: list[int] = []
    elements = 0
    for place, gradient in enumerate(gradients):
        if places and elements + gradient.numel > AT_ONCE:
            yield places
            places, elements = [], 0
        places.append(place)
        elements += gradient.numel
    if places:
        yield places


def _arranged(gradients: Sequence[Gradient]) -> ProductGroups:
    return ProductGroups([gradient.form for gradient in gradients])


def _sides(gradients: Sequence[Gradient]) -> tuple[list[Factor | None], list[Factor | None]]:
    return [gradient.left for gradient in gradients], [gradient.right for gradient in gradients]


class _Work:
    """Gradients while they are multiplied by their factors.

    Args:
        arrangement: Places of the gradients, and which are multiplied together.
        runs: Runs of all gradients.
        lefts: Factor inverses for the rows.
        rights: Factor inverses for the columns.
        product: Type of the products.

    Attributes:
        results: Results of the runs, 1-D, valid once :meth:`multiply` has been called.
    """

    def __init__(
        self,
        arrangement: ProductGroups,
        runs: Sequence[Tensor],
        lefts: Sequence[Factor | None],
        rights: Sequence[Factor | None],
        product: torch.dtype,
    ) -> None:
        self._arrangement, self._runs, self._lefts, self._rights = arrangement, runs, lefts, rights
        self._space = torch.empty(arrangement.numel, dtype=product, device=runs[0].device)
        self.results = arrangement.results.cut([self._space])

    def multiply(self, measured: bool, out: Sequence[Tensor] | None = None) -> GradientPasses:
        """Multiply every matrix by its factors, and small matrices of one form together.

        Args:
            measured: Whether the norms of the gradients are needed.
            out: fp32 tensors for the results; None: they stay where they are.

        Returns:
            The passes that work on the results.
        """
        arrangement, space = self._arrangement, self._space
        passes = GradientPasses(self._runs, arrangement, space, self.results, out)
        passes.gather(measured)
        between = space.new_empty(arrangement.partway)
        for group in arrangement.groups:
            self._multiply(group, between)
        return passes

    # --- products -----------------------------------------------------------------------------------------------

    def _multiply(self, group: ProductGroup, between: Tensor) -> None:
        """Multiply one matrix, or several that follow one another in memory."""
        form, places, start = group
        space, count = self._space, len(places)
        if form.windows:
            self._multiply_by_windows(group, between)
            return
        left = None if form.lone_side == "right" else self._factors([self._lefts[place] for place in places])
        right = None if form.lone_side == "left" else self._factors([self._rights[place] for place in places])
        operand = _matrices(space, start, count, form, form.stride, form.step)
        if left is not None and right is not None:
            partway = _matrices(between, 0, count, form, form.stride, form.region)
            _product(left, operand, partway)
            operand, left = partway, None
        first, second = (operand, right) if left is None else (left, operand)
        if form.has_last_column:
            self._multiply_parts(form, start + form.result, first, second)
        else:
            _product(first, second, _matrices(space, start + form.result, count, form, form.columns, form.step))

    def _multiply_by_windows(self, group: ProductGroup, between: Tensor) -> None:
        (form, places, start), space, count = group, self._space, len(group.places)
        sides: list[Any] = [[side[place] for place in places] for side in (self._lefts, self._rights)]
        if count > 1:
            left, right = (None if side[0] is None else Window.of(side) for side in sides)
        else:
            (left,), (right,) = sides
        operand = multiply_(_matrices(space, start, count, form, form.stride, form.step), left, right)
        if form.keeps_strides:
            return
        product = _matrices(between, 0, count, form, form.stride, form.region).copy_(operand)
        if form.has_last_column:
            rows, columns = form.rows, form.columns - 1
            space[start:][: rows * columns].view(rows, columns).copy_(product[:, :-1])
            space[start + rows * columns :][:rows].copy_(product[:, -1])
        else:
            _matrices(space, start, count, form, form.columns, form.step).copy_(product)

    def _multiply_parts(self, form: ProductForm, result: int, first: Tensor, second: Any) -> None:
        """Write the product's other columns, and behind them its last column."""
        rows, columns = form.rows, form.columns - 1
        weights = self._space[result : result + rows * columns].view(rows, columns)
        torch.mm(first, second[:, :-1], out=weights)
        torch.mv(first, second[:, -1], out=self._space[result + rows * columns :][:rows])

    def _factors(self, inverses: Sequence[Any]) -> Tensor:
        """Return a single matrix's own factor if products take it as it lies, else copies with aligned rows."""
        first: Tensor = inverses[0]
        side = len(first)
        if len(inverses) == 1 and first.dtype == self._space.dtype and side == aligned(side):
            return first
        copies = self._space.new_empty(len(inverses), side, aligned(side))[..., :side]
        torch._foreach_copy_(list(copies.unbind()), list(inverses))
        return copies if len(inverses) > 1 else copies[0]


def _matrices(space: Tensor, start: int, count: int, form: ProductForm, stride: int, step: int) -> Tensor:
    """Return a view of one matrix, or of a stack of several, that begins at ``start``."""
    if count == 1:
        return space.as_strided((form.rows, form.columns), (stride, 1), start)
    return space.as_strided((count, form.rows, form.columns), (step, stride, 1), start)


def _product(first: Tensor, second: Any, out: Tensor) -> None:
    (torch.mm if out.dim() == 2 else torch.bmm)(first, second, out=out)
