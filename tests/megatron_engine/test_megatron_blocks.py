"""tp_mode="block": every tensor-parallel shard is a matrix of its own; test_megatron_traffic has what is sent."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron_cells import Cell
from megatron_harness import largest_gap, opened, run_cells
from megatron_types import maker
from ranks import run_ranks

from megatron_patches.cpu import cpu_megatron
from megatron_patches.registry import RankwiseConfig, tp_mode
from megatron_patches.support import SupportError

STEPS = 3
BLOCK: dict[str, Any] = {"rankwise_tp_mode": "block"}


def _first_update(rank: int, world: int) -> tuple[float, float]:
    """Agreement of a row-parallel shard's first change with the polar factor of its gradient, alone and as a part."""
    cell = Cell(tp=2, clip=0.0, optimizer=BLOCK)
    with cpu_megatron(), opened(cell, maker("mars-m", gamma=0.0)) as trainer:
        names = trainer.optimizer.chained_optimizers[0].optimizer.table.parameters
        assert all(name.endswith(f"@tp{rank}") for name in names)
        layer = trainer.chunks[0].module.decoder.layers[0].self_attention.linear_proj.weight
        before, seen = layer.detach().clone(), []
        trainer.train_step(lambda _: seen.append(layer.main_grad.clone()))
        change, shards = before - layer.detach(), [torch.empty_like(seen[0]) for _ in range(world)]
        dist.all_gather(shards, seen[0])
        part = _polar(torch.cat(shards, dim=1)).chunk(world, dim=1)[rank]
        return _alignment(change, _polar(seen[0])), _alignment(change, part)


def _polar(matrix: torch.Tensor) -> torch.Tensor:
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    return left @ right


def _alignment(change: torch.Tensor, direction: torch.Tensor) -> float:
    return float((change * direction).sum() / (change.norm() * direction.norm()))


def test_the_rule_works_on_the_shard() -> None:
    for alone, as_part in run_ranks(2, _first_update):
        assert alone > 0.95 > as_part + 0.02


def test_data_parallel_ranks_follow_one() -> None:
    alone = run_cells(2, [Cell(tp=2, clip=0.0, optimizer=BLOCK)], maker("mars-m"), STEPS)[0]
    both = run_cells(
        4, [Cell(tp=2, clip=0.0, use_distributed_optimizer=True, optimizer=BLOCK)], maker("mars-m"), STEPS
    )[0]
    exact = run_cells(2, [Cell(tp=2, clip=0.0)], maker("mars-m"), STEPS)[0]
    assert largest_gap(both.weights, alone.weights) < 1e-5 < 1e-3 < largest_gap(alone.weights, exact.weights)


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(SupportError, match="tp_mode='blocks'.*exact"):
        tp_mode(RankwiseConfig(rankwise_tp_mode="blocks"), {})
    assert tp_mode(RankwiseConfig(), {"tp_mode": "block"}) == "block"
