"""What is planned from sizes alone is what real Megatron ranks plan: owners, states, bytes, collectives of each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from megatron_cells import HEADS, HIDDEN, LENGTH, VOCABULARY, Cell
from megatron_harness import opened
from megatron_types import TYPES, maker
from ranks import run_ranks

from megatron_patches.cpu import cpu_megatron
from rankwise.estimate import RankEstimate, estimate, estimate_units
from rankwise.launch.planning.cluster import Cluster
from rankwise.launch.planning.megatron import StageSource, rank_contents, stage_model, stage_parts, wrapped
from rankwise.launch.planning.model_shapes import Sizes
from rankwise.launch.planning.optimizers import Chosen, built

NAMES = ("mars-m", "sonew", "ldadam", "mkor")
CUT: dict[str, Any] = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "bucket_size": 5000}
EXPERTS_TP = "experts on ranks, TP"
CELLS = {
    2: {
        "distributed": Cell(use_distributed_optimizer=True),
        "buckets": Cell(**CUT),
        "TP": Cell(tp=2),
        "plain": Cell(),
        "stages with one embedding": Cell(pp=2, tied=True, use_distributed_optimizer=True),
        "chunks": Cell(pp=2, vpp=2, layers=4, microbatches=4, tied=True, **CUT),
        "experts": Cell(moe=4, use_distributed_optimizer=True),
        "experts on ranks": Cell(ep=2, moe=4, **CUT),
    },
    4: {
        "TP, buckets": Cell(tp=2, **CUT),
        "TP and stages": Cell(tp=2, pp=2, use_distributed_optimizer=True),
        EXPERTS_TP: Cell(tp=2, ep=2, moe=4, sp=True, use_distributed_optimizer=True),
    },
}
Answer = tuple[list[RankEstimate], dict[str, int]]
Held = list[int]


def _real(name: str, cell: Cell) -> tuple[int, int, list[Answer], Held]:
    """This rank's stage, its share of the experts, what each of its optimizers planned and holds."""
    from megatron.core import parallel_state as mpu

    with opened(cell, maker(name)) as trainer:
        if cell.ep > 1 and cell.tp > 1:  # whose forward pass gathers unequal parts, which gloo does not
            for chunk in trainer.chunks:
                chunk.zero_grad_buffer()
            trainer.optimizer.step()
        else:
            trainer.train_step()
        wrappers = getattr(trainer.optimizer, "chained_optimizers", [trainer.optimizer])
        found = [(estimate(wrapper.optimizer), dict(wrapper.optimizer.owners())) for wrapper in wrappers]
        held = [sum(wrapper.optimizer.state_bytes().values()) for wrapper in wrappers]
        return mpu.get_pipeline_model_parallel_rank(), mpu.get_expert_model_parallel_rank(), found, held


def _planned(
    name: str, cell: Cell, world: int, stage: int, share: int
) -> Iterator[tuple[list[RankEstimate], dict[str, int], Sequence[int]]]:
    """What each optimizer of a rank plans, and where its ranks lie in the stage."""
    sizes = Sizes(
        *("llama", cell.layers, cell.hidden, HEADS, HEADS // 2, 2 * cell.hidden, VOCABULARY, LENGTH, cell.tied),
        *(cell.moe, HIDDEN if cell.moe else 0),
    )
    cluster = Cluster(
        *(world, None, cell.tp, cell.pp),
        distributed=cell.use_distributed_optimizer,
        overlap=cell.overlap_grad_reduce,
        vpp=cell.vpp,
        ep=cell.ep,
        precision=cell.precision,
    )
    dense, *experts = wrapped(stage_parts(sizes, cluster, stage, VOCABULARY), cluster)
    for parts, cut, places in (dense, *experts[share : share + 1]):
        optimizer = built(
            Chosen(name, {"lr": 5e-3, **TYPES[name]}),
            stage_model(parts),
            {part.name: part.fused for part in parts if part.fused},
        )
        optimizer.attach(StageSource(cut))
        ranks = rank_contents(parts, dict.fromkeys((part.name for part in parts), 0), cut, stage, cell.bucket_size)
        (unit,) = optimizer.imagine([ranks])
        yield estimate_units(optimizer, [unit]), unit.exchange and dict(unit.exchange.plan.owners) or {}, places


def _all(rank: int, world: int) -> dict[tuple[str, str], tuple[int, int, list[Answer], Held]]:
    with cpu_megatron():
        return {
            (name, label): _real(name, cell)
            for label, cell in CELLS[world].items()
            for name in NAMES
            if (name, label) != ("mkor", EXPERTS_TP)  # whose statistics a forward pass gives
        }


def _without_early_messages(ranks: list[RankEstimate]) -> list[RankEstimate]:
    return [replace(rank, periodic_bytes=0, periodic_collectives=0) for rank in ranks]


@pytest.mark.slow
@pytest.mark.parametrize("world", CELLS)
def test_the_plan_is_what_ranks_plan(world: int) -> None:
    for rank, answers in enumerate(run_ranks(world, _all)):
        for (name, label), (stage, share, found, held) in answers.items():
            cell = CELLS[world][label]
            expected = list(_planned(name, cell, world, stage, share))
            assert [owners for _, owners in found] == [owners for _, owners, _ in expected], (rank, name, label)
            for (ranks, _), (theirs, _, places), size in zip(found, expected, held, strict=True):
                if name == "mkor":  # whose factor messages leave during the backward pass
                    ranks, theirs = _without_early_messages(ranks), _without_early_messages(theirs)
                assert ranks == theirs, (rank, name, label)
                own = theirs[places.index(rank % (world // cell.pp))]
                assert size == pytest.approx(own.state_bytes, rel=0.05), (rank, name, label)
