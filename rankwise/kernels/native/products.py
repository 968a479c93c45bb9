"""The library of matrix products for processors with tiles for them (Intel AMX)."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

from rankwise.kernels.native.building import library

__all__ = ["SIDE", "products"]

_SOURCE = Path(__file__).with_name("products.cpp")
_FLAGS: tuple[str, ...] = ()
SIDE = 32
"""Rows and columns of a block."""


@cache
def products() -> ctypes.CDLL | None:
    """The library; None where the processor has no tiles, the system lends none, or there is no compiler."""
    own = library(_SOURCE, _FLAGS)
    return own if own is not None and own.has_tiles() else None
