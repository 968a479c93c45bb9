"""Views of runs in flat tensors, and what is taken for granted of them."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from rankwise.intervals import Run
from rankwise.kernels.run_views import RunPlan, RunViews, are_runs, chosen_of

FLAT = torch.arange(14.0)[:12]
PARTS = Run(7, 2, 2, 3)


def values_of(place: Run) -> list[float] | list[list[float]]:
    values = FLAT.tolist()
    if place.rows == 1:
        return values[place.offset : place.offset + place.numel]
    starts = range(place.offset, place.offset + place.rows * place.stride, place.stride)
    return [values[start : start + place.width] for start in starts]


@pytest.mark.parametrize(
    "places", [[(0, 12)], [(2, 3)], [(0, 4), (4, 8)], [(1, 3), (6, 0), (6, 2)], [(6, 2), (1, 3)], []]
)
@pytest.mark.parametrize("parts", [[], [PARTS]])
def test_many_runs_at_once_are_those_of_each(places: list[tuple[int, int]], parts: list[Run]) -> None:
    """In a row, with gaps, empty, out of order, and one that is stored in parts among them."""
    wanted = [*(Run(*place) for place in places), *parts]
    plan = RunPlan([wanted] if wanted else [])
    found = plan.cut([FLAT] if wanted else [])
    assert [run.tolist() for run in found] == [values_of(place) for place in wanted]
    assert plan.lengths == tuple(run.numel() for run in found) and are_runs(found) == are_runs(list(found))
    addresses = plan.addresses([FLAT.data_ptr()] if wanted else [], FLAT.itemsize)
    assert [at for at, run in zip(addresses, found, strict=True) if run.numel()] == [
        run.data_ptr() for run in found if run.numel()
    ]


def test_whole_tensors_are_themselves() -> None:
    tensors = [torch.zeros(3), torch.zeros(0), torch.zeros(5)]
    plan = RunPlan([[Run(0, 3)], [Run(0, 0)], [Run(0, 5)]])
    assert all(run is tensor for run, tensor in zip(plan.cut(tensors), tensors, strict=True))
    padded = plan.cut([torch.zeros(4), *tensors[1:]])
    assert [run.numel() for run in padded] == [3, 0, 5] and padded[2] is tensors[2]


@pytest.mark.parametrize("places", [[Run(0, 13)], [Run(0, 4), Run(4, 9)], [PARTS, Run(10, 3)]])
def test_a_tensor_that_has_become_too_short(places: list[Run]) -> None:
    """A kernel would write behind it."""
    with pytest.raises(RuntimeError, match=r"a tensor of 12 elements must have 13"):
        RunPlan([places]).cut([FLAT])


def test_a_changed_list_is_no_longer_taken_for_granted() -> None:
    plan = RunPlan([[Run(0, 4), Run(4, 4)]])

    def views() -> RunViews:
        found = plan.cut([FLAT])
        assert found.as_planned is not None
        return found

    changed, longer = views(), views()
    changed[0] = torch.zeros(4)
    longer.append(torch.zeros(4))
    assert changed.as_planned is None and longer.as_planned is None
    for other in (copy.copy(views()), copy.deepcopy(views()), pickle.loads(pickle.dumps(views())), views()[:]):
        assert type(other) is list and [run.tolist() for run in other] == [run.tolist() for run in views()]


@pytest.mark.parametrize("chosen", [(1, 2), (2, 3), (0, 3, 4), tuple(range(5))])
def test_some_of_planned_runs_are_planned(chosen: tuple[int, ...]) -> None:
    plan = RunPlan([[Run(6, 2), Run(1, 3)], [Run(0, 12)], [Run(2, 2), Run(4, 1)]])
    flats = [FLAT, FLAT + 20, FLAT + 40]
    every = plan.cut(flats)
    found = chosen_of(every, chosen)
    assert [run.tolist() for run in found] == [every[place].tolist() for place in chosen]
    assert isinstance(found, RunViews) and found.as_planned is not None
    tensors, part = found.as_planned
    assert part is chosen_of(every, chosen).as_planned[1], "it is found again by its plan"  # type: ignore[attr-defined]
    assert part.lengths == tuple(run.numel() for run in found)
    bases = [tensor.data_ptr() for tensor in tensors]
    assert part.addresses(bases, FLAT.itemsize) == [run.data_ptr() for run in found]


@pytest.mark.parametrize("chosen", [(), (2,)])
def test_one_of_planned_runs_is_a_list(chosen: tuple[int, ...]) -> None:
    """To plan each of many by itself would take more than it saves."""
    every = RunPlan([[Run(6, 2), Run(1, 3)], [Run(0, 12)]]).cut([FLAT, FLAT + 20])
    found = chosen_of(every, chosen)
    assert not isinstance(found, RunViews) and all(map(torch.equal, found, map(every.__getitem__, chosen)))


def test_runs_in_another_order_are_a_list() -> None:
    """Tables go through the tensors in order."""
    every = RunPlan([[Run(0, 2)], [Run(0, 3)]]).cut([FLAT, FLAT + 20])
    found = chosen_of(every, (1, 0))
    assert not isinstance(found, RunViews) and [run.numel() for run in found] == [3, 2]


def test_some_of_a_changed_list_are_a_list() -> None:
    every = RunPlan([[Run(0, 2), Run(2, 3)]]).cut([FLAT])
    every[0] = FLAT[:1]
    found = chosen_of(every, (0,))
    assert not isinstance(found, RunViews) and found[0].numel() == 1
