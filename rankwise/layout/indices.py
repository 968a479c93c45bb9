"""Lists of indices on a device, kept from step to step."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor

__all__ = ["DeviceIndices"]

_KEPT = 16


class DeviceIndices:
    """Index tensors by their values: copying one to the device anew would stall the host at every step.

    The last few are kept. Where the set of parameters with gradients is another one at every step they would be as many
    as there are steps.

    Args:
        device: Where they are wanted.
        kept: How many of them.
    """

    def __init__(self, device: torch.device, kept: int = _KEPT) -> None:
        self.device, self._kept = device, kept
        self._recent: OrderedDict[tuple[int, ...], Tensor] = OrderedDict()
        # A graph reads them at every replay; how long it lives is not known here.
        self._in_graphs: dict[tuple[int, ...], Tensor] = {}

    def __len__(self) -> int:
        return len(self._recent.keys() | self._in_graphs.keys())

    def __contains__(self, positions: tuple[int, ...]) -> bool:
        return positions in self._recent or positions in self._in_graphs

    def of(self, positions: tuple[int, ...]) -> Tensor:
        """The positions as (n,) int64 on the device."""
        found = self._recent.pop(positions, None)
        if found is None:
            found = self._in_graphs.get(positions)
        if found is None:
            found = torch.tensor(positions, dtype=torch.long, device=self.device)
        self._recent[positions] = found
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            self._in_graphs[positions] = found
        while len(self._recent) > self._kept:
            self._recent.popitem(last=False)
        return found
