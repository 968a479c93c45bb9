"""MKOR: the gradients of many matrices, preconditioned together on the device.

Two products a matrix, and a few passes over all of them (:mod:`.gradient_passes`). Operands and results lie in one
piece of memory, a region for each matrix: where both sides have a factor, the result replaces the operand.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from rankwise.kernels.triton.language import ELEMENTS, ceil_div
from rankwise.mkor.cuda.gradient_passes import Destination, GradientPasses
from rankwise.mkor.preconditioning import AT_ONCE, Gradient, Preconditioned

__all__ = ["AT_ONCE", "precondition_into", "preconditioned", "takes"]

_ALIGNED = 8
"""Rows of operands begin at multiples of it: as many elements of two bytes as tensor cores read at once."""
_COPIES = 1 << 25
"""Elements of copies of factors at a time."""
_SMALL = 1 << 20
"""Elements of a matrix up to which a copy of its factors costs less than a launch for it alone."""


def takes(dtype: torch.dtype, product: torch.dtype) -> bool:
    """Whether there is a form for gradients of this type with products in this type."""
    return dtype == torch.float32 and product in ELEMENTS


def preconditioned(gradients: Sequence[Gradient], product: torch.dtype, rescale: bool) -> Preconditioned:
    """Multiply gradients by their factor inverses: :func:`rankwise.mkor.formulas.precondition`.

    Args:
        gradients: Their runs are contiguous and fp32; at least one.
        product: Type of the products, and of the results.
        rescale: Whether the results are to get the norms of the gradients. One whose own norm is 0 or not finite
            becomes the gradient, rounded to the type of the products.

    Returns:
        The results, in the order of the gradients and of their runs.

    Raises:
        ValueError: A run is of another kind, or a gradient has no factor.
    """
    work = _Work(gradients, product)
    passes = work.multiply(rescale)
    if not rescale:
        return Preconditioned(work.results, None)
    choices = passes.choose()
    passes.finish(choices)
    return Preconditioned(work.results, choices[0])


def precondition_into(
    out: Sequence[Sequence[Tensor]], gradients: Sequence[Gradient], product: torch.dtype, rescale: bool
) -> None:
    """The same in fp32, some of the gradients at a time; what has no usable norm becomes the gradient itself.

    Args:
        out: For each gradient a contiguous fp32 run for each of its runs, of its length.
        gradients: See :func:`preconditioned`.
        product: Alike.
        rescale: Alike.

    Raises:
        ValueError: Alike.
    """
    for places in _at_once(gradients):
        runs = [run for place in places for run in out[place]]
        passes = _Work([gradients[place] for place in places], product).multiply(rescale, runs)
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


@dataclass(frozen=True, order=True)
class _Form:
    """What gradients have in common whose products may be one.

    Attributes:
        rows: Of the whole matrix, biases included.
        columns: Of it.
        lone_side: Which side alone has a factor; empty where both have one.
        has_last_column: Whether the bias is one: it lies by itself in the result.
    """

    rows: int
    columns: int
    lone_side: str
    has_last_column: bool

    @classmethod
    def of(cls, gradient: Gradient) -> _Form:
        """Of a gradient.

        Raises:
            ValueError: It has no factor.
        """
        if gradient.left is None and gradient.right is None:
            raise ValueError("a gradient without any factor is not preconditioned; leave it out")
        lone = "right" if gradient.left is None else "left" if gradient.right is None else ""
        return cls(*gradient.shape, lone, gradient.has_last_column)

    @property
    def stride(self) -> int:
        """From row to row of an operand."""
        return _aligned(self.columns)

    @property
    def region(self) -> int:
        """Elements of an operand."""
        return _aligned(self.rows * self.stride)

    @property
    def result(self) -> int:
        """Where the result begins in the matrix's memory: over the operand unless that is yet to be read."""
        return self.region if self.lone_side else 0

    @property
    def step(self) -> int:
        """Elements of a matrix's memory."""
        return self.region + self.result

    @property
    def is_stacked(self) -> bool:
        """Whether matrices of this form are multiplied at once."""
        return self.rows * self.columns <= _SMALL and not self.has_last_column


class _Work:
    """Gradients on their way.

    Args:
        gradients: Them.
        product: Type of the products.

    Attributes:
        results: Of the runs, 1-D, valid once :meth:`multiply` has been called.
    """

    def __init__(self, gradients: Sequence[Gradient], product: torch.dtype) -> None:
        self._gradients = gradients
        self._forms = [_Form.of(gradient) for gradient in gradients]
        # Those of one form side by side.
        self._order = sorted(range(len(gradients)), key=self._forms.__getitem__)
        self._starts = [0] * len(gradients)
        total = 0
        for place in self._order:
            self._starts[place] = total
            total += self._forms[place].step
        self._space = torch.empty(total, dtype=product, device=gradients[0].weights[0].device)
        self.results = [result for place in range(len(gradients)) for result in self._results(place)]

    def multiply(self, measured: bool, out: Sequence[Tensor] | None = None) -> GradientPasses:
        """Every matrix by its factors, small ones of one form at once.

        Args:
            measured: Whether the gradients are to be measured, too.
            out: Of the passes.

        Returns:
            What can be done with the results.
        """
        gradients = self._gradients
        sources = [run for gradient in gradients for run in gradient.runs]
        operands = [operand for place in range(len(gradients)) for operand in self._operands(place)]
        passes = GradientPasses(sources, operands, self.results, out, [len(each.runs) for each in gradients])
        passes.gather(measured)
        groups = list(self._groups())
        partways = [len(places) * form.region for form, places in groups if not form.lone_side]
        between = self._space.new_empty(max(partways, default=0))
        for form, places in groups:
            self._multiply(form, places, between)
        return passes

    # --- memory -------------------------------------------------------------------------------------------------

    def _operands(self, place: int) -> Iterator[Destination]:
        gradient, form = self._gradients[place], self._forms[place]
        size = self._space.itemsize
        address = self._space.data_ptr() + size * self._starts[place]
        before = 0
        for run in gradient.weights if form.has_last_column else gradient.runs:
            # Without gaps one address says all.
            own = (address, before) if form.stride != gradient.columns else (address + size * before, 0)
            yield Destination(*own, gradient.columns, form.stride)
            before += run.numel()
        before = 0
        for run in gradient.biases if form.has_last_column else ():
            yield Destination(address + size * gradient.columns, before, 1, form.stride)
            before += run.numel()

    def _results(self, place: int) -> Sequence[Tensor]:
        gradient = self._gradients[place]
        start = self._starts[place] + self._forms[place].result
        found = self._space[start : start + gradient.numel]
        lengths = [run.numel() for run in gradient.runs]
        return found.split(lengths) if len(lengths) > 1 else [found]

    def _groups(self) -> Iterator[tuple[_Form, list[int]]]:
        for form, alike in groupby(self._order, self._forms.__getitem__):
            places = list(alike)
            at_once = max(1, _COPIES // (form.rows**2 + form.columns**2)) if form.is_stacked else 1
            yield from ((form, places[first : first + at_once]) for first in range(0, len(places), at_once))

    # --- products -----------------------------------------------------------------------------------------------

    def _multiply(self, form: _Form, places: Sequence[int], between: Tensor) -> None:
        """One matrix, or several whose memory follows one another."""
        space, start, count = self._space, self._starts[places[0]], len(places)
        gradients = [self._gradients[place] for place in places]
        left = None if form.lone_side == "right" else self._factors([each.left for each in gradients])
        right = None if form.lone_side == "left" else self._factors([each.right for each in gradients])
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

    def _multiply_parts(self, form: _Form, result: int, first: Tensor, second: Any) -> None:
        """The product's last column behind the others."""
        rows, columns = form.rows, form.columns - 1
        weights = self._space[result : result + rows * columns].view(rows, columns)
        torch.mm(first, second[:, :-1], out=weights)
        torch.mv(first, second[:, -1], out=self._space[result + rows * columns :][:rows])

    def _factors(self, inverses: Sequence[Any]) -> Tensor:
        """Of one matrix its own where products take it as it lies; else copies whose rows begin at even places."""
        first: Tensor = inverses[0]
        side = len(first)
        if len(inverses) == 1 and first.dtype == self._space.dtype and side % _ALIGNED == 0:
            return first
        found = self._space.new_empty(len(inverses), side, _aligned(side))[..., :side]
        torch._foreach_copy_(list(found.unbind()), list(inverses))
        return found if len(inverses) > 1 else found[0]


def _aligned(length: int) -> int:
    return ceil_div(length, _ALIGNED) * _ALIGNED


def _matrices(space: Tensor, start: int, count: int, form: _Form, stride: int, step: int) -> Tensor:
    """One matrix, or a stack of several; ``space`` begins where its memory does."""
    if count == 1:
        return space.as_strided((form.rows, form.columns), (stride, 1), start)
    return space.as_strided((count, form.rows, form.columns), (step, stride, 1), start)


def _product(first: Tensor, second: Any, out: Tensor) -> None:
    (torch.mm if out.dim() == 2 else torch.bmm)(first, second, out=out)
