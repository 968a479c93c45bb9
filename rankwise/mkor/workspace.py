"""Memory for what comes in between while MKOR preconditions one gradient after another."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from rankwise.plan.notes import Note

__all__ = ["SPACE", "Workspace"]


class Workspace:
    """Buffers of the host, made once to serve matrix after matrix: fresh memory costs a page fault every few KiB."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype], Tensor] = {}

    def take(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A buffer of this shape, with whatever is in it; the one taken before by this name and type is given up.

        Args:
            name: What for. Only buffers of different names, or types, are in use at once.
            shape: Its shape; contiguous.
            dtype: Its type.
        """
        numel = math.prod(shape)
        buffer = self._buffers.get((name, dtype))
        if buffer is None or buffer.numel() < numel:
            buffer = self._buffers[name, dtype] = torch.empty(numel, dtype=dtype, device="cpu")
        return buffer[:numel].view(*shape)


SPACE: Note[Workspace] = Note("what a unit's matrices are preconditioned in")
