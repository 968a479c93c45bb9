"""Straddling matrices to their owners and back: packed, asynchronous, one shape batch ahead of the computation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from .layout import Fragment, Layout
from .plan import Batch, MatrixPlan, MatrixTask
from .traffic import Traffic

__all__ = ["Compute", "Deliver", "MatrixExchange"]

Compute = Callable[[Batch, Sequence[MatrixTask], Tensor], Tensor]
Deliver = Callable[[MatrixTask, int, Tensor], None]


@dataclass(frozen=True)
class _Piece:
    """A fragment's place in its owner's stack of matrices."""

    task: MatrixTask
    row: int  # of the owner's stack
    offset: int  # in the owner's flattened stack
    numel: int
    fragment: int  # local fragment index; -1 for another rank's


@dataclass(frozen=True)
class _Side:
    """The pieces this rank exchanges with the others in one direction, in rank order, and how many elements with each.

    A payload goes once to every rank that holds a piece of its matrix: ``rows`` lists the matrices, rank by rank,
    ``row_counts`` how many there are of each rank, and ``row_of`` where in that list each piece's matrix is.
    """

    pieces: tuple[_Piece, ...]
    numels: list[int]
    counts: list[int]
    rows: list[int]
    row_counts: list[int]
    row_of: list[int]

    @classmethod
    def of(cls, by_rank: Sequence[Sequence[_Piece]]) -> _Side:
        rows: list[int] = []
        row_counts: list[int] = []
        row_of: list[int] = []
        for pieces in by_rank:
            place = {row: len(rows) + i for i, row in enumerate(dict.fromkeys(piece.row for piece in pieces))}
            rows.extend(place)
            row_counts.append(len(place))
            row_of.extend(place[piece.row] for piece in pieces)
        flat = tuple(piece for pieces in by_rank for piece in pieces)
        counts = [sum(piece.numel for piece in pieces) for pieces in by_rank]
        return cls(flat, [piece.numel for piece in flat], counts, rows, row_counts, row_of)


@dataclass(frozen=True)
class _BatchPlan:
    """What one batch means to this rank."""

    batch: Batch
    owned: list[MatrixTask]
    length: int
    local: tuple[_Piece, ...]  # held and owned here
    outgoing: _Side  # held here, owned elsewhere
    incoming: _Side  # held elsewhere, owned here
    incoming_rows: Tensor  # incoming.rows, on the device
    travels: bool  # alike on all ranks: whether anything of the batch crosses ranks


@dataclass(frozen=True)
class _Message:
    """An all-to-all under way. The outgoing buffer is kept alive until it has been sent."""

    received: Tensor
    sent: Tensor
    work: dist.Work

    def wait(self) -> Tensor:
        self.work.wait()
        return self.received


@dataclass(frozen=True)
class _Gather:
    stack: Tensor
    message: _Message | None


@dataclass(frozen=True)
class _Return:
    plan: _BatchPlan
    result: Tensor
    length: int | None  # of the payload; None if every holder gets its own piece
    message: _Message | None


class MatrixExchange:
    """Runs batched matrix updates on their owners, whatever the fragments' layout.

    Per batch and step there are at most two collectives: pieces to the owners, results back. A batch in which every
    matrix already lies whole on its owner communicates nothing. The pieces of batch *k+1* travel while batch *k* is
    computed, and the results of *k* while *k+1* is.
    """

    def __init__(self, layout: Layout, plan: MatrixPlan, device: torch.device, dtype: torch.dtype) -> None:
        """Plan every message once.

        Args:
            layout: The common layout.
            plan: Owners and batches; must be the same on every rank.
            device: Where fragments live.
            dtype: Type of gathered matrices and of results, also on the wire.
        """
        self.layout, self.plan = layout, plan
        self.traffic = Traffic()
        self._device, self._dtype = device, dtype
        index_of = {fragment: index for index, fragment in enumerate(layout.mine)}
        self._batches = [self._plan_batch(batch, index_of) for batch in plan.batches]

    @property
    def bytes_per_gather(self) -> int:
        """Bytes this rank sends to owners per step."""
        if self.layout.replicated:
            return 0
        return self._dtype.itemsize * sum(sum(plan.outgoing.counts) for plan in self._batches)

    def owned(self) -> list[MatrixTask]:
        """The tasks this rank owns, in batch order."""
        return [task for plan in self._batches for task in plan.owned]

    def run(
        self,
        sources: Sequence[Tensor | None],
        compute: Compute,
        deliver: Deliver,
        payload: Callable[[Batch], int] | None = None,
    ) -> None:
        """Gather, compute on owners, and deliver results to the holders.

        Args:
            sources: Per local fragment, its 1-D values; None for fragments no task uses, and, in a single process, for
                parameters without a gradient: a task none of whose parts has one is left out of the step, a part
                without one counts as zero.
            compute: ``(batch, owned tasks, stack)`` with ``stack`` of shape (owned, task length); returns
                (owned, result length). Called only on ranks that own a task of the batch.
            deliver: ``(task, local fragment index, result)``; called once per local fragment of every task.
                ``result`` is the fragment's own piece, or the whole payload when ``payload`` is given. Valid during
                the call only.
            payload: Length of the whole result that every holder receives instead of its piece (low-rank factors).
        """
        arriving = self._start_gather(self._batches[0], sources) if self._batches else None
        returning: _Return | None = None
        for plan, following in zip(self._batches, [*self._batches[1:], None], strict=True):
            assert arriving is not None
            current = arriving
            arriving = None if following is None else self._start_gather(following, sources)
            stack = self._finish_gather(plan, current)
            leaving = self._start_return(plan, self._compute(plan, stack, sources, compute), payload)
            if returning is not None:
                self._finish_return(returning, sources, deliver)
            returning = leaving
        if returning is not None:
            self._finish_return(returning, sources, deliver)

    # --- planning -----------------------------------------------------------------------------------------------

    def _plan_batch(self, batch: Batch, index_of: Mapping[Fragment, int]) -> _BatchPlan:
        world, me = self.layout.world_size, self.layout.rank
        shapes, holders = self.layout.shapes, self.layout.holders
        length = sum(prod(shapes[part]) for part in batch.tasks[0].parts)
        to_owner: list[list[_Piece]] = [[] for _ in range(world)]
        from_holder: list[list[_Piece]] = [[] for _ in range(world)]
        owned: list[MatrixTask] = []
        rows = [0] * world
        travels = False
        for task in batch.tasks:
            owner = self.plan.owners[task.key]
            row, first = rows[owner], 0
            rows[owner] += 1
            if owner == me:
                owned.append(task)
            for part in task.parts:
                travels = travels or any(holder != owner for holder in holders[part])
                for holder in holders[part] if owner == me else (me,):
                    by_rank = from_holder[holder] if owner == me else to_owner[owner]
                    for fragment in holders[part].get(holder, ()):
                        offset = row * length + first + fragment.start
                        index = index_of[fragment] if holder == me else -1
                        by_rank.append(_Piece(task, row, offset, fragment.numel, index))
                first += prod(shapes[part])
        local, from_holder[me] = tuple(from_holder[me]), []
        incoming = _Side.of(from_holder)
        incoming_rows = torch.tensor(incoming.rows, dtype=torch.long, device=self._device)
        return _BatchPlan(batch, owned, length, local, _Side.of(to_owner), incoming, incoming_rows, travels)

    # --- one batch ----------------------------------------------------------------------------------------------

    def _start_gather(self, plan: _BatchPlan, sources: Sequence[Tensor | None]) -> _Gather:
        stack = torch.empty(len(plan.owned), plan.length, dtype=self._dtype, device=self._device)
        flat = stack.view(-1)
        for piece in plan.local:
            source, place = sources[piece.fragment], flat.narrow(0, piece.offset, piece.numel)
            if source is None:
                place.zero_()
            else:
                place.copy_(source)
        if not plan.travels or self.layout.replicated:
            return _Gather(stack, None)
        leaving = [self._present(sources, piece) for piece in plan.outgoing.pieces]
        return _Gather(stack, self._all_to_all(self._pack(leaving), plan.outgoing.counts, plan.incoming.counts))

    @staticmethod
    def _present(sources: Sequence[Tensor | None], piece: _Piece) -> Tensor:
        source = sources[piece.fragment]
        if source is None:
            raise RuntimeError(
                f"'{piece.task.key}' has no values on this rank; on several ranks a missing gradient must be passed as "
                "zeros, or the ranks would exchange messages of different sizes."
            )
        return source

    def _finish_gather(self, plan: _BatchPlan, gather: _Gather) -> Tensor:
        if gather.message is not None:
            flat = gather.stack.view(-1)
            arrived = gather.message.wait().split(plan.incoming.numels)
            for piece, values in zip(plan.incoming.pieces, arrived, strict=True):
                flat.narrow(0, piece.offset, piece.numel).copy_(values)
        return gather.stack

    def _compute(self, plan: _BatchPlan, stack: Tensor, sources: Sequence[Tensor | None], compute: Compute) -> Tensor:
        if not plan.owned:
            return stack
        live = {piece.row for piece in plan.local if sources[piece.fragment] is not None} | set(plan.incoming.rows)
        if len(live) == len(plan.owned):
            return compute(plan.batch, plan.owned, stack).to(self._dtype)
        if not live:
            return stack
        rows = sorted(live)
        part = compute(plan.batch, [plan.owned[row] for row in rows], stack[rows]).to(self._dtype)
        result = part.new_zeros(len(plan.owned), part.shape[1])
        result[rows] = part
        return result

    def _start_return(self, plan: _BatchPlan, result: Tensor, payload: Callable[[Batch], int] | None) -> _Return:
        length = None if payload is None else payload(plan.batch)
        if not plan.travels:
            return _Return(plan, result, length, None)
        there, here = plan.incoming, plan.outgoing
        if length is None:
            flat = result.reshape(-1)
            leaving = self._pack([flat.narrow(0, piece.offset, piece.numel) for piece in there.pieces])
            message = self._all_to_all(leaving, there.counts, here.counts)
        else:
            leaving = result.index_select(0, plan.incoming_rows).reshape(-1)
            message = self._all_to_all(
                leaving, [length * count for count in there.row_counts], [length * count for count in here.row_counts]
            )
        return _Return(plan, result, length, message)

    def _finish_return(self, returning: _Return, sources: Sequence[Tensor | None], deliver: Deliver) -> None:
        plan, result, length = returning.plan, returning.result, returning.length
        flat = result.reshape(-1)
        for piece in plan.local:
            if sources[piece.fragment] is not None:
                values = flat.narrow(0, piece.offset, piece.numel) if length is None else result[piece.row]
                deliver(piece.task, piece.fragment, values)
        if returning.message is None:
            return
        received = returning.message.wait()
        if length is None:
            arrived = received.split(plan.outgoing.numels)
        else:
            payloads = received.split(length)
            arrived = tuple(payloads[row] for row in plan.outgoing.row_of)
        for piece, values in zip(plan.outgoing.pieces, arrived, strict=True):
            deliver(piece.task, piece.fragment, values)

    # --- messages -----------------------------------------------------------------------------------------------

    def _pack(self, values: Sequence[Tensor]) -> Tensor:
        if not values:
            return torch.empty(0, dtype=self._dtype, device=self._device)
        return torch.cat([value.to(self._dtype) for value in values])

    def _all_to_all(self, sent: Tensor, send_counts: list[int], receive_counts: list[int]) -> _Message:
        self.traffic.count(sent)
        received = torch.empty(sum(receive_counts), dtype=self._dtype, device=self._device)
        work = dist.all_to_all_single(
            received, sent, receive_counts, send_counts, group=self.layout.group, async_op=True
        )
        assert work is not None
        return _Message(received, sent, work)
