"""SONew's pass over runs of parameters needs their places in their chains, and their neighbours."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

__all__ = ["ChainRun", "Margins"]


class ChainRun(NamedTuple):
    """Where a run lies in its parameter.

    Attributes:
        start: Flat index of its first element.
        chain: Length of the chains, one of which starts at every multiple of it; None: the parameter is one chain.
    """

    start: int
    chain: int | None


class Margins(NamedTuple):
    """Neighbours of a run, each (3 + band, band): gradient, momentum, diagonal, edges by distance; 0 beyond the end."""

    left: Tensor
    right: Tensor
