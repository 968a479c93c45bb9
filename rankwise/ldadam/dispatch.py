"""The forms of LDAdam's steps, on whole matrices and on shards, chosen by device and type."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from rankwise.kernels import triton
from rankwise.kernels.dispatch import kernels_for
from rankwise.kernels.product_types import multiplies_bfloat16
from rankwise.ldadam import rule
from rankwise.ldadam.in_place import StepsInPlace

__all__ = ["Moments", "computes_stacks", "moments_for", "shards_step_for", "steps_in_place_for"]

Moments = Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
"""A form of :func:`rankwise.ldadam.rule.low_rank_moments`."""


def shards_step_for(device: torch.device, dtype: torch.dtype) -> Callable[..., None] | None:
    """LDAdam's step on the shards of many matrices at once, or None where there is no such form.

    Args:
        device: Device of the tensors.
        dtype: Type of the tensors.

    Returns:
        As :func:`rankwise.ldadam.cuda.low_rank_step.low_rank_step_`.
    """
    if kernels_for(device, dtype) is not triton:
        return None
    from rankwise.ldadam.cuda.low_rank_step import low_rank_step_

    return partial(low_rank_step_, precision=_precision(device))


def moments_for(device: torch.device, dtype: torch.dtype) -> Moments:
    """:func:`rankwise.ldadam.rule.low_rank_moments`, or its form in one launch.

    Args:
        device: Device of the tensors.
        dtype: Type of the tensors.
    """
    if kernels_for(device, dtype) is not triton:
        return rule.low_rank_moments
    from rankwise.ldadam.cuda.low_rank_moments import low_rank_moments

    return partial(low_rank_moments, precision=_precision(device))


def steps_in_place_for(device: torch.device, dtype: torch.dtype) -> StepsInPlace | None:
    """What steps many whole matrices where they lie, or None where there is no such form.

    Args:
        device: Device of the tensors.
        dtype: Type of the tensors.
    """
    if kernels_for(device, dtype) is not triton:
        return None
    from rankwise.ldadam.cuda.grouped_matrices import ldadam_matrices_, takes_matrices

    return StepsInPlace(takes_matrices, partial(ldadam_matrices_, precision=_precision(device)))


def computes_stacks(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether matrices are computed in stacks. On CPUs products of stacks are slower, and round otherwise.

    Args:
        device: Device of the matrices.
        dtype: Type of the matrices.
    """
    return device.type != "cpu" or kernels_for(device, dtype) is triton


def _precision(device: torch.device) -> str:
    """How float32 is multiplied: in halves where bfloat16 is fast, and in Triton's interpreter, which shows it."""
    return "bf16x3" if device.type == "cpu" or multiplies_bfloat16(device) else "ieee"
