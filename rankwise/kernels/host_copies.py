"""Values of a device that the host learns later, without waiting for them when they are asked for."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["HostCopy"]


class HostCopy:
    """A copy in the host's memory, under way since it was made.

    Args:
        values: On any device; may be overwritten at once.

    Attributes:
        values: The copy; what it has to become, once :meth:`read` has returned.
        is_here: Whether nobody has to wait: the values were the host's.
    """

    def __init__(self, values: Tensor) -> None:
        device = values.device
        self.is_here = device.type == "cpu"
        pinned = device.type == "cuda"
        self.values = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=pinned)
        self.values.copy_(values, non_blocking=True)
        self._arrived: torch.Event | None = None
        # Tensors without memory, of which nothing arrives, know no events.
        if not self.is_here and not values.is_meta:
            self._arrived = torch.Event(device)
            self._arrived.record()

    def read(self) -> Any:
        """The values as Python's, in lists as deep as the tensor; waits until they have arrived."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self.values.tolist()
