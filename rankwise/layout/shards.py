"""Slices of parameters and shards: which elements of a parameter a rank holds, and where they are stored."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod

from rankwise.intervals import Run

__all__ = ["Shard", "Slice"]


@dataclass(frozen=True)
class Slice:
    """Elements [start, end) of a flattened parameter, and where one of the optimizer's tensors stores them.

    Attributes:
        key: Unique name of the parameter (or of one matrix of a stack, ``"name[3]"``).
        start: First element in the row-major flattened parameter, or in its block of columns.
        end: One past the last element.
        offset: Position of the first element in the flattened tensor.
        columns: The block of columns [first, last) of which the elements are a part, where tensor parallelism cut the
            parameter along its last dimension; None where rows are whole.
        copy: Number of the copy that they belong to, where ranks hold the parameter alike.
    """

    key: str
    start: int
    end: int
    offset: int
    columns: tuple[int, int] | None = None
    copy: int = 0

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.end - self.start


@dataclass(frozen=True, kw_only=True)
class Shard(Slice):
    """A slice of a parameter of known shape, in one of the tensors that a step works on.

    Attributes:
        shape: Logical shape of the parameter, before any rank cut it.
        tensor: Index of the optimizer's tensor that stores the run.
        spread: Number of equal parts and distance between their beginnings, where the run is stored with gaps; None
            where it is stored in one part.
    """

    shape: tuple[int, ...]
    tensor: int
    spread: tuple[int, int] | None = None

    @property
    def is_whole(self) -> bool:
        """Whether the run covers the parameter."""
        return self.columns is None and self.start == 0 and self.end == prod(self.shape)

    @property
    def row_length(self) -> int:
        """Elements from one row to the next in the flattened parameter or block."""
        if self.columns is not None:
            return self.columns[1] - self.columns[0]
        return self.shape[-1] if self.shape else 1

    @property
    def block_numel(self) -> int:
        """Elements of the parameter, or of the block of columns that the run is a part of."""
        return prod(self.shape) if self.columns is None else prod(self.shape[:-1]) * self.row_length

    def stored(self, offset: int) -> Run:
        """Where its values lie in a flat tensor that is laid out alike and has the first of them at ``offset``."""
        rows, stride = self.spread or (1, 0)
        return Run(offset, self.numel // rows, rows, stride)

    @cached_property
    def places(self) -> tuple[Run, ...]:
        """Runs of the row-major flattened parameter that make up this one: one, or up to three among columns."""
        if self.columns is None:
            return (Run(self.start, self.numel),)
        length, left = self.shape[-1], self.columns[0]
        return tuple(Run(row * length + left + at, width, rows, length) for row, at, rows, width in self.rectangles())

    def rectangles(self) -> Iterator[tuple[int, int, int, int]]:
        """First row, first column, rows and columns of up to three rectangles of the block that make up the run."""
        position, length = self.start, self.row_length
        while position < self.end:
            row, column = divmod(position, length)
            whole = (self.end - position) // length if column == 0 else 0
            rows, width = (whole, length) if whole else (1, min(length - column, self.end - position))
            yield row, column, rows, width
            position += rows * width
