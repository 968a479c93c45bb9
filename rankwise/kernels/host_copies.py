"""The host learns values of a device later, so that it does not wait where it asks for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["HostCopy"]


class HostCopy:
    """A copy in the host's memory, which is under way from the beginning.

    Args:
        values: Values on any device, which may be overwritten at once.

    Attributes:
        values: The copy, complete once :meth:`read` has returned.
        is_here: Whether the values were the host's, so that nobody has to wait.
    """

    def __init__(self, values: Tensor) -> None:
        device = values.device
        self.is_here = device.type == "cpu"
        pinned = device.type == "cuda"
        self.values = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=pinned)
        self.values.copy_(values, non_blocking=True)
        self._arrived: torch.Event | None = None
        # The meta device, whose values never arrive, has no events.
        if not self.is_here and not values.is_meta:
            self._arrived = torch.Event(device)
            self._arrived.record()

    def read(self) -> Any:
        """Wait until the values have arrived, and return them as Python numbers in lists as deep as the tensor."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self.values.tolist()
