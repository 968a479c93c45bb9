"""The forms of SONew's pass over runs, chosen by device and type."""

from __future__ import annotations

from collections.abc import Callable

import torch

from rankwise.kernels import native, triton
from rankwise.kernels.dispatch import is_for_cpus, kernels_for
from rankwise.sonew import blocked
from rankwise.sonew import native as compiled

__all__ = ["directions_for"]


def directions_for(device: torch.device, dtype: torch.dtype) -> Callable[..., torch.Tensor] | None:
    """SONew's pass over runs, in the form of :func:`rankwise.sonew.blocked.sonew_directions`.

    Args:
        device: Where the tensors lie.
        dtype: Their type.

    Returns:
        None where there is no such pass.
    """
    chosen = kernels_for(device, dtype)
    if is_for_cpus(chosen):
        return (compiled if chosen is native else blocked).sonew_directions
    if chosen is not triton:
        return None
    from rankwise.sonew.cuda import sonew_directions

    return sonew_directions
