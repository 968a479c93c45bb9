"""A norm above a clip is scaled down to it."""

from __future__ import annotations

from torch import Tensor

__all__ = ["clip_coefficient"]


def clip_coefficient(squared_norm: Tensor, clip: float) -> Tensor:
    """``min(1, clip / norm)``: 1 for a zero norm, NaN for a norm that is NaN."""
    return clip / squared_norm.sqrt().clamp(min=clip)
