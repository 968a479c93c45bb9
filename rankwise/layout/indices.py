"""Index tensors on a device, kept from step to step."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor

__all__ = ["DeviceIndices"]

_KEPT = 16


class DeviceIndices:
    """Index tensors by their values: copying one to the device anew would stall the host at every step.

    Only the last few are kept, because the set of parameters with gradients may be another one at every step.
    """

    def __init__(self, device: torch.device, kept: int = _KEPT) -> None:
        self.device, self._kept = device, kept
        self._recent: OrderedDict[tuple[int, ...], Tensor] = OrderedDict()
        # A CUDA graph reads its tensors at every replay, and may live as long as the process.
        self._in_graphs: dict[tuple[int, ...], Tensor] = {}

    def __len__(self) -> int:
        return len(self._recent.keys() | self._in_graphs.keys())

    def __contains__(self, positions: tuple[int, ...]) -> bool:
        return positions in self._recent or positions in self._in_graphs

    def of(self, positions: tuple[int, ...]) -> Tensor:
        """Return the positions as a tensor on the device, (n,) int64."""
        index = self._recent.pop(positions, None)
        if index is None:
            index = self._in_graphs.get(positions)
        if index is None:
            index = torch.tensor(positions, dtype=torch.long, device=self.device)
        self._recent[positions] = index
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            self._in_graphs[positions] = index
        while len(self._recent) > self._kept:
            self._recent.popitem(last=False)
        return index
