"""Layouts refuse what does not tile, and know who holds what."""

from __future__ import annotations

import random
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_layouts import cuts, random_shards
from ranks import run_ranks

from rankwise.layout.layout import Layout, LayoutError, Shard

SHAPES = {"w": (4, 6), "b": (5,), "s": ()}
quick = settings(max_examples=40, deadline=None)


def piece(start: int, end: int, key: str = "w", shape: tuple[int, ...] = (4, 6)) -> Shard:
    return Shard(key, start, end, 0, shape=shape, tensor=0)


@pytest.mark.parametrize(
    ("ranks", "spans"),
    [
        ([[piece(0, 10)], [piece(9, 24)]], "[(0, 10), (9, 24)]"),
        ([[piece(0, 10)], [piece(11, 24)]], "[(0, 10), (11, 24)]"),
        ([[piece(1, 24)], []], "[(1, 24)]"),
        ([[piece(0, 24)], [piece(0, 24)]], "[(0, 24), (0, 24)]"),
        ([[piece(0, 12), piece(12, 12)], [piece(12, 24)]], "[(0, 12), (12, 12), (12, 24)]"),
    ],
    ids=["overlap", "gap", "late start", "two copies", "empty run"],
)
def test_shards_must_tile(ranks: list[list[Shard]], spans: str) -> None:
    with pytest.raises(LayoutError) as error:
        Layout(tuple(map(tuple, ranks)))
    assert "'w'" in str(error.value) and spans in str(error.value) and "[0, 24)" in str(error.value)


@pytest.mark.parametrize("end", [23, 25])
def test_shards_must_end_with_the_parameter(end: int) -> None:
    with pytest.raises(LayoutError, match=rf"'w' end at {end}, its shape \(4, 6\) has 24"):
        Layout(((piece(0, 7),), (piece(7, end),)))


def test_ranks_must_agree_on_shapes() -> None:
    with pytest.raises(LayoutError, match=r"'w' has shape \(6, 4\) on rank 1 and \(4, 6\)"):
        Layout(((piece(0, 12),), (piece(12, 24, shape=(6, 4)),)))


def test_replicas_are_checked_rank_by_rank() -> None:
    Layout(((piece(0, 24),), (piece(0, 24),)), replicated=True)
    with pytest.raises(LayoutError, match="'w' end at 20"):
        Layout(((piece(0, 24),), (piece(0, 20),)), replicated=True)
    with pytest.raises(LayoutError, match="not every rank holds 'b', but parameters were said to be replicated"):
        Layout(((piece(0, 24), piece(0, 5, "b", (5,))), (piece(0, 24),)), replicated=True)


def test_shard_knows_its_size() -> None:
    assert piece(3, 10).numel == 7 and not piece(3, 10).is_whole
    assert piece(0, 24).is_whole and Shard("s", 0, 1, 0, shape=(), tensor=0).is_whole


@quick
@given(world=st.integers(1, 5), seed=st.integers(0, 10**6))
def test_holders_and_straddlers(world: int, seed: int) -> None:
    ranks = random_shards(SHAPES, world, seed)
    for rank in range(world):
        layout = Layout(ranks, rank)
        assert layout.world_size == world and layout.mine == ranks[rank]
        assert list(layout.shapes.items()) == sorted(SHAPES.items())
        for key, shape in SHAPES.items():
            held = layout.holders[key]
            assert all(held.values())
            assert sum(shard.numel for pieces in held.values() for shard in pieces) == prod(shape)
            assert all(shard in ranks[holder] for holder, pieces in held.items() for shard in pieces)
            assert (key in layout.straddlers) == (len(held) > 1)
        assert list(layout.straddlers) == sorted(layout.straddlers)


@quick
@given(numel=st.integers(1, 60), pieces=st.integers(2, 6), seed=st.integers(0, 10**6), data=st.data())
def test_any_changed_border_is_noticed(numel: int, pieces: int, seed: int, data: st.DataObject) -> None:
    runs = cuts(random.Random(seed), numel, pieces)
    Layout((tuple(piece(*run, shape=(numel,)) for run in runs),))
    index = data.draw(st.integers(0, len(runs) - 1))
    shift = data.draw(st.sampled_from([-1, 1]))
    runs[index] = (runs[index][0], runs[index][1] + shift)
    with pytest.raises(LayoutError):
        Layout((tuple(piece(*run, shape=(numel,)) for run in runs),))


def test_replicated_parameters_do_not_straddle() -> None:
    layout = Layout(random_shards(SHAPES, 3, 0, replicated=True), 1, replicated=True)
    assert layout.straddlers == () and set(layout.holders["w"]) == {0, 1, 2}


def _share(rank: int, world: int) -> list[object]:
    import torch.distributed as dist

    ranks = random_shards(SHAPES, world, seed=3)
    layout = Layout.share(ranks[rank], dist.group.WORLD)
    try:
        Layout.share(ranks[rank] if rank else (), dist.group.WORLD)
        message = ""
    except LayoutError as error:
        message = str(error)
    return [layout.ranks == ranks, layout.rank, layout.group is dist.group.WORLD, message]


def test_share_tells_every_rank_the_same() -> None:
    for rank, (same, own_rank, group_kept, message) in enumerate(run_ranks(3, _share)):
        assert same and own_rank == rank and group_kept
        assert "tile" in message or "elements" in message


def test_share_of_one_process_is_local() -> None:
    layout = Layout.share([piece(0, 24)], None, replicated=True)
    assert layout.world_size == 1 and not layout.replicated and layout.group is None
