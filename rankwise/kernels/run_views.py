"""Views of many runs in flat tensors are planned once, so that a kernel gets its tables without a look at each view.

A plan consists of integers. It holds no memory, and takes the addresses of the flat tensors anew at each step: a
framework may move them between two steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import groupby
from operator import itemgetter
from typing import Any, Generic, NamedTuple, SupportsIndex, TypeVar

from torch import Tensor

from rankwise.intervals import Run

__all__ = ["RunPlan", "RunViews", "TensorRuns", "are_runs", "chosen_of"]

Which = TypeVar("Which")

# Parameters whose gradients come and go make many sets of runs.
_MOST_PARTS = 1024


class RunPlan:
    """Where runs lie in some flat tensors; a plan cuts all lists of tensors that are laid out so.

    The views are 1-D, or (parts, elements) where a run is stored with gaps.

    Args:
        places: Places of the runs in each flat tensor.

    Attributes:
        lengths: Lengths of all runs.
        has_gaps: Whether a run is stored in several parts.
    """

    def __init__(self, places: Sequence[Sequence[Run]]) -> None:
        self.places = tuple(map(tuple, places))
        self.lengths = tuple(place.numel for runs in self.places for place in runs)
        self.has_gaps = any(place.rows > 1 for runs in self.places for place in runs)
        self._cuts = [_Cutting(runs) for runs in self.places]
        self._wholes = [runs[0].numel if _may_be_whole(runs) else -1 for runs in self.places]
        self._parts: dict[tuple[int, ...], TensorRuns[int]] = {}

    @cached_property
    def _runs(self) -> list[Run]:
        return [place for runs in self.places for place in runs]

    @cached_property
    def _tensor_of(self) -> list[int]:
        return [tensor for tensor, runs in enumerate(self.places) for _ in runs]

    def cut(self, flats: Sequence[Tensor]) -> RunViews:
        """Return views of the runs in as many 1-D tensors as were planned.

        Raises:
            RuntimeError: A run reaches beyond its tensor.
        """
        if [flat.numel() for flat in flats] == self._wholes:
            return RunViews(flats, flats, self)
        views: list[Tensor] = []
        for flat, cutting, whole in zip(flats, self._cuts, self._wholes, strict=True):
            if flat.numel() == whole:
                views.append(flat)
            else:
                views += cutting.of(flat)
        return RunViews(views, flats, self)

    def only(self, chosen: Sequence[int]) -> TensorRuns[int] | None:
        """Return some of the runs, given by their numbers; the same object for the same runs.

        It is None where the order of the runs is not that of the tensors.
        """
        key = tuple(chosen)
        if key not in self._parts:
            order = [self._tensor_of[place] for place in key]
            if order != sorted(order):
                return None
            if len(self._parts) >= _MOST_PARTS:
                self._parts.clear()
            self._parts[key] = TensorRuns.of(zip(order, map(self._runs.__getitem__, key), strict=True))
        return self._parts[key]

    def addresses(self, bases: Sequence[int], itemsize: int) -> list[int]:
        """Return the addresses at which the runs begin.

        Args:
            bases: Addresses at which the flat tensors begin.
            itemsize: Bytes of an element.
        """
        return [base + itemsize * place.offset for base, runs in zip(bases, self.places, strict=True) for place in runs]


class TensorRuns(NamedTuple, Generic[Which]):
    """Runs in some of many tensors.

    Attributes:
        tensors: Key of each tensor that has such runs, an index for example, in the order of the runs.
        runs: The runs in these tensors.
    """

    tensors: tuple[Which, ...]
    runs: RunPlan

    @classmethod
    def of(cls, places: Iterable[tuple[Which, Run]]) -> TensorRuns[Which]:
        """Plan runs that are given with the keys of their tensors; runs of one tensor follow each other."""
        grouped = [(tensor, [run for _, run in members]) for tensor, members in groupby(places, itemgetter(0))]
        return cls(tuple(tensor for tensor, _ in grouped), RunPlan([runs for _, runs in grouped]))


class RunViews(list[Tensor]):
    """A list of the views that a plan has cut.

    Args:
        views: Views of the runs.
        flats: Tensors that the plan has cut.
        plan: Plan of the runs.
    """

    def __init__(self, views: Sequence[Tensor], flats: Sequence[Tensor], plan: RunPlan) -> None:
        super().__init__(views)
        self._flats, self._plan = flats, plan
        self._changed = False

    def only(self, chosen: Sequence[int]) -> list[Tensor]:
        """Return some of the views, by their numbers; several are planned, too, where their order allows it."""
        views = list(map(self.__getitem__, chosen))
        part = None if len(views) < 2 or self.as_planned is None else self._plan.only(chosen)
        return views if part is None else RunViews(views, [self._flats[tensor] for tensor in part.tensors], part.runs)

    def __setitem__(self, place: Any, value: Any) -> None:
        # The plan no longer describes this list, even if all other views are where they were.
        self._changed = True
        super().__setitem__(place, value)

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        # The tensors of a copy lie elsewhere, so that the plan does not describe them.
        return list, (list(self),)

    @property
    def as_planned(self) -> tuple[Sequence[Tensor], RunPlan] | None:
        """The flat tensors and their plan; None where the list has been changed since it was cut."""
        if self._changed or len(self) != len(self._plan.lengths):
            return None
        return self._flats, self._plan


def are_runs(tensors: Sequence[Tensor]) -> bool:
    """Whether no tensor has gaps."""
    planned = tensors.as_planned if isinstance(tensors, RunViews) else None
    if planned is not None:
        return not planned[1].has_gaps
    return all(tensor.dim() < 2 for tensor in tensors)


def chosen_of(tensors: Sequence[Tensor], chosen: Sequence[int]) -> list[Tensor]:
    """Return some of the tensors, by their numbers; planned views stay planned where their order allows it."""
    return tensors.only(chosen) if isinstance(tensors, RunViews) else list(map(tensors.__getitem__, chosen))


def _may_be_whole(places: Sequence[Run]) -> bool:
    return len(places) == 1 and places[0].offset == 0 and places[0].rows == 1


class _Cutting:
    """How one flat tensor is cut: by one call where no two of its runs overlap, in any order."""

    def __init__(self, places: Sequence[Run]) -> None:
        self._places = places
        self._sizes: list[int] = []
        self._chosen = [0] * len(places)
        self._end = max((place.end for place in places), default=0)
        self._are_apart = all(place.rows == 1 for place in places)
        end = 0
        for at in sorted(range(len(places)), key=places.__getitem__):
            place = places[at]
            if place.offset < end:
                self._are_apart = False
                break
            if place.offset > end:
                # The elements between two runs become a piece that nobody takes.
                self._sizes.append(place.offset - end)
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
        pieces = flat.split_with_sizes([*self._sizes, flat.numel() - self._end])
        return pieces[:-1] if self._are_all else list(map(pieces.__getitem__, self._chosen))
