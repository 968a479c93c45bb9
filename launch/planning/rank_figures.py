"""The plan of a run says what every rank holds, sends and computes, and which matrices it owns."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from torch import nn

from rankwise.comm.exchange import MatrixExchange
from rankwise.estimate import RankEstimate, estimate_units, imagined_units
from rankwise.launch.planning.autotp import contents_under_autotp, parts_under_autotp
from rankwise.launch.planning.cluster import Cluster
from rankwise.launch.planning.fsdp import MeshSource, contents_on_mesh, tensor_parallel_dims
from rankwise.launch.planning.megatron import StageSource, Wrapped, rank_contents, stage_model, stage_parts, wrapped
from rankwise.launch.planning.model_shapes import Sizes, active_parameters
from rankwise.launch.planning.optimizers import Chosen, built
from rankwise.launch.planning.overlap import Pipeline, pipeline_of
from rankwise.plan.step_unit import StepUnit
from rankwise.step.optimizer import ShardedOptimizer

__all__ = ["Figures", "deepspeed_figures", "fsdp_figures", "megatron_figures"]

ADAMW = 8
"""Bytes of AdamW's states for each element."""
_MASTER = 4
_DEEPSPEED_ALIGNMENT = 2


@dataclass
class Figures:
    """The figures of a run before it begins.

    Attributes:
        ranks: Estimates of all ranks, in the order of their numbers; under Megatron stage by stage.
        weights: Bytes of the model's weights on every rank.
        gradients: Bytes of gradients on every rank that are kept until the step.
        master: Bytes on every rank of fp32 weights beside the model's.
        owners: Owner's rank by matrix.
        lent: Number of matrix states that other ranks keep between steps.
        parameters: Elements of the whole model, each once.
        active: Those that a token meets.
        exchanging: Ranks among which an update's messages go; those of experts go among fewer.
        adamw: Bytes of AdamW's state of every rank.
        largest: Bytes of matrix states of the matrix that has most on one rank, and its name.
        pipelines: The batches of every optimizer's step.
        exchanges: The exchange of every optimizer's step, with the places of its ranks among all.
    """

    ranks: list[RankEstimate] = field(default_factory=list)
    weights: list[int] = field(default_factory=list)
    gradients: list[int] = field(default_factory=list)
    master: list[int] = field(default_factory=list)
    owners: dict[str, int] = field(default_factory=dict)
    lent: int = 0
    parameters: int = 0
    active: float = 0.0
    exchanging: int = 1
    adamw: list[int] = field(default_factory=list)
    largest: tuple[int, str] = (0, "")
    pipelines: list[Pipeline] = field(default_factory=list)
    exchanges: list[tuple[MatrixExchange, Sequence[int]]] = field(default_factory=list, compare=False)

    def states(self) -> list[int]:
        """Return the bytes of optimizer states on every rank."""
        return [rank.state_bytes for rank in self.ranks]

    @property
    def fullest(self) -> float:
        """The fullest rank's state, divided by the mean."""
        return max(self.states()) / fmean(self.states())

    def mean(self, of: Callable[[RankEstimate], float]) -> float:
        """Return the mean of a quantity over ranks."""
        return fmean(of(rank) for rank in self.ranks)


def deepspeed_figures(
    picked: Chosen, model: nn.Module, cluster: Cluster, config: Mapping[str, Any] | None = None
) -> Figures:
    """Return the figures under a ZeRO stage, with all parameters in one param group.

    Args:
        picked: The optimizer.
        model: Model on the meta device.
        cluster: Ranks, with a ZeRO stage.
        config: Configuration of Hugging Face, which says how many experts a token is sent to.
    """
    assert cluster.stage is not None
    optimizer = built(picked, model)
    figures = Figures(exchanging=cluster.ranks)
    figures.parameters = sum(parameter.numel() for parameter in model.parameters())
    figures.active = active_parameters(model, config)
    units, held = _units_of_zero(optimizer, model, cluster)
    figures.ranks = _estimates(figures, optimizer, units, range(cluster.ranks))
    elements = [rank.elements for rank in figures.ranks]
    whole = held * cluster.width
    # Replicated fp32 weights are their own masters; partitions are copies.
    copied = cluster.stage > 0 or cluster.precision != "fp32"
    # The bits that a narrow master lacks are a state of the optimizer.
    master = cluster.width if optimizer.options.store_param_remainders else _MASTER
    figures.master = [master * count * copied for count in elements]
    figures.weights = [count * cluster.width if cluster.stage == 3 else whole for count in elements]
    figures.gradients = [count * cluster.width if cluster.stage >= 2 else whole for count in elements]
    figures.adamw = [ADAMW * count for count in elements]
    return figures


def _units_of_zero(optimizer: ShardedOptimizer, model: nn.Module, cluster: Cluster) -> tuple[list[StepUnit], int]:
    """Return the steps of all ranks, and how many elements of the model a rank holds before ZeRO partitions them."""
    assert cluster.stage is not None
    parameters = optimizer.table.parameters
    if cluster.tp == 1:
        alignment = _DEEPSPEED_ALIGNMENT if cluster.stage in (1, 2) else 1
        units = imagined_units(optimizer, cluster.ranks, cluster.stage, alignment, cluster.offloaded)
        return units, sum(parameter.numel() for parameter in parameters.values())
    parts = parts_under_autotp(model, parameters, cluster.tp)
    optimizer.attach(StageSource(cluster))
    contents = contents_under_autotp(parts, cluster, _DEEPSPEED_ALIGNMENT)
    units = optimizer.imagine([contents], spends_gradients=cluster.stage > 0, offloaded=cluster.offloaded)
    return units, sum(part.shard(cluster.tp) for part in parts)


def fsdp_figures(
    picked: Chosen, model: nn.Module, cluster: Cluster, config: Mapping[str, Any] | None = None
) -> Figures:
    """Return the figures under FSDP2, with ``fully_shard`` on every layer and the model, and one param group.

    Args:
        picked: The optimizer.
        model: Model on the meta device.
        cluster: Ranks, with a mesh.
        config: Configuration of Hugging Face, which says how many experts a token is sent to.

    Raises:
        ValueError: The mesh cannot cut the model.
    """
    assert cluster.mesh is not None
    cuts = tensor_parallel_dims(model) if cluster.mesh.tp > 1 else {}
    optimizer = built(picked, model)
    parameters = optimizer.table.parameters
    optimizer.attach(MeshSource(parameters, cuts, cluster.mesh))
    figures = Figures(exchanging=cluster.ranks)
    figures.parameters = sum(parameter.numel() for parameter in model.parameters())
    figures.active = active_parameters(model, config)
    contents = contents_on_mesh(parameters, dict.fromkeys(parameters, 0), cuts, cluster.mesh)
    units = optimizer.imagine([contents], offloaded=cluster.offloaded)
    figures.ranks = _estimates(figures, optimizer, units, range(cluster.ranks))
    for rank in figures.ranks:
        # Shards are their own masters, and what was gathered for a layer's computation is freed before the step.
        figures.weights.append(rank.elements * cluster.width)
        figures.gradients.append(rank.elements * cluster.width)
        figures.master.append(0)
        figures.adamw.append(ADAMW * rank.elements)
    return figures


def megatron_figures(picked: Chosen, sizes: Sizes, cluster: Cluster) -> Figures:
    """Return the figures under Megatron, stage by stage.

    Args:
        picked: The optimizer.
        sizes: Sizes of the model.
        cluster: Ranks, without a ZeRO stage.
    """
    figures = Figures(exchanging=cluster.tp * cluster.dp)
    for stage in range(cluster.pp):
        parts = stage_parts(sizes, cluster, stage)
        first = len(figures.ranks)
        count = cluster.tp * cluster.dp
        figures.ranks += [RankEstimate() for _ in range(count)]
        for sizes_of in (figures.weights, figures.gradients, figures.master, figures.adamw):
            sizes_of += [0] * count
        for one in wrapped(parts, cluster):
            _add_wrapped(figures, picked, one, stage, [first + place for place in one.places])
        again = stage > 0 and sizes.tied
        for part in parts:
            if not (part.apart and again):
                elements = math.prod(part.shape)
                figures.parameters += elements
                figures.active += elements * (1.0 if part.expert is None else sizes.per_token / sizes.experts)
    return figures


def _add_wrapped(found: Figures, picked: Chosen, one: Wrapped, stage: int, places: Sequence[int]) -> None:
    """Add what one optimizer of Megatron's holds to the ranks that share it."""
    optimizer = built(picked, stage_model(one.parts), {part.name: part.fused for part in one.parts if part.fused})
    optimizer.attach(StageSource(one.cluster))
    groups = dict.fromkeys((part.name for part in one.parts), 0)
    ranks = rank_contents(one.parts, groups, one.cluster, stage)
    shard = sum(part.shard(one.cluster.tp) for part in one.parts)
    copied = one.cluster.precision != "fp32"
    units = optimizer.imagine([ranks], offloaded=one.cluster.offloaded)
    for place, rank in zip(places, _estimates(found, optimizer, units, places), strict=True):
        found.ranks[place] += rank
        found.master[place] += _MASTER * rank.elements * copied
        found.weights[place] += shard * one.cluster.width
        found.gradients[place] += shard * 4  # main_grad is fp32
        found.adamw[place] += ADAMW * rank.elements


def _estimates(
    found: Figures, optimizer: ShardedOptimizer, units: Sequence[StepUnit], places: Sequence[int]
) -> list[RankEstimate]:
    """Return what the units' ranks, in these places, hold, and enter their owners in the figures."""
    for unit in units:
        if unit.exchange is None:
            continue
        plan = unit.exchange.plan
        found.pipelines.append(pipeline_of(unit.exchange, optimizer.step_costs(unit), places))
        found.exchanges.append((unit.exchange, places))
        found.owners.update({key: places[owner] for key, owner in plan.owners.items()})
        found.lent += len(plan.keepers)
        for batch in plan.batches:
            stored = unit.stored_states(batch.tasks[0])
            for task in batch.tasks:
                together: Counter[int] = Counter()
                for name, state in stored.items():
                    together[plan.keepers.get((task.key, name), plan.owners[task.key])] += state.nbytes(unit.dtype)
                found.largest = max(found.largest, (max(together.values(), default=0), task.key))
    return estimate_units(optimizer, units)
