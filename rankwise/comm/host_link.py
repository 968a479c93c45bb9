"""Copies between the host's memory, where offloaded weights and states stay, and the device that multiplies matrices.

On CUDA each way has a stream of its own, so that the next batch comes and the last one goes while one is computed, and
the host's end of every copy is pinned. Memory is that of torch's caching allocators: what is under way at a time is a
batch that arrives, one that is computed and one that leaves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

__all__ = ["HostLink"]

_ALIGNMENT = 16
"""Bytes; kernels load as many at a time."""


def _memory(size: int, device: torch.device) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, device=device)


def _host_memory(size: int, pinned: bool) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=pinned)


class HostLink:
    """Brings tensors of the host to a device and fetches results.

    Args:
        device: The device; the host itself stands in for one in tests.

    Attributes:
        device: The device.
        bytes_up: Bytes that have gone to the device.
        bytes_down: Bytes that have come from the device.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.bytes_up = self.bytes_down = 0
        self._streams: list[torch.cuda.Stream] = []

    @property
    def _has_streams(self) -> bool:
        return self.device.type == "cuda"

    def _stream(self, way: int) -> torch.cuda.Stream:
        if not self._streams:
            self._streams = [torch.cuda.Stream(self.device), torch.cuda.Stream(self.device)]
        return self._streams[way]

    @contextmanager
    def upward(self) -> Iterator[None]:
        """Issue what follows on the stream of what arrives; it waits for nothing that is computed."""
        if not self._has_streams:
            yield
            return
        with torch.cuda.stream(self._stream(0)):
            yield

    @contextmanager
    def downward(self, after: torch.cuda.Event | None) -> Iterator[None]:
        """Issue what follows on the stream of what leaves, after an event."""
        if after is None:
            yield
            return
        stream = self._stream(1)
        stream.wait_event(after)
        with torch.cuda.stream(stream):
            yield

    def record(self) -> torch.cuda.Event | None:
        """Mark what the present stream has been given; None where there are no streams."""
        if not self._has_streams:
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event

    def take(self, after: torch.cuda.Event | None, tensors: Iterable[Tensor]) -> None:
        """Let the present stream use what has arrived by an event."""
        if after is None:
            return
        stream = torch.cuda.current_stream(self.device)
        stream.wait_event(after)
        for tensor in tensors:
            # Its memory is of the other stream, which must not give it away before this one has done with it.
            tensor.record_stream(stream)

    def bring(self, tensors: Sequence[Tensor], alignment: int = _ALIGNMENT) -> list[Tensor]:
        """Copies of the host's tensors on the device, inside :meth:`upward`.

        Args:
            tensors: Tensors of any types and strides.
            alignment: Bytes of which each copy begins at a multiple; with 1 they lie end to end.
        """
        offsets, size = _places(tensors, alignment)
        memory = _memory(size, self.device)
        staging = _host_memory(size, True) if self._has_streams else memory
        copies = []
        for tensor, offset in zip(tensors, offsets, strict=True):
            _part(staging, offset, tensor).copy_(tensor)
            copies.append(_part(memory, offset, tensor))
            self.bytes_up += tensor.nbytes
        if staging is not memory:
            memory.copy_(staging, non_blocking=True)
        return copies

    def fetch(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Copies of the device's tensors on the host, inside :meth:`downward`; waits until they are there."""
        offsets, size = _places(tensors, _ALIGNMENT)
        memory = _host_memory(size, self._has_streams)
        copies = []
        for tensor, offset in zip(tensors, offsets, strict=True):
            copies.append(_part(memory, offset, tensor).copy_(tensor, non_blocking=True))
            self.bytes_down += tensor.nbytes
        arrived = self.record()
        if arrived is not None:
            arrived.synchronize()
        return copies


def _places(tensors: Sequence[Tensor], alignment: int) -> tuple[list[int], int]:
    offsets, end = [], 0
    for tensor in tensors:
        offsets.append(-(-end // alignment) * alignment)
        end = offsets[-1] + tensor.nbytes
    return offsets, end


def _part(memory: Tensor, offset: int, like: Tensor) -> Tensor:
    return memory[offset : offset + like.nbytes].view(like.dtype).view(like.shape)
