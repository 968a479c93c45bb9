"""Ranks that need not exist and hold equal cuts of every parameter: what each holds follows from a few numbers.

A model of a thousand matrices on thousands of ranks has millions of shards. Estimates need their sizes, and those
are alike for all matrices of a shape.
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
        group: As passed to the constructor.
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
        """What the tensor of a rank stores."""
        slices, position = [], 0
        for name, size in self.sizes.items():
            share = self.share(name)
            first, last = min(rank * share, size), min((rank + 1) * share, size)
            if first < last:
                slices.append(Slice(name, first, last, position))
            position += share
        return TensorContents(self.group, tuple(slices))

    def whole(self) -> TensorContents:
        """All parameters end to end."""
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
    base: int  # of the parameter in every rank's tensor

    def of(self, rank: int) -> Shard | None:
        """What a rank holds of it."""
        start = max(self.first, rank * self.share)
        end = min(self.first + self.shard.numel, (rank + 1) * self.share)
        if start >= end:
            return None
        place = (start - self.first, end - self.first, 0, self.base + start - rank * self.share)
        return Shard(self.shard.key, self.shard.shape, *place)


class EvenLayout(Layout):
    """A layout of equal cuts that lists shards when it is asked for them; rank 0 looks at it.

    Args:
        cuts: The parameters.
        whole: Their shards where nothing is cut: of ``cuts.whole()``, contiguous and one for each key.
        name_of: The parameter that a key belongs to.
    """

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
        """See the base class."""
        return {key: self._runs[key].shard.shape for key in sorted(self._runs)}  # type: ignore[attr-defined]

    def elements(self, key: str) -> Mapping[int, int]:
        """See the base class; the same object for runs that are cut alike."""
        run: _Run = self._runs[key]  # type: ignore[attr-defined]
        size, shares = run.shard.numel, self._shares  # type: ignore[attr-defined]
        sign = (run.first, size, run.share)
        if sign not in shares:
            first, last, end = run.first // run.share, (run.first + size - 1) // run.share, run.first + size
            found = dict.fromkeys(range(first, last + 1), run.share)
            found[first] -= run.first - first * run.share
            found[last] -= (last + 1) * run.share - end
            shares[sign] = found
        known: Mapping[int, int] = shares[sign]
        return known

    def gathered(self, key: str, owner: int) -> Mapping[int, int]:
        """See the base class."""
        return self.elements(key)

    def first_copy(self, key: str) -> int:
        """See the base class."""
        return 0

    @cached_property
    def straddlers(self) -> tuple[str, ...]:
        """See the base class."""
        return tuple(key for key in self.shapes if len(self.elements(key)) > 1)

    @cached_property
    def all_hold(self) -> bool:
        """See the base class: ranks are filled in order."""
        return any(len(self.ranks) - 1 in self.elements(key) for key in self.shapes)

    @cached_property
    def holders(self) -> Mapping[str, dict[int, tuple[Shard, ...]]]:  # type: ignore[override]
        """See the base class; made anew whenever it is asked for."""
        return _Lazy(self.shapes, lambda key: _by_rank(self._parts(key)))

    @cached_property
    def copies(self) -> Mapping[str, dict[int, tuple[tuple[int, Shard], ...]]]:  # type: ignore[override]
        """See the base class; made anew whenever it is asked for."""
        return _Lazy(self.shapes, lambda key: {0: tuple(self._parts(key))})

    def _parts(self, key: str) -> Iterator[tuple[int, Shard]]:
        run: _Run = self._runs[key]  # type: ignore[attr-defined]
        for rank in self.elements(key):
            part = run.of(rank)
            assert part is not None
            yield rank, part


def _by_rank(parts: Iterator[tuple[int, Shard]]) -> dict[int, tuple[Shard, ...]]:
    found: dict[int, tuple[Shard, ...]] = {}
    for rank, part in parts:
        found[rank] = (*found.get(rank, ()), part)
    return found


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
    """Values that would fill the memory together."""

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
