"""These functions estimate memory, traffic and work of every rank without GPUs, processes or gradients.

>>> with torch.device("meta"):                                   # a model that takes no memory
...     model = build()
>>> optimizer = MARS(model.named_parameters(), variant="muon")
>>> max(rank.state_bytes for rank in estimate(optimizer, world=64, stage=2))
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import zip_longest
from math import prod

import torch

from rankwise.comm.message_format import Traffic
from rankwise.comm.owner_plan import MatrixTask
from rankwise.comm.volume import RankBuffers, batch_buffers, halo_volume, link_volume, matrix_volume, sums_volume
from rankwise.layout.even_cuts import EvenCuts
from rankwise.layout.layout import Layout
from rankwise.layout.layout_source import RANKS_OF_A_NODE, Slice, TensorContents, TensorParallel
from rankwise.plan.state_memory import element_states
from rankwise.plan.step_costs import ScratchMemory, StepCosts
from rankwise.plan.step_unit import StepUnit
from rankwise.step.optimizer import ShardedOptimizer

__all__ = ["RankEstimate", "cut_by_stage", "estimate", "estimate_units", "imagined_contents", "imagined_units"]

META = torch.device("meta")


@dataclass
class RankEstimate:
    """What one rank holds, sends and computes per step.

    Messages are counted as exchanges count them: what an all-to-all sends to other ranks, and the vector that is handed
    to an all-reduce.

    Attributes:
        elements: Parameter elements whose update this rank computes.
        element_state_bytes: Bytes of states with one value per element, without the padding of the framework's buffers.
        matrix_state_bytes: Bytes of matrix states that the rank keeps.
        bytes_sent: Bytes sent per step.
        joint_bytes: Those of them that go to sums and gathers among the ranks that compute slices together.
        ring_bytes: Bytes that pass each link of a ring of these ranks.
        ring_ranks: Number of these ranks.
        collectives: Collectives per step.
        periodic_bytes: Bytes sent in addition every ``period`` steps.
        periodic_collectives: Collectives in addition every ``period`` steps.
        period: Number of steps from one periodic message to the next.
        bytes_up: Bytes that go from the host to the device per step if that multiplies the matrices of weights and
            states that are kept on the host; 0 where none are.
        bytes_down: Bytes that come back per step.
        periodic_up: Bytes that go up in addition every ``period`` steps.
        periodic_down: Bytes that come back in addition every ``period`` steps.
        flops: Floating-point operations per step: the matrix rule of owned matrices, and a rough count for the rest.
        matrix_flops: Floating-point operations of owned matrices.
        scratch_bytes: Most bytes that a step needs beside weights, gradients and states, for fp32 parameters on a
            device with Triton.
    """

    elements: int = 0
    element_state_bytes: int = 0
    matrix_state_bytes: int = 0
    bytes_sent: int = 0
    joint_bytes: int = 0
    ring_bytes: float = 0.0
    ring_ranks: int = 1
    collectives: int = 0
    periodic_bytes: int = 0
    periodic_collectives: int = 0
    period: int = 1
    bytes_up: int = 0
    bytes_down: int = 0
    periodic_up: int = 0
    periodic_down: int = 0
    flops: float = 0.0
    matrix_flops: float = 0.0
    scratch_bytes: int = 0

    @property
    def state_bytes(self) -> int:
        """Bytes of all optimizer states."""
        return self.element_state_bytes + self.matrix_state_bytes

    def __add__(self, other: RankEstimate) -> RankEstimate:
        """Add the costs of a rank that takes part in both steps; the larger ring, period and scratch count."""
        total = RankEstimate(**{one.name: getattr(self, one.name) + getattr(other, one.name) for one in fields(self)})
        total.period = max(self.period, other.period)
        total.ring_ranks = max(self.ring_ranks, other.ring_ranks)
        total.scratch_bytes = max(self.scratch_bytes, other.scratch_bytes)
        return total


def estimate(
    optimizer: ShardedOptimizer,
    world: int | None = None,
    stage: int = 1,
    alignment: int = 1,
    offloaded: bool = False,
) -> list[RankEstimate]:
    """Predict what each data-parallel rank holds, sends and computes.

    Args:
        optimizer: Optimizer of parameters that may be on the meta device; MKOR must have captured the model.
        world: Number of ranks to imagine. None: the layout of the optimizer's framework, after its first step.
        stage: ZeRO stage to imagine: 0 replicates parameters, 1 and 2 cut the joined parameters of each param group
            into equal parts, 3 cuts every parameter.
        alignment: The equal parts of stages 1 and 2 are padded to a multiple of so many elements.
        offloaded: Whether imagined ranks keep weights and states on the host, beside another device.

    Returns:
        One estimate per rank.

    Raises:
        ValueError: The stage is unknown, or nothing is planned yet and no world is given.
    """
    if world is None:
        units = list(optimizer.planned_units)
        if not units:
            raise ValueError("estimate: nothing is planned before the first step; say how many ranks: world=8, stage=2")
    else:
        units = imagined_units(optimizer, world, stage, alignment, offloaded)
    return estimate_units(optimizer, units)


def estimate_units(optimizer: ShardedOptimizer, units: Sequence[StepUnit]) -> list[RankEstimate]:
    """Do what :func:`estimate` does for units that are planned or imagined.

    Args:
        optimizer: The optimizer that the units were planned for.
        units: All units of one round of steps, at least one.
    """
    ranks = [RankEstimate() for _ in range(units[0].layout.world_size)]
    for unit in units:
        _add(optimizer, unit, ranks)
    return ranks


def _add(optimizer: ShardedOptimizer, unit: StepUnit, ranks: Sequence[RankEstimate]) -> None:
    layout, costs, itemsize = unit.layout, optimizer.step_costs(unit), unit.dtype.itemsize
    borrowed = [0] * layout.world_size
    for shares, count, kept in element_states(unit):
        for holder, held in shares.items():
            rank = ranks[holder]
            rank.elements += held * count
            rank.element_state_bytes += kept[holder]
            rank.flops += held * count * costs.element_flops
    if unit.exchange is not None:
        plan = unit.exchange.plan
        for batch in plan.batches:
            # Tasks that are stacked have states of the same shapes.
            stored = unit.stored_states(batch.tasks[0])
            sizes = {name: state.nbytes(unit.dtype) for name, state in stored.items()}
            for task in batch.tasks:
                owner = ranks[plan.owners[task.key]]
                owner.flops += task.cost
                owner.matrix_flops += task.cost
                if unit.collectives.place is not None:
                    lent = sum(size for name, size in sizes.items() if not stored[name].state.counted)
                    owner.bytes_up += lent
                    owner.periodic_down += lent
                    owner.periodic_up += itemsize * costs.brought(task)
                for name, size in sizes.items():
                    keeper = ranks[plan.keepers.get((task.key, name), plan.owners[task.key])]
                    keeper.matrix_state_bytes += size
                    if keeper is not owner:
                        # The state goes to the owner in every step, and back after steps that change it.
                        keeper.bytes_sent += size
                        owner.periodic_bytes += size
                        borrowed[plan.owners[task.key]] += size
            for joint in costs.together(batch):
                for partner in batch.partners:
                    rank = ranks[partner]
                    rank.bytes_sent += joint.bytes
                    rank.joint_bytes += joint.bytes
                    rank.ring_bytes += joint.passed(len(batch.partners))
                    rank.ring_ranks = max(rank.ring_ranks, len(batch.partners))
                    rank.collectives += 1
            for size in costs.periodic_together(batch):
                for partner in batch.partners:
                    ranks[partner].periodic_bytes += size
                    ranks[partner].periodic_collectives += 1
        _send(ranks, matrix_volume(unit.exchange.layout, plan, unit.exchange.wire, costs.reply))
        if unit.collectives.place is not None:
            for rank, crossing in zip(
                ranks, link_volume(unit.exchange.layout, plan, itemsize, costs.reply), strict=True
            ):
                rank.bytes_up += crossing.up
                rank.bytes_down += crossing.down
                rank.period = costs.period
        for rank in ranks if plan.keepers else ():
            rank.collectives += 1
            rank.periodic_collectives += 1
    for rank, size, more in zip(ranks, _scratch_memory(unit, costs), borrowed, strict=True):
        rank.scratch_bytes = max(rank.scratch_bytes, size + more)
    if layout.world_size == 1:
        return
    _send(ranks, sums_volume(layout, unit.summed, costs.sums))
    if unit.halo is not None:
        width, keys = unit.halo.width, unit.halo.keys
        _send(ranks, halo_volume(layout, keys, width, costs.halo_fields, itemsize, unit.halo.by_row))
    scalars = (*costs.scalars, 4) if optimizer.options.skip_nonfinite else costs.scalars
    for rank in ranks:
        rank.bytes_sent += sum(scalars)
        rank.collectives += len(scalars)
        rank.periodic_bytes += sum(costs.periodic)
        rank.periodic_collectives += len(costs.periodic)
        rank.period = costs.period


def _scratch_memory(unit: StepUnit, costs: StepCosts) -> list[int]:
    """Return the most bytes that each rank needs at a time."""
    layout, scratch = unit.layout, costs.scratch
    totals, largest = [0] * layout.world_size, [0] * layout.world_size
    for shares, count in _alike(layout):
        for holder, held in shares.items():
            totals[holder] += count * held
            largest[holder] = max(largest[holder], held)
    always = list(map(scratch.elements, totals, largest))
    most = [0.0] * layout.world_size
    if unit.exchange is not None:
        plan, wire = unit.exchange.plan, unit.exchange.wire.scratch
        alone: list[list[MatrixTask]] = [[] for _ in layout.ranks]
        batches = []
        for batch in batch_buffers(unit.exchange.layout, plan, costs.reply):
            for rank, buffers in batch.items():
                alone[rank] += buffers.alone
            batches.append(batch)
        for rank, tasks in enumerate(alone):
            travelling = [batch.get(rank, _NOTHING) for batch in batches]
            most[rank] = _most(travelling, scratch, unit.dtype.itemsize, wire, scratch.alone(tasks))
    return [int(one + other) for one, other in zip(always, most, strict=True)]


def _alike(layout: Layout) -> Iterable[tuple[Mapping[int, int], int]]:
    """Return elements by rank, each with the number of keys that are held so."""
    counted: dict[int, tuple[Mapping[int, int], int]] = {}
    for key in layout.shapes:
        elements = layout.elements(key)
        counted[id(elements)] = elements, counted.get(id(elements), (elements, 0))[1] + 1
    return counted.values()


_NOTHING = RankBuffers()


def _most(batches: Sequence[RankBuffers], own: ScratchMemory, itemsize: int, wire: float, alone: int) -> float:
    """Return the most scratch bytes of all batches, while pieces of the next and results of the last one travel."""
    most, returning = 0.0, 0.0
    for batch, following in zip_longest(batches, batches[1:], fillvalue=_NOTHING):
        arriving = itemsize * following.stack + wire * following.gathers
        result = itemsize * batch.result
        computed = itemsize * batch.stack + own.stacked(batch.tasks) + (0 if own.spends_stack else result)
        leaving = result + wire * batch.returns
        gathered = itemsize * batch.stack + wire * batch.gathers
        most = max(most, gathered + arriving + returning, arriving + computed + returning, arriving + leaving)
        returning = leaving
    return max(most, returning + alone)


def _send(ranks: Sequence[RankEstimate], sent: Sequence[Traffic]) -> None:
    for rank, traffic in zip(ranks, sent, strict=True):
        rank.bytes_sent += traffic.bytes
        rank.collectives += traffic.collectives


def imagined_units(
    optimizer: ShardedOptimizer, world: int, stage: int, alignment: int = 1, offloaded: bool = False
) -> list[StepUnit]:
    """Plan units, with owners, of ranks that need not exist, for :func:`estimate`.

    Args:
        optimizer: Optimizer of parameters that may be on the meta device.
        world: Number of ranks.
        stage: ZeRO stage.
        alignment: The equal parts of stages 1 and 2 are padded to a multiple of so many elements.
        offloaded: Whether weights and states are on the host, beside another device.

    Raises:
        ValueError: The stage is unknown.
    """
    contents, replicated = imagined_contents(optimizer, world, stage, alignment), stage == 0 and world > 1
    # As DeepSpeed and Megatron do.
    all_ranks = (tuple(range(world)),)
    together = TensorParallel.far(all_ranks, None, RANKS_OF_A_NODE) if stage == 3 and world > 1 else None
    return optimizer.imagine(contents, replicated, stage > 0, offloaded, together)


def imagined_contents(
    optimizer: ShardedOptimizer, world: int, stage: int, alignment: int = 1
) -> list[list[list[TensorContents]] | EvenCuts]:
    """Return what the tensors of every rank store, for each unit; or even cuts, if every parameter is cut.

    Args:
        optimizer: Optimizer of parameters that may be on the meta device.
        world: Number of ranks.
        stage: ZeRO stage.
        alignment: The equal parts of stages 1 and 2 are padded to a multiple of so many elements.

    Raises:
        ValueError: The stage is unknown.
    """
    _refuse_unknown(stage)
    groups: dict[int, dict[str, int]] = {}
    for name, (info, group) in optimizer.table.catalog.items():
        groups.setdefault(group, {})[name] = prod(info.shape)
    if stage == 3:
        return [EvenCuts(group, sizes, world) for group, sizes in groups.items()]
    units = [
        [[TensorContents(group, tuple(slices))] for slices in cut_by_stage(sizes, world, stage, alignment)]
        for group, sizes in groups.items()
    ]
    if stage == 0:  # one step for all groups
        units = [[[content for unit in units for content in unit[rank]] for rank in range(world)]]
    return list(units)


def _refuse_unknown(stage: int) -> None:
    if stage not in range(4):
        raise ValueError(f"estimate: stage={stage!r} is invalid: it must be 0, 1, 2 or 3")


def cut_by_stage(sizes: Mapping[str, int], world: int, stage: int, alignment: int = 1) -> list[Sequence[Slice]]:
    """Return what the ranks' tensors of one param group store.

    Args:
        sizes: Elements of each parameter, by name.
        world: Number of ranks.
        stage: ZeRO stage.
        alignment: The equal parts of stages 1 and 2 are padded to a multiple of so many elements.
    """
    even = EvenCuts(0, sizes, world)
    if stage == 0:
        return [even.whole().slices] * world
    return [even.contents(rank).slices for rank in range(world)] if stage == 3 else _joined(sizes, world, alignment)


def _joined(sizes: Mapping[str, int], world: int, alignment: int) -> list[Sequence[Slice]]:
    """Cut the parameters, laid end to end, into equal parts."""
    share = -(-sum(sizes.values()) // (world * alignment)) * alignment
    ranks: list[list[Slice]] = [[] for _ in range(world)]
    position = 0
    for name, size in sizes.items():
        for rank in range(position // share, (position + size - 1) // share + 1):
            first, last = max(position, rank * share), min(position + size, (rank + 1) * share)
            ranks[rank].append(Slice(name, first - position, last - position, first - rank * share))
        position += size
    return list(ranks)
