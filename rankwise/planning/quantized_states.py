"""Element states in 8 bits: where the bytes of each entry lie, and the way to the form that everybody reads and back.

A rule that keeps a state so asks for its bytes at every step. Whoever else asks, a checkpoint above all, finds it
opened: in bfloat16, in which it has the same values, and laid out as all states are. It may be changed then, or be
replaced by what was saved, in any type: the next step quantizes it again. What nobody has changed keeps its bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rankwise.kernels.quantization import QUANTIZED, dequantized, quantize_, quantized_length

__all__ = ["OPENED", "ByteLayout", "StateRun"]

OPENED = torch.bfloat16
"""Type of the opened form."""


class StateRun(NamedTuple):
    """An entry's part of a state.

    Attributes:
        first: Where it begins in the flat state.
        numel: Elements.
    """

    first: int
    numel: int


class ByteLayout:
    """Where the bytes of one state of one tensor lie: entry by entry, each quantized for itself.

    Args:
        runs: The parts of the entries that keep the state, in order.

    Attributes:
        numel: Bytes of all together.
    """

    def __init__(self, runs: Sequence[StateRun]) -> None:
        self._runs = runs
        self._firsts: dict[int, int] = {}
        self.numel = 0
        for run in runs:
            self._firsts[run.first] = self.numel
            self.numel += quantized_length(run.numel)

    def fits(self, state: Tensor) -> bool:
        """Whether a state is of this form."""
        return state.dtype == QUANTIZED and state.numel() == self.numel

    def of(self, kept: Tensor, run: StateRun) -> Tensor:
        """The bytes of an entry, a view."""
        first = self._firsts[run.first]
        return kept[first : first + quantized_length(run.numel)]

    def quantized(self, flat: Tensor) -> Tensor:
        """The bytes of a state of any floating-point type."""
        kept = self.fresh(flat.device)
        quantize_(
            [flat[run.first : run.first + run.numel] for run in self._runs], [self.of(kept, r) for r in self._runs]
        )
        return kept

    def opened(self, kept: Tensor, shape: Sequence[int]) -> Tensor:
        """A new state of this shape with the values of the bytes."""
        found = torch.zeros(tuple(shape), dtype=OPENED, device=kept.device)
        flat = found.view(-1)
        for run in self._runs:
            flat[run.first : run.first + run.numel].copy_(dequantized(self.of(kept, run), run.numel, OPENED))
        return found

    def fresh(self, device: torch.device) -> Tensor:
        """The bytes of a state of zeros."""
        return torch.zeros(self.numel, dtype=QUANTIZED, device=device)
