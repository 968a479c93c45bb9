"""Straddling matrices to their owners and back: packed, asynchronous, one shape batch ahead of the computation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import profiler
from torch.profiler import record_function

from .layout import Fragment, Layout, Place
from .plan import Batch, MatrixPlan, MatrixTask, Reply, own_pieces
from .traffic import Traffic

__all__ = ["Compute", "Deliver", "MatrixExchange"]

Compute = Callable[[Batch, Sequence[MatrixTask], Tensor], Tensor]
Deliver = Callable[[MatrixTask, int, Tensor], None]


@dataclass(frozen=True)
class _Piece:
    """A fragment's place in its owner's stack of matrices."""

    task: MatrixTask
    row: int  # of the owner's stack
    offset: int  # of the parameter in the owner's flattened stack
    numel: int
    fragment: int  # local fragment index; -1 for another rank's
    places: tuple[Place, ...]  # within the parameter

    def fill(self, stack: Tensor, values: Tensor | None) -> None:
        """Write the fragment's values, or zeros, into the flattened stack."""
        position = 0
        for place in self.places:
            target = place.of(stack, self.offset)
            if values is None:
                target.zero_()
            else:
                target.copy_(values[position : position + target.numel()].view_as(target))
                position += target.numel()

    def parts(self, stack: Tensor) -> list[Tensor]:
        """The fragment's values in the flattened stack, as 1-D tensors to be joined."""
        return [place.of(stack, self.offset).reshape(-1) for place in self.places]

    def read(self, stack: Tensor) -> Tensor:
        """The fragment's values in the flattened stack, 1-D."""
        parts = self.parts(stack)
        return parts[0] if len(parts) == 1 else torch.cat(parts)


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
    labels: Mapping[str, str]  # of its phases, for a profiler
    owned: list[MatrixTask]
    length: int
    local: tuple[_Piece, ...]  # held and owned here
    outgoing: _Side  # held here, gathered elsewhere
    incoming: _Side  # held elsewhere, gathered here
    results_in: _Side  # held here, computed elsewhere
    results_out: _Side  # held elsewhere, computed here
    result_rows: Tensor  # results_out.rows, on the device
    gathers: bool  # alike on all ranks: whether gradients of the batch cross ranks
    returns: bool  # and whether results do
    copied: bool  # alike on all ranks: whether several ranks hold the same elements


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
    reply: Reply
    message: _Message | None


def _phase(plan: _BatchPlan, phase: str) -> AbstractContextManager[Any]:
    """A profiler's range; nothing, at no cost, where none runs."""
    return record_function(plan.labels[phase]) if profiler._is_profiler_enabled else nullcontext()


def _separated(result: Tensor, values: int) -> list[Tensor]:
    """The flattened stacks of results with ``values`` values per element, one stack for each of these."""
    if values == 1:
        return [result.reshape(-1)]
    return [part.reshape(-1) for part in result.chunk(values, dim=1)]


def _times(factor: int, counts: Sequence[int]) -> list[int]:
    return [factor * count for count in counts]


class MatrixExchange:
    """Runs batched matrix updates on their owners, whatever the fragments' layout.

    A matrix is gathered from one copy where ranks hold several (the owner's own if it has one), and its result goes to
    all of them. Per batch and step there are at most two collectives: pieces to the owners, results back. A batch in
    which every matrix already lies whole on its owner communicates nothing. The pieces of batch *k+1* travel while
    batch *k* is computed, and the results of *k* while *k+1* is. A profiler shows the phases of batch *k* as
    ``rankwise: gather k``, ``compute k``, ``return k`` and ``deliver k``.
    """

    def __init__(
        self,
        layout: Layout,
        plan: MatrixPlan,
        device: torch.device,
        dtype: torch.dtype,
        wire_dtype: torch.dtype | None = None,
    ) -> None:
        """Plan every message once.

        Args:
            layout: The common layout.
            plan: Owners and batches; must be the same on every rank.
            device: Where fragments live.
            dtype: Type of gathered matrices and of results.
            wire_dtype: Their type in messages. None: ``dtype``, so that messages round nothing. Otherwise what crosses
                ranks is rounded to it, once on the way to the owner and once on the way back.
        """
        self.layout, self.plan = layout, plan
        self.traffic = Traffic()
        self._device, self._dtype, self._wire = device, dtype, wire_dtype or dtype
        index_of = {fragment: index for index, fragment in enumerate(layout.mine)}
        self._batches = [self._plan_batch(number, batch, index_of) for number, batch in enumerate(plan.batches)]

    @property
    def bytes_per_gather(self) -> int:
        """Bytes this rank sends to owners per step."""
        if self.layout.replicated:
            return 0
        return self._wire.itemsize * sum(sum(plan.outgoing.counts) for plan in self._batches)

    @property
    def wire_itemsize(self) -> int:
        """Bytes of one element in a message."""
        return self._wire.itemsize

    def owned(self) -> list[MatrixTask]:
        """The tasks this rank owns, in batch order."""
        return [task for plan in self._batches for task in plan.owned]

    def run(
        self,
        sources: Sequence[Tensor | None],
        compute: Compute,
        deliver: Deliver,
        reply: Callable[[Batch], Reply] = own_pieces,
    ) -> None:
        """Gather, compute on owners, and deliver results to the holders.

        Args:
            sources: Per local fragment, its 1-D values; None for fragments no task uses, and, where every rank has
                whole copies, for parameters without a gradient: a task none of whose parts has one is left out of
                the step, a part without one counts as zero. It must then be None on all ranks.
            compute: ``(batch, owned tasks, stack)`` with ``stack`` of shape (owned, task length); returns
                (owned, result length). Called only on ranks that own a task of the batch.
            deliver: ``(task, local fragment index, result)``; called once per local fragment of every task, unless
                its source is None.
                ``result`` is what ``reply`` says. Valid during
                the call only.
            reply: What the holders of a batch's matrices get of the results; their own piece unless it says otherwise.
        """
        arriving = self._start_gather(self._batches[0], sources) if self._batches else None
        returning: _Return | None = None
        for plan, following in zip(self._batches, [*self._batches[1:], None], strict=True):
            assert arriving is not None
            current = arriving
            arriving = None if following is None else self._start_gather(following, sources)
            stack = self._finish_gather(plan, current)
            with _phase(plan, "compute"):
                result = self._compute(plan, stack, sources, compute, reply(plan.batch))
            leaving = self._start_return(plan, result, reply(plan.batch))
            if returning is not None:
                self._finish_return(returning, sources, deliver)
            returning = leaving
        if returning is not None:
            self._finish_return(returning, sources, deliver)

    # --- planning -----------------------------------------------------------------------------------------------

    def _plan_batch(self, number: int, batch: Batch, index_of: Mapping[Fragment, int]) -> _BatchPlan:
        world, me = self.layout.world_size, self.layout.rank
        shapes, holders = self.layout.shapes, self.layout.holders
        length = sum(prod(shapes[part]) for part in batch.tasks[0].parts)
        # By the other rank: what this one sends to an owner and gathers as one, and the same for the results.
        outgoing, incoming, results_in, results_out = ([[] for _ in range(world)] for _ in range(4))  # type: ignore[var-annotated]
        owned: list[MatrixTask] = []
        rows = [0] * world
        gathers = returns = copied = False
        for task in batch.tasks:
            owner = self.plan.owners[task.key]
            row, first = rows[owner], 0
            rows[owner] += 1
            if owner == me:
                owned.append(task)
            for part in task.parts:

                def piece(fragment: Fragment, row: int = row, first: int = first, task: MatrixTask = task) -> _Piece:
                    index = index_of.get(fragment, -1)
                    return _Piece(task, row, row * length + first, fragment.numel, index, fragment.places)

                gathered = self.layout.nearest_copy(part, owner)
                gathers = gathers or any(holder != owner for holder, _ in gathered)
                returns = returns or any(holder != owner for holder in holders[part])
                copied = copied or len(self.layout.copies[part]) > 1
                for holder, fragment in gathered:
                    if owner == me:
                        incoming[holder].append(piece(fragment))
                    elif holder == me:
                        outgoing[owner].append(piece(fragment))
                for holder in holders[part] if owner == me else (me,):
                    by_rank = results_out[holder] if owner == me else results_in[owner]
                    by_rank.extend(map(piece, holders[part].get(holder, ())))
                first += prod(shapes[part])
        local, incoming[me], results_out[me] = tuple(incoming[me]), [], []
        there = _Side.of(results_out)
        result_rows = torch.tensor(there.rows, dtype=torch.long, device=self._device)
        return _BatchPlan(
            batch=batch,
            labels={phase: f"rankwise: {phase} {number}" for phase in ("gather", "compute", "return", "deliver")},
            owned=owned,
            length=length,
            local=local,
            outgoing=_Side.of(outgoing),
            incoming=_Side.of(incoming),
            results_in=_Side.of(results_in),
            results_out=there,
            result_rows=result_rows,
            gathers=gathers,
            returns=returns,
            copied=copied,
        )

    # --- one batch ----------------------------------------------------------------------------------------------

    def _start_gather(self, plan: _BatchPlan, sources: Sequence[Tensor | None]) -> _Gather:
        with _phase(plan, "gather"):
            return self._gather(plan, sources)

    def _gather(self, plan: _BatchPlan, sources: Sequence[Tensor | None]) -> _Gather:
        stack = torch.empty(len(plan.owned), plan.length, dtype=self._dtype, device=self._device)
        flat = stack.view(-1)
        for piece in plan.local:
            piece.fill(flat, sources[piece.fragment])
        if not plan.gathers:
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
                piece.fill(flat, values)
        return gather.stack

    def _compute(
        self,
        plan: _BatchPlan,
        stack: Tensor,
        sources: Sequence[Tensor | None],
        compute: Compute,
        reply: Reply,
    ) -> Tensor:
        if not plan.owned:
            return stack
        live = {piece.row for piece in plan.local if sources[piece.fragment] is not None} | set(plan.incoming.rows)
        if len(live) == len(plan.owned):
            return compute(plan.batch, plan.owned, stack).to(self._dtype)
        if not live:
            # Nobody reads it, but the message has the size that was planned.
            return stack.new_zeros(len(plan.owned), reply.whole or reply.values * plan.length)
        rows = sorted(live)
        part = compute(plan.batch, [plan.owned[row] for row in rows], stack[rows]).to(self._dtype)
        result = part.new_zeros(len(plan.owned), part.shape[1])
        result[rows] = part
        return result

    def _start_return(self, plan: _BatchPlan, result: Tensor, reply: Reply) -> _Return:
        with _phase(plan, "return"):
            return self._return(plan, result, reply)

    def _return(self, plan: _BatchPlan, result: Tensor, reply: Reply) -> _Return:
        if not plan.returns:
            return _Return(plan, result, reply, None)
        if plan.copied and self._wire != self._dtype:
            # Where ranks hold the same elements, the owner must use what the others get, or the copies drift apart.
            result = result.to(self._wire).to(self._dtype)
        there, here = plan.results_out, plan.results_in
        if reply.whole is None:
            flats = _separated(result, reply.values)
            leaving = self._pack([part for piece in there.pieces for flat in flats for part in piece.parts(flat)])
            message = self._all_to_all(leaving, *(_times(reply.values, side.counts) for side in (there, here)))
        else:
            leaving = result.index_select(0, plan.result_rows).reshape(-1).to(self._wire)
            message = self._all_to_all(leaving, *(_times(reply.whole, side.row_counts) for side in (there, here)))
        return _Return(plan, result, reply, message)

    def _finish_return(self, returning: _Return, sources: Sequence[Tensor | None], deliver: Deliver) -> None:
        with _phase(returning.plan, "deliver"):
            self._deliver(returning, sources, deliver)

    def _deliver(self, returning: _Return, sources: Sequence[Tensor | None], deliver: Deliver) -> None:
        plan, result, reply = returning.plan, returning.result, returning.reply
        flats = _separated(result, reply.values) if reply.whole is None else []
        for piece in plan.local:
            if sources[piece.fragment] is not None:
                own = [piece.read(flat) for flat in flats] or [result[piece.row]]
                deliver(piece.task, piece.fragment, own[0] if len(own) == 1 else torch.cat(own))
        if returning.message is None:
            return
        received = returning.message.wait().to(self._dtype)
        if reply.whole is None:
            arrived = received.split(_times(reply.values, plan.results_in.numels))
        else:
            payloads = received.split(reply.whole)
            arrived = tuple(payloads[row] for row in plan.results_in.row_of)
        for piece, values in zip(plan.results_in.pieces, arrived, strict=True):
            if sources[piece.fragment] is not None:
                deliver(piece.task, piece.fragment, values)

    # --- messages -----------------------------------------------------------------------------------------------

    def _pack(self, values: Sequence[Tensor]) -> Tensor:
        if not values:
            return torch.empty(0, dtype=self._wire, device=self._device)
        return torch.cat([value.to(self._wire) for value in values])

    def _all_to_all(self, sent: Tensor, send_counts: list[int], receive_counts: list[int]) -> _Message:
        self.traffic.count(sent)
        received = torch.empty(sum(receive_counts), dtype=self._wire, device=self._device)
        work = dist.all_to_all_single(
            received, sent, receive_counts, send_counts, group=self.layout.group, async_op=True
        )
        assert work is not None
        return _Message(received, sent, work)
