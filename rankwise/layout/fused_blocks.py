"""Logical matrices of a fused weight: which parts of the weight's shards belong to which of its blocks.

A fused weight stays one parameter wherever it is stored, with the element states, passes and checkpoints of one. Only
the computation of matrices sees *blocks*, each a matrix with a key, a shape, an owner and states of its own. A block is
made of equal runs of rows, or of columns, at equal distances; in row-major storage these are runs of ``width``
elements, ``period`` apart. A shard therefore has at most three pieces of a block: the end of a run that was cut, whole
runs, which are one strided view however many they are, and the beginning of a run. In the block's own order each piece
is a run of consecutive elements, a shard like any other; only its storage has gaps
(:attr:`rankwise.layout.shards.Shard.spread`). The layout of blocks follows from the common layout and the blocks alone:
it is planned once without communication, and messages carry the same elements as without blocks. A piece with gaps is
copied by one strided copy, to the owner's stack or back; one without gaps is a view.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from rankwise.intervals import Interval, Run
from rankwise.layout.shards import Shard

__all__ = ["Block", "cut_into_blocks"]


@dataclass(frozen=True)
class Block:
    """One logical matrix of a weight: ``count`` runs of ``width`` rows or columns, ``period`` apart.

    Attributes:
        name: Name of the block in its weight.
        by_columns: Whether the runs are columns of the weight as stored.
        first: Row or column at which the first run begins.
        width: Length of each run.
        period: Distance from one run to the next. Several runs fill the cut dimension with their periods.
        count: Number of runs.
    """

    name: str
    by_columns: bool
    first: int
    width: int
    period: int
    count: int = 1

    @property
    def size(self) -> int:
        """Rows or columns of the block."""
        return self.width * self.count

    def key(self, weight: str) -> str:
        """Key of this block in a weight, or in one matrix of a stack."""
        return f"{weight}[{self.name}]"

    def shape(self, weight: Sequence[int]) -> tuple[int, int]:
        """Shape of this block in a weight of the given shape, or in a stack of such weights."""
        rows, columns = weight[-2:]
        return (rows, self.size) if self.by_columns else (self.size, columns)

    def of(self, values: Tensor, rows: int, columns: int = 1) -> Tensor:
        """View the block's elements of flattened weights, (..., runs, elements), in the block's own order.

        Args:
            values: (..., rows * columns), each weight contiguous.
            rows: Rows of the weight.
            columns: Columns of the weight.
        """
        runs = self._flat(rows, columns)
        shape, strides = (*values.shape[:-1], runs.rows, runs.width), (*values.stride()[:-1], runs.stride, 1)
        return values.as_strided(shape, strides, values.storage_offset() + runs.offset)

    def slices(self, rows: int, columns: int = 1) -> list[slice]:
        """Ranges of the runs in a flattened weight of this shape, in the block's own order."""
        runs = self._flat(rows, columns)
        starts = (runs.offset + index * runs.stride for index in range(runs.rows))
        return [slice(start, start + runs.width) for start in starts]

    def _flat(self, rows: int, columns: int) -> Run:
        """The runs in the flattened weight, where every row has the runs of columns."""
        if not self.by_columns:
            return Run(self.first * columns, self.width * columns, self.count, self.period * columns)
        if self.count == 1:
            return Run(self.first, self.width, rows, columns)
        return Run(self.first, self.width, self.count * rows, self.period)

    def runs(self) -> Iterator[Interval]:
        """The runs along the cut dimension."""
        first = Interval(self.first, self.first + self.width)
        return (first.shifted(index * self.period) for index in range(self.count))


def cut_into_blocks(part: Shard, blocks: Sequence[Block]) -> Iterator[Shard]:
    """Cut a weight's shard, stored without gaps, into pieces of blocks; yields it whole where there are none."""
    if not blocks:
        yield part
    for block in blocks:
        whole = replace(part, key=block.key(part.key), shape=block.shape(part.shape))
        if not block.by_columns:
            yield from _pieces(whole, block._flat(part.shape[0], part.row_length))
        elif part.columns is None:
            yield from _pieces(whole, block._flat(*part.shape))
        else:
            yield from _pieces_of_columns(whole, part, block)


def _pieces_of_columns(whole: Shard, part: Shard, block: Block) -> Iterator[Shard]:
    """Cut a shard of some columns, run by run."""
    assert part.columns is not None
    left, right = part.columns
    for index, run in enumerate(block.runs()):
        held = run.common(left, right)
        if held.length:
            columns = held.shifted(index * block.width - run.start)
            piece = replace(whole, columns=None if columns == (0, block.size) else columns)
            yield from _pieces(piece, Run(held.start - left, held.length, part.shape[0], right - left))


def _pieces(part: Shard, runs: Run) -> Iterator[Shard]:
    """Cut the part of a block's runs that lies in a shard; both count elements of the same flattened tensor."""
    first = max(0, (part.start - runs.offset - runs.width) // runs.stride + 1)
    last = min(runs.rows, -(-(part.end - runs.offset) // runs.stride))
    if first >= last:
        return

    def piece(begin: int, end: int, run: int, before: int = 0) -> Shard:
        """Elements [begin, end) of the block, the first of them ``before`` elements into a run."""
        offset = part.offset + runs.offset + run * runs.stride + before - part.start
        count = (end - begin) // runs.width
        spread = (count, runs.stride) if count > 1 and runs.stride > runs.width else None
        return replace(part, start=begin, end=end, offset=offset, spread=spread)

    cut = part.start - runs.offset - first * runs.stride
    if cut > 0:
        end = min(runs.width, cut + part.numel)
        yield piece(first * runs.width + cut, first * runs.width + end, first, cut)
        first += 1
    left = min(runs.width, part.end - runs.offset - (last - 1) * runs.stride)
    whole = last if left == runs.width else last - 1
    if first < whole:
        yield piece(first * runs.width, whole * runs.width, first)
    if first <= whole < last:
        yield piece(whole * runs.width, whole * runs.width + left, whole)
