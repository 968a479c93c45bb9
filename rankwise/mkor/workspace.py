"""A workspace is memory for temporaries while MKOR preconditions one gradient after another."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from rankwise.plan.notes import Note

__all__ = ["SPACE", "Workspace"]


class Workspace:
    """Buffers of the host that serve one matrix after another, as fresh memory costs a page fault every few KiB."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype], Tensor] = {}

    def take(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return an uninitialized buffer; the last one of this name and type must not be used any more.

        Args:
            name: Purpose of the buffer. Buffers that are in use at once differ in name or type.
            shape: Shape of the buffer, which is contiguous.
            dtype: Type of the buffer.
        """
        numel = math.prod(shape)
        buffer = self._buffers.get((name, dtype))
        if buffer is None or buffer.numel() < numel:
            buffer = self._buffers[name, dtype] = torch.empty(numel, dtype=dtype, device="cpu")
        return buffer[:numel].view(*shape)


SPACE: Note[Workspace] = Note("what a unit's matrices are preconditioned in")
