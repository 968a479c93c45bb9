"""The shards of a step, with the rules that their parameters take."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from rankwise.intervals import Interval
from rankwise.layout.fused_blocks import Block, cut_into_blocks
from rankwise.layout.layout import Shard
from rankwise.layout.layout_source import Slice, TensorContents
from rankwise.routing.roles import ParameterInfo, Route

__all__ = ["Entry", "PlannedEntries", "cut_into_entries", "entries_of_blocks"]

T = TypeVar("T")

# Sets of entries that have gradients can differ at every step; the answers kept for them are bounded.
_MOST_ANSWERS = 4096


@dataclass(frozen=True)
class Entry:
    """A local shard with the rule its parameter takes.

    Attributes:
        index: Index among the entries of the unit.
        shard: Where the shard lies.
        info: Description of the parameter, or of its block.
        route: The rule that it takes.
        whole: The entry that keeps the states, of which this one is a piece; None where this one keeps them.
    """

    index: int
    shard: Shard
    info: ParameterInfo
    route: Route
    whole: Entry | None = None

    @property
    def stored(self) -> Entry:
        """The entry that keeps the states."""
        return self if self.whole is None else self.whole

    @property
    def key(self) -> str:
        """Name of the parameter, or of one matrix of a stack."""
        return self.shard.key


class PlannedEntries(tuple[Entry, ...]):
    """Entries of a unit, in storage order, that are stepped together; results that depend on them alone are kept."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        super().__init__()
        self._planned: dict[Hashable, Any] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return tuple, (tuple(self),)

    def once(self, what: Hashable, plan: Callable[[PlannedEntries], T]) -> T:
        """Return what ``plan`` computes of the entries alone; it is computed once for each key ``what``."""
        if what not in self._planned:
            if len(self._planned) >= _MOST_ANSWERS:
                self._planned.clear()
            self._planned[what] = plan(self)
        result: T = self._planned[what]
        return result

    def only(self, places: Sequence[int]) -> PlannedEntries:
        """Select entries by their indices; the result is the same object every time."""
        return self.once(("only", *places), lambda entries: PlannedEntries(entries[place] for place in places))


def cut_into_entries(
    contents: Sequence[TensorContents], infos: Mapping[str, ParameterInfo], routes: Mapping[str, Route]
) -> list[Entry]:
    """Turn what tensors store into entries in storage order, splitting a stack of matrices into its matrices."""
    entries: list[Entry] = []
    for tensor, content in enumerate(contents):
        for piece in content.slices:
            info, chosen = infos[piece.key], routes[piece.key]
            for shard in _shards(piece, tensor, info, chosen):
                entries.append(Entry(len(entries), shard, info, chosen))
    return entries


def entries_of_blocks(
    stored: list[Entry], blocks: Mapping[str, Sequence[Block]], infos: Mapping[str, ParameterInfo]
) -> list[Entry]:
    """Cut stored entries into the pieces of blocks that matrix rules see; the same list where no weight is fused."""
    if not blocks:
        return stored
    entries: list[Entry] = []
    for entry in stored:
        for piece in cut_into_blocks(entry.shard, blocks.get(entry.key, ())):
            info = infos[piece.key] if piece is not entry.shard else entry.info
            entries.append(Entry(len(entries), piece, info, entry.route, entry))
    return entries


def _shards(piece: Slice, tensor: int, info: ParameterInfo, chosen: Route) -> Iterator[Shard]:
    if piece.start == piece.end:
        return
    if chosen.rule != "matrix" or len(info.shape) != 3:
        yield Shard(**vars(piece), shape=info.shape, tensor=tensor)
        return
    rows, width = info.matrix_shape[0], info.matrix_shape[-1]
    size = rows * (width if piece.columns is None else piece.columns[1] - piece.columns[0])
    for index in range(piece.start // size, (piece.end - 1) // size + 1):
        first = index * size
        held = Interval(piece.start, piece.end).common(first, first + size)
        place = (*held.shifted(-first), piece.offset + held.start - piece.start, piece.columns, piece.copy)
        yield Shard(f"{piece.key}[{index}]", *place, shape=info.matrix_shape, tensor=tensor)
