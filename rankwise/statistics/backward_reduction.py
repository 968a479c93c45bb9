"""This module sums MKOR's statistics over ranks while the backward pass that produces them still runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from rankwise.comm.local_groups import local_group
from rankwise.comm.message_format import Traffic
from rankwise.statistics.window_sums import Record, clear

__all__ = ["BackwardReduction", "ReducedSums", "twin_group"]

# Vector elements per message: so many are worth a message, and few enough to be complete early.
BUCKET_ELEMENTS = 1 << 16

ReducedSums = tuple[Tensor, Tensor, Tensor]
"""Sums of one weight over all ranks: its inputs, its number of tokens ``(1,)``, and its output gradients."""


def twin_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Make another group of a group's ranks, with its timeout; every one of these ranks must call this.

    On ``group`` itself, a framework's collectives would meet MKOR's in an order that differs between ranks.
    """
    backend = group._get_backend(torch.accelerator.current_accelerator() or torch.device("cpu"))
    timeout = getattr(getattr(backend, "options", None), "_timeout", None)
    ranks = dist.get_process_group_ranks(group)
    return local_group(ranks, timeout=timeout)


@dataclass(eq=False)
class _Bucket:
    """Weights whose vectors travel in one message."""

    names: list[str]
    changes: list[int] = field(default_factory=list)
    sent: Tensor | None = None
    work: dist.Work | None = None
    sizes: list[int] = field(default_factory=list)

    def wait(self) -> list[Tensor]:
        assert self.sent is not None and self.work is not None
        self.work.wait()
        return list(self.sent.split(self.sizes))

    def forget(self) -> None:
        self.sent = self.work = None


class BackwardReduction:
    """All-reduces the sums of a model's weights in buckets, each as soon as the last micro-batch has filled it.

    Sums over micro-batches and over ranks commute, so vectors travel once per step, in its last micro-batch. All ranks
    send the same buckets in one order: a bucket that a rank's backward pass never fills (it has an unused layer) holds
    later buckets back until ``step()``. The last bucket always waits for ``step()`` and says whether the sums of a
    bucket have changed on any rank since it left: a weight was used more often than in earlier steps, or a backward
    pass was thrown away. Then all ranks send their present sums in one more message, which counts instead. Dropping
    sums therefore takes no message, on one rank or on all: the next ``take`` completes what has begun.

    Args:
        records: Records of the captured weights by name, in forward order; the names are equal on all ranks.
        group: Group that nobody else uses, from :func:`twin_group`.
        is_last: Whether the present backward pass is the last before the step.
        before: The reduction of an earlier capture on this group, whose messages may be under way.
    """

    def __init__(
        self,
        records: Mapping[str, Record],
        group: dist.ProcessGroup,
        is_last: Callable[[], bool],
        before: BackwardReduction | None = None,
    ) -> None:
        self.traffic = Traffic()
        self.group = group
        self._before = before
        self._records = dict(records)
        self._names = {record: name for name, record in records.items()}
        self._is_last = is_last
        double = any(record.sum_input.dtype == torch.float64 for record in records.values())
        self._dtype = torch.float64 if double else torch.float32
        self._buckets = [_Bucket(names) for names in _grouped(list(records)[::-1], self._records)]
        # A weight is complete after as many commits as in the busiest window so far. In the first, none leaves early.
        self._expected: dict[str, int] | None = None
        self._seen = dict.fromkeys(self._records, 0)
        self._next = 0
        self._taken = 0
        self._results: dict[str, ReducedSums] = {}
        self.failures: dict[str, float] = {}
        """Failed factor steps in a row of each weight, by the last window's report of its owner."""
        self.tokens: dict[str, float] = {}
        """Number of tokens of each weight in the last window, over all ranks."""

    @property
    def message_bytes(self) -> tuple[int, ...]:
        """Bytes of each all-reduce of a factor step."""
        sizes = [sum(_length(self._records[name]) for name in bucket.names) for bucket in self._buckets]
        sizes[-1] += 2 + len(self._records)
        return tuple(size * self._dtype.itemsize for size in sizes)

    # --- backward -----------------------------------------------------------------------------------------------

    def committed(self, record: Record) -> None:
        """Note that a weight has got the sums of a module call, and send the buckets that are complete."""
        name = self._names.get(record)
        if name is None or not self._is_last():
            return
        self._seen[name] += 1
        while self._expected is not None and self._next < len(self._buckets) - 1:
            expected, bucket = self._expected, self._buckets[self._next]
            if any(self._seen[other] < expected[other] for other in bucket.names):
                return
            self._send(bucket)

    def dropped(self, records: Iterable[Record]) -> None:
        """Note that sums were forgotten. Nothing is sent, because other ranks may not have forgotten theirs."""
        for record in records:
            if (name := self._names.get(record)) is not None:
                self._seen[name] = 0

    def _send(self, bucket: _Bucket, *extra: Tensor) -> None:
        with torch.no_grad():
            bucket.changes = self._changes(bucket)
            bucket.sizes, bucket.sent = self._packed([self._records[name] for name in bucket.names], extra)
        with record_function("rankwise: statistics"):
            bucket.work = self._all_reduce(bucket.sent)
        self._next += 1

    def _changes(self, bucket: _Bucket) -> list[int]:
        return [self._records[name].changes for name in bucket.names]

    def _packed(self, records: Sequence[Record], extra: Sequence[Tensor] = ()) -> tuple[list[int], Tensor]:
        """Copy inputs, tokens and outputs of each record, and ``extra``, to one vector; return the lengths and it."""
        parts: list[Tensor] = []
        for record in records:
            inputs, outputs = record.whole_sums()
            tokens = torch.full((1,), float(record.count), dtype=self._dtype, device=inputs.device)
            parts += [inputs, tokens, outputs]
        parts += extra
        packed = torch.cat([part.to(parts[0].device, self._dtype) for part in parts])
        return [part.numel() for part in parts], packed

    def _all_reduce(self, sent: Tensor) -> dist.Work:
        self.traffic.count(sent)
        work = dist.all_reduce(sent, group=self.group, async_op=True)
        assert work is not None
        return work

    # --- the end of a window ------------------------------------------------------------------------------------

    def take(self, names: Sequence[str], first: bool, failures: Callable[[str], Tensor | None]) -> list[ReducedSums]:
        """Return the sums of some weights over all ranks; a collective.

        Args:
            names: Weights of the present ``step()`` call.
            first: Whether it is the first call of the step, which completes all weights.
            failures: Failed factor steps in a row of a weight that this rank owns; None for others.

        Returns:
            The sums of each name.
        """
        if first or any(name not in self._results for name in names):
            self._finish(failures)
        return [self._results.pop(name) for name in names]

    def _finish(self, failures: Callable[[str], Tensor | None]) -> None:
        tail, self._results = self.complete(failures)
        weights = len(self._records)
        self.failures = dict(zip(self._records, tail[2 : 2 + weights], strict=True))
        self.tokens = dict(zip(self._records, tail[2 + weights :], strict=True))
        if tail[0]:
            self._send_anew()
            self.tokens = dict(zip(self._records, self._token_counts(self._results).tolist(), strict=True))
        clear(list(self._records.values()))
        if any(self._seen.values()):  # nothing was counted if the wrapper was met in this very step
            busiest = self._expected or self._seen
            self._expected = {name: max(count, self._seen[name]) for name, count in busiest.items()}
        self._seen = dict.fromkeys(self._records, 0)
        self._next = 0

    def complete(self, failures: Callable[[str], Tensor | None]) -> tuple[list[float], dict[str, ReducedSums]]:
        """Send the buckets that have not left, and wait for all of them; a collective."""
        if self._before is not None:
            before, self._before = self._before, None
            before.complete(lambda name: None)
        self._taken += 1
        changed = any(bucket.changes != self._changes(bucket) for bucket in self._buckets[: self._next])
        while self._next < len(self._buckets) - 1:
            self._send(self._buckets[self._next])
        device = next(iter(self._records.values())).sum_input.device
        stamps = torch.tensor([float(changed), float(self._taken)], dtype=self._dtype, device="cpu").to(device)
        zero = torch.zeros(1, dtype=self._dtype, device=device)
        counts = [zero if (count := failures(name)) is None else count.view(1) for name in self._records]
        self._send(self._buckets[-1], stamps, *counts)
        results: dict[str, ReducedSums] = {}
        for bucket in self._buckets:
            parts = bucket.wait()
            bucket.forget()
            for index, name in enumerate(bucket.names):
                results[name] = (parts[3 * index], parts[3 * index + 1], parts[3 * index + 2])
        # The one wait for the device of a factor step.
        tail: list[float] = torch.cat(
            [*parts[3 * len(self._buckets[-1].names) :], self._token_counts(results)]
        ).tolist()
        if tail[1] != self._taken * dist.get_world_size(self.group):
            raise RuntimeError(
                "MKOR: data-parallel ranks are at different steps of their statistics; one of them ran a step() that "
                "the others did not. Call it alike on every rank."
            )
        return tail, results

    def _token_counts(self, found: Mapping[str, ReducedSums]) -> Tensor:
        return torch.cat([found[name][1] for name in self._records])

    def _send_anew(self) -> None:
        """Send all sums as they are now, and take them in place of those that left earlier."""
        sizes, packed = self._packed(list(self._records.values()))
        self._all_reduce(packed).wait()
        pieces = packed.split(sizes)
        for index, name in enumerate(self._records):
            self._results[name] = (pieces[3 * index], pieces[3 * index + 1], pieces[3 * index + 2])

    def forget_results(self) -> None:
        """Drop results that nobody took in the step before."""
        self._results = {}


def _length(record: Record) -> int:
    return record.shape.in_features + record.shape.out_features + 1


def _grouped(names: Iterable[str], records: Mapping[str, Record]) -> list[list[str]]:
    """Group names in buckets of at least :data:`BUCKET_ELEMENTS`; the last one may have fewer."""
    buckets: list[list[str]] = [[]]
    size = 0
    for name in names:
        if size >= BUCKET_ELEMENTS:
            buckets.append([])
            size = 0
        buckets[-1].append(name)
        size += _length(records[name])
    return buckets
