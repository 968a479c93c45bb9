"""Intervals of what is counted along one dimension, and runs of elements in flat tensors."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

__all__ = ["Interval", "Run"]


class Interval(NamedTuple):
    """The positions [start, end) along one dimension: of a flattened parameter, or of its rows or columns."""

    start: int
    end: int

    @property
    def length(self) -> int:
        """Number of positions."""
        return self.end - self.start

    def common(self, start: int, end: int) -> Interval:
        """The part that lies in [start, end); empty, with the length 0, where none does."""
        first = max(self.start, start)
        return Interval(first, max(first, min(self.end, end)))

    def shifted(self, by: int) -> Interval:
        """Return the interval moved by ``by`` positions."""
        return Interval(self.start + by, self.end + by)


class Run(NamedTuple):
    """Where values lie in a flat tensor: side by side, or in ``rows`` equal parts.

    Attributes:
        offset: Position of the first one.
        width: Elements that lie side by side.
        rows: Number of such parts.
        stride: Distance from the beginning of one part to that of the next.
    """

    offset: int
    width: int
    rows: int = 1
    stride: int = 0

    @property
    def numel(self) -> int:
        """Number of values."""
        return self.width * self.rows

    @property
    def end(self) -> int:
        """One past the position of the last value."""
        return self.offset + (self.rows - 1) * self.stride + self.width

    def of(self, flat: Tensor, first: int = 0) -> Tensor:
        """View the values in a flat tensor, in which the offset counts from the element ``first``.

        Returns:
            1-D, or (rows, width) where they lie in several parts.
        """
        start = first + self.offset
        if self.rows == 1:
            return flat[start : start + self.width]
        return flat.as_strided((self.rows, self.width), (self.stride, 1), flat.storage_offset() + start)
