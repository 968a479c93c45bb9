"""Which runs of which shards one rank sends and receives for a batch of matrices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, zip_longest
from math import prod
from operator import add

import torch
from torch import Tensor

from rankwise.comm.owner_plan import Batch, MatrixTask
from rankwise.layout.layout import Layout, Shard, StridedRun

__all__ = ["BatchPlan", "PackedRun", "Side", "plan_batch"]


@dataclass(frozen=True)
class PackedRun:
    """A shard's place in its owner's stack of matrices."""

    task: MatrixTask
    row: int  # of the owner's stack
    offset: int  # of the parameter in the owner's flattened stack
    numel: int
    shard: int  # local shard index; -1 for another rank's
    places: tuple[StridedRun, ...]  # within the parameter

    def destinations(self, stack: Tensor, values: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Where the shard's values belong in the flattened stack: pairs of equal shapes to be copied."""
        if values.dim() > 1:  # stored with gaps: at one place
            (place,) = self.places
            target, parts = place.of(stack, self.offset), values.shape[0]
            if place.rows == 1:
                yield target.view(values.shape), values
            else:
                yield target.unflatten(0, (parts, -1)), values.unflatten(1, (-1, place.width))
            return
        position = 0
        for place in self.places:
            target = place.of(stack, self.offset)
            yield target, values[position : position + target.numel()].view_as(target)
            position += target.numel()

    def parts(self, stack: Tensor) -> list[Tensor]:
        """The shard's values in the flattened stack, as 1-D tensors to be joined."""
        return [place.of(stack, self.offset).reshape(-1) for place in self.places]

    def read(self, stack: Tensor) -> Tensor:
        """The shard's values in the flattened stack, 1-D."""
        parts = self.parts(stack)
        return parts[0] if len(parts) == 1 else torch.cat(parts)


@dataclass(frozen=True)
class Side:
    """The pieces this rank exchanges with the others in one direction, in rank order, and how many elements with each.

    A payload goes once to every rank that holds a piece of its matrix: ``rows`` lists the matrices, rank by rank,
    ``row_counts`` how many there are of each rank, and ``row_of`` where in that list each piece's matrix is.

    Where a message is written block by block, ``pads`` are the zeros behind each piece, so that another matrix begins
    with a block, and ``blocks`` how many there are with each rank.
    """

    pieces: tuple[PackedRun, ...]
    numels: list[int]
    counts: list[int]
    rows: list[int]
    row_counts: list[int]
    row_of: list[int]
    pads: list[int]
    blocks: list[int]

    @classmethod
    def of(cls, by_rank: Sequence[Sequence[PackedRun]], block: int = 1) -> Side:
        """The side of pieces listed by the other rank, and how many elements are written together."""
        rows: list[int] = []
        row_counts: list[int] = []
        row_of: list[int] = []
        for pieces in by_rank:
            place = {row: len(rows) + i for i, row in enumerate(dict.fromkeys(piece.row for piece in pieces))}
            rows.extend(place)
            row_counts.append(len(place))
            row_of.extend(place[piece.row] for piece in pieces)
        flat = tuple(piece for pieces in by_rank for piece in pieces)
        numels, counts = [piece.numel for piece in flat], [sum(piece.numel for piece in pieces) for pieces in by_rank]
        pads = _pads(numels, row_of, block)
        filled, blocks = iter(map(add, numels, pads)), []
        for pieces in by_rank:
            blocks.append(sum(islice(filled, len(pieces))) // block)
        return cls(flat, numels, counts, rows, row_counts, row_of, pads, blocks)


def _pads(numels: Sequence[int], row_of: Sequence[int], block: int) -> list[int]:
    """Behind the last piece of each matrix, what it lacks of whole blocks."""
    pads, run = [], 0
    for numel, row, following in zip_longest(numels, row_of, row_of[1:]):
        run += numel
        pads.append(0 if row == following else -run % block)
        run = run if row == following else 0
    return pads


@dataclass(frozen=True)
class BatchPlan:
    """What one batch means to this rank."""

    batch: Batch
    labels: Mapping[str, str]  # of its phases, for a profiler
    owned: list[MatrixTask]
    length: int
    local: tuple[PackedRun, ...]  # held and owned here
    outgoing: Side  # held here, gathered elsewhere
    incoming: Side  # held elsewhere, gathered here
    results_in: Side  # held here, computed elsewhere
    results_out: Side  # held elsewhere, computed here
    result_rows: Tensor  # results_out.rows, on the device
    gathers: bool  # alike on all ranks: whether gradients of the batch cross ranks
    returns: bool  # and whether results do
    copied: bool  # alike on all ranks: whether several ranks hold the same elements


def plan_batch(
    layout: Layout,
    owners: Mapping[str, int],
    number: int,
    batch: Batch,
    index_of: Mapping[Shard, int],
    device: torch.device,
    block: int = 1,
) -> BatchPlan:
    """Find this rank's part in the exchange of one batch.

    Args:
        layout: The common layout.
        owners: Owner by task key.
        number: Number of the batch.
        batch: Its tasks.
        index_of: Position of every local shard.
        device: Where shards live.
        block: Elements that messages have together.
    """
    world, me = layout.world_size, layout.rank
    shapes, holders = layout.shapes, layout.holders
    length = sum(prod(shapes[part]) for part in batch.tasks[0].parts)
    # By the other rank: what this one sends to an owner and gathers as one, and the same for the results.
    outgoing, incoming, results_in, results_out = ([[] for _ in range(world)] for _ in range(4))  # type: ignore[var-annotated]
    owned: list[MatrixTask] = []
    rows = [0] * world
    gathers = returns = copied = False
    for task in batch.tasks:
        owner = owners[task.key]
        row, first = rows[owner], 0
        rows[owner] += 1
        if owner == me:
            owned.append(task)
        for part in task.parts:

            def piece(shard: Shard, row: int = row, first: int = first, task: MatrixTask = task) -> PackedRun:
                index = index_of.get(shard, -1)
                return PackedRun(task, row, row * length + first, shard.numel, index, shard.places)

            gathered = layout.nearest_copy(part, owner)
            gathers = gathers or any(holder != owner for holder, _ in gathered)
            returns = returns or any(holder != owner for holder in holders[part])
            copied = copied or len(layout.copies[part]) > 1
            for holder, shard in gathered:
                if owner == me:
                    incoming[holder].append(piece(shard))
                elif holder == me:
                    outgoing[owner].append(piece(shard))
            for holder in holders[part] if owner == me else (me,):
                by_rank = results_out[holder] if owner == me else results_in[owner]
                by_rank.extend(map(piece, holders[part].get(holder, ())))
            first += prod(shapes[part])
    local, incoming[me], results_out[me] = tuple(incoming[me]), [], []
    there = Side.of(results_out, block)
    result_rows = torch.tensor(there.rows, dtype=torch.long, device=device)
    return BatchPlan(
        batch=batch,
        labels={phase: f"rankwise: {phase} {number}" for phase in ("gather", "compute", "return", "deliver")},
        owned=owned,
        length=length,
        local=local,
        outgoing=Side.of(outgoing, block),
        incoming=Side.of(incoming, block),
        results_in=Side.of(results_in, block),
        results_out=there,
        result_rows=result_rows,
        gathers=gathers,
        returns=returns,
        copied=copied,
    )
