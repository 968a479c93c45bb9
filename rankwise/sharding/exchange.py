"""Straddling matrices to their owners and back: packed, asynchronous, one shape batch ahead of the computation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from .layout import Layout
from .plan import Batch, MatrixPlan, MatrixTask

__all__ = ["Compute", "Deliver", "MatrixExchange"]

Compute = Callable[[Batch, Sequence[MatrixTask], Tensor], Tensor]
Deliver = Callable[[MatrixTask, int, Tensor], None]


@dataclass(frozen=True)
class _Piece:
    """A fragment's place in its task: local fragment index on its rank, range inside the task's flat vector."""

    task: int  # position among the batch's tasks of the same owner
    fragment: int
    start: int
    end: int

    @property
    def numel(self) -> int:
        return self.end - self.start


@dataclass
class _BatchPlan:
    batch: Batch
    owned: list[MatrixTask]
    length: int
    pieces: list[list[list[_Piece]]]  # pieces[owner][holder]
    tasks: list[list[MatrixTask]]  # tasks[owner]
    travels: bool


@dataclass
class _Message:
    """An all-to-all under way. The outgoing buffer is kept alive until it has been sent."""

    received: Tensor
    sent: Tensor
    work: dist.Work


@dataclass
class _Gather:
    stack: Tensor
    message: _Message | None


@dataclass
class _Return:
    index: int
    result: Tensor
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
            dtype: Type of gathered matrices, also on the wire.
        """
        self.layout, self.plan = layout, plan
        self._device, self._dtype = device, dtype
        self._batches = [self._plan_batch(batch) for batch in plan.batches]

    @property
    def bytes_per_gather(self) -> int:
        """Bytes this rank sends to owners per step."""
        if self.layout.replicated:
            return 0
        me = self.layout.rank
        width = torch.empty(0, dtype=self._dtype).element_size()
        return width * sum(
            piece.numel
            for plan in self._batches
            for owner in range(self.layout.world_size)
            if owner != me
            for piece in plan.pieces[owner][me]
        )

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
                parameters without a gradient: their tasks are left out of the step.
            compute: ``(batch, owned tasks, stack)`` with ``stack`` of shape (owned, task length); returns
                (owned, result length). Called only on ranks that own a task of the batch.
            deliver: ``(task, local fragment index, result)``; called once per local fragment of every task.
                ``result`` is the fragment's own piece, or the whole payload when ``payload`` is given. Valid during
                the call only.
            payload: Length of the whole result that every holder receives instead of its piece (low-rank factors).
        """
        arriving = self._start_gather(0, sources) if self._batches else None
        returning: _Return | None = None
        for index, plan in enumerate(self._batches):
            assert arriving is not None
            current = arriving
            arriving = self._start_gather(index + 1, sources) if index + 1 < len(self._batches) else None
            stack = self._finish_gather(index, current)
            result = self._compute(plan, stack, sources, compute)
            following = self._start_return(index, result, payload)
            if returning is not None:
                self._finish_return(returning, sources, deliver, payload)
            returning = following
        if returning is not None:
            self._finish_return(returning, sources, deliver, payload)

    def _compute(self, plan: _BatchPlan, stack: Tensor, sources: Sequence[Tensor | None], compute: Compute) -> Tensor:
        if not plan.owned:
            return stack
        mine = plan.pieces[self.layout.rank][self.layout.rank]
        idle = {piece.task for piece in mine if sources[piece.fragment] is None}
        if not idle:
            return compute(plan.batch, plan.owned, stack)
        live = [index for index in range(len(plan.owned)) if index not in idle]
        if not live:
            return stack
        part = compute(plan.batch, [plan.owned[index] for index in live], stack[live])
        result = part.new_zeros(len(plan.owned), part.shape[1])
        result[live] = part
        return result

    def _plan_batch(self, batch: Batch) -> _BatchPlan:
        world, me = self.layout.world_size, self.layout.rank
        tasks: list[list[MatrixTask]] = [[] for _ in range(world)]
        pieces: list[list[list[_Piece]]] = [[[] for _ in range(world)] for _ in range(world)]
        numel = {key: prod(shape) for key, shape in self.layout.shapes.items()}
        index_of = [{fragment: i for i, fragment in enumerate(fragments)} for fragments in self.layout.ranks]
        length = sum(numel[part] for part in batch.tasks[0].parts)
        for task in batch.tasks:
            owner = self.plan.owners[task.key]
            base = 0
            for part in task.parts:
                for holder, fragments in self.layout.holders[part].items():
                    for fragment in fragments:
                        pieces[owner][holder].append(
                            _Piece(
                                len(tasks[owner]),
                                index_of[holder][fragment],
                                base + fragment.start,
                                base + fragment.end,
                            )
                        )
                base += numel[part]
            tasks[owner].append(task)
        travels = any(pieces[owner][holder] for owner in range(world) for holder in range(world) if owner != holder)
        return _BatchPlan(batch, tasks[me], length, pieces, tasks, travels)

    def _start_gather(self, index: int, sources: Sequence[Tensor | None]) -> _Gather:
        plan, me = self._batches[index], self.layout.rank
        stack = torch.empty(len(plan.owned), plan.length, dtype=self._dtype, device=self._device)
        for piece in plan.pieces[me][me]:
            source = sources[piece.fragment]
            if source is not None:
                stack[piece.task, piece.start : piece.end] = source
        if not plan.travels or self.layout.replicated:
            return _Gather(stack, None)
        world = range(self.layout.world_size)
        send_sizes = [self._volume(plan.pieces[owner][me]) if owner != me else 0 for owner in world]
        receive_sizes = [self._volume(plan.pieces[me][holder]) if holder != me else 0 for holder in world]
        outgoing = [sources[piece.fragment] for owner in world if owner != me for piece in plan.pieces[owner][me]]
        return _Gather(stack, self._all_to_all(outgoing, receive_sizes, send_sizes))

    def _finish_gather(self, index: int, gather: _Gather) -> Tensor:
        if gather.message is None:
            return gather.stack
        gather.message.work.wait()
        plan, me = self._batches[index], self.layout.rank
        position = 0
        for holder in range(self.layout.world_size):
            if holder == me:
                continue
            for piece in plan.pieces[me][holder]:
                values = gather.message.received[position : position + piece.numel]
                gather.stack[piece.task, piece.start : piece.end] = values
                position += piece.numel
        return gather.stack

    def _start_return(self, index: int, result: Tensor, payload: Callable[[Batch], int] | None) -> _Return:
        plan, me = self._batches[index], self.layout.rank
        if not plan.travels:
            return _Return(index, result, None)
        world = range(self.layout.world_size)
        outgoing: list[Tensor | None]
        if payload is None:
            send_sizes = [self._volume(plan.pieces[me][holder]) if holder != me else 0 for holder in world]
            receive_sizes = [self._volume(plan.pieces[owner][me]) if owner != me else 0 for owner in world]
            outgoing = [
                result[piece.task, piece.start : piece.end]
                for holder in world
                if holder != me
                for piece in plan.pieces[me][holder]
            ]
        else:
            length = payload(plan.batch)
            recipients = [self._distinct(plan.pieces[me][holder]) if holder != me else [] for holder in world]
            send_sizes = [length * len(tasks) for tasks in recipients]
            receive_sizes = [
                length * len(self._distinct(plan.pieces[owner][me])) if owner != me else 0 for owner in world
            ]
            outgoing = [result[task] for tasks in recipients for task in tasks]
        return _Return(index, result, self._all_to_all(outgoing, receive_sizes, send_sizes))

    def _finish_return(
        self,
        returning: _Return,
        sources: Sequence[Tensor | None],
        deliver: Deliver,
        payload: Callable[[Batch], int] | None,
    ) -> None:
        plan, me, result = self._batches[returning.index], self.layout.rank, returning.result
        for piece in plan.pieces[me][me]:
            if sources[piece.fragment] is None:
                continue
            values = result[piece.task] if payload is not None else result[piece.task, piece.start : piece.end]
            deliver(plan.owned[piece.task], piece.fragment, values)
        if returning.message is None:
            return
        returning.message.work.wait()
        buffer = returning.message.received
        position = 0
        for owner in range(self.layout.world_size):
            if owner == me:
                continue
            pieces = plan.pieces[owner][me]
            if payload is None:
                for piece in pieces:
                    deliver(plan.tasks[owner][piece.task], piece.fragment, buffer[position : position + piece.numel])
                    position += piece.numel
            else:
                length = payload(plan.batch)
                arrived: Mapping[int, int] = {task: i for i, task in enumerate(self._distinct(pieces))}
                for piece in pieces:
                    first = position + arrived[piece.task] * length
                    deliver(plan.tasks[owner][piece.task], piece.fragment, buffer[first : first + length])
                position += length * len(arrived)

    def _all_to_all(
        self, outgoing: Sequence[Tensor | None], receive_sizes: list[int], send_sizes: list[int]
    ) -> _Message:
        sent = self._pack(outgoing)
        received = torch.empty(sum(receive_sizes), dtype=self._dtype, device=self._device)
        work = dist.all_to_all_single(received, sent, receive_sizes, send_sizes, group=self.layout.group, async_op=True)
        assert work is not None
        return _Message(received, sent, work)

    def _pack(self, values: Sequence[Tensor | None]) -> Tensor:
        present = [value.to(self._dtype) for value in values if value is not None]
        if not present:
            return torch.empty(0, dtype=self._dtype, device=self._device)
        return torch.cat(present)

    @staticmethod
    def _volume(pieces: Sequence[_Piece]) -> int:
        return sum(piece.numel for piece in pieces)

    @staticmethod
    def _distinct(pieces: Sequence[_Piece]) -> list[int]:
        return sorted({piece.task for piece in pieces})
