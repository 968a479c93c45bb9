"""The plan of a run: of every rank what it holds, sends and computes, and who owns what."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean

import torch
from torch import nn

from rankwise.estimate import RankEstimate, estimate_units, imagined_units
from rankwise.launch.planning.cluster import Cluster
from rankwise.launch.planning.described import Sizes
from rankwise.launch.planning.megatron import StageSource, rank_contents, stage_model, stage_parts
from rankwise.launch.planning.optimizers import Chosen, built
from rankwise.step.optimizer import ShardedOptimizer

__all__ = ["Figures", "deepspeed_figures", "megatron_figures"]

ADAMW = 8
"""Bytes of AdamW's state for each element."""
_MASTER = 4
_DEEPSPEED_ALIGNMENT = 2


@dataclass
class Figures:
    """What is known of a run before it.

    Attributes:
        ranks: Of every rank, in the order of their numbers; under Megatron stage by stage.
        weights: Bytes of the model's weights of every rank.
        gradients: Bytes of gradients that are kept until the step.
        master: Bytes of fp32 weights beside the model's.
        owners: Rank by matrix.
        parameters: Elements of the whole model, each once.
        exchanging: Ranks among which an update's messages go.
        adamw: Bytes of AdamW's state of every rank.
        largest: Bytes of matrix states of the matrix that has most, and its name.
    """

    ranks: list[RankEstimate] = field(default_factory=list)
    weights: list[int] = field(default_factory=list)
    gradients: list[int] = field(default_factory=list)
    master: list[int] = field(default_factory=list)
    owners: dict[str, int] = field(default_factory=dict)
    parameters: int = 0
    exchanging: int = 1
    adamw: list[int] = field(default_factory=list)
    largest: tuple[int, str] = (0, "")

    def states(self) -> list[int]:
        """Bytes of optimizer state of every rank."""
        return [rank.state_bytes for rank in self.ranks]

    @property
    def fullest(self) -> float:
        """The fullest rank's state over the mean."""
        return max(self.states()) / fmean(self.states())

    def mean(self, of: Callable[[RankEstimate], float]) -> float:
        """Over ranks."""
        return fmean(of(rank) for rank in self.ranks)


def deepspeed_figures(picked: Chosen, model: nn.Module, cluster: Cluster) -> Figures:
    """Under a ZeRO stage, all parameters in one param group.

    Args:
        picked: The optimizer.
        model: On the meta device.
        cluster: With a stage.
    """
    assert cluster.stage is not None
    optimizer = built(picked, model)
    found = Figures(exchanging=cluster.ranks)
    found.parameters = sum(parameter.numel() for parameter in model.parameters())
    alignment = _DEEPSPEED_ALIGNMENT if cluster.stage in (1, 2) else 1
    _add(found, optimizer, imagined_units(optimizer, cluster.ranks, cluster.stage, alignment), 0)
    elements = [rank.elements for rank in found.ranks]
    whole = found.parameters * cluster.width
    # Replicated weights that are fp32 already are their own masters; partitions are copies.
    copied = cluster.stage > 0 or cluster.precision != "fp32"
    found.master = [_MASTER * count * copied for count in elements]
    found.weights = [count * cluster.width if cluster.stage == 3 else whole for count in elements]
    found.gradients = [count * cluster.width if cluster.stage >= 2 else whole for count in elements]
    found.adamw = [ADAMW * count for count in elements]
    return found


def megatron_figures(picked: Chosen, sizes: Sizes, cluster: Cluster) -> Figures:
    """Under Megatron, stage by stage.

    Args:
        picked: The optimizer.
        sizes: Of the model.
        cluster: Without a ZeRO stage.
    """
    found = Figures(exchanging=cluster.tp * cluster.dp)
    for stage in range(cluster.pp):
        parts = stage_parts(sizes, cluster, stage)
        model = stage_model(parts)
        optimizer = built(picked, model, {part.name: part.fused for part in parts if part.fused})
        optimizer.attach(StageSource(cluster))
        groups = dict.fromkeys((part.name for part in parts), 0)
        ranks = rank_contents(parts, groups, cluster, stage)
        first = len(found.ranks)
        _add(found, optimizer, optimizer.imagine([ranks]), first)
        shard = sum(part.shard(cluster.tp) for part in parts)
        elements = [rank.elements for rank in found.ranks[first:]]
        copied = cluster.precision != "fp32"
        found.master += [_MASTER * count * copied for count in elements]
        found.weights += [shard * cluster.width] * len(elements)
        found.gradients += [shard * 4] * len(elements)  # main_grad is fp32
        found.adamw += [ADAMW * count for count in elements]
        shared = sum(parameter.numel() for parameter in model.parameters())
        again = stage > 0 and sizes.tied
        found.parameters += shared - sum(part.shape[0] * part.shape[1] for part in parts if part.apart and again)
    return found


def _add(found: Figures, optimizer: ShardedOptimizer, units: Sequence[object], first: int) -> None:
    found.ranks += estimate_units(optimizer, units)  # type: ignore[arg-type]
    for unit in units:
        exchange = unit.exchange  # type: ignore[attr-defined]
        if exchange is None:
            continue
        plan, work = exchange.plan, optimizer.work(unit)  # type: ignore[arg-type]
        found.owners.update({key: first + owner for key, owner in plan.owners.items()})
        seen: dict[object, int] = {}
        for batch in plan.batches:
            task = batch.tasks[0]
            if batch.signature not in seen:
                states = work.matrix_state(task, torch.device("meta"))
                seen[batch.signature] = sum(state.nbytes for state in states.values())
            found.largest = max(found.largest, (seen[batch.signature], task.key))
