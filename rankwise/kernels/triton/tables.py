"""Small tables of integers on the device: uploaded once, without waiting, and usable from any stream."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

__all__ = ["Row", "Table", "table_of"]

_KEPT_TABLES = 256

Row = tuple[int, ...]


class Table:
    """Integers on a device.

    Args:
        values: The integers.
        device: Where they are wanted.

    Raises:
        RuntimeError: If the stream is being captured: a replay would read host memory that may be gone by then.
    """

    def __init__(self, values: Row, device: torch.device) -> None:
        host = torch.tensor(values, dtype=torch.int64)
        self._ready: set[int] = set()
        self._uploaded: torch.cuda.Event | None = None
        if device.type != "cuda":
            self._table = host.to(device)
            return
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "a step on tensors that no earlier step has seen cannot be captured: take one step on the same "
                "weights, gradients and states before the capture, and keep the gradients' memory "
                "(zero_grad(set_to_none=False))"
            )
        stream = torch.cuda.current_stream(device)
        # The host's allocator keeps pinned memory until the copy has been made.
        self._table = host.pin_memory().to(device, non_blocking=True)
        self._uploaded = torch.cuda.Event()
        self._uploaded.record(stream)
        self._ready.add(stream.cuda_stream)

    def here(self) -> Tensor:
        """The table, for work on the current stream."""
        if self._uploaded is not None and not torch.cuda.is_current_stream_capturing():
            # Entering a capture waits for the device, so that a captured stream has nothing to wait for.
            stream = torch.cuda.current_stream(self._table.device)
            if stream.cuda_stream not in self._ready:
                stream.wait_event(self._uploaded)
                self._table.record_stream(stream)
                self._ready.add(stream.cuda_stream)
        return self._table


@lru_cache(maxsize=_KEPT_TABLES)
def table_of(values: Row, device: torch.device) -> Table:
    """The table of these integers, from the last time if it is still kept."""
    return Table(values, device)
