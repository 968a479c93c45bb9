"""States in fewer than 32 bits are runs of codes in memory; this module describes what reading and writing them takes.

A *code* is what is kept of one element; :mod:`rankwise.kernels.quantization` defines codes. Elements, and the blocks
of :data:`BLOCK` elements that share an exponent, count from the beginning of their parameter. How a parameter is cut
into runs therefore changes no bit of what is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["BFLOAT16", "BLOCK", "ROOT", "SIGNED", "LowPrecisionRuns", "blocks_of", "is_coded", "is_narrow"]

BLOCK = 64
"""Elements that share an exponent."""

SIGNED = torch.int8
"""Type of the codes of values of either sign."""

ROOT = torch.uint8
"""Type of the codes of second moments, through their roots."""

BFLOAT16 = torch.bfloat16


def is_coded(dtype: torch.dtype | None) -> bool:
    """Whether a state of this type has exponents beside its codes."""
    return dtype in (SIGNED, ROOT)


def is_narrow(dtype: torch.dtype | None) -> bool:
    """Whether a state of this type is kept in fewer bits than it is computed in, and a pass opens and keeps it."""
    return dtype == BFLOAT16 or is_coded(dtype)


def blocks_of(first: int, numel: int) -> int:
    """Return in how many blocks ``numel`` elements lie, of which the first is element ``first`` of its parameter."""
    return (first + numel - 1) // BLOCK - first // BLOCK + 1 if numel else 0


@dataclass(frozen=True, slots=True)
class LowPrecisionRuns:
    """The codes of some runs of one state, which take the place of a list of tensors in a pass.

    Attributes:
        codes: Codes of each run, 1-D and contiguous: bfloat16 values, or :data:`SIGNED` or :data:`ROOT` codes.
        exponents: Exponents of each run, int8, one for every block that it lies in; empty where codes are bfloat16.
        firsts: Place of each run's first element in its parameter.
        keys: 32 bits for each run, which give its parameter and state their own noise in stochastic rounding.
        step: Number of the step, which makes rounding stochastic: one for all runs, or (runs,) on the device. None
            rounds to the nearest, halves to even.
        loose: For each run, fp32 memory for the new values of its first and of its last elements whose blocks other
            runs have in common with it, or None; a pass that takes such runs encodes the rest. Empty: all is encoded.
    """

    codes: Sequence[Tensor]
    exponents: Sequence[Tensor]
    firsts: Sequence[int]
    keys: Sequence[int]
    step: int | Tensor | None = None
    loose: Sequence[tuple[Tensor | None, Tensor | None]] = ()

    def __len__(self) -> int:
        return len(self.codes)

    @property
    def dtype(self) -> torch.dtype:
        """Type of the codes; there must be a run."""
        return self.codes[0].dtype

    def only(self, places: Sequence[int]) -> LowPrecisionRuns:
        """Return some of the runs, by their places."""
        step = self.step
        if isinstance(step, Tensor) and step.dim():
            step = torch.stack([step[place] for place in places])
        exponents = [self.exponents[place] for place in places] if self.exponents else ()
        return LowPrecisionRuns(
            [self.codes[place] for place in places],
            exponents,
            [self.firsts[place] for place in places],
            [self.keys[place] for place in places],
            step,
            [self.loose[place] for place in places] if self.loose else (),
        )

    def check(self, values: Sequence[Tensor]) -> None:
        """Refuse values that do not fit, because compiled forms would read and write beyond them.

        Raises:
            ValueError: A run has another length than its values, or not one exponent for each of its blocks.
        """
        for at, (value, codes) in enumerate(zip(values, self.codes, strict=True)):
            blocks = blocks_of(self.firsts[at], codes.numel()) if is_coded(codes.dtype) else 0
            exponents = self.exponents[at].numel() if self.exponents else 0
            if codes.numel() != value.numel() or exponents != blocks or not is_narrow(codes.dtype):
                raise ValueError(
                    f"run {at} has {value.numel()} values for {codes.numel()} codes of {codes.dtype} with {exponents} "
                    f"exponents; it must have a code for each and {blocks} exponents"
                )
