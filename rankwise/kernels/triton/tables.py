"""Small tables of integers lie on the device, are uploaded once without waiting, and serve every stream.

A graph must not read what is uploaded while it is captured, because the host's copy may be gone at a replay. In a
capture, kernels that have the integers as arguments write the tables of addresses, which belong to the graph. The long
tables of tiles must have been made before, and are never freed.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from rankwise.kernels import graphs

__all__ = ["KEPT_TABLES", "Row", "Table", "table_here", "table_of"]

# A step of MARS-M on 7 B parameters has 260 tables in turn; with fewer places than that none would be found again.
KEPT_TABLES = 2048

Row = tuple[int, ...]

_in_graphs: set[Table] = set()
"""Tables that a graph may read. They are never freed, because nobody says how long a graph lives."""


class Table:
    """A table of integers on a device.

    Args:
        values: The integers; a tensor of them must lie on the device, made on the current stream.
        device: Device of the table.

    Raises:
        RuntimeError: The stream is being captured: a replay would read host memory that may be gone by then.
    """

    def __init__(self, values: Row | Tensor, device: torch.device) -> None:
        graphs.refuse_capture(device, "a step on tensors of sizes that no earlier step has seen")
        self._ready: set[int] = set()
        self._uploaded: torch.cuda.Event | None = None
        self._table = values if isinstance(values, Tensor) else _uploaded(values, device)
        if device.type != "cuda":
            return
        stream = torch.cuda.current_stream(device)
        self._uploaded = torch.cuda.Event()
        self._uploaded.record(stream)
        self._ready.add(stream.cuda_stream)

    def here(self) -> Tensor:
        """Return the table for work on the current stream, which waits for the upload where it must."""
        if graphs.is_capturing(self._table.device):
            # A capture begins by waiting for the device, so that a captured stream has nothing to wait for.
            _in_graphs.add(self)
        elif self._uploaded is not None:
            stream = torch.cuda.current_stream(self._table.device)
            if stream.cuda_stream not in self._ready:
                stream.wait_event(self._uploaded)
                self._table.record_stream(stream)
                self._ready.add(stream.cuda_stream)
        return self._table


def _uploaded(values: Row, device: torch.device) -> Tensor:
    host = torch.tensor(values, dtype=torch.int64, device="cpu")
    if device.type != "cuda":
        return host.to(device)
    # Pinned memory may be dropped here: its allocator keeps it until the copy has been made.
    return host.pin_memory().to(device, non_blocking=True)


@lru_cache(maxsize=KEPT_TABLES)
def table_of(values: Row, device: torch.device) -> Table:
    """Return the table of these integers, kept from an earlier call if there was one."""
    return Table(values, device)


def table_here(values: Row, device: torch.device) -> Tensor:
    """Return a table of addresses for work on the current stream; in a capture, one that the graph itself writes."""
    if not graphs.is_capturing(device):
        return table_of(values, device).here()
    table = torch.zeros(len(values), dtype=torch.int64, device=device)
    if values:
        torch._foreach_add_(list(table.unbind()), list(values))
    return table
