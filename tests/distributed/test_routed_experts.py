"""MKOR of experts that are linear modules: every token counts once, however unevenly ranks route theirs."""

from __future__ import annotations

from typing import Any

import pytest
from ranks import run_ranks
from routed_experts import INTERVAL, LR, MOMENTUM, STEPS, TOKENS, by_hand, data, make
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from rankwise import MKOR

CALLS_IDLE = (True, False)


def _train(rank: int, world: int) -> list[dict[str, Tensor]]:
    return [_train_one(rank, world, calls_idle) for calls_idle in CALLS_IDLE]


def _train_one(rank: int, world: int, calls_idle: bool) -> dict[str, Tensor]:
    model = make(calls_idle)
    copies: Any = DistributedDataParallel(model, find_unused_parameters=not calls_idle) if world > 1 else model
    options: dict[str, Any] = {"backend": "sgd", "momentum": MOMENTUM, "factor_dtype": "float64"}
    optimizer = MKOR(model.named_parameters(), lr=LR, weight_decay=0.0, update_interval=INTERVAL, **options)
    optimizer.capture(copies)
    edges = [TOKENS * number // world for number in range(world + 1)]
    mine = slice(edges[rank], edges[rank + 1])
    for step in range(STEPS):
        x, chosen, y = data(step)
        optimizer.zero_grad()
        ((copies(x[mine], chosen[mine]) - y[mine]).square().mean() * 4).backward()
        optimizer.step()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("world", [1, 2, 3])
def test_experts_follow_all_their_tokens(world: int) -> None:
    ranks = run_ranks(world, _train, timeout=60) if world > 1 else [_train(0, 1)]
    for position, calls_idle in enumerate(CALLS_IDLE):
        expected, moves = by_hand(calls_idle)
        assert moves["experts.3.up"] > 0 == moves["experts.4.up"] and moves["mix"] > moves["experts.3.up"]
        start = dict(make(calls_idle).named_parameters())
        for rank in ranks:
            for name, weight in expected.items():
                moved = (weight - start[name]).norm().item()
                assert (rank[position][name] - weight).norm().item() <= 1e-12 * moved, (calls_idle, name)
                assert (moved > 0.01) == ("experts.4" not in name)
