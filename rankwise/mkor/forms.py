"""The forms of MKOR's products and factor updates, chosen by device and type."""

from __future__ import annotations

from collections.abc import Callable

import torch

from rankwise.kernels import native
from rankwise.kernels.forms import kernels_for
from rankwise.mkor import blocked
from rankwise.mkor import native as compiled

__all__ = ["precondition_into_for"]


def precondition_into_for(device: torch.device, dtype: torch.dtype) -> Callable[..., None]:
    """:func:`rankwise.mkor.blocked.precondition_into`, or a form of it for what it runs on.

    Args:
        device: A CPU.
        dtype: The type of the gradients.
    """
    return (compiled if kernels_for(device, dtype) is native else blocked).precondition_into
