"""STAND-IN: recipes of 8-bit training, which say what is kept and quantize nothing here."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any


class Format(enum.Enum):
    """Kinds of 8-bit numbers."""

    E4M3 = "e4m3"
    E5M2 = "e5m2"
    HYBRID = "hybrid"


class Recipe:
    """How tensors are scaled."""

    def delayed(self) -> bool:
        """Whether by the largest values of earlier steps."""
        return isinstance(self, DelayedScaling)


class DelayedScaling(Recipe):
    """Scales from a history of largest values, which is state of the module. Unknown settings are passed over."""

    def __init__(
        self,
        margin: int = 0,
        fp8_format: Format = Format.HYBRID,
        amax_history_len: int = 1024,
        amax_compute_algo: Any = "max",
        **_: Any,
    ) -> None:
        self.margin, self.fp8_format = margin, fp8_format
        self.amax_history_len, self.amax_compute_algo = amax_history_len, amax_compute_algo


@dataclass
class Float8CurrentScaling(Recipe):
    """Scales from the tensor itself: without state."""

    fp8_format: Format = Format.HYBRID
    fp8_dpa: bool = False


class MXFP8BlockScaling(Recipe):
    """A scale for each run of 32 numbers: without state."""


class Float8BlockScaling(Recipe):
    """A scale for each block: without state."""


class NVFP4BlockScaling(Recipe):
    """Four bits: without state."""
