"""Integers say where the gradients of many matrices lie while they are multiplied by their factors.

Operands and results lie in one piece of memory, with a region for each matrix. The result replaces the operand, unless
a single dense factor makes it of the operand itself.
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
"""Rows of operands begin at multiples of this number, as tensor cores read so many elements of two bytes at once."""
_COPIES = 1 << 25
"""Copies of factors have at most so many elements at a time."""
_SMALL = 1 << 20
"""For a matrix of up to so many elements, a copy of its factors costs less than a launch of its own."""


def aligned(length: int) -> int:
    """Round a length up to a multiple of the alignment."""
    return -(-length // _ALIGNED) * _ALIGNED


class GradientForm(NamedTuple):
    """The form of a gradient, without its values.

    Attributes:
        rows: Rows of the weight in memory.
        columns: Columns of the weight in memory.
        weights: Lengths of the weight's runs.
        biases: Lengths of the bias's runs; empty where it does not ride along.
        turned: Whether the bias is one more row; otherwise it is one more column.
        has_left: Whether the rows have a factor.
        has_right: Whether the columns have a factor.
        windows: Whether factors are windows of vectors, and not dense.
    """

    rows: int
    columns: int
    weights: tuple[int, ...]
    biases: tuple[int, ...]
    turned: bool
    has_left: bool
    has_right: bool
    windows: bool = False

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
        """Number of elements of all runs."""
        return self.shape[0] * self.shape[1]


@dataclass(frozen=True, order=True)
class ProductForm:
    """The common form of gradients that one product may multiply.

    Attributes:
        rows: Rows of the whole matrix, biases included.
        columns: Columns of the whole matrix, biases included.
        lone_side: The only side that has a factor; empty where both have one.
        has_last_column: Whether the bias is the last column, which follows the weight in the result.
        windows: Whether factors are windows of vectors.
    """

    rows: int
    columns: int
    lone_side: str
    has_last_column: bool
    windows: bool

    @classmethod
    def of(cls, gradient: GradientForm) -> ProductForm:
        """Return the form that a gradient takes in products.

        Raises:
            ValueError: The gradient has no factor.
        """
        if not gradient.has_left and not gradient.has_right:
            raise ValueError("a gradient without any factor is not preconditioned; leave it out")
        lone = "" if gradient.has_left and gradient.has_right else "left" if gradient.has_left else "right"
        return cls(*gradient.shape, lone, gradient.has_last_column, gradient.windows)

    @property
    def stride(self) -> int:
        """Elements from one row of an operand to the next."""
        return aligned(self.columns)

    @property
    def region(self) -> int:
        """Elements of an operand."""
        return aligned(self.rows * self.stride)

    @property
    def result(self) -> int:
        """Where the result begins in the matrix's memory: over the operand, or behind it if one product reads it."""
        return self.region if self.lone_side and not self.windows else 0

    @property
    def keeps_strides(self) -> bool:
        """Whether the elements of the result lie as those of the operand do."""
        return not self.has_last_column and self.stride == self.columns

    @property
    def stops_partway(self) -> bool:
        """Whether other memory has the matrix for a while: between two dense products, or before its gaps close."""
        return not self.keeps_strides if self.windows else not self.lone_side

    @property
    def step(self) -> int:
        """Elements of a matrix's memory."""
        return self.region + self.result

    @property
    def is_stacked(self) -> bool:
        """Whether one product multiplies several matrices of this form."""
        if self.windows and self.keeps_strides:
            return True
        return self.rows * self.columns <= _SMALL and not self.has_last_column


class ProductGroup(NamedTuple):
    """Gradients that one product multiplies, and which follow one another in memory.

    Attributes:
        form: Common form of the gradients.
        places: Indices of the gradients among all gradients.
        start: Where the memory of the first gradient begins.
    """

    form: ProductForm
    places: tuple[int, ...]
    start: int


class _Operand(NamedTuple):
    """Where a run goes, in elements: where its target begins, how many precede it there, a row, the next row."""

    first: int
    before: int
    columns: int
    stride: int


class ProductGroups:
    """Products of gradients, grouped by form.

    Args:
        gradients: Forms of the gradients, at least one.

    Attributes:
        numel: Elements of the memory that the gradients share.
        results: Places of the results in this memory, in the order of the gradients and of their runs.
        groups: Gradients that are multiplied at once.
        partway: Elements of the other memory that products need.
        runs_of: Number of runs of each gradient.
        has_gaps: Whether the rows of an operand have gaps between them.

    Raises:
        ValueError: A gradient has no factor.
    """

    def __init__(self, gradients: Sequence[GradientForm]) -> None:
        forms = [ProductForm.of(gradient) for gradient in gradients]
        # Gradients of one form lie side by side.
        order = sorted(range(len(gradients)), key=forms.__getitem__)
        *starts, self.numel = accumulate((forms[place].step for place in order), initial=0)
        start_of = dict(zip(order, starts, strict=True))
        begins = [start_of[place] for place in range(len(gradients))]
        both = list(zip(gradients, forms, begins, strict=True))
        self.results = RunPlan([[place for matrix in both for place in _results(*matrix)]])
        operands = [operand for matrix in both for operand in _operands(*matrix)]
        self._firsts, *self._others = zip(*operands, strict=True)
        self.has_gaps = any(operand.columns != operand.stride for operand in operands)
        self.groups = [
            ProductGroup(form, places, start_of[places[0]])
            for form, same_form in groupby(order, forms.__getitem__)
            for places in _at_once(form, tuple(same_form))
        ]
        self.partway = max((len(group.places) * group.form.region for group in self._stopping), default=0)
        self.runs_of = [len(gradient.weights) + len(gradient.biases) for gradient in gradients]

    @property
    def _stopping(self) -> Iterator[ProductGroup]:
        return (group for group in self.groups if group.form.stops_partway)

    def columns(self, base: int, itemsize: int) -> list[Sequence[int]]:
        """Return lists with an entry per run: address of its target, elements before it there, of a row, to the next.

        Args:
            base: Address at which the memory begins.
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
        # Without gaps the address of the run itself says all.
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
    size = form.rows + form.columns if form.windows else form.rows**2 + form.columns**2
    most = max(1, _COPIES // size) if form.is_stacked else 1
    return (places[first : first + most] for first in range(0, len(places), most))
