"""STAND-IN: names of the operations of which fused sequences are made; none is to be called."""

from __future__ import annotations

from typing import Any

from torch import nn


class FusibleOperation(nn.Module):
    """What a fused sequence consists of."""


class Sequential(nn.Sequential):
    """A fused sequence."""


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (FusibleOperation,), {})
