"""Sends straddling matrices to their owners and back, packed into asynchronous messages."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from rankwise.comm.batch_messages import BatchPlan, PackedRun, Side, plan_batch
from rankwise.comm.host_link import HostLink
from rankwise.comm.message_format import Traffic, WireFormat
from rankwise.comm.owner_plan import Batch, MatrixPlan, MatrixTask, Reply
from rankwise.layout.indices import DeviceIndices
from rankwise.layout.layout import Layout

__all__ = ["Gather", "MatrixExchange", "Return"]


@dataclass(frozen=True)
class _Message:
    """An all-to-all under way. It keeps the outgoing buffer alive until it has been sent."""

    received: Tensor
    sent: Tensor
    work: dist.Work
    wire: WireFormat

    def wait(self) -> Tensor:
        self.work.wait()
        return self.wire.read(self.received)


@dataclass
class Gather:
    """Pieces of a batch on their way to this rank; :meth:`MatrixExchange.finish_gather` waits for them."""

    stack: Tensor
    message: _Message | None
    is_source: bool = False  # whether the stack is a source itself, not a copy
    arrived: torch.cuda.Event | None = None  # when this rank's pieces are on a device that they were brought to


@dataclass(frozen=True)
class Return:
    """Results of a batch on their way to this rank; :meth:`MatrixExchange.finish_return` waits for them."""

    plan: BatchPlan
    result: Tensor
    reply: Reply
    message: _Message | None
    computed: torch.cuda.Event | None = None  # when a device has the result that is to be fetched


def _separated(result: Tensor, values: int) -> list[Tensor]:
    """Flattened stacks of results with ``values`` values per element, one stack for each of these."""
    if values == 1:
        return [result.reshape(-1)]
    return [part.reshape(-1) for part in result.chunk(values, dim=1)]


def _fill(stack: Tensor, pieces: Sequence[PackedRun], values: Sequence[Tensor | None]) -> None:
    """Write shards into the flattened stack, zeros for shards without values: two launches, however many they are."""
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


def _pieces(values: Tensor, side: Side) -> Sequence[Tensor]:
    """Split received values into pieces, without the zeros that filled their blocks."""
    if values.numel() == sum(side.numels):
        return values.split(side.numels)
    filled = values.split([numel + pad for numel, pad in zip(side.numels, side.pads, strict=True)])
    return [value[:numel] for value, numel in zip(filled, side.numels, strict=True)]


def _times(factor: int, counts: Sequence[int]) -> list[int]:
    return [factor * count for count in counts]


class MatrixExchange:
    """Moves matrices to their owners and results back to the holders, whatever the shards' layout.

    Where several ranks hold a matrix, one copy is gathered (the owner's own if it has one), and all get the result. A
    batch takes at most two collectives: pieces to the owners, results back. A batch in which every matrix already lies
    whole on its owner communicates nothing.

    Attributes:
        batches: Batches to be gathered and returned, in this order on every rank.
        in_place: Batches of one matrix that this rank alone has, each part in one run; nothing of them travels, and no
            other rank waits for them. Empty unless matrices are computed one by one.
        in_place_shards: Local shards of the matrices in :attr:`in_place`.
        dtype: Type of gathered matrices and of results.
        wire: Format of values in messages.
        device: Device of the messages and of the computation.
        link: Brings shards of the host to the device, and results back; None where the shards lie there.
        indices: Index tensors on the exchange's device.
        one_by_one: See the constructor.
        one_by_one_on: Types of devices on which stacks of matrices are no faster than single ones.
    """

    one_by_one_on: ClassVar[Collection[str]] = ("cpu",)

    def __init__(
        self,
        layout: Layout,
        plan: MatrixPlan,
        device: torch.device,
        dtype: torch.dtype,
        wire: WireFormat | None = None,
        one_by_one: bool | None = None,
        link: HostLink | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """Plan every message once.

        Args:
            layout: The common layout.
            plan: Owners and batches; must be the same on every rank.
            device: Device of the shards, or of the link.
            dtype: Type of gathered matrices and of results.
            wire: Format of values in messages. None: ``dtype``, so that messages round nothing. Otherwise what crosses
                ranks is rounded, once on the way to the owner and once on the way back.
            one_by_one: Whether matrices that lie whole on their owners are computed one at a time and without a copy;
                a gathered stack may then be a source itself. None: on devices of :attr:`one_by_one_on`.
            link: Where the shards lie on the host and another device computes.
            group: Ranks of the layout, which can send tensors of the device; None: the layout's own group.
        """
        self.layout, self.plan = layout, plan
        self.link, self._group = link, group or layout.group
        self.traffic = Traffic()
        self.device, self.dtype, self.wire = device, dtype, wire or WireFormat(dtype)
        self._zeros = torch.zeros(self.wire.block - 1, dtype=self.wire.joined, device=device)
        self.one_by_one = device.type in self.one_by_one_on if one_by_one is None else one_by_one
        self.indices = DeviceIndices(device)
        index_of = {shard: index for index, shard in enumerate(layout.mine)}
        self._plans = [
            plan_batch(layout, plan.owners, number, batch, index_of, device, self.wire.block)
            for number, batch in enumerate(() if layout.imagined else self._computed_batches())
        ]
        # Every rank decides alike: the collectives of the rest must come in the same order on all of them.
        stays = self.one_by_one and link is None
        in_place = [stays and self._lies_in_place(plan.batch) for plan in self._plans]
        self.batches = [plan for plan, lies_here in zip(self._plans, in_place, strict=True) if not lies_here]
        self.in_place = [
            plan for plan, lies_here in zip(self._plans, in_place, strict=True) if lies_here and plan.owned
        ]
        self.in_place_shards = frozenset(piece.shard for plan in self.in_place for piece in plan.local)

    def _computed_batches(self) -> Iterator[Batch]:
        for batch in self.plan.batches:
            # Slices are computed together with those of other ranks.
            alone = self.one_by_one and not batch.partners
            apart = [task for task in batch.tasks if alone and self._is_apart(task)]
            keys_apart = {task.key for task in apart}
            straddling = tuple(task for task in batch.tasks if task.key not in keys_apart)
            if straddling:
                # Straddling matrices come first, so that they travel while the others are computed.
                yield replace(batch, tasks=straddling)
            for task in apart:
                yield replace(batch, tasks=(task,))

    def _is_apart(self, task: MatrixTask) -> bool:
        """Whether a task is a batch of its own: where stacks are faster, only one that is stepped where it lies."""
        if self.device.type in self.one_by_one_on:
            return self._lies_whole(task)
        return self._lies_in_place(Batch(task.signature, (task,)))

    def _lies_whole(self, task: MatrixTask) -> bool:
        return all(set(self.layout.holders[part]) == {self.plan.owners[task.key]} for part in task.parts)

    def _lies_in_place(self, batch: Batch) -> bool:
        """Whether a batch is one matrix that its owner alone has, every part in one run; the same on every rank."""
        if len(batch.tasks) != 1 or batch.partners or not self._lies_whole(batch.tasks[0]):
            return False
        runs = (shards for part in batch.tasks[0].parts for shards in self.layout.holders[part].values())
        return all(len(parts) == 1 and parts[0].is_whole and parts[0].spread is None for parts in runs)

    @property
    def bytes_per_gather(self) -> int:
        """Bytes this rank sends to owners per step."""
        if self.layout.replicated:
            return 0
        record = self.wire.record * self.wire.dtype.itemsize
        return record * sum(sum(plan.outgoing.blocks) for plan in self._plans)

    def owned(self) -> list[MatrixTask]:
        """The tasks this rank owns, in batch order."""
        return [task for plan in self._plans for task in plan.owned]

    # --- one batch ----------------------------------------------------------------------------------------------

    def start_gather(
        self, plan: BatchPlan, sources: Sequence[Tensor | None], missing: frozenset[str] = frozenset()
    ) -> Gather:
        """Send this rank's pieces of a batch to the owners.

        Args:
            plan: One of :attr:`batches` or :attr:`in_place`.
            sources: Values of each local shard as it is stored; they must not change until the batch has been gathered.
                None for shards no task uses. None also, on all ranks, for parameters without a gradient where every
                rank has whole copies: a task without any gradient is left out of the step, and a part without one
                counts as zero.
            missing: Parameters that have no values on any rank, which all ranks know: zeros travel in their place.

        Raises:
            RuntimeError: A source is None that another rank waits for.
        """
        if self._is_in_place(plan, sources):
            source = sources[plan.local[0].shard]
            assert source is not None
            return Gather(source.view(1, -1), None, is_source=True)
        if self.link is None:
            return self._gather(plan, sources, missing)
        with self.link.upward():
            gather = self._gather(plan, self._brought(plan, sources), missing)
            gather.arrived = self.link.record()
        return gather

    def _gather(self, plan: BatchPlan, sources: Sequence[Tensor | None], missing: frozenset[str]) -> Gather:
        stack = torch.empty(len(plan.owned), plan.length, dtype=self.dtype, device=self.device)
        flat = stack.view(-1)
        _fill(flat, plan.local, [sources[piece.shard] for piece in plan.local])
        if not plan.gathers:
            return Gather(stack, None)
        outgoing = [[self._present(sources, piece, missing)] for piece in plan.outgoing.pieces]
        return Gather(stack, self._send(self.wire, outgoing, plan.outgoing, plan.incoming))

    def _brought(self, plan: BatchPlan, sources: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The sources of a batch on the device that computes."""
        assert self.link is not None
        there: list[Tensor | None] = [None] * len(sources)
        here = {piece.shard: sources[piece.shard] for piece in (*plan.local, *plan.outgoing.pieces)}
        present = {shard: source for shard, source in here.items() if source is not None}
        for shard, copy in zip(present, self.link.bring(list(present.values())), strict=True):
            there[shard] = copy
        return there

    def _is_in_place(self, plan: BatchPlan, sources: Sequence[Tensor | None]) -> bool:
        """Whether the stack would be a copy of one shard, and may be that shard."""
        if not self.one_by_one or self.link is not None or plan.gathers or len(plan.owned) != 1 or len(plan.local) != 1:
            return False
        source = sources[plan.local[0].shard]
        if source is None or source.dim() > 1:
            return False
        return source.numel() == plan.length and source.dtype == self.dtype

    def _present(self, sources: Sequence[Tensor | None], piece: PackedRun, missing: frozenset[str]) -> Tensor:
        source = sources[piece.shard]
        if source is None and self.layout.mine[piece.shard].key in missing:
            return torch.zeros(piece.numel, dtype=self.dtype, device=self.device)
        if source is None:
            raise RuntimeError(
                f"'{piece.task.key}' has no values on this rank; on several ranks a missing gradient must be passed as "
                "zeros, or the ranks would exchange messages of different sizes."
            )
        return source

    def finish_gather(self, plan: BatchPlan, gather: Gather) -> Tensor:
        """Wait for the pieces of others and return the stack, (owned, task length); it may be a source itself."""
        if self.link is not None:
            arriving = [] if gather.message is None else [gather.message.received]
            self.link.take(gather.arrived, [gather.stack, *arriving])
        if gather.message is not None:
            flat = gather.stack.view(-1)
            _fill(flat, plan.incoming.pieces, _pieces(gather.message.wait(), plan.incoming))
            gather.message = None  # frees its memory while the batch is computed
        return gather.stack

    def live_rows(
        self, plan: BatchPlan, sources: Sequence[Tensor | None], missing: frozenset[str] = frozenset()
    ) -> tuple[int, ...]:
        """Rows of the stack of which any part has values; see :meth:`start_gather` for the arguments."""
        if missing:
            return tuple(row for row, task in enumerate(plan.owned) if not missing.issuperset(task.parts))
        live = {piece.row for piece in plan.local if sources[piece.shard] is not None} | set(plan.incoming.rows)
        return tuple(sorted(live))

    def start_return(self, plan: BatchPlan, result: Tensor, reply: Reply) -> Return:
        """Send the results of a batch to the holders.

        Args:
            plan: The batch.
            result: (owned, result length), of the type of gathered matrices; ignored where this rank owns nothing.
            reply: What the holders get of the result.
        """
        if not plan.returns:
            return Return(plan, result, reply, None, self._computed())
        wire, to_holders, from_owners = self.wire.back(reply, plan.copied), plan.results_out, plan.results_in
        if plan.copied and wire.joined != self.dtype:
            # Other holders of the elements get rounded values; the owner must use them, too, or copies drift apart.
            result = result.to(wire.joined).to(self.dtype)
        if reply.whole is not None:
            outgoing = result.index_select(0, plan.result_rows).reshape(-1).to(wire.joined)
            sizes = (_times(reply.whole, side.row_counts) for side in (to_holders, from_owners))
            message = self._all_to_all(wire, outgoing, *sizes)
        else:
            flats = _separated(result, reply.values)
            parts = [[part for flat in flats for part in piece.parts(flat)] for piece in to_holders.pieces]
            if reply.values == 1:
                message = self._send(wire, parts, to_holders, from_owners)
            else:
                sizes = (_times(reply.values, side.counts) for side in (to_holders, from_owners))
                message = self._all_to_all(wire, self._pack(wire, list(chain.from_iterable(parts))), *sizes)
        return Return(plan, result, reply, message, self._computed())

    def _computed(self) -> torch.cuda.Event | None:
        return None if self.link is None else self.link.record()

    def finish_return(self, returning: Return, sources: Sequence[Tensor | None]) -> list[tuple[int, Tensor]]:
        """Wait for the results of others, given the sources that were gathered.

        Returns:
            For each local shard of the batch's tasks that has a source, what ``reply`` says of the result.
        """
        if self.link is None:
            return self._results(returning, sources)
        with self.link.downward(returning.computed):
            results = self._results(returning, sources)
            # Shards of a matrix may get one result whole, which comes once.
            places = [(values.data_ptr(), values.numel()) for _, values in results]
            different = {place: values for place, (_, values) in zip(places, results, strict=True)}
            copies = dict(zip(different, self.link.fetch(list(different.values())), strict=True))
        return [(shard, copies[place]) for place, (shard, _) in zip(places, results, strict=True)]

    def _results(self, returning: Return, sources: Sequence[Tensor | None]) -> list[tuple[int, Tensor]]:
        plan, result, reply = returning.plan, returning.result, returning.reply
        results: list[tuple[int, Tensor]] = []
        flats = _separated(result, reply.values) if reply.whole is None else []
        for piece in plan.local:
            if sources[piece.shard] is not None:
                values_of = [piece.read(flat) for flat in flats] or [result[piece.row]]
                results.append((piece.shard, values_of[0] if len(values_of) == 1 else torch.cat(values_of)))
        if returning.message is not None:
            received = returning.message.wait().to(self.dtype)
            if reply.whole is None and reply.values == 1:
                arrived = _pieces(received, plan.results_in)
            elif reply.whole is None:
                arrived = received.split(_times(reply.values, plan.results_in.numels))
            else:
                payloads = received.split(reply.whole)
                arrived = tuple(payloads[row] for row in plan.results_in.row_of)
            pieces = zip(plan.results_in.pieces, arrived, strict=True)
            results += [(piece.shard, values) for piece, values in pieces if sources[piece.shard] is not None]
        return results

    # --- messages -----------------------------------------------------------------------------------------------

    def _send(self, wire: WireFormat, pieces: Sequence[Sequence[Tensor]], there: Side, here: Side) -> _Message:
        """Send pieces, with one value for each of their elements."""
        sizes = there.counts, here.counts
        if wire.block > 1:
            pieces = [[*part, self._zeros[:pad]] if pad else part for part, pad in zip(pieces, there.pads, strict=True)]
            sizes = _times(wire.record, there.blocks), _times(wire.record, here.blocks)
        return self._all_to_all(wire, self._pack(wire, list(chain.from_iterable(pieces))), *sizes)

    def _pack(self, wire: WireFormat, values: Sequence[Tensor]) -> Tensor:
        if not values:
            return torch.empty(0, dtype=wire.joined, device=self.device)
        return torch.cat([value.to(wire.joined).reshape(-1) for value in values])

    def _all_to_all(self, wire: WireFormat, values: Tensor, sending: list[int], receiving: list[int]) -> _Message:
        sent = wire.write(values)
        self.traffic.count(sent)
        received = torch.empty(sum(receiving), dtype=wire.dtype, device=self.device)
        work = dist.all_to_all_single(received, sent, receiving, sending, group=self._group, async_op=True)
        assert work is not None
        return _Message(received, sent, work, wire)
