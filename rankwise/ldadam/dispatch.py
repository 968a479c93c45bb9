"""The forms of LDAdam's steps, on whole matrices and on shards, chosen by device and type."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from rankwise.kernels import triton
from rankwise.kernels.dispatch import kernels_for
from rankwise.ldadam import rule
from rankwise.ldadam.in_place import StepsInPlace

__all__ = ["Moments", "computes_stacks", "moments_for", "shards_step_for", "steps_in_place_for"]

Moments = Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
"""A form of :func:`rankwise.ldadam.rule.low_rank_moments`."""


def shards_step_for(device: torch.device, dtype: torch.dtype) -> Callable[..., None] | None:
    """LDAdam's step on the shards of many matrices at once, or None where there is no such form.

    Returns:
        As :func:`rankwise.ldadam.cuda.low_rank_step.low_rank_step_`.
    """
    if kernels_for(device, dtype) is not triton:
        return None
    from rankwise.ldadam.cuda.low_rank_step import low_rank_step_

    return low_rank_step_


def moments_for(device: torch.device, dtype: torch.dtype) -> Moments:
    """:func:`rankwise.ldadam.rule.low_rank_moments`, or its form in one launch."""
    if kernels_for(device, dtype) is not triton:
        return rule.low_rank_moments
    from rankwise.ldadam.cuda.low_rank_moments import low_rank_moments

    return partial(low_rank_moments, precision=_precision(device))


def steps_in_place_for(device: torch.device, dtype: torch.dtype) -> StepsInPlace | None:
    """What steps many whole matrices where they lie, or None where there is no such form."""
    if kernels_for(device, dtype) is not triton:
        return None
    from rankwise.ldadam.cuda.grouped_matrices import ldadam_matrices_, takes_matrices

    return StepsInPlace(takes_matrices, partial(ldadam_matrices_, precision=_precision(device)))


def computes_stacks(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether matrices are computed in stacks. On CPUs products of stacks are slower, and round otherwise."""
    return device.type != "cpu" or kernels_for(device, dtype) is triton


def _precision(device: torch.device) -> str:
    """Triton's name for how tensor cores multiply float32: in three TF32 products on NVIDIA's since 8.0."""
    cuda = device.type == "cuda" and torch.version.hip is None
    return "tf32x3" if cuda and torch.cuda.get_device_capability(device) >= (8, 0) else "ieee"
