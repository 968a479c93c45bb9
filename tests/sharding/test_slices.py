"""Which matrices can be computed slice by slice, and who owns the slices."""

from __future__ import annotations

from math import prod

import pytest

from rankwise.comm.owner_plan import MatrixTask, plan_matrices
from rankwise.layout.equal_slices import SlicedMatrix, find_slices, in_slices
from rankwise.layout.layout import Layout, Shard

PAIR = ((0, 1),)


def _rows(key: str, shape: tuple[int, int], *ranges: tuple[int, int], copy: int = 0) -> list[Shard]:
    """Shards of whole rows, one behind the other in one tensor."""
    width, position, found = shape[1], 0, []
    for first, last in ranges:
        found.append(Shard(key, first * width, last * width, position, shape=shape, tensor=0, copy=copy))
        position += (last - first) * width
    return found


def _columns(key: str, shape: tuple[int, int], first: int, last: int) -> list[Shard]:
    return [Shard(key, 0, shape[0] * (last - first), 0, (first, last), shape=shape, tensor=0)]


def _run(key: str, shape: tuple[int, int], start: int, end: int, copy: int = 0) -> list[Shard]:
    return [Shard(key, start, end, 0, shape=shape, tensor=0, copy=copy)]


def _layout(*ranks: list[Shard]) -> Layout:
    return Layout(tuple(map(tuple, ranks)))


def test_rows_and_columns() -> None:
    tall = find_slices(_layout(_rows("w", (8, 3), (0, 4)), _rows("w", (8, 3), (4, 8))), ["w"], PAIR)
    assert tall == {"w": SlicedMatrix("w", 0, (4, 3), 2, ((0, 1),))}
    assert tall["w"].parts == ["w[0:4]", "w[4:8]"]
    wide = find_slices(_layout(_columns("w", (3, 8), 0, 4), _columns("w", (3, 8), 4, 8)), ["w"], PAIR)
    assert wide == {"w": SlicedMatrix("w", 1, (3, 4), 2, ((0, 1),))}
    assert wide["w"].parts == ["w[:,0:4]", "w[:,4:8]"]


def test_strips_give_every_rank_several_slices() -> None:
    """Gate and up projections in one weight: every rank has a part of each."""
    layout = _layout(_rows("w", (8, 3), (0, 2), (4, 6)), _rows("w", (8, 3), (2, 4), (6, 8)))
    assert find_slices(layout, ["w"], PAIR) == {"w": SlicedMatrix("w", 0, (2, 3), 4, ((0, 1, 0, 1),))}


def test_cuts_inside_slices_need_an_owner_in_every_set() -> None:
    """Two tensor-parallel ranks, each block cut in the middle of a row over two data-parallel ranks."""
    shape, sets = (8, 3), ((0, 1), (2, 3))
    layout = _layout(*(_run("w", shape, start, end) for start, end in ((0, 8), (12, 20), (8, 12), (20, 24))))
    assert find_slices(layout, ["w"], sets) == {"w": SlicedMatrix("w", 0, (4, 3), 2, ((0, 1), (2, 3)))}
    # Cut between rows, they could be four slices, of which no set has all: two it is.
    layout = _layout(*(_run("w", shape, start, end) for start, end in ((0, 6), (12, 18), (6, 12), (18, 24))))
    assert find_slices(layout, ["w"], sets) == {"w": SlicedMatrix("w", 0, (4, 3), 2, ((0, 1), (2, 3)))}
    # Data-parallel copies.
    copies = [_run("w", shape, 12 * tensor, 12 * tensor + 12, copy=data) for data in (0, 1) for tensor in (0, 1)]
    assert find_slices(_layout(*copies), ["w"], sets) == {"w": SlicedMatrix("w", 0, (4, 3), 2, ((0, 1), (2, 3)))}


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(_layout(_rows("w", (8, 3), (0, 8)), []), id="whole on one rank"),
        pytest.param(_layout(_rows("w", (8, 3), (0, 3)), _rows("w", (8, 3), (3, 8))), id="unequal rows"),
        pytest.param(_layout(_run("w", (8, 3), 0, 13), _run("w", (8, 3), 13, 24)), id="cut in a row"),
        pytest.param(_layout(_columns("w", (3, 9), 0, 4), _columns("w", (3, 9), 4, 9)), id="unequal columns"),
        pytest.param(
            _layout(_rows("w", (9, 3), (0, 3), (3, 6)), _rows("w", (9, 3), (6, 9))), id="more slices on one rank"
        ),
    ],
)
def test_other_matrices_have_one_owner(layout: Layout) -> None:
    assert find_slices(layout, ["w"], PAIR) == {}


def test_slices_are_parameters_of_their_layout() -> None:
    layout = _layout(
        [*_rows("w", (8, 3), (0, 2), (4, 6)), *_columns("c", (3, 8), 0, 4), Shard("v", 0, 5, 0, shape=(5,), tensor=1)],
        [*_rows("w", (8, 3), (2, 4), (6, 8)), *_columns("c", (3, 8), 4, 8)],
    )
    sliced = in_slices(layout, find_slices(layout, ["w", "c"], PAIR))
    assert sliced.shapes == {
        "c[:,0:4]": (3, 4),
        "c[:,4:8]": (3, 4),
        "v": (5,),
        **{f"w[{first}:{first + 2}]": (2, 3) for first in (0, 2, 4, 6)},
    }
    assert not sliced.straddlers and all(shard.is_whole for parts in sliced.ranks for shard in parts)
    # Each shard keeps its place among the rank's, in its tensor, and its size.
    for before, after in zip(layout.ranks, sliced.ranks, strict=True):
        assert [(f.tensor, f.offset, f.numel) for f in before] == [(f.tensor, f.offset, f.numel) for f in after]


def _plan(matrices: int, batch_elements: int, kept: dict[str, int] | None = None):  # type: ignore[no-untyped-def]
    shape, sets = (8, 3), ((0, 1), (2, 3))
    ranks = [
        [part for index in range(matrices) for part in _run(f"w{index}", shape, 12 * tensor, 12 * tensor + 12, data)]
        for data in (0, 1)
        for tensor in (0, 1)
    ]
    layout = _layout(*ranks)
    slices = find_slices(layout, list(layout.shapes), sets)
    tasks = [
        MatrixTask(part, (part,), slices[key].shape, float(prod(slices[key].shape)), key)
        for key in slices
        for part in slices[key].parts
    ]
    return plan_matrices(in_slices(layout, slices), tasks, [0.0] * 4, batch_elements, kept, slices)


def test_partners_share_whole_matrices_in_one_order() -> None:
    plan, loads = _plan(matrices=5, batch_elements=24)
    assert loads == [36.0, 36.0, 24.0, 24.0]
    seen = []
    for batch in plan.batches:
        by_owner = {rank: [task for task in batch.tasks if plan.owners[task.key] == rank] for rank in batch.partners}
        assert batch.partners in ((0, 1), (2, 3)) and sum(map(len, by_owner.values())) == len(batch.tasks)
        orders = {tuple(task.whole for task in tasks) for tasks in by_owner.values()}
        assert len(orders) == 1 and all(len(tasks) <= 2 for tasks in by_owner.values())
        seen += [task.key for task in batch.tasks]
    assert len(seen) == len(set(seen)) == 10


def test_owners_that_have_states_keep_them() -> None:
    kept = {"w0[0:4]": 2, "w0[4:8]": 3}
    plan, _ = _plan(matrices=1, batch_elements=24, kept=kept)
    assert plan.owners == kept
    # Not one that another set would have to share.
    plan, _ = _plan(matrices=1, batch_elements=24, kept={"w0[0:4]": 0, "w0[4:8]": 3})
    assert plan.owners == {"w0[0:4]": 0, "w0[4:8]": 1}
