"""Where the gradients of many matrices lie while they are multiplied by their factors: integers alone.

Operands and results lie in one piece of memory, a region for each matrix: where both sides have a factor, the result
replaces the operand.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import NamedTuple

from rankwise.intervals import Run
from rankwise.kernels.run_views import RunPlan

__all__ = ["GradientForm", "ProductForm", "ProductGroup", "ProductGroups", "aligned"]

_ALIGNED = 8
"""Rows of operands begin at multiples of it: as many elements of two bytes as tensor cores read at once."""
_COPIES = 1 << 25
"""Elements of copies of factors at a time."""
_SMALL = 1 << 20
"""Elements of a matrix up to which a copy of its factors costs less than a launch for it alone."""


def aligned(length: int) -> int:
    """The least such multiple that is not less."""
    return -(-length // _ALIGNED) * _ALIGNED


class GradientForm(NamedTuple):
    """What is known of a gradient without its values.

    Attributes:
        rows: Rows of the weight as it lies.
        columns: Columns of it.
        weights: Lengths of its runs.
        biases: Those of the bias, where it rides along.
        turned: Whether the bias is one more row; otherwise it is one more column.
        has_left: Whether the rows have a factor.
        has_right: Whether the columns have one.
    """

    rows: int
    columns: int
    weights: tuple[int, ...]
    biases: tuple[int, ...]
    turned: bool
    has_left: bool
    has_right: bool

    @property
    def has_last_column(self) -> bool:
        """Whether the bias is the matrix's last column."""
        return len(self.biases) > 0 and not self.turned

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the whole matrix."""
        return self.rows + (len(self.biases) > 0 and self.turned), self.columns + self.has_last_column

    @property
    def numel(self) -> int:
        """Elements of all runs."""
        return self.shape[0] * self.shape[1]


@dataclass(frozen=True, order=True)
class ProductForm:
    """What gradients have in common whose products may be one.

    Attributes:
        rows: Rows of the whole matrix, biases included.
        columns: Columns of it.
        lone_side: Which side alone has a factor; empty where both have one.
        has_last_column: Whether the bias is one: it lies by itself in the result.
    """

    rows: int
    columns: int
    lone_side: str
    has_last_column: bool

    @classmethod
    def of(cls, gradient: GradientForm) -> ProductForm:
        """The form that a gradient takes in products.

        Raises:
            ValueError: It has no factor.
        """
        if not gradient.has_left and not gradient.has_right:
            raise ValueError("a gradient without any factor is not preconditioned; leave it out")
        lone = "" if gradient.has_left and gradient.has_right else "left" if gradient.has_left else "right"
        return cls(*gradient.shape, lone, gradient.has_last_column)

    @property
    def stride(self) -> int:
        """From row to row of an operand."""
        return aligned(self.columns)

    @property
    def region(self) -> int:
        """Elements of an operand."""
        return aligned(self.rows * self.stride)

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


class ProductGroup(NamedTuple):
    """Gradients that are multiplied at once; their memory follows one another.

    Attributes:
        form: What the gradients have in common.
        places: Indices among all gradients.
        start: Where their memory begins.
    """

    form: ProductForm
    places: tuple[int, ...]
    start: int


class _Operand(NamedTuple):
    """Where a run is put: of elements, from the beginning of the memory, those before it, of a row, and to the next."""

    first: int
    before: int
    columns: int
    stride: int


class ProductGroups:
    """Products of gradients, grouped by form.

    Args:
        gradients: Their forms, at least one.

    Attributes:
        numel: Elements of the memory that they share.
        results: Where their results lie in it, in the order of the gradients and of their runs.
        groups: Those that are multiplied at once.
        partway: Elements of the largest first product of two.
        runs_of: How many runs each gradient has.
        has_gaps: Whether the rows of an operand have some between them.

    Raises:
        ValueError: A gradient has no factor.
    """

    def __init__(self, gradients: Sequence[GradientForm]) -> None:
        forms = [ProductForm.of(gradient) for gradient in gradients]
        # Those of one form side by side.
        order = sorted(range(len(gradients)), key=forms.__getitem__)
        *starts, self.numel = accumulate((forms[place].step for place in order), initial=0)
        start_of = dict(zip(order, starts, strict=True))
        begins = [start_of[place] for place in range(len(gradients))]
        both = list(zip(gradients, forms, begins, strict=True))
        self.results = RunPlan([[place for each in both for place in _results(*each)]])
        operands = [operand for each in both for operand in _operands(*each)]
        self._firsts, *self._others = zip(*operands, strict=True)
        self.has_gaps = any(operand.columns != operand.stride for operand in operands)
        self.groups = [
            ProductGroup(form, places, start_of[places[0]])
            for form, alike in groupby(order, forms.__getitem__)
            for places in _at_once(form, tuple(alike))
        ]
        self.partway = max((len(group.places) * group.form.region for group in self._of_two), default=0)
        self.runs_of = [len(gradient.weights) + len(gradient.biases) for gradient in gradients]

    @property
    def _of_two(self) -> Iterator[ProductGroup]:
        return (group for group in self.groups if not group.form.lone_side)

    def columns(self, base: int, itemsize: int) -> list[Sequence[int]]:
        """By run: address of its target, elements of the target before it, of a row, and to the next row.

        Args:
            base: Where the memory begins.
            itemsize: Bytes of an element.
        """
        return [[base + itemsize * first for first in self._firsts], *self._others]


def _results(gradient: GradientForm, form: ProductForm, start: int) -> Iterator[Run]:
    first = start + form.result
    for length in (*gradient.weights, *gradient.biases):
        yield Run(first, length)
        first += length


def _operands(gradient: GradientForm, form: ProductForm, start: int) -> Iterator[_Operand]:
    before = 0
    columns, stride = gradient.columns, form.stride
    for length in gradient.weights if form.has_last_column else (*gradient.weights, *gradient.biases):
        # Without gaps one address says all.
        yield (
            _Operand(start, before, columns, stride)
            if stride != columns
            else _Operand(start + before, 0, columns, stride)
        )
        before += length
    before = 0
    for length in gradient.biases if form.has_last_column else ():
        yield _Operand(start + columns, before, 1, stride)
        before += length


def _at_once(form: ProductForm, places: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    most = max(1, _COPIES // (form.rows**2 + form.columns**2)) if form.is_stacked else 1
    return (places[first : first + most] for first in range(0, len(places), most))
