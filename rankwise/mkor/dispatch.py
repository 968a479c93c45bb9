"""This module chooses the forms of MKOR's products and factor updates, by device and type."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor

from rankwise.kernels import triton
from rankwise.kernels.dispatch import is_for_cpus, kernels_for
from rankwise.mkor import cpu
from rankwise.mkor import native as compiled

__all__ = ["factor_update_for", "precondition_into_for", "together_for"]


def precondition_into_for(device: torch.device, dtype: torch.dtype) -> Callable[..., None] | None:
    """Return what preconditions one gradient, :func:`rankwise.mkor.cpu.precondition_into` or a form of it.

    Args:
        device: Where the gradients lie.
        dtype: Type of the gradients.

    Returns:
        The function; None where reading a norm would make the host wait, and matrices are preconditioned in stacks.
    """
    return compiled.precondition_into if is_for_cpus(kernels_for(device, dtype)) else None


def factor_update_for(device: torch.device, dtype: torch.dtype, factor: torch.dtype) -> Callable[..., Tensor] | None:
    """Return what updates dense factors in place, :func:`rankwise.mkor.cpu.update_factors_` or a form of it.

    Args:
        device: Where the factors lie.
        dtype: Type of the vectors.
        factor: Type of the factors.

    Returns:
        The function; None where only the pure functions are left.
    """
    chosen = kernels_for(device, dtype)
    if is_for_cpus(chosen):
        return cpu.update_factors_
    if chosen is not triton or factor == torch.float64:
        return None
    from rankwise.mkor.cuda.factor_updates import update_factors_

    return update_factors_


def together_for(device: torch.device, dtype: torch.dtype, product: torch.dtype) -> ModuleType | None:
    """Return :mod:`rankwise.mkor.cuda.preconditioning_together`, or None where it takes no such gradients.

    Args:
        device: Where the gradients lie.
        dtype: Type of the gradients.
        product: Type of the products.
    """
    if kernels_for(device, dtype) is not triton:
        return None
    from rankwise.mkor.cuda import preconditioning_together

    return preconditioning_together if preconditioning_together.takes(dtype, product) else None
