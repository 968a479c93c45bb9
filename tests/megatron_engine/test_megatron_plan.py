"""What is planned from sizes alone is what real Megatron ranks plan: owners, states, bytes, collectives of each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from megatron_cells import HEADS, LENGTH, VOCABULARY, Cell
from megatron_harness import opened
from megatron_types import TYPES, maker
from ranks import run_ranks

from megatron_patches.cpu import cpu_megatron
from rankwise.estimate import RankEstimate, estimate, estimate_units
from rankwise.launch.planning.cluster import Cluster
from rankwise.launch.planning.described import Sizes
from rankwise.launch.planning.megatron import StageSource, rank_contents, stage_model, stage_parts
from rankwise.launch.planning.optimizers import Chosen, built

NAMES = ("mars-m", "sonew", "ldadam", "mkor")
CUT: dict[str, Any] = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "bucket_size": 5000}
CELLS = {
    2: {
        "distributed": Cell(use_distributed_optimizer=True),
        "buckets": Cell(**CUT),
        "TP": Cell(tp=2),
        "plain": Cell(),
        "stages with one embedding": Cell(pp=2, tied=True, use_distributed_optimizer=True),
    },
    4: {
        "TP, buckets": Cell(tp=2, **CUT),
        "TP and stages": Cell(tp=2, pp=2, use_distributed_optimizer=True),
    },
}
Answer = tuple[list[RankEstimate], dict[str, int]]


def _real(name: str, cell: Cell) -> tuple[int, Answer]:
    with opened(cell, maker(name)) as trainer:
        trainer.train_step()
        found: list[RankEstimate] = []
        owners: dict[str, int] = {}
        wrappers = getattr(trainer.optimizer, "chained_optimizers", [trainer.optimizer])
        for wrapper in wrappers:
            found += estimate(wrapper.optimizer)
            owners |= wrapper.optimizer.owners()
        from megatron.core import parallel_state as mpu

        return mpu.get_pipeline_model_parallel_rank(), (found, owners)


def _planned(name: str, cell: Cell, world: int, stage: int) -> Answer:
    sizes = Sizes("llama", cell.layers, cell.hidden, HEADS, HEADS // 2, 2 * cell.hidden, VOCABULARY, LENGTH, cell.tied)
    cluster = Cluster(
        *(world, None, cell.tp, cell.pp),
        distributed=cell.use_distributed_optimizer,
        overlap=cell.overlap_grad_reduce,
    )
    parts = stage_parts(sizes, cluster, stage, VOCABULARY)
    optimizer = built(
        Chosen(name, {"lr": 5e-3, **TYPES[name]}),
        stage_model(parts),
        {part.name: part.fused for part in parts if part.fused},
    )
    optimizer.attach(StageSource(cluster))
    ranks = rank_contents(parts, dict.fromkeys((part.name for part in parts), 0), cluster, stage, cell.bucket_size)
    (unit,) = optimizer.imagine([ranks])
    return estimate_units(optimizer, [unit]), {} if unit.exchange is None else dict(unit.exchange.plan.owners)


def _all(rank: int, world: int) -> dict[tuple[str, str], tuple[int, Answer]]:
    with cpu_megatron():
        return {(name, label): _real(name, cell) for label, cell in CELLS[world].items() for name in NAMES}


@pytest.mark.slow
@pytest.mark.parametrize("world", CELLS)
def test_the_plan_is_what_ranks_plan(world: int) -> None:
    for rank, answers in enumerate(run_ranks(world, _all)):
        for (name, label), (stage, (ranks, owners)) in answers.items():
            expected, theirs = _planned(name, CELLS[world][label], world, stage)
            assert owners == theirs, (rank, name, label)
            if name == "mkor":  # whose factor messages leave during the backward pass
                ranks, expected = (
                    [replace(one, periodic_bytes=0, periodic_collectives=0) for one in ones]
                    for ones in (ranks, expected)
                )
            assert ranks == expected, (rank, name, label)
