"""This module loads the library of matrix products for processors with matrix tiles (Intel AMX)."""

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
    """Return the library; None where the processor has no tiles, the system lends none, or there is no compiler."""
    compiled = library(_SOURCE, _FLAGS)
    return compiled if compiled is not None and compiled.has_tiles() else None
