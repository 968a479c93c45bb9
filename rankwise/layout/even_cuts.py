"""Ranks that need not exist and hold equal cuts of every parameter: a few numbers tell what each holds.

A model of a thousand matrices on thousands of ranks has millions of shards. Estimates need only their sizes, which are
equal for all matrices of a shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple, TypeVar

from rankwise.layout.layout import Layout, Shard
from rankwise.layout.layout_source import Slice, TensorContents

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
            first, last = min(rank * share, size), min((rank + 1) * share, size)
            if first < last:
                slices.append(Slice(name, first, last, position))
            position += share
        return TensorContents(self.group, tuple(slices))

    def whole(self) -> TensorContents:
        """Contents of a tensor of all parameters, end to end."""
        slices, position = [], 0
        for name, size in self.sizes.items():
            slices.append(Slice(name, 0, size, position))
            position += size
        return TensorContents(self.group, tuple(slices))


class _Run(NamedTuple):
    """A whole parameter, or one matrix of a stack: where it begins in its parameter, and how that is cut."""

    shard: Shard
    first: int
    share: int
    base: int  # offset of the parameter in every rank's tensor

    def of(self, rank: int) -> Shard | None:
        """Return the part that a rank holds, if any."""
        start = max(self.first, rank * self.share)
        end = min(self.first + self.shard.numel, (rank + 1) * self.share)
        if start >= end:
            return None
        place = (start - self.first, end - self.first, 0, self.base + start - rank * self.share)
        return Shard(self.shard.key, self.shard.shape, *place)


class EvenLayout(Layout):
    """A layout of equal cuts, made of shards of ``cuts.whole()`` only when it is asked for; seen from rank 0."""

    def __init__(self, cuts: EvenCuts, whole: Sequence[Shard], name_of: Callable[[str], str]) -> None:
        runs, base, end = {}, {}, 0
        stored = {piece.name: piece.offset for piece in cuts.whole().slices}
        for name in cuts.sizes:
            base[name], end = end, end + cuts.share(name)
        for shard in whole:
            name = name_of(shard.key)
            runs[shard.key] = _Run(shard, shard.offset - stored[name], cuts.share(name), base[name])
        values = {"ranks": _Ranks(runs, cuts.world), "rank": 0, "group": None, "replicated": False, "imagined": True}
        for key, value in {**values, "_runs": runs, "_shares": {}}.items():
            object.__setattr__(self, key, value)  # a frozen dataclass

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes by key, in sorted key order."""
        return {key: self._runs[key].shard.shape for key in sorted(self._runs)}  # type: ignore[attr-defined]

    def elements(self, key: str) -> Mapping[int, int]:
        """Elements of a key by rank; the same object for runs that are cut alike."""
        run: _Run = self._runs[key]  # type: ignore[attr-defined]
        size, shares = run.shard.numel, self._shares  # type: ignore[attr-defined]
        sign = (run.first, size, run.share)
        if sign not in shares:
            first, last, end = run.first // run.share, (run.first + size - 1) // run.share, run.first + size
            elements = dict.fromkeys(range(first, last + 1), run.share)
            elements[first] -= run.first - first * run.share
            elements[last] -= (last + 1) * run.share - end
            shares[sign] = elements
        known: Mapping[int, int] = shares[sign]
        return known

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
        return any(len(self.ranks) - 1 in self.elements(key) for key in self.shapes)

    @cached_property
    def holders(self) -> Mapping[str, dict[int, tuple[Shard, ...]]]:  # type: ignore[override]
        """Holders by key, made anew whenever they are asked for."""
        return _Lazy(self.shapes, lambda key: _by_rank(self._parts(key)))

    @cached_property
    def copies(self) -> Mapping[str, dict[int, tuple[tuple[int, Shard], ...]]]:  # type: ignore[override]
        """Copies by key, made anew whenever they are asked for."""
        return _Lazy(self.shapes, lambda key: {0: tuple(self._parts(key))})

    def _parts(self, key: str) -> Iterator[tuple[int, Shard]]:
        run: _Run = self._runs[key]  # type: ignore[attr-defined]
        for rank in self.elements(key):
            part = run.of(rank)
            assert part is not None
            yield rank, part


def _by_rank(parts: Iterator[tuple[int, Shard]]) -> dict[int, tuple[Shard, ...]]:
    shards: dict[int, tuple[Shard, ...]] = {}
    for rank, part in parts:
        shards[rank] = (*shards.get(rank, ()), part)
    return shards


class _Ranks(Sequence[tuple[Shard, ...]]):
    """The shards of every rank."""

    def __init__(self, runs: Mapping[str, _Run], world: int) -> None:
        self._runs, self._world = runs, world

    def __len__(self) -> int:
        return self._world

    def __getitem__(self, rank: int) -> tuple[Shard, ...]:  # type: ignore[override]
        if not 0 <= rank < self._world:
            raise IndexError(rank)
        return tuple(part for run in self._runs.values() if (part := run.of(rank)) is not None)


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
