"""This module chooses SONew's pass over runs, by device and type."""

from __future__ import annotations

from collections.abc import Callable

import torch

from rankwise.kernels import native, triton
from rankwise.kernels.dispatch import kernels_for
from rankwise.sonew import native as compiled

__all__ = ["directions_for"]


def directions_for(device: torch.device, dtype: torch.dtype, band: int) -> Callable[..., torch.Tensor] | None:
    """Return SONew's pass over runs, :func:`rankwise.sonew.native.sonew_directions` or its form for CUDA.

    Args:
        device: Where the tensors lie.
        dtype: Type of the tensors.
        band: Neighbours on each side.

    Returns:
        The pass; None where only :func:`rankwise.sonew.windows.windowed_directions` works.
    """
    chosen = kernels_for(device, dtype)
    if chosen is native:
        return compiled.sonew_directions if compiled.takes(dtype, band) else None
    if chosen is not triton:
        return None
    from rankwise.sonew.cuda import sonew_directions

    return sonew_directions
