"""Halos are what slicing the whole parameter would give."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from collectives import recorded
from random_layouts import random_shards
from ranks import run_ranks
from torch import Tensor

from rankwise.comm.halo import HaloExchange, ReadField
from rankwise.comm.volume import halo_volume
from rankwise.layout.layout import Layout, Shard

CPU = torch.device("cpu")
SHAPES: dict[str, tuple[int, ...]] = {"w": (5, 4), "v": (3, 7), "e": (23,), "other": (6, 6)}
FIELDS = 3


def _whole() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = {key: int(torch.Size(shape).numel()) for key, shape in SHAPES.items()}
    return {key: torch.randn(FIELDS, size, dtype=torch.float64, generator=generator) for key, size in sizes.items()}


def _expected(whole: Tensor, shard: Shard, width: int, by_row: bool) -> tuple[Tensor, Tensor]:
    row = shard.shape[-1] if by_row and len(shard.shape) > 1 else whole.shape[1]
    sides = []
    for elements, inside in (
        (range(shard.start - width, shard.start), shard.start),
        (range(shard.end, shard.end + width), shard.end - 1),
    ):
        side = torch.zeros(FIELDS, width, dtype=torch.float64)
        for at, element in enumerate(elements):
            if 0 <= element < whole.shape[1] and element // row == inside // row:
                side[:, at] = whole[:, element]
        sides.append(side)
    return sides[0], sides[1]


def _crosses(layout: Layout, keys: list[str], width: int, by_row: bool) -> bool:
    for key in keys:
        owner = {
            i: rank for rank, runs in layout.holders[key].items() for run in runs for i in range(run.start, run.end)
        }
        for i in owner:
            for j in range(i + 1, i + width + 1):
                row = SHAPES[key][-1] if by_row and len(SHAPES[key]) > 1 else len(owner)
                # Only what lies beside a border is needed, so i must end its run.
                ends = any(i == run.end - 1 for runs in layout.holders[key].values() for run in runs)
                starts = any(j == run.start for runs in layout.holders[key].values() for run in runs)
                if j in owner and owner[i] != owner[j] and i // row == j // row and (ends or starts):
                    return True
    return False


def reader(field: list[Tensor]) -> ReadField:
    return lambda places: [field[index][part] for index, part in places]


def _check(rank: int, world: int) -> list[bool]:
    return check(rank, world, dist.group.WORLD)


def check(rank: int, world: int, group: object) -> list[bool]:
    whole, keys, active = _whole(), ["w", "v", "e"], []
    for seed in range(16):
        for width in (0, 1, 2, 6):
            for by_row in (False, True):
                layout = Layout(random_shards(SHAPES, world, seed), rank, group)  # type: ignore[arg-type]
                halo = HaloExchange(layout, width, keys, CPU, torch.float64, by_row)
                fields = [
                    [whole[shard.key][f, shard.start : shard.end] for shard in layout.mine] for f in range(FIELDS)
                ]
                with recorded("all_to_all_single") as calls:
                    found = halo([reader(field) for field in fields])
                assert halo.active == _crosses(layout, keys, width, by_row)
                assert len(calls["all_to_all_single"]) == int(halo.active)
                for index, shard in enumerate(layout.mine):
                    selected = shard.key in keys
                    left, right = _expected(whole[shard.key], shard, width, by_row)
                    for f in range(FIELDS):
                        assert torch.equal(found[f][index][0], left[f] * selected)
                        assert torch.equal(found[f][index][1], right[f] * selected)
                    assert not halo.empty or (left.count_nonzero() + right.count_nonzero()) * selected == 0
                active.append(halo.active)
    return active


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_random_layouts(world: int) -> None:
    ranks = [check(0, 1, None)] if world == 1 else run_ranks(world, _check)
    assert all(other == ranks[0] for other in ranks)
    assert any(ranks[0]) == (world > 1)


def _far(rank: int, world: int) -> list[Tensor]:
    # Two elements per rank and a halo of five: it spans three ranks.
    shard = Shard("e", 2 * rank, 2 * rank + 2, 0, shape=(2 * world,), tensor=0)
    layout = Layout.share([shard], dist.group.WORLD)
    halo = HaloExchange(layout, 5, ["e"], CPU, torch.float64)
    return list(halo([reader([torch.tensor([2.0 * rank, 2.0 * rank + 1], dtype=torch.float64)])])[0][0][:2])


def test_a_halo_may_span_several_ranks() -> None:
    left, right = run_ranks(4, _far)[3]
    assert left.tolist() == [1, 2, 3, 4, 5] and right.tolist() == [0] * 5
    left, right = run_ranks(4, _far)[1]
    assert left.tolist() == [0, 0, 0, 0, 1] and right.tolist() == [4, 5, 6, 7, 0]


def test_cuts_between_rows_need_nothing_when_chains_are_rows() -> None:
    ranks = ((Shard("w", 0, 12, 0, shape=(4, 6), tensor=0),), (Shard("w", 12, 24, 0, shape=(4, 6), tensor=0),))
    by_tensor, by_row = (HaloExchange(Layout(ranks), 3, ["w"], CPU, torch.float64, by) for by in (False, True))
    assert by_tensor.active and not by_row.active and by_row.empty


def test_replicas_need_nothing() -> None:
    whole = (Shard("w", 0, 24, 0, shape=(4, 6), tensor=0),)
    assert HaloExchange(Layout((whole, whole), replicated=True), 3, ["w"], CPU, torch.float64).empty


def _narrow(rank: int, world: int) -> list[Tensor]:
    columns = ((0, 3), (3, 5))[rank]
    width = columns[1] - columns[0]
    layout = Layout.share([Shard("w", 0, 4 * width, 0, columns, shape=(4, 5), tensor=0)], dist.group.WORLD)
    halo = HaloExchange(layout, 4, ["w"], CPU, torch.float64)
    values = torch.arange(1.0, 21.0, dtype=torch.float64).view(4, 5)[:, slice(*columns)]
    found = halo([reader([values.reshape(-1)])])[0][0].rows
    assert halo.traffic == halo_volume(layout, ["w"], 4, 1, 8, by_row=False)[rank]
    assert found is not None
    return list(found)


def test_a_halo_may_be_wider_than_what_other_columns_have_of_a_row() -> None:
    whole = torch.nn.functional.pad(torch.arange(1.0, 21.0, dtype=torch.float64), (4, 4))
    for (first, last), rows in zip(((0, 3), (3, 5)), run_ranks(2, _narrow), strict=True):
        for number, (left, right) in enumerate(rows):
            assert torch.equal(left, whole[5 * number + first :][:4])
            assert torch.equal(right, whole[5 * number + last + 4 :][:4])
