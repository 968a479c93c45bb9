"""Computes what every rank will send, and hold of messages, from a layout and a plan, without any other process."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

import torch

from rankwise.comm.message_format import Traffic, WireFormat
from rankwise.comm.neighbours import fetched
from rankwise.comm.owner_plan import Batch, MatrixPlan, MatrixTask, Reply, added, own_pieces
from rankwise.layout.layout import Layout, Shard

__all__ = [
    "BatchBuffers",
    "BatchVolume",
    "Flow",
    "LinkVolume",
    "RankBuffers",
    "batch_buffers",
    "batch_volumes",
    "halo_volume",
    "link_volume",
    "matrix_volume",
    "sent_in",
    "sums_volume",
]


class Flow(NamedTuple):
    """Bytes of one message of all ranks, by rank; empty where none is sent."""

    sent: dict[int, int]
    received: dict[int, int]


class BatchVolume(NamedTuple):
    """Bytes of the messages for one batch: pieces to the owners, and results back."""

    gather: Flow
    back: Flow


def batch_volumes(
    layout: Layout, plan: MatrixPlan, wire: WireFormat, reply: Callable[[Batch], Reply] = own_pieces
) -> Iterator[BatchVolume]:
    """Bytes of the messages for each batch, in order."""
    for batch in plan.batches:
        gather, back, answer = Flow({}, {}), Flow({}, {}), reply(batch)
        returning = wire.back(answer, any(_is_copied(layout, part) for task in batch.tasks for part in task.parts))
        for task in batch.tasks:
            owner = plan.owners[task.key]
            gathered = added([layout.gathered(part, owner) for part in task.parts])
            held = added([layout.elements(part) for part in task.parts])
            # Most of many ranks hold the same number of elements, so sizes are computed once for each number.
            sizes = {count: wire.bytes_of(count) for count in set(gathered.values())}
            _flow(gather.sent, gather.received, owner, gathered, sizes)
            sizes = {count: returning.bytes_of(answer.whole or answer.values * count) for count in set(held.values())}
            _flow(back.received, back.sent, owner, held, sizes)
        yield BatchVolume(gather, back)


def _is_copied(layout: Layout, part: str) -> bool:
    return sum(layout.elements(part).values()) > prod(layout.shapes[part])


def _flow(
    theirs: dict[int, int], owners: dict[int, int], owner: int, held: Mapping[int, int], sizes: Mapping[int, int]
) -> None:
    """Count what an owner and all holders exchange of a matrix, on both sides."""
    total = 0
    for holder, count in held.items():
        if holder != owner:
            size = sizes[count]
            theirs[holder] = theirs.get(holder, 0) + size
            total += size
    if total:
        owners[owner] = owners.get(owner, 0) + total


def sent_in(volumes: Iterable[BatchVolume], ranks: Iterable[int]) -> dict[int, Traffic]:
    """Messages and bytes of each rank for some batches; all ranks join the same collectives."""
    collectives, sent = 0, dict.fromkeys(ranks, 0)
    for volume in volumes:
        for flow in volume:
            collectives += bool(flow.sent)
            for rank, size in flow.sent.items():
                sent[rank] += size
    return {rank: Traffic(collectives, size) for rank, size in sent.items()}


def matrix_volume(
    layout: Layout, plan: MatrixPlan, wire: WireFormat, reply: Callable[[Batch], Reply] = own_pieces
) -> list[Traffic]:
    """Messages and bytes of each rank when all straddling matrices travel; see :func:`batch_volumes`."""
    return list(sent_in(batch_volumes(layout, plan, wire, reply), range(layout.world_size)).values())


class LinkVolume(NamedTuple):
    """Bytes that one rank's matrices send over the link between host and device in a step."""

    up: int
    down: int


def link_volume(
    layout: Layout, plan: MatrixPlan, itemsize: int, reply: Callable[[Batch], Reply] = own_pieces
) -> list[LinkVolume]:
    """Bytes of each rank where the host keeps the shards and a device computes, without the matrices' states."""
    up, down = [0] * layout.world_size, [0] * layout.world_size
    for batch in plan.batches:
        answer = reply(batch)
        for task in batch.tasks:
            owner = plan.owners[task.key]
            for holder, count in added([layout.gathered(part, owner) for part in task.parts]).items():
                up[holder] += itemsize * count
            for holder, count in added([layout.elements(part) for part in task.parts]).items():
                down[holder] += itemsize * (answer.whole or answer.values * count)
    return list(map(LinkVolume, up, down))


def sums_volume(layout: Layout, keys: Collection[str], quantities: Sequence[int]) -> list[Traffic]:
    """Messages and bytes of each rank in all-reduces of this many per-parameter sums each, in float64."""
    straddlers = sum(key in keys for key in layout.straddlers)
    sizes = [8 * count * straddlers for count in quantities if straddlers]
    return [Traffic(len(sizes), sum(sizes)) for _ in range(layout.world_size)]


def halo_volume(
    layout: Layout, keys: Collection[str], width: int, fields: int, itemsize: int, by_row: bool
) -> list[Traffic]:
    """Messages and bytes that each rank sends so that every shard sees ``width`` neighbours on either side.

    Args:
        layout: The common layout.
        keys: Parameters whose chains cross shard borders.
        width: Neighbours on each side.
        fields: Values of each neighbour that are fetched.
        itemsize: Bytes of one value.
        by_row: Whether chains end with the rows.
    """
    sent = [0] * layout.world_size
    known: dict[tuple[object, ...], list[int]] = {}
    for key in keys:
        for members in layout.copies.get(key, {}).values():
            ranks = list(dict.fromkeys(holder for holder, _ in members))
            numbers = {rank: number for number, rank in enumerate(ranks)}
            # Equal layers are cut alike, over other ranks, so each geometry is counted once.
            geometry = tuple(
                (numbers[holder], part.shape, part.start, part.end, part.columns) for holder, part in members
            )
            if geometry not in known:
                held_by = [numbers[holder] for holder, _ in members]
                known[geometry] = _sent_of([part for _, part in members], held_by, width, by_row)
            for rank, count in zip(ranks, known[geometry], strict=True):
                sent[rank] += count * fields * itemsize
    return [Traffic(int(any(sent)), size) for size in sent]


def _sent_of(shards: Sequence[Shard], numbers: Sequence[int], width: int, by_row: bool) -> list[int]:
    """Elements of one copy of a parameter that each of its holders, in the order of their numbers, sends to others."""
    elements, number = fetched(shards, width, by_row), torch.tensor(numbers, dtype=torch.int64, device="cpu")
    holder, wanting = number[elements.holder], number[elements.wanting]
    sent: list[int] = holder[holder != wanting].bincount(minlength=max(numbers) + 1).tolist()
    return sent


@dataclass
class RankBuffers:
    """Elements of the buffers that one rank has for one batch.

    Attributes:
        tasks: Matrices that the rank gathers.
        alone: Matrices that lie whole on the rank.
        stack: Elements of the gathered stack.
        gathers: Elements sent and received on the way to the owners.
        result: Elements of the computed results.
        returns: Elements sent and received on the way back.
    """

    tasks: list[MatrixTask] = field(default_factory=list)
    alone: list[MatrixTask] = field(default_factory=list)
    stack: int = 0
    gathers: int = 0
    result: int = 0
    returns: int = 0


BatchBuffers = dict[int, RankBuffers]
"""Buffers of one batch by rank."""


def batch_buffers(layout: Layout, plan: MatrixPlan, reply: Callable[[Batch], Reply]) -> Iterator[BatchBuffers]:
    """Buffers of all ranks for each batch, in order."""
    for batch in plan.batches:
        buffers: BatchBuffers = {}
        alike: dict[tuple[int, int], _Alike] = {}
        for task in batch.tasks:
            owner = plan.owners[task.key]
            if all(layout.elements(part).keys() == {owner} for part in task.parts):
                buffers.setdefault(owner, RankBuffers()).alone.append(task)
                continue
            for part in task.parts:
                held, gathered = layout.elements(part), layout.gathered(part, owner)
                # The entry keeps both mappings alive, so that no others get the same ids.
                entry = alike.setdefault((id(held), id(gathered)), _Alike(held, gathered, []))
                entry.owners.append(owner)
            _own(buffers.setdefault(owner, RankBuffers()), task, layout, reply(batch))
        for entry in alike.values():
            _add(buffers, entry, reply(batch))
        yield buffers


class _Alike(NamedTuple):
    """Parts of matrices that ranks hold alike; they keep the millions of shares of a large run countable."""

    held: Mapping[int, int]
    gathered: Mapping[int, int]
    owners: list[int]


def _own(mine: RankBuffers, task: MatrixTask, layout: Layout, answer: Reply) -> None:
    elements = sum(prod(layout.shapes[part]) for part in task.parts)
    mine.tasks.append(task)
    mine.stack += elements
    mine.result += answer.whole or answer.values * elements


def _add(found: BatchBuffers, alike: _Alike, answer: Reply) -> None:
    """Count what every rank exchanges with the owners: with all of them first, and then not with itself."""
    count, total = len(alike.owners), sum(alike.gathered.values())
    back = {holder: answer.whole or answer.values * held for holder, held in alike.held.items()}
    all_back = sum(back.values())
    for holder, share in alike.gathered.items():
        found.setdefault(holder, RankBuffers()).gathers += count * share
    for holder, share in back.items():
        found.setdefault(holder, RankBuffers()).returns += count * share
    for owner in alike.owners:
        found[owner].gathers += total - 2 * alike.gathered.get(owner, 0)
        found[owner].returns += all_back - 2 * back.get(owner, 0)
