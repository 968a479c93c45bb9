"""Which runs of which shards a rank sends and receives for a batch of matrices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, zip_longest
from math import prod
from operator import add

import torch
from torch import Tensor

from rankwise.comm.owner_plan import Batch, MatrixTask
from rankwise.intervals import Run
from rankwise.layout.layout import Layout, Shard

__all__ = ["BatchPlan", "PackedRun", "Side", "plan_batch"]


@dataclass(frozen=True)
class PackedRun:
    """A shard's place in its owner's stack of matrices."""

    task: MatrixTask
    row: int  # row of the owner's stack
    offset: int  # offset of the parameter in the owner's flattened stack
    numel: int
    shard: int  # index of the local shard; -1 for another rank's
    runs: tuple[Run, ...]  # runs within the parameter

    def destinations(self, stack: Tensor, values: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Pair the shard's values with their places in the flattened stack: tensors of equal shapes to be copied."""
        if values.dim() > 1:  # stored with gaps, which are not in the stack: the shard is one strided run there
            (run,) = self.runs
            target, parts = run.of(stack, self.offset), values.shape[0]
            if run.rows == 1:
                yield target.view(values.shape), values
            else:
                yield target.unflatten(0, (parts, -1)), values.unflatten(1, (-1, run.width))
            return
        position = 0
        for run in self.runs:
            target = run.of(stack, self.offset)
            yield target, values[position : position + target.numel()].view_as(target)
            position += target.numel()

    def parts(self, stack: Tensor) -> list[Tensor]:
        """Views of the shard's values in the flattened stack, as 1-D tensors to be joined."""
        return [run.of(stack, self.offset).reshape(-1) for run in self.runs]

    def read(self, stack: Tensor) -> Tensor:
        """Read the shard's values in the flattened stack, 1-D."""
        parts = self.parts(stack)
        return parts[0] if len(parts) == 1 else torch.cat(parts)


@dataclass(frozen=True)
class Side:
    """The pieces this rank exchanges with the others in one direction, in rank order, and how many elements with each.

    A payload is sent once to every rank that holds a piece of its matrix: ``rows`` lists the matrices, rank by rank,
    ``row_counts`` is their number by rank, and ``row_of`` the index in that list of each piece's matrix.

    Where a message is written block by block, ``pads`` are the zeros behind each piece, so that the next matrix begins
    with a block, and ``blocks`` is the number of blocks by rank.
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
        """Make a side of pieces that are listed by the other rank; ``block`` elements are written together."""
        rows: list[int] = []
        row_counts: list[int] = []
        row_of: list[int] = []
        for pieces in by_rank:
            index_of = {row: len(rows) + i for i, row in enumerate(dict.fromkeys(piece.row for piece in pieces))}
            rows.extend(index_of)
            row_counts.append(len(index_of))
            row_of.extend(index_of[piece.row] for piece in pieces)
        flat = tuple(piece for pieces in by_rank for piece in pieces)
        numels, counts = [piece.numel for piece in flat], [sum(piece.numel for piece in pieces) for pieces in by_rank]
        pads = _pads(numels, row_of, block)
        filled, blocks = iter(map(add, numels, pads)), []
        for pieces in by_rank:
            blocks.append(sum(islice(filled, len(pieces))) // block)
        return cls(flat, numels, counts, rows, row_counts, row_of, pads, blocks)


def _pads(numels: Sequence[int], row_of: Sequence[int], block: int) -> list[int]:
    """Zeros behind each piece, which fill the last block of each matrix."""
    pads, run = [], 0
    for numel, row, following in zip_longest(numels, row_of, row_of[1:]):
        run += numel
        pads.append(0 if row == following else -run % block)
        run = run if row == following else 0
    return pads


@dataclass(frozen=True)
class BatchPlan:
    """This rank's part of one batch."""

    batch: Batch
    labels: Mapping[str, str]  # names of its phases, for a profiler
    owned: list[MatrixTask]
    length: int
    local: tuple[PackedRun, ...]  # held and owned here
    outgoing: Side  # held here, gathered elsewhere
    incoming: Side  # held elsewhere, gathered here
    results_in: Side  # held here, computed elsewhere
    results_out: Side  # held elsewhere, computed here
    result_rows: Tensor  # results_out.rows, on the device
    gathers: bool  # alike on all ranks: whether gradients of the batch cross ranks
    returns: bool  # alike on all ranks: whether results cross ranks
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
    """Find this rank's part in the exchange of a batch, whose messages write ``block`` elements together."""
    world, me = layout.world_size, layout.rank
    shapes, holders = layout.shapes, layout.holders
    length = sum(prod(shapes[part]) for part in batch.tasks[0].parts)
    # Lists by the other rank. What a rank sends to itself is local.
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
    to_holders = Side.of(results_out, block)
    result_rows = torch.tensor(to_holders.rows, dtype=torch.long, device=device)
    return BatchPlan(
        batch=batch,
        labels={phase: f"rankwise: {phase} {number}" for phase in ("gather", "compute", "return", "deliver")},
        owned=owned,
        length=length,
        local=local,
        outgoing=Side.of(outgoing, block),
        incoming=Side.of(incoming, block),
        results_in=Side.of(results_in, block),
        results_out=to_holders,
        result_rows=result_rows,
        gathers=gathers,
        returns=returns,
        copied=copied,
    )
