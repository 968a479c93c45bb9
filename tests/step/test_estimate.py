"""Estimates for ranks that do not exist: totals are kept, shares are even, traffic does not grow with the ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from rankwise import MARS, MKOR, LDAdam, SONew
from rankwise.estimate import RankEstimate, estimate
from rankwise.step.optimizer import ShardedOptimizer

WIDTH, BLOCKS = 256, 48
STAGES = (0, 1, 2, 3)


def _model() -> nn.Module:
    def block() -> nn.Module:
        layers = [nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4 * WIDTH)]
        return nn.Sequential(nn.LayerNorm(WIDTH), *layers, nn.Linear(4 * WIDTH, WIDTH))

    return nn.Sequential(nn.Embedding(1000, WIDTH), *(block() for _ in range(BLOCKS)))


def _mkor(model: nn.Module) -> ShardedOptimizer:
    optimizer = MKOR(model.named_parameters(), factor_dtype="bfloat16")
    optimizer.capture(model)
    return optimizer


BUILDERS: dict[str, Callable[[nn.Module], ShardedOptimizer]] = {
    "mars-m": lambda model: MARS(model.named_parameters(), variant="muon"),
    "sonew": lambda model: SONew(model.named_parameters(), band=4),
    "ldadam": lambda model: LDAdam(model.named_parameters(), rank=64),
    "mkor": _mkor,
}


def _optimizer(name: str) -> ShardedOptimizer:
    with torch.device("meta"):
        return BUILDERS[name](_model())


def _total(ranks: list[RankEstimate], what: str) -> float:
    return float(sum(getattr(rank, what) for rank in ranks))


@pytest.mark.parametrize("name", BUILDERS)
def test_memory_and_work_are_shared_out(name: str) -> None:
    optimizer = _optimizer(name)
    (alone,) = estimate(optimizer, world=1)
    assert (alone.bytes_sent, alone.collectives, alone.periodic_bytes) == (0, 0, 0)
    assert alone.elements == sum(parameter.numel() for parameter in optimizer.table.parameters.values())
    for stage in STAGES:
        ranks = estimate(optimizer, world=8, stage=stage)
        copies = 8 if stage == 0 else 1
        assert _total(ranks, "element_state_bytes") == copies * alone.element_state_bytes
        # Ranks that compute a matrix of LDAdam's together have its basis or its moments whole.
        together = name == "ldadam" and stage == 3
        least, held = alone.matrix_state_bytes, _total(ranks, "matrix_state_bytes")
        assert (least < held < 1.6 * least) if together else held == least
        if stage:
            assert max(rank.state_bytes for rank in ranks) <= (1.25 if together else 1.15) * alone.state_bytes / 8
            assert max(rank.flops for rank in ranks) <= 1.25 * alone.flops / 8
    assert not optimizer.planner.units and not optimizer.planner.loads


def test_known_sizes() -> None:
    (alone,) = estimate(_optimizer("mkor"), world=1)
    sides = [(WIDTH + 1, 3 * WIDTH), (WIDTH + 1, WIDTH), (WIDTH + 1, 4 * WIDTH), (4 * WIDTH + 1, WIDTH)]
    # 128 bfloat16 vectors of either side of a layer, the input's with a number for the bias, their weights, and a count
    # of failures.
    assert alone.matrix_state_bytes == BLOCKS * sum(128 * (2 * (a + b) + 2 * 4) + 4 for a, b in sides)
    assert alone.element_state_bytes == 2 * 4 * alone.elements


@pytest.mark.parametrize("name", ["mars-m", "ldadam", "mkor"])
def test_traffic_does_not_grow_with_the_ranks(name: str) -> None:
    optimizer = _optimizer(name)
    elements = sum(parameter.numel() for parameter in optimizer.table.parameters.values())
    # Gathered once; one value per element returned, by LDAdam two or less.
    limit = 4 * elements * (3 if name == "ldadam" else 2)
    totals = [_total(estimate(optimizer, world=world, stage=3), "bytes_sent") for world in (2, 8, 64)]
    assert 0 < min(totals) and max(totals) <= limit
    # Contiguous cuts: matrices that lie whole on their owner send nothing.
    assert _total(estimate(optimizer, world=8, stage=1), "bytes_sent") <= 0.2 * totals[1]


def test_comm_dtype_halves_the_bytes() -> None:
    with torch.device("meta"):
        model = _model()
    sent = [
        _total(
            estimate(MARS(model.named_parameters(), variant="muon", comm_dtype=dtype), world=4, stage=3), "bytes_sent"
        )
        for dtype in (None, "bfloat16")
    ]
    sums = 8 * 4 * 2 * (4 * BLOCKS + 1)
    assert 0 < sent[1] < sent[0] and abs(sent[0] - 2 * sent[1]) <= sums


def test_factors_return_where_they_are_smaller() -> None:
    with torch.device("meta"):
        optimizer = LDAdam(nn.Linear(512, 512, bias=False).named_parameters(), rank=16)
    parts = 4 * 512 * 512
    for world, holders in ((2, 1), (4, 3), (64, 63)):
        total = _total(estimate(optimizer, world=world, stage=2), "bytes_sent")
        gathered = parts * holders // world
        assert total == gathered + min(holders * 4 * 16 * 3 * 512, 2 * gathered)


def test_what_cannot_be_estimated() -> None:
    optimizer = _optimizer("mars-m")
    with pytest.raises(ValueError, match="nothing is planned before the first step; say how many ranks"):
        estimate(optimizer)
    with pytest.raises(ValueError, match="stage=4 is invalid: it must be 0, 1, 2 or 3"):
        estimate(optimizer, world=2, stage=4)
