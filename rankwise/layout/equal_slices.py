"""Matrices whose holders have whole slices of them: tensor parallelism's rows or columns.

Such slices need not be gathered: their owners compute one matrix together, each on its slice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from rankwise.layout.layout import Layout, Shard

__all__ = ["SlicedMatrix", "find_slices", "in_slices"]


@dataclass(frozen=True)
class SlicedMatrix:
    """A matrix cut into equal slices, of which every rank of a set can own the same number.

    Attributes:
        key: Key of the matrix in the layout.
        axis: 0 for slices of rows, 1 for slices of columns.
        shape: Shape of one slice.
        count: Number of slices.
        owners: Choices of one owner for each slice, each choice from the ranks of one set.
    """

    key: str
    axis: int
    shape: tuple[int, int]
    count: int
    owners: tuple[tuple[int, ...], ...]

    def part(self, index: int) -> str:
        """Key of a slice in :func:`in_slices`: the matrix with the range of its rows or columns."""
        size = self.shape[self.axis]
        span = f"{index * size}:{(index + 1) * size}"
        return f"{self.key}[{span}]" if self.axis == 0 else f"{self.key}[:,{span}]"

    @property
    def parts(self) -> list[str]:
        """Keys of all slices, in the order of the matrix."""
        return [self.part(index) for index in range(self.count)]

    def place(self, shard: Shard) -> Shard:
        """Convert a shard of the matrix to one of the slice it lies in."""
        if self.axis == 1:
            assert shard.columns is not None
            index, start, end = shard.columns[0] // self.shape[1], shard.start, shard.end
        else:
            index = shard.start // prod(self.shape)
            first = index * prod(self.shape)
            start, end = shard.start - first, shard.end - first
        return replace(shard, key=self.part(index), shape=self.shape, start=start, end=end, columns=None)


def find_slices(layout: Layout, keys: Iterable[str], sets: Sequence[Sequence[int]]) -> dict[str, SlicedMatrix]:
    """Find the matrices that can be computed in slices.

    Args:
        layout: The common layout.
        keys: Two-dimensional parameters of the layout.
        sets: Ranks that can compute a matrix together.

    Returns:
        The finest equal slices that no shard crosses, by key; without the matrices that one rank holds whole, that
        have no such slices, or of whose slices no set holds the same number on each of its ranks.
    """
    straddlers = set(layout.straddlers)
    # Layers are alike, and a matrix may have thousands of shards.
    found: dict[Hashable, SlicedMatrix | None] = {}
    matrices = {}
    for key in keys:
        if key in straddlers:
            cut = layout.shapes[key], layout.cut_of(key)
            if cut not in found:
                found[cut] = _slices_of(layout, key, sets)
            matrix = found[cut]
            if matrix is not None:
                matrices[key] = replace(matrix, key=key)
    return matrices


def _slices_of(layout: Layout, key: str, sets: Sequence[Sequence[int]]) -> SlicedMatrix | None:
    shards = [(rank, part) for rank, parts in layout.holders[key].items() for part in parts]
    for axis, count in _cuts([part for _, part in shards], layout.shapes[key]):
        rows, columns = layout.shapes[key]
        shape = (rows // count, columns) if axis == 0 else (rows, columns // count)
        matrix = SlicedMatrix(key, axis, shape, count, ())
        owners = _owners(matrix, shards, sets)
        if owners:
            return replace(matrix, owners=owners)
    return None


def _cuts(shards: Sequence[Shard], shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Axis and number of equal slices that no shard crosses, from the finest."""
    rows, columns = shape
    blocks = {part.columns for part in shards}
    if None not in blocks:
        if len({last - first for first, last in filter(None, blocks)}) == 1:
            yield 1, len(blocks)
        return
    for count in range(min(len(shards), rows), 1, -1):
        size = rows // count * columns
        # No run may cross the end of the slice in which it begins.
        if rows % count == 0 and all(part.end <= (part.start // size + 1) * size for part in shards):
            yield 0, count


def _owners(
    matrix: SlicedMatrix, shards: Sequence[tuple[int, Shard]], sets: Sequence[Sequence[int]]
) -> tuple[tuple[int, ...], ...]:
    held: list[dict[int, int]] = [{} for _ in range(matrix.count)]
    place = {key: index for index, key in enumerate(matrix.parts)}
    for rank, shard in shards:
        shares = held[place[matrix.place(shard).key]]
        shares[rank] = shares.get(rank, 0) + shard.numel
    choices = []
    for ranks in sets:
        members = frozenset(ranks)
        holding = [members.intersection(shares) for shares in held]
        if not all(holding):
            continue
        owners = [max(some, key=lambda rank: (shares[rank], -rank)) for shares, some in zip(held, holding, strict=True)]
        counts = Counter(owners)
        if counts.keys() == members and len(set(counts.values())) == 1:
            choices.append(tuple(owners))
    return tuple(choices)


def in_slices(layout: Layout, matrices: Mapping[str, SlicedMatrix]) -> Layout:
    """The layout in which the slices of matrices are parameters of their own; shards keep their order."""
    if not matrices:
        return layout
    ranks = tuple(
        tuple(matrices[part.key].place(part) if part.key in matrices else part for part in parts)
        for parts in layout.ranks
    )
    return Layout(ranks, layout.rank, layout.group, layout.replicated, layout.imagined)
