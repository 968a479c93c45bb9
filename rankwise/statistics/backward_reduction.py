"""MKOR's statistics summed over ranks while the backward pass that produces them still runs."""

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

# Vector elements per message: enough to be worth a message, few enough to leave early.
BUCKET_ELEMENTS = 1 << 16

ReducedSums = tuple[Tensor, Tensor, Tensor]
"""Sums of one weight over all ranks: of the inputs, of tokens ``(1,)``, and of the output gradients."""


def twin_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Another group of the same ranks, with the same timeout; all of them must call this.

    A framework's own collectives on ``group`` would meet ours in an order that differs between ranks.
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

    Sums over micro-batches and over ranks commute, so vectors travel once per step, in its last micro-batch. Every
    rank sends the same buckets in the same order, whatever it has by then: what a rank's backward pass never fills
    (an unused layer) holds its later buckets back until ``step()``. The last bucket always waits for ``step()`` and
    tells whether the sums of a bucket have changed on any rank since it left: a weight was used more often than in
    earlier steps, or a backward pass was thrown away. Then all ranks send their present sums in one more message, and
    those count. So dropping sums takes no message, on one rank or on all: the next ``take`` completes what has begun.

    Args:
        records: The captured weights by name, in forward order; the same on every rank.
        group: Used by nobody else, see `twin_group`.
        is_last: Whether the present backward pass is the last before the step.
        before: What was used before on the same group, after another capture.
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
        # Commits per window that complete a weight: as many as in the busiest one so far. Nothing leaves early before.
        self._expected: dict[str, int] | None = None
        self._seen = dict.fromkeys(self._records, 0)
        self._next = 0
        self._taken = 0
        self._results: dict[str, ReducedSums] = {}
        self.failures: dict[str, float] = {}
        """Failed factor steps in a row by weight, as told by their owners in the last window."""
        self.tokens: dict[str, float] = {}
        """Their numbers in the last window by weight, over all ranks."""

    @property
    def message_bytes(self) -> tuple[int, ...]:
        """Bytes of each all-reduce of a factor step."""
        sizes = [sum(_length(self._records[name]) for name in bucket.names) for bucket in self._buckets]
        sizes[-1] += 2 + len(self._records)
        return tuple(size * self._dtype.itemsize for size in sizes)

    # --- backward -----------------------------------------------------------------------------------------------

    def committed(self, record: Record) -> None:
        """A weight has got the sums of a module call; send what is complete."""
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
        """Sums were forgotten. Sends nothing: other ranks may know nothing of it."""
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
        """Copies of the inputs, tokens and outputs of each, and what else."""
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
        """Sums over all ranks, of some weights; every rank must call this alike.

        Args:
            names: The weights of the present ``step()`` call.
            first: Whether it is the first call of the step, which completes all weights.
            failures: Failed factor steps in a row of a weight this rank owns, else None.

        Returns:
            One result per name.
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
        if any(self._seen.values()):  # none where the wrapper has been found in this step
            busiest = self._expected or self._seen
            self._expected = {name: max(count, self._seen[name]) for name, count in busiest.items()}
        self._seen = dict.fromkeys(self._records, 0)
        self._next = 0

    def complete(self, failures: Callable[[str], Tensor | None]) -> tuple[list[float], dict[str, ReducedSums]]:
        """Send what has not left; wait for everything. Every rank must call this alike."""
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
        found: dict[str, ReducedSums] = {}
        for bucket in self._buckets:
            parts = bucket.wait()
            bucket.forget()
            for index, name in enumerate(bucket.names):
                found[name] = (parts[3 * index], parts[3 * index + 1], parts[3 * index + 2])
        # The one wait for the device of a factor step.
        tail: list[float] = torch.cat([*parts[3 * len(self._buckets[-1].names) :], self._token_counts(found)]).tolist()
        if tail[1] != self._taken * dist.get_world_size(self.group):
            raise RuntimeError(
                "MKOR: data-parallel ranks are at different steps of their statistics; one of them ran a step() that "
                "the others did not. Call it alike on every rank."
            )
        return tail, found

    def _token_counts(self, found: Mapping[str, ReducedSums]) -> Tensor:
        return torch.cat([found[name][1] for name in self._records])

    def _send_anew(self) -> None:
        """All sums as they are now, in place of those that left earlier."""
        sizes, packed = self._packed(list(self._records.values()))
        self._all_reduce(packed).wait()
        pieces = packed.split(sizes)
        for index, name in enumerate(self._records):
            self._results[name] = (pieces[3 * index], pieces[3 * index + 1], pieces[3 * index + 2])

    def forget_results(self) -> None:
        """Drop what nobody has taken in the step before."""
        self._results = {}


def _length(record: Record) -> int:
    return record.shape.in_features + record.shape.out_features + 1


def _grouped(names: Iterable[str], records: Mapping[str, Record]) -> list[list[str]]:
    """Names in buckets of at least `BUCKET_ELEMENTS`, but for the last."""
    found: list[list[str]] = [[]]
    size = 0
    for name in names:
        if size >= BUCKET_ELEMENTS:
            found.append([])
            size = 0
        found[-1].append(name)
        size += _length(records[name])
    return found
