"""Straddling matrices to their owners and back: packed, asynchronous, one shape batch ahead of the computation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import profiler
from torch.profiler import record_function

from .indices import DeviceIndices
from .layout import Layout
from .pieces import BatchPlan, Piece, plan_batch
from .plan import Batch, MatrixPlan, MatrixTask, Reply, own_pieces
from .traffic import Traffic

__all__ = ["AtOnce", "Compute", "Deliver", "MatrixExchange"]

Compute = Callable[[Batch, Sequence[MatrixTask], Tensor], Tensor]
Deliver = Callable[[MatrixTask, int, Tensor], None]
AtOnce = Callable[[MatrixTask, Sequence[int], Sequence[Tensor]], None]


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
    plan: BatchPlan
    result: Tensor
    reply: Reply
    message: _Message | None


def _phase(plan: BatchPlan, phase: str) -> AbstractContextManager[Any]:
    """A profiler's range; nothing, at no cost, where none runs."""
    return record_function(plan.labels[phase]) if profiler._is_profiler_enabled else nullcontext()


def _separated(result: Tensor, values: int) -> list[Tensor]:
    """The flattened stacks of results with ``values`` values per element, one stack for each of these."""
    if values == 1:
        return [result.reshape(-1)]
    return [part.reshape(-1) for part in result.chunk(values, dim=1)]


def _fill(stack: Tensor, pieces: Sequence[Piece], values: Sequence[Tensor | None]) -> None:
    """Write fragments into the flattened stack, zeros for those without values: two launches, however many they are."""
    pairs: list[tuple[Tensor, Tensor]] = []
    empty: list[Tensor] = []
    for piece, value in zip(pieces, values, strict=True):
        if value is None:
            empty.extend(piece.parts(stack))
        else:
            pairs.extend(piece.destinations(stack, value))
    if pairs:
        torch._foreach_copy_([target for target, _ in pairs], [source for _, source in pairs])
    if empty:
        torch._foreach_zero_(empty)


def _times(factor: int, counts: Sequence[int]) -> list[int]:
    return [factor * count for count in counts]


class MatrixExchange:
    """Runs batched matrix updates on their owners, whatever the fragments' layout.

    A matrix is gathered from one copy where ranks hold several (the owner's own if it has one), and its result goes to
    all of them. Per batch and step there are at most two collectives: pieces to the owners, results back. A batch in
    which every matrix already lies whole on its owner communicates nothing. The pieces of batch *k+1* travel while
    batch *k* is computed, and the results of *k* while *k+1* is. A profiler shows the phases of batch *k* as
    ``rankwise: gather k``, ``compute k``, ``return k`` and ``deliver k``.

    Attributes:
        one_by_one: See the constructor.
    """

    def __init__(
        self,
        layout: Layout,
        plan: MatrixPlan,
        device: torch.device,
        dtype: torch.dtype,
        wire_dtype: torch.dtype | None = None,
        one_by_one: bool = False,
    ) -> None:
        """Plan every message once.

        Args:
            layout: The common layout.
            plan: Owners and batches; must be the same on every rank.
            device: Where fragments live.
            dtype: Type of gathered matrices and of results.
            wire_dtype: Their type in messages. None: ``dtype``, so that messages round nothing. Otherwise what crosses
                ranks is rounded to it, once on the way to the owner and once on the way back.
            one_by_one: Compute matrices that lie whole on their owners one at a time and without a copy: on CPUs a
                stack gains nothing. ``compute`` must leave what it gets as it was.
        """
        self.layout, self.plan = layout, plan
        self.traffic = Traffic()
        self._device, self._dtype, self._wire = device, dtype, wire_dtype or dtype
        self.one_by_one = one_by_one
        self._indices = DeviceIndices(device)
        index_of = {fragment: index for index, fragment in enumerate(layout.mine)}
        self._batches = [
            plan_batch(layout, plan.owners, number, batch, index_of, device)
            for number, batch in enumerate(self._computed_batches(one_by_one))
        ]
        # Alike on all ranks: with other batches in between, the collectives of the rest would come in another order.
        here = [one_by_one and self._lies_in_place(plan.batch) for plan in self._batches]
        self._here = [plan for plan, in_place in zip(self._batches, here, strict=True) if in_place and plan.owned]
        self._elsewhere = [plan for plan, in_place in zip(self._batches, here, strict=True) if not in_place]

    def _computed_batches(self, one_by_one: bool) -> Iterator[Batch]:
        for batch in self.plan.batches:
            # Slices are computed together with those of other ranks.
            alone = one_by_one and not batch.partners
            apart = [task for task in batch.tasks if alone and self._lies_whole(task)]
            here = {task.key for task in apart}
            straddling = tuple(task for task in batch.tasks if task.key not in here)
            if straddling:
                # First, so that they travel while the others are computed.
                yield replace(batch, tasks=straddling)
            for task in apart:
                yield replace(batch, tasks=(task,))

    def _lies_whole(self, task: MatrixTask) -> bool:
        return all(set(self.layout.holders[part]) == {self.plan.owners[task.key]} for part in task.parts)

    def _lies_in_place(self, batch: Batch) -> bool:
        """Whether it is one matrix that its owner alone has, every part in one run; the answer of every rank."""
        if len(batch.tasks) != 1 or batch.partners or not self._lies_whole(batch.tasks[0]):
            return False
        runs = (fragments for part in batch.tasks[0].parts for fragments in self.layout.holders[part].values())
        return all(len(fragments) == 1 and fragments[0].is_whole for fragments in runs)

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

    @property
    def alone(self) -> set[int]:
        """Local fragments of the matrices that :meth:`run` hands to ``at_once``."""
        return {piece.fragment for plan in self._here for piece in plan.local}

    def owned(self) -> list[MatrixTask]:
        """The tasks this rank owns, in batch order."""
        return [task for plan in self._batches for task in plan.owned]

    def run(
        self,
        sources: Sequence[Tensor | None],
        compute: Compute,
        deliver: Deliver,
        reply: Callable[[Batch], Reply] = own_pieces,
        delivered: Callable[[Batch], None] | None = None,
        at_once: AtOnce | None = None,
    ) -> None:
        """Gather, compute on owners, and deliver results to the holders.

        Args:
            sources: Per local fragment, its 1-D values; None for fragments no task uses, and, where every rank has
                whole copies, for parameters without a gradient: a task none of whose parts has one is left out of
                the step, a part without one counts as zero. It must then be None on all ranks.
            compute: ``(batch, owned tasks, stack)`` with ``stack`` of shape (owned, task length); returns
                (owned, result length). Called only on ranks that own a task of the batch.
            deliver: ``(task, local fragment index, result)``; called once per local fragment of every task, unless
                its source is None. ``result`` is what ``reply`` says, and valid until the batch is delivered.
            reply: What the holders of a batch's matrices get of the results; their own piece unless it says otherwise.
            delivered: Called once all results of a batch that this rank holds fragments of have been delivered.
            at_once: ``(task, local fragment indices, values)`` part by part, in place of all of the above for matrices
                computed one by one of which this rank has all, each part in one run: they need neither copy nor stack.
        """
        batches = self._batches if at_once is None else self._elsewhere
        arriving = self._start_gather(batches[0], sources) if batches else None
        returning: _Return | None = None
        for plan, following in zip_longest(batches, batches[1:]):
            assert arriving is not None
            current = arriving
            arriving = None if following is None else self._start_gather(following, sources)
            stack = self._finish_gather(plan, current)
            with _phase(plan, "compute"):
                result = self._compute(plan, stack, sources, compute, reply(plan.batch))
            leaving = self._start_return(plan, result, reply(plan.batch))
            if returning is not None:
                self._finish_return(returning, sources, deliver, delivered)
            returning = leaving
        if at_once is not None:
            for plan in self._here:
                self._compute_here(plan, sources, at_once)
        if returning is not None:
            self._finish_return(returning, sources, deliver, delivered)

    def _compute_here(self, plan: BatchPlan, sources: Sequence[Tensor | None], at_once: AtOnce) -> None:
        if all(sources[piece.fragment] is None for piece in plan.local):
            return
        parts = []
        for piece in plan.local:
            source = sources[piece.fragment]
            parts.append(torch.zeros(piece.numel, dtype=self._dtype, device=self._device) if source is None else source)
        with _phase(plan, "compute"):
            at_once(plan.owned[0], [piece.fragment for piece in plan.local], parts)

    # --- one batch ----------------------------------------------------------------------------------------------

    def _start_gather(self, plan: BatchPlan, sources: Sequence[Tensor | None]) -> _Gather:
        with _phase(plan, "gather"):
            return self._gather(plan, sources)

    def _gather(self, plan: BatchPlan, sources: Sequence[Tensor | None]) -> _Gather:
        if self._is_in_place(plan, sources):
            source = sources[plan.local[0].fragment]
            assert source is not None
            return _Gather(source.view(1, -1), None)
        stack = torch.empty(len(plan.owned), plan.length, dtype=self._dtype, device=self._device)
        flat = stack.view(-1)
        _fill(flat, plan.local, [sources[piece.fragment] for piece in plan.local])
        if not plan.gathers:
            return _Gather(stack, None)
        leaving = [self._present(sources, piece) for piece in plan.outgoing.pieces]
        return _Gather(stack, self._all_to_all(self._pack(leaving), plan.outgoing.counts, plan.incoming.counts))

    def _is_in_place(self, plan: BatchPlan, sources: Sequence[Tensor | None]) -> bool:
        """Whether the stack would be a copy of one fragment, and may be that fragment."""
        if not self.one_by_one or plan.gathers or len(plan.owned) != 1 or len(plan.local) != 1:
            return False
        source = sources[plan.local[0].fragment]
        return source is not None and source.numel() == plan.length and source.dtype == self._dtype

    @staticmethod
    def _present(sources: Sequence[Tensor | None], piece: Piece) -> Tensor:
        source = sources[piece.fragment]
        if source is None:
            raise RuntimeError(
                f"'{piece.task.key}' has no values on this rank; on several ranks a missing gradient must be passed as "
                "zeros, or the ranks would exchange messages of different sizes."
            )
        return source

    def _finish_gather(self, plan: BatchPlan, gather: _Gather) -> Tensor:
        if gather.message is not None:
            flat = gather.stack.view(-1)
            arrived = gather.message.wait().split(plan.incoming.numels)
            _fill(flat, plan.incoming.pieces, arrived)
        return gather.stack

    def _compute(
        self,
        plan: BatchPlan,
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
        rows = tuple(sorted(live))
        index = self._indices.of(rows)
        chosen = stack.index_select(0, index)
        part = compute(plan.batch, [plan.owned[row] for row in rows], chosen).to(self._dtype)
        return part.new_zeros(len(plan.owned), part.shape[1]).index_copy_(0, index, part)

    def _start_return(self, plan: BatchPlan, result: Tensor, reply: Reply) -> _Return:
        with _phase(plan, "return"):
            return self._return(plan, result, reply)

    def _return(self, plan: BatchPlan, result: Tensor, reply: Reply) -> _Return:
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

    def _finish_return(
        self,
        returning: _Return,
        sources: Sequence[Tensor | None],
        deliver: Deliver,
        delivered: Callable[[Batch], None] | None,
    ) -> None:
        with _phase(returning.plan, "deliver"):
            self._deliver(returning, sources, deliver)
            if delivered is not None:
                delivered(returning.plan.batch)

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
