"""Random ways to cut parameters over ranks, reproducible from a seed."""

from __future__ import annotations

import random
from math import prod

from rankwise.layout.layout import Shard

Shapes = dict[str, tuple[int, ...]]


def cuts(rng: random.Random, numel: int, pieces: int) -> list[tuple[int, int]]:
    """At most ``pieces`` runs that tile ``[0, numel)``, cut anywhere."""
    inner = sorted(rng.sample(range(1, numel), min(pieces, numel) - 1)) if numel > 1 else []
    return list(zip([0, *inner], [*inner, numel], strict=True))


def random_shards(shapes: Shapes, world: int, seed: int, replicated: bool = False) -> tuple[tuple[Shard, ...], ...]:
    """Every rank's shards: uneven cuts, anywhere in a row; ranks without anything; several runs on one rank."""
    rng = random.Random(seed)
    ranks: list[list[Shard]] = [[] for _ in range(world)]
    used = [0] * world
    # Now and then one rank holds nothing at all.
    idle = rng.randrange(2 * world)
    holders = [rank for rank in range(world) if world == 1 or rank != idle]
    for key, shape in shapes.items():
        whole = [(0, prod(shape))]
        runs = whole if replicated or rng.random() < 0.3 else cuts(rng, prod(shape), rng.randint(2, world + 3))
        for run in runs:
            for rank in range(world) if replicated else [rng.choice(holders)]:
                used[rank] += rng.choice((0, 0, 3))  # padding
                ranks[rank].append(Shard(key, *run, used[rank], shape=shape, tensor=0))
                used[rank] += run[1] - run[0]
    return tuple(map(tuple, ranks))
