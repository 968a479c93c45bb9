"""The forms of LDAdam's steps, on whole matrices and on fragments, chosen by device and type."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from rankwise.kernels import native, triton
from rankwise.kernels.forms import kernels_for
from rankwise.ldadam import formulas
from rankwise.ldadam import native as compiled
from rankwise.ldadam.native import LowRankStep, takes

__all__ = [
    "LowRankStep",
    "fragments_step_for",
    "moments_for",
    "step_for",
    "steps_in_place_for",
    "subtract_for",
    "takes",
]


def fragments_step_for(device: torch.device, dtype: torch.dtype) -> Callable[..., None] | None:
    """LDAdam's step on the fragments of many matrices at once, or None where there is no such form.

    Args:
        device: Where the tensors lie.
        dtype: Their type.

    Returns:
        As :func:`rankwise.ldadam.cuda_fragments.low_rank_step_`.
    """
    if kernels_for(device, dtype) is not triton:
        return None
    from rankwise.ldadam.cuda_fragments import low_rank_step_

    return low_rank_step_


def moments_for(device: torch.device, dtype: torch.dtype) -> formulas.Moments:
    """:func:`rankwise.ldadam.formulas.low_rank_moments`, or its form in one launch.

    Args:
        device: Where the tensors lie.
        dtype: Their type.
    """
    if kernels_for(device, dtype) is not triton:
        return formulas.low_rank_moments
    from rankwise.ldadam.cuda import low_rank_moments

    return low_rank_moments


def step_for(device: torch.device, dtype: torch.dtype) -> Callable[..., tuple[torch.Tensor, ...]]:
    """:func:`rankwise.ldadam.formulas.ldadam_step`, or a form of it for what it runs on.

    Args:
        device: Where the tensors lie.
        dtype: Their type.
    """
    if kernels_for(device, dtype) is native:
        return compiled.ldadam_step
    return partial(formulas.ldadam_step, moments=moments_for(device, dtype))


def steps_in_place_for(
    device: torch.device, dtype: torch.dtype
) -> Callable[[Sequence[LowRankStep]], list[float | None]] | None:
    """:func:`rankwise.ldadam.native.ldadam_steps_`, or None where there is no such form.

    Args:
        device: Where the tensors lie.
        dtype: Their type.
    """
    return compiled.ldadam_steps_ if kernels_for(device, dtype) is native else None


def subtract_for(device: torch.device, dtype: torch.dtype) -> formulas.Subtract:
    """:func:`rankwise.ldadam.formulas.subtract_product_`, or a form of it for what it runs on.

    Args:
        device: Where the tensors lie.
        dtype: Their type.
    """
    if kernels_for(device, dtype) is native:
        return compiled.subtract_product_
    return formulas.subtract_product_
