"""This module says where the kernels for CUDA run, and imports Triton only when a pass calls them."""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor

from rankwise.kernels.passes import Field, Pass, Tensors

__all__ = ["STEPS_ON_DEVICE", "is_available", "run", "squared_norms"]

STEPS_ON_DEVICE = True
"""Whether the number of a step may be a tensor on the device with an entry per shard."""


def is_available(device: torch.device, dtype: torch.dtype = torch.float32) -> bool:
    """Whether the kernels run: they need fp32, Triton, and compute capability 7.0 or later or a GPU of AMD's."""
    if device.type != "cuda" or dtype != torch.float32:
        return False
    if torch.version.hip is not None:
        return find_spec("triton") is not None
    return find_spec("triton") is not None and torch.cuda.get_device_capability(device) >= (7, 0)


def run(update: Pass) -> Tensor | None:
    """Do what :func:`rankwise.kernels.triton.steps.run` does; without gradients it does nothing."""
    from rankwise.kernels.triton import steps

    return steps.run(update) if update.grads else None


def squared_norms(tensors: Tensors, references: Field | None = None, k: float = 0.0) -> Tensor:
    """Return what :func:`rankwise.kernels.triton.steps.squared_norms` does; for no tensors, an empty result."""
    from rankwise.kernels.triton import steps

    if not tensors:
        return torch.empty(0, dtype=torch.float64, device="cpu")
    return steps.squared_norms(tensors, references, k)
