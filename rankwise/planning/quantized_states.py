"""Element states in 8 bits: where codes and exponents lie, and the way to the form that everybody reads and back.

Codes lie where a wider state's elements would, and the exponents of all runs behind them. A rule that keeps a state so
asks for both at every step. Whoever else asks, a checkpoint above all, finds it opened: in a type in which it has the
same values, and laid out as all states are. It may be changed then, or be replaced by what was saved, in any type: the
next step encodes it again. What nobody has changed keeps its values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rankwise.kernels.low_precision_runs import ROOT, SIGNED, LowPrecisionRuns, blocks_of
from rankwise.kernels.quantization import decode_, encode_

__all__ = ["OPENED", "QuantizedLayout", "QuantizedRun"]

OPENED = {SIGNED: torch.bfloat16, ROOT: torch.float32}
"""Types of the opened form, by that of the codes."""


class QuantizedRun(NamedTuple):
    """An entry's part of a state.

    Attributes:
        offset: Offset of its codes in the state.
        numel: Elements.
        first: Place of the first one in its parameter.
    """

    offset: int
    numel: int
    first: int


class QuantizedLayout:
    """Where codes and exponents of one state of one tensor lie.

    Args:
        dtype: Type of the codes.
        numel: Elements of the state, including those that are in no run.
        runs: The parts of the entries that keep the state.

    Attributes:
        exponents: Where the exponents of each run begin, by its offset.
        numel: Bytes of all together.
    """

    def __init__(self, dtype: torch.dtype, numel: int, runs: Sequence[QuantizedRun]) -> None:
        self.dtype, self._runs = dtype, runs
        self.exponents: dict[int, int] = {}
        self.numel = numel
        for run in runs:
            self.exponents[run.offset] = self.numel
            self.numel += blocks_of(run.first, run.numel)

    def fits(self, state: Tensor) -> bool:
        """Whether a state is of this form."""
        return state.dtype == self.dtype and state.dim() == 1 and state.numel() == self.numel

    def encoded(self, flat: Tensor) -> Tensor:
        """The coded form of a state of any floating-point type, rounded to the nearest."""
        kept = self.fresh(flat.device)
        encode_([flat[run.offset : run.offset + run.numel] for run in self._runs], self._narrow(kept))
        return kept

    def opened(self, kept: Tensor, shape: Sequence[int]) -> Tensor:
        """A new state of this shape with the values of a coded one."""
        found = torch.zeros(tuple(shape), dtype=OPENED[self.dtype], device=kept.device)
        flat = found.view(-1)
        decode_([flat[run.offset : run.offset + run.numel] for run in self._runs], self._narrow(kept))
        return found

    def fresh(self, device: torch.device) -> Tensor:
        """The coded form of a state of zeros."""
        return torch.zeros(self.numel, dtype=self.dtype, device=device)

    def _narrow(self, kept: Tensor) -> LowPrecisionRuns:
        signed, runs = kept.view(torch.int8), self._runs
        blocks = [slice(self.exponents[r.offset], self.exponents[r.offset] + blocks_of(r.first, r.numel)) for r in runs]
        return LowPrecisionRuns(
            [kept[run.offset : run.offset + run.numel] for run in runs],
            [signed[place] for place in blocks],
            [run.first for run in runs],
            [0] * len(runs),
        )
