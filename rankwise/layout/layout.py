"""The layout: which elements of every parameter this rank and the other ranks hold."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch.distributed as dist

from rankwise.layout.agreement import gather_together
from rankwise.layout.fused_blocks import Block, cut_into_blocks
from rankwise.layout.shards import Shard

__all__ = ["Layout", "LayoutError", "Shard"]


class LayoutError(RuntimeError):
    """The shards that a framework reported do not tile their parameters."""


@dataclass(frozen=True)
class Layout:
    """Every rank's shards of the parameters that one ``step()`` call works on.

    Attributes:
        ranks: ``ranks[r]`` lists the shards of data-parallel rank ``r``; the same on every rank.
        rank: This process's position in ``group``.
        group: The data-parallel process group, or None for a single process.
        replicated: Whether every rank holds every parameter whole (stage 0, DDP). Sums and halos then need no
            communication; only matrices, whose states live on one owner, travel.
        imagined: Whether its ranks need not exist: messages are counted, and none is prepared.
    """

    ranks: tuple[tuple[Shard, ...], ...]
    rank: int = 0
    group: dist.ProcessGroup | None = None
    replicated: bool = False
    imagined: bool = False

    def __post_init__(self) -> None:
        if self.replicated:
            copies = (tuple(replace(part, copy=rank) for part in parts) for rank, parts in enumerate(self.ranks))
            object.__setattr__(self, "ranks", tuple(copies))
        self._check_tiling()

    @classmethod
    def single(cls, shards: Iterable[Shard]) -> Layout:
        """The layout of a lone process."""
        return cls(ranks=(tuple(shards),))

    @classmethod
    def share(
        cls,
        shards: Sequence[Shard] | Callable[[], Sequence[Shard]],
        group: dist.ProcessGroup | None,
        replicated: bool = False,
    ) -> Layout:
        """Exchange shard lists once over ``group`` and build the common layout.

        Args:
            shards: This rank's shards, possibly none; or a function that finds them, and may fail on some ranks.
            group: Data-parallel process group; None or a group of one stays local.
            replicated: See the class.

        Raises:
            LayoutError: The shards of some parameter overlap or leave a gap.
            Exception: ``shards`` failed on some rank; raised on every rank.
        """
        everyone = gather_together(lambda: tuple(shards() if callable(shards) else shards), group)
        if len(everyone) == 1:
            return cls.single(everyone[0])
        return cls(ranks=tuple(everyone), rank=dist.get_rank(group), group=group, replicated=replicated)

    def cut(self, blocks: Mapping[str, Sequence[Block]]) -> Layout:
        """The layout in which blocks, which tile their two-dimensional weights, are parameters of their own."""
        if not blocks:
            return self
        ranks = tuple(
            tuple(piece for part in parts for piece in cut_into_blocks(part, blocks.get(part.key, ())))
            for parts in self.ranks
        )
        return replace(self, ranks=ranks)

    @property
    def world_size(self) -> int:
        """Number of data-parallel ranks."""
        return len(self.ranks)

    @property
    def is_whole_run(self) -> bool:
        """Whether these ranks are all there are, so that a matrix is computed by its owner and nowhere else."""
        return len(self.ranks) == (dist.get_world_size() if dist.is_initialized() else 1)

    @property
    def mine(self) -> tuple[Shard, ...]:
        """The shards of this rank, in the order every per-shard list follows."""
        return self.ranks[self.rank]

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Logical shape by key, over all ranks, in sorted key order: the same dictionary on every rank."""
        shapes = {shard.key: shard.shape for shards in self.ranks for shard in shards}
        return {key: shapes[key] for key in sorted(shapes)}

    @cached_property
    def holders(self) -> dict[str, dict[int, tuple[Shard, ...]]]:
        """For each key, the ranks that hold part of it and their shards."""
        holders: dict[str, dict[int, tuple[Shard, ...]]] = {key: {} for key in self.shapes}
        for rank, shards in enumerate(self.ranks):
            for shard in shards:
                holders[shard.key][rank] = (*holders[shard.key].get(rank, ()), shard)
        return holders

    @cached_property
    def copies(self) -> dict[str, dict[int, tuple[tuple[int, Shard], ...]]]:
        """For each key and copy, its shards with the ranks that hold them, in order of rank."""
        copies_of: dict[str, dict[int, list[tuple[int, Shard]]]] = {key: {} for key in self.shapes}
        for rank, shards in enumerate(self.ranks):
            for shard in shards:
                copies_of[shard.key].setdefault(shard.copy, []).append((rank, shard))
        return {
            key: {copy: tuple(members) for copy, members in sorted(copies.items())} for key, copies in copies_of.items()
        }

    def elements(self, key: str) -> Mapping[int, int]:
        """Elements of a key by rank, all copies counted."""
        return {rank: sum(part.numel for part in parts) for rank, parts in self.holders[key].items()}

    def cut_of(self, key: str) -> Hashable:
        """Which ranks hold which parts of a key, to compare with other keys."""
        parts = ((rank, part) for rank, held in self.holders[key].items() for part in held)
        return tuple((rank, part.start, part.end, part.columns, part.copy) for rank, part in parts)

    def gathered(self, key: str, owner: int) -> Mapping[int, int]:
        """Elements by rank of the copy of a key that ``owner`` gathers."""
        elements: dict[int, int] = {}
        for holder, shard in self.nearest_copy(key, owner):
            elements[holder] = elements.get(holder, 0) + shard.numel
        return elements

    def first_copy(self, key: str) -> int:
        """Number of the first copy of a key."""
        return next(iter(self.copies[key]))

    @property
    def all_hold(self) -> bool:
        """Whether every rank holds something."""
        return all(self.ranks)

    def nearest_copy(self, key: str, rank: int) -> tuple[tuple[int, Shard], ...]:
        """Shards of the copy of a parameter of which ``rank`` holds a part, else of the first one."""
        copies = self.copies[key]
        for members in copies.values():
            if any(holder == rank for holder, _ in members):
                return members
        return next(iter(copies.values()))

    @cached_property
    def straddlers(self) -> tuple[str, ...]:
        """Keys of which some rank holds a part but no whole copy, sorted."""
        return tuple(
            key
            for key, copies in self.copies.items()
            if any(len({holder for holder, _ in members}) > 1 for members in copies.values())
        )

    def _check_tiling(self) -> None:
        shapes: dict[str, tuple[int, ...]] = {}
        runs: dict[tuple[str, int], list[Shard]] = {}
        for rank, shards in enumerate(self.ranks):
            for shard in shards:
                if shapes.setdefault(shard.key, shard.shape) != shard.shape:
                    raise LayoutError(
                        f"'{shard.key}' has shape {shard.shape} on rank {rank} and {shapes[shard.key]} on an "
                        "earlier one; all data-parallel ranks must hold the same model."
                    )
                runs.setdefault((shard.key, shard.copy), []).append(shard)
        if self.replicated:
            missing = sorted({key for key in shapes for copy in range(len(self.ranks)) if (key, copy) not in runs})
            if missing:
                raise LayoutError(
                    f"not every rank holds {', '.join(map(repr, missing))}, but parameters were said to be replicated; "
                    "all data-parallel ranks must hold the same model."
                )
        for (key, _), pieces in runs.items():
            _check_blocks(key, shapes[key], pieces)


def _check_blocks(key: str, shape: tuple[int, ...], pieces: Sequence[Shard]) -> None:
    """Check that blocks of columns tile a parameter, and runs each block."""
    whole = (0, shape[-1] if shape else 1)
    blocks: dict[tuple[int, int], list[Shard]] = {}
    for piece in pieces:
        blocks.setdefault(piece.columns or whole, []).append(piece)
    _check_runs(f"the column blocks of '{key}'", sorted(blocks), whole[1], shape)
    for members in blocks.values():
        runs = sorted((piece.start, piece.end) for piece in members)
        _check_runs(f"the shards of '{key}'", runs, members[0].block_numel, shape)


def _check_runs(what: str, runs: Sequence[tuple[int, int]], size: int, shape: tuple[int, ...]) -> None:
    position = 0
    for start, end in runs:
        if start != position or end <= start:
            raise LayoutError(
                f"{what} are {list(runs)}: they must tile [0, {size}) exactly once. "
                "The framework's partitioning differs from the one this version was tested with."
            )
        position = end
    if position != size:
        raise LayoutError(
            f"{what} end at {position}, its shape {shape} has {size} "
            "elements. The framework's partitioning differs from the one this version was tested with."
        )
