"""Ranks that need not exist and hold equal cuts of every parameter: a few numbers tell what each holds.

A model of a thousand matrices on thousands of ranks has millions of shards. Estimates need only their sizes, which are
equal for all matrices of a shape.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import NamedTuple, TypeVar

from rankwise.intervals import Interval
from rankwise.layout.fused_blocks import Block, cut_into_blocks
from rankwise.layout.layout import Layout
from rankwise.layout.layout_source import TensorContents
from rankwise.layout.shards import Shard, Slice

__all__ = ["EvenCuts", "EvenLayout"]

Value = TypeVar("Value")


class EvenCuts(NamedTuple):
    """Parameters of one param group, each cut into equal parts, the last of which may be shorter or missing.

    Attributes:
        group: Index of the param group, as passed to the constructor.
        sizes: Elements of each parameter, by name.
        world: Number of ranks.
    """

    group: int
    sizes: Mapping[str, int]
    world: int

    def share(self, name: str) -> int:
        """Elements of a parameter on a rank that is not the last."""
        return -(-self.sizes[name] // self.world)

    def contents(self, rank: int) -> TensorContents:
        """Contents of a rank's tensor."""
        slices, position = [], 0
        for name, size in self.sizes.items():
            share = self.share(name)
            held = Interval(rank * share, (rank + 1) * share).common(0, size)
            if held.length:
                slices.append(Slice(name, *held, position))
            position += share
        return TensorContents(self.group, tuple(slices))

    def whole(self) -> TensorContents:
        """Contents of a tensor of all parameters, end to end."""
        return self._replace(world=1).contents(0)


class _Run(NamedTuple):
    """A whole parameter, or one matrix of a stack: where it begins in its parameter, and how that is cut."""

    shard: Shard
    first: int
    share: int
    base: int  # offset of the parameter in every rank's tensor

    def of(self, rank: int) -> Shard | None:
        """Return the part that a rank holds, if any."""
        share = Interval(rank * self.share, (rank + 1) * self.share)
        held = share.common(self.first, self.first + self.shard.numel)
        if not held.length:
            return None
        place = (*held.shifted(-self.first), self.base + held.start - share.start)
        return Shard(self.shard.key, *place, shape=self.shard.shape, tensor=0)


class EvenLayout(Layout):
    """A layout of equal cuts, made of shards of ``cuts.whole()`` only when it is asked for; seen from rank 0.

    Args:
        cuts: The cuts.
        whole: Shards of a tensor of all parameters.
        name_of: Tells the parameter that the key of a shard belongs to.
        blocks: Blocks that tile weights and are parameters of their own.
    """

    _runs: Mapping[str, _Run]
    _block_of: Mapping[str, tuple[str, Block]]
    _shares: dict[tuple[int, int, int], Mapping[int, int]]
    _given: tuple[EvenCuts, Sequence[Shard], Callable[[str], str]]

    def __init__(
        self,
        cuts: EvenCuts,
        whole: Sequence[Shard],
        name_of: Callable[[str], str],
        blocks: Mapping[str, Sequence[Block]] = MappingProxyType({}),
    ) -> None:
        runs, base, end = {}, {}, 0
        stored = {piece.key: piece.offset for piece in cuts.whole().slices}
        for name in cuts.sizes:
            base[name], end = end, end + cuts.share(name)
        for shard in whole:
            name = name_of(shard.key)
            runs[shard.key] = _Run(shard, shard.offset - stored[name], cuts.share(name), base[name])
        block_of = {block.key(key): (key, block) for key, tiles in blocks.items() for block in tiles}
        values = {"ranks": _Ranks(runs, cuts.world, blocks), "rank": 0, "group": None, "replicated": False}
        own = {"imagined": True, "_runs": runs, "_block_of": block_of, "_shares": {}, "_given": (cuts, whole, name_of)}
        for key, value in {**values, **own}.items():
            object.__setattr__(self, key, value)  # a frozen dataclass

    def cut(self, blocks: Mapping[str, Sequence[Block]]) -> Layout:
        """The layout in which blocks, which tile their two-dimensional weights, are parameters of their own."""
        return EvenLayout(*self._given, blocks) if blocks else self

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes by key, in sorted key order."""
        cut = {key for key, _ in self._block_of.values()}
        shapes = {key: run.shard.shape for key, run in self._runs.items() if key not in cut}
        shapes |= {key: block.shape(self._runs[whole].shard.shape) for key, (whole, block) in self._block_of.items()}
        return {key: shapes[key] for key in sorted(shapes)}

    def elements(self, key: str) -> Mapping[int, int]:
        """Elements of a key by rank; the same object for runs that are cut alike."""
        if key in self._block_of:
            held: dict[int, int] = {}
            for rank, piece in self._parts(key):
                held[rank] = held.get(rank, 0) + piece.numel
            return held
        run, shares = self._runs[key], self._shares
        sign = (run.first, run.shard.numel, run.share)
        if sign not in shares:
            end = run.first + run.shard.numel
            first, last = run.first // run.share, (end - 1) // run.share
            elements = dict.fromkeys(range(first, last + 1), run.share)
            elements[first] -= run.first - first * run.share
            elements[last] -= (last + 1) * run.share - end
            shares[sign] = elements
        return shares[sign]

    def cut_of(self, key: str) -> Hashable:
        """Which ranks hold which parts of a key, to compare with other keys."""
        if key in self._block_of:
            return super().cut_of(key)
        run = self._runs[key]
        return run.first, run.share

    def gathered(self, key: str, owner: int) -> Mapping[int, int]:
        """Elements of a key by rank; there are no copies to choose from."""
        return self.elements(key)

    def first_copy(self, key: str) -> int:
        """Return the only copy of a key."""
        return 0

    @cached_property
    def straddlers(self) -> tuple[str, ...]:
        """Keys of which several ranks hold parts."""
        return tuple(key for key in self.shapes if len(self.elements(key)) > 1)

    @cached_property
    def all_hold(self) -> bool:
        """Whether every rank holds something; ranks are filled in order, so the last one tells."""
        return any(len(self.ranks) - 1 in self.elements(key) for key in self._runs)

    @cached_property
    def holders(self) -> Mapping[str, dict[int, tuple[Shard, ...]]]:  # type: ignore[override]
        """Holders by key, made anew whenever they are asked for."""
        return _Lazy(self.shapes, lambda key: _by_rank(self._parts(key)))

    @cached_property
    def copies(self) -> Mapping[str, dict[int, tuple[tuple[int, Shard], ...]]]:  # type: ignore[override]
        """Copies by key, made anew whenever they are asked for."""
        return _Lazy(self.shapes, lambda key: {0: tuple(self._parts(key))})

    def _parts(self, key: str) -> Iterator[tuple[int, Shard]]:
        whole, block = self._block_of.get(key, (key, None))
        for rank in self.elements(whole):
            shard = self._runs[whole].of(rank)
            assert shard is not None
            yield from ((rank, piece) for piece in cut_into_blocks(shard, () if block is None else (block,)))


def _by_rank(parts: Iterator[tuple[int, Shard]]) -> dict[int, tuple[Shard, ...]]:
    shards: dict[int, tuple[Shard, ...]] = {}
    for rank, part in parts:
        shards[rank] = (*shards.get(rank, ()), part)
    return shards


class _Ranks(Sequence[tuple[Shard, ...]]):
    """The shards of every rank."""

    def __init__(self, runs: Mapping[str, _Run], world: int, blocks: Mapping[str, Sequence[Block]]) -> None:
        self._runs, self._world, self._blocks = runs, world, blocks

    def __len__(self) -> int:
        return self._world

    def __getitem__(self, rank: int) -> tuple[Shard, ...]:  # type: ignore[override]
        if not 0 <= rank < self._world:
            raise IndexError(rank)
        held = ((key, shard) for key, run in self._runs.items() if (shard := run.of(rank)) is not None)
        return tuple(piece for key, shard in held for piece in cut_into_blocks(shard, self._blocks.get(key, ())))


class _Lazy(Mapping[str, Value]):
    """A mapping that makes its values on demand, because together they would fill the memory."""

    def __init__(self, keys: Mapping[str, object], make: Callable[[str], Value]) -> None:
        self._keys, self._make = keys, make

    def __getitem__(self, key: str) -> Value:
        if key not in self._keys:
            raise KeyError(key)
        return self._make(key)

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)
