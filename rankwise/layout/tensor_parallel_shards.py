"""The part of a parameter that a rank holds where tensor parallelism has cut the parameter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from rankwise.intervals import Interval
from rankwise.layout.shards import Slice

__all__ = ["TensorParallelShard"]


@dataclass(frozen=True)
class TensorParallelShard:
    """What this rank holds of a parameter.

    Attributes:
        shape: Shape of the whole parameter.
        rank: This rank's place among the tensor-parallel ranks.
        ways: Number of tensor-parallel ranks.
        runs: First elements and lengths of the runs of the flattened parameter, one behind the other in the shard; None
            where the shard has all rows.
        columns: Block of columns [first, last) that is held of all rows; None for all columns.
        share: This rank's place among ranks that hold the same part, and their number; a rank that holds nothing comes
            last. (If there are fewer heads than ranks, no gradient reaches some ranks' layers.)
    """

    shape: tuple[int, ...]
    rank: int = 0
    ways: int = 1
    runs: tuple[tuple[int, int], ...] | None = None
    columns: tuple[int, int] | None = None
    share: tuple[int, int] = (0, 1)

    @property
    def is_whole(self) -> bool:
        """Whether every tensor-parallel rank holds the parameter whole."""
        return self.runs is None and self.columns is None

    @property
    def rows(self) -> tuple[tuple[int, int], ...] | None:
        """The rows [start, end) of a matrix that are held; None for all rows."""
        if self.runs is None:
            return None
        width = prod(self.shape[1:])
        return tuple((start // width, (start + length) // width) for start, length in self.runs)

    @classmethod
    def cut(
        cls, local: Sequence[int], dim: int | None, rank: int, ways: int, sections: Sequence[int] = ()
    ) -> TensorParallelShard:
        """Return an equal share of a parameter, as Megatron cuts it.

        Args:
            local: Shape of the shard.
            dim: Dimension that is cut, 0 or 1; None where every rank holds the whole.
            rank: This rank's place among the tensor-parallel ranks.
            ways: Number of tensor-parallel ranks.
            sections: Rows of the shard's pieces, where it has one of each section of the parameter; else empty.
        """
        shape = tuple(size * ways if axis == dim else size for axis, size in enumerate(local))
        if dim is None or (dim == 1 and ways == 1):
            return cls(shape, rank, ways)
        if dim == 1:
            return cls(shape, rank, ways, columns=(rank * local[1], (rank + 1) * local[1]))
        runs, first = [], 0
        for rows in sections or local[:1]:
            numel = rows * prod(local[1:])
            runs.append((first + rank * numel, numel))
            first += ways * numel
        return cls(shape, rank, ways, tuple(runs))

    def slices(self, name: str, start: int, end: int, offset: int, copy: int = 0) -> list[Slice]:
        """Return the elements [start, end) of the flattened shard in terms of the parameter.

        Args:
            name: Name of the parameter.
            start: First element.
            end: Element behind the last one.
            offset: Where the first element is stored.
            copy: Number of the data-parallel copy.
        """
        if self.is_whole:
            return [Slice(name, start, end, offset, None, copy * self.ways + self.rank)]
        if self.columns is not None:
            return [Slice(name, start, end, offset, self.columns, copy)]
        slices = []
        for first, before, length in self._placed_runs():
            held = Interval(start, end).common(before, before + length)
            if held.length:
                slices.append(Slice(name, *held.shifted(first - before), offset + held.start - start, None, copy))
        return slices

    def local(self, position: int) -> int:
        """Return where an element lies in the flattened shard.

        Args:
            position: Position in the flattened parameter, or in its block of columns, as slices have it.
        """
        for first, before, length in self._placed_runs():
            if first <= position < first + length:
                return position - first + before
        return position

    def positions(self) -> Iterator[tuple[int, int, int]]:
        """Yield first elements of runs in the parameter and in the shard, and lengths; a column block's row by row."""
        if self.columns is None:
            yield from self._placed_runs()
            return
        first, last = self.columns
        for row in range(prod(self.shape[:-1])):
            yield row * self.shape[-1] + first, row * (last - first), last - first

    def _placed_runs(self) -> Iterator[tuple[int, int, int]]:
        before = 0
        for first, length in self.runs or ():
            yield first, before, length
            before += length
