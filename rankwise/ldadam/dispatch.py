"""The forms of LDAdam's steps, on whole matrices and on shards, chosen by device and type."""

from __future__ import annotations

from collections.abc import Callable

import torch

from rankwise.kernels import triton
from rankwise.kernels.dispatch import kernels_for
from rankwise.kernels.product_types import multiplies_bfloat16
from rankwise.ldadam.in_place import StepsInPlace

__all__ = ["computes_stacks", "shards_step_for", "steps_in_place_for"]


def shards_step_for(device: torch.device, dtype: torch.dtype) -> Callable[..., None] | None:
    """LDAdam's step on the shards of many matrices at once, or None where there is no such form.

    Returns:
        As :func:`rankwise.ldadam.cuda.low_rank_step.low_rank_step_`.
    """
    if not _multiplies_halves(device, dtype):
        return None
    from rankwise.ldadam.cuda.low_rank_step import low_rank_step_

    return low_rank_step_


def steps_in_place_for(device: torch.device, dtype: torch.dtype) -> StepsInPlace | None:
    """What steps many whole matrices where they lie, or None where there is no such form."""
    if not _multiplies_halves(device, dtype):
        return None
    from rankwise.ldadam.cuda.grouped_matrices import ldadam_matrices_, takes_matrices

    return StepsInPlace(takes_matrices, ldadam_matrices_)


def computes_stacks(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether matrices are computed in stacks. On CPUs products of stacks are slower, and round otherwise."""
    return device.type != "cpu" or kernels_for(device, dtype) is triton


def _multiplies_halves(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether Triton's kernels run, on a device that multiplies bfloat16 or in the interpreter, which shows it."""
    return kernels_for(device, dtype) is triton and (device.type == "cpu" or multiplies_bfloat16(device))
