"""Views of many runs in flat tensors, planned once: what a kernel needs of them is known without a look at each.

A plan has integers alone. It holds no memory, and what follows from it and from the addresses of the flat tensors is
right wherever these lie: a framework may move them between two steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple, SupportsIndex

from torch import Tensor

__all__ = ["RunPart", "RunPlace", "RunPlan", "RunViews", "are_runs", "chosen_of"]

# Sets of runs whose gradients come and go are many.
_MOST_PARTS = 1024


class RunPlace(NamedTuple):
    """Where a run lies in its flat tensor, in elements.

    Attributes:
        first: Where it begins.
        numel: How long it is.
        spread: Parts that it is stored in, and the distance between the beginnings of two; None: in one.
    """

    first: int
    numel: int
    spread: tuple[int, int] | None = None

    @property
    def end(self) -> int:
        """One past its last element."""
        if self.spread is None:
            return self.first + self.numel
        parts, distance = self.spread
        return self.first + (parts - 1) * distance + self.numel // parts

    def of(self, flat: Tensor) -> Tensor:
        """The run, a view: 1-D, or (parts, elements) where it is stored with gaps."""
        if self.spread is None:
            return flat[self.first : self.first + self.numel]
        parts, distance = self.spread
        return flat.as_strided((parts, self.numel // parts), (distance, 1), flat.storage_offset() + self.first)


class RunPlan:
    """Where runs lie in some flat tensors; cuts any that are laid out alike.

    The views are 1-D, or (parts, elements) where a run is stored with gaps.

    Args:
        places: For each flat tensor, of its runs.

    Attributes:
        lengths: Lengths of all runs.
        tensors: How many flat tensors there are.
        has_gaps: Whether a run is stored in several parts.
    """

    def __init__(self, places: Sequence[Sequence[RunPlace]]) -> None:
        self.places = tuple(map(tuple, places))
        self.tensors = len(places)
        self.lengths = tuple(place.numel for found in self.places for place in found)
        self.has_gaps = any(place.spread is not None for found in self.places for place in found)
        self._cuts = [_Cutting(found) for found in self.places]
        self._wholes = [found[0].numel if _may_be_whole(found) else -1 for found in self.places]
        self._parts: dict[tuple[int, ...], RunPart] = {}

    @cached_property
    def _runs(self) -> list[RunPlace]:
        return [place for found in self.places for place in found]

    @cached_property
    def _tensor_of(self) -> list[int]:
        return [tensor for tensor, found in enumerate(self.places) for _ in found]

    def cut(self, flats: Sequence[Tensor]) -> RunViews:
        """The runs of as many 1-D tensors as were planned.

        Raises:
            RuntimeError: A run reaches beyond its tensor.
        """
        if [flat.numel() for flat in flats] == self._wholes:
            return RunViews(flats, flats, self)
        found: list[Tensor] = []
        for flat, cutting, whole in zip(flats, self._cuts, self._wholes, strict=True):
            if flat.numel() == whole:
                found.append(flat)
            else:
                found += cutting.of(flat)
        return RunViews(found, flats, self)

    def only(self, chosen: Sequence[int]) -> RunPart | None:
        """Some of the runs, given by their places in order; the same object every time.

        None where their order is another one than that of the tensors.
        """
        key = tuple(chosen)
        if key not in self._parts:
            order = [self._tensor_of[place] for place in key]
            if order != sorted(order):
                return None
            if len(self._parts) >= _MOST_PARTS:
                self._parts.clear()
            runs: dict[int, list[RunPlace]] = {}
            for tensor, place in zip(order, key, strict=True):
                runs.setdefault(tensor, []).append(self._runs[place])
            self._parts[key] = RunPart(tuple(runs), RunPlan(list(runs.values())))
        return self._parts[key]

    def addresses(self, bases: Sequence[int], itemsize: int) -> list[int]:
        """Where the runs begin.

        Args:
            bases: Where the flat tensors do.
            itemsize: Bytes of an element.
        """
        return [
            base + itemsize * place.first for base, found in zip(bases, self.places, strict=True) for place in found
        ]


class RunPart(NamedTuple):
    """Some of a plan's runs.

    Attributes:
        tensors: Those of the plan's that have any.
        plan: Plan of the runs in them.
    """

    tensors: tuple[int, ...]
    plan: RunPlan


class RunViews(list[Tensor]):
    """The runs that a plan has cut.

    Args:
        views: Views of the runs.
        flats: The tensors that they are views of.
        plan: Has cut them.
    """

    def __init__(self, views: Sequence[Tensor], flats: Sequence[Tensor], plan: RunPlan) -> None:
        super().__init__(views)
        self._flats, self._plan = flats, plan
        self._changed = False

    def only(self, chosen: Sequence[int]) -> list[Tensor]:
        """Some of them, by their places; several are as planned as these where they can be."""
        views = list(map(self.__getitem__, chosen))
        part = None if len(views) < 2 or self.as_planned is None else self._plan.only(chosen)
        return views if part is None else RunViews(views, [self._flats[tensor] for tensor in part.tensors], part.plan)

    def __setitem__(self, place: Any, value: Any) -> None:
        # The others are where they were, but nobody may take it for granted any more.
        self._changed = True
        super().__setitem__(place, value)

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        # A copy's tensors lie elsewhere.
        return list, (list(self),)

    @property
    def as_planned(self) -> tuple[Sequence[Tensor], RunPlan] | None:
        """The flat tensors and what they were cut by; None where the list has been changed since."""
        if self._changed or len(self) != len(self._plan.lengths):
            return None
        return self._flats, self._plan


def are_runs(tensors: Sequence[Tensor]) -> bool:
    """Whether none of them has gaps."""
    planned = tensors.as_planned if isinstance(tensors, RunViews) else None
    if planned is not None:
        return not planned[1].has_gaps
    return all(tensor.dim() < 2 for tensor in tensors)


def chosen_of(tensors: Sequence[Tensor], chosen: Sequence[int]) -> list[Tensor]:
    """Some of them, by their places; planned runs stay so."""
    return tensors.only(chosen) if isinstance(tensors, RunViews) else list(map(tensors.__getitem__, chosen))


def _may_be_whole(places: Sequence[RunPlace]) -> bool:
    return len(places) == 1 and places[0].first == 0 and places[0].spread is None


class _Cutting:
    """How one flat tensor is cut: at once where its runs lie one behind the other, in any order."""

    def __init__(self, places: Sequence[RunPlace]) -> None:
        self._places = places
        self._sizes: list[int] = []
        self._chosen = [0] * len(places)
        self._end = max((place.end for place in places), default=0)
        self._are_apart = all(place.spread is None for place in places)
        end = 0
        for at in sorted(range(len(places)), key=lambda at: (places[at].first, places[at].numel)):
            place = places[at]
            if place.first < end:
                self._are_apart = False
                break
            if place.first > end:
                # What lies between two of them is cut out, too.
                self._sizes.append(place.first - end)
            self._chosen[at] = len(self._sizes)
            self._sizes.append(place.numel)
            end = place.end
        self._are_all = self._chosen == list(range(len(self._sizes)))

    def of(self, flat: Tensor) -> Sequence[Tensor]:
        if flat.numel() < self._end:
            raise RuntimeError(
                f"a tensor of {flat.numel()} elements must have {self._end}: it was replaced since the step was planned"
            )
        if not self._are_apart or len(self._places) < 2:
            return [place.of(flat) for place in self._places]
        found = flat.split_with_sizes([*self._sizes, flat.numel() - self._end])
        return found[:-1] if self._are_all else list(map(found.__getitem__, self._chosen))
