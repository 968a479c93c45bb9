"""What this rank holds of every parameter, and what the other ranks hold: the only thing a framework must tell us."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch.distributed as dist

__all__ = ["Fragment", "Layout", "LayoutError"]


class LayoutError(RuntimeError):
    """The fragments a framework reported do not tile their parameters."""


@dataclass(frozen=True)
class Fragment:
    """A contiguous run of one parameter inside one of the tensors the optimizer was handed.

    Attributes:
        key: Unique name of the parameter (or of one matrix of a stack, ``"name[3]"``).
        shape: Logical shape of the parameter on this tensor-parallel rank.
        start: First element of the run in the row-major flattened parameter.
        end: One past the last element of the run.
        tensor: Index of the optimizer's tensor that stores the run.
        offset: Position of the run in that tensor, flattened.
    """

    key: str
    shape: tuple[int, ...]
    start: int
    end: int
    tensor: int
    offset: int

    @property
    def numel(self) -> int:
        """Number of elements of the run."""
        return self.end - self.start

    @property
    def is_whole(self) -> bool:
        """Whether the run covers the parameter."""
        return self.start == 0 and self.end == prod(self.shape)


@dataclass(frozen=True)
class Layout:
    """Every rank's fragments of the parameters that one ``step()`` call works on.

    Attributes:
        ranks: ``ranks[r]`` lists the fragments of data-parallel rank ``r``; the same on every rank.
        rank: This process's position in ``group``.
        group: The data-parallel process group, or None for a single process.
        replicated: Every rank holds every parameter whole (stage 0, DDP). Sums and halos then need no
            communication; only matrices, whose states live on one owner, travel.
    """

    ranks: tuple[tuple[Fragment, ...], ...]
    rank: int = 0
    group: dist.ProcessGroup | None = None
    replicated: bool = False

    def __post_init__(self) -> None:
        self._check_tiling()

    @classmethod
    def single(cls, fragments: Iterable[Fragment]) -> Layout:
        """The layout of a lone process."""
        return cls(ranks=(tuple(fragments),))

    @classmethod
    def share(cls, fragments: Sequence[Fragment], group: dist.ProcessGroup | None, replicated: bool = False) -> Layout:
        """Exchange fragment lists once over ``group`` and build the common layout.

        Args:
            fragments: This rank's fragments, possibly none.
            group: Data-parallel process group; None or a group of one stays local.
            replicated: See the class.

        Raises:
            LayoutError: The fragments of some parameter overlap or leave a gap.
        """
        world = dist.get_world_size(group) if group is not None else 1
        if world == 1:
            return cls.single(fragments)
        everyone: list[tuple[Fragment, ...]] = [()] * world
        dist.all_gather_object(everyone, tuple(fragments), group=group)
        return cls(ranks=tuple(everyone), rank=dist.get_rank(group), group=group, replicated=replicated)

    @property
    def world_size(self) -> int:
        """Number of data-parallel ranks."""
        return len(self.ranks)

    @property
    def mine(self) -> tuple[Fragment, ...]:
        """The fragments of this rank, in the order every per-fragment list follows."""
        return self.ranks[self.rank]

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Logical shape by key, over all ranks, in sorted key order: the same dictionary on every rank."""
        found = {fragment.key: fragment.shape for fragments in self.ranks for fragment in fragments}
        return {key: found[key] for key in sorted(found)}

    @cached_property
    def holders(self) -> dict[str, dict[int, tuple[Fragment, ...]]]:
        """For each key, the ranks that hold part of it and their fragments."""
        found: dict[str, dict[int, tuple[Fragment, ...]]] = {key: {} for key in self.shapes}
        for rank, fragments in enumerate(self.ranks):
            for fragment in fragments:
                found[fragment.key][rank] = (*found[fragment.key].get(rank, ()), fragment)
        return found

    @cached_property
    def straddlers(self) -> tuple[str, ...]:
        """Keys whose fragments lie on more than one rank, sorted; empty when parameters are replicated."""
        if self.replicated:
            return ()
        return tuple(key for key, ranks in self.holders.items() if len(ranks) > 1)

    def _check_tiling(self) -> None:
        shapes: dict[str, tuple[int, ...]] = {}
        runs: dict[tuple[str, int], list[tuple[int, int]]] = {}
        for rank, fragments in enumerate(self.ranks):
            for fragment in fragments:
                if shapes.setdefault(fragment.key, fragment.shape) != fragment.shape:
                    raise LayoutError(
                        f"'{fragment.key}' has shape {fragment.shape} on rank {rank} and {shapes[fragment.key]} on an "
                        "earlier one; all data-parallel ranks must hold the same model."
                    )
                copy = rank if self.replicated else 0
                runs.setdefault((fragment.key, copy), []).append((fragment.start, fragment.end))
        if self.replicated:
            missing = sorted({key for key in shapes for copy in range(len(self.ranks)) if (key, copy) not in runs})
            if missing:
                raise LayoutError(
                    f"not every rank holds {', '.join(map(repr, missing))}, but parameters were said to be replicated; "
                    "all data-parallel ranks must hold the same model."
                )
        for (key, _), spans in runs.items():
            position = 0
            for start, end in sorted(spans):
                if start != position or end <= start:
                    raise LayoutError(
                        f"the fragments of '{key}' are {sorted(spans)}: they must tile [0, {prod(shapes[key])}) "
                        "exactly once. The framework's partitioning differs from the one this version was tested with."
                    )
                position = end
            if position != prod(shapes[key]):
                raise LayoutError(
                    f"the fragments of '{key}' end at {position}, its shape {shapes[key]} has {prod(shapes[key])} "
                    "elements. The framework's partitioning differs from the one this version was tested with."
                )
