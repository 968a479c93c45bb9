"""Sums over cut parameters equal sums over whole ones, in one collective."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from collectives import recorded
from random_layouts import random_shards
from ranks import run_ranks

from rankwise.comm.parameter_sums import ShardSums
from rankwise.layout.layout import Layout

CPU = torch.device("cpu")
SHAPES: dict[str, tuple[int, ...]] = {"a": (4, 5), "b": (9,), "c": (3, 7), "d": (6,)}


def check(rank: int, world: int, group: object) -> list[int]:
    whole = {key: torch.arange(1.0, 1 + torch.Size(shape).numel()).double() for key, shape in SHAPES.items()}
    straddling = []
    for seed in range(20):
        for replicated in (False, True) if world > 1 else (False,):
            for keys in ({"a", "b", "c", "d"}, {"a", "d"}, set()):
                layout = Layout(random_shards(SHAPES, world, seed, replicated), rank, group, replicated)  # type: ignore[arg-type]
                sums = ShardSums(layout, CPU, keys)
                parts = [whole[shard.key][shard.start : shard.end] for shard in layout.mine]
                powers = [[(part**q).sum() for part in parts] for q in (1, 2, 3)]
                partial = torch.tensor(powers, dtype=torch.float64).reshape(3, len(parts))
                with recorded("all_reduce", "all_to_all_single") as calls:
                    found = sums(partial)
                assert len(calls["all_reduce"]) == int(bool(keys & set(layout.straddlers)))
                assert sums.straddlers == len(keys & set(layout.straddlers))
                assert not calls["all_to_all_single"]
                for index, shard in enumerate(layout.mine):
                    summed = [shard] if replicated else layout.holders[shard.key][rank]
                    local = torch.cat([whole[shard.key][other.start : other.end] for other in summed])
                    values = whole[shard.key] if shard.key in keys else local
                    expected = torch.stack([(values**q).sum() for q in (1, 2, 3)])
                    assert torch.equal(found[:, index], expected)  # integers: exact in any order
                straddling.append(sums.straddlers)
    return straddling


def _check(rank: int, world: int) -> list[int]:
    return check(rank, world, dist.group.WORLD)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_random_layouts(world: int) -> None:
    ranks = [check(0, 1, None)] if world == 1 else run_ranks(world, _check)
    assert all(other == ranks[0] for other in ranks)
    assert any(ranks[0]) == (world > 1)
