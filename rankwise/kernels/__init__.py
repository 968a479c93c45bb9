"""List forms of the element-wise updates, chosen by device and type.

On CPUs they go through memory block by block (:mod:`.blocked`); on CUDA, with Triton installed and in fp32, a launch
serves all fragments (:mod:`.triton`); everything else takes ``torch._foreach_*`` (:mod:`.foreach`). All of them do what
the pure functions of :mod:`rankwise.updates` do, which are their oracle in tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType

import torch

from rankwise.kernels import blocked, blocked_sonew, foreach, triton
from rankwise.updates import ldadam as updates
from rankwise.updates.linalg import newton_schulz

__all__ = ["FORMS", "kernels_for", "low_rank_for", "moments_for", "newton_schulz_for", "sonew_for", "using"]

FORMS = (
    "adamw_",
    "mars_adamw_",
    "mars_lion_",
    "mars_momentum_",
    "mars_squared_norms",
    "scaled_step_",
    "squared_norms",
)
"""Functions that every module offers, with the signatures of :mod:`.foreach`."""

_forced: ModuleType | None = None


def kernels_for(device: torch.device, dtype: torch.dtype) -> ModuleType:
    """The module whose :data:`FORMS` are the fastest.

    Args:
        device: Where the tensors lie.
        dtype: Their type.
    """
    if _forced is not None:
        return _forced
    if device.type == "cpu":
        return blocked
    return triton if triton.is_available(device, dtype) else foreach


def sonew_for(device: torch.device, dtype: torch.dtype) -> Callable[..., tuple[torch.Tensor, torch.Tensor]] | None:
    """SONew's pass over runs, in the form of :func:`rankwise.kernels.blocked_sonew.sonew_directions`.

    Args:
        device: Where the tensors lie.
        dtype: Their type.

    Returns:
        None where there is no such pass.
    """
    chosen = kernels_for(device, dtype)
    if chosen is blocked:
        return blocked_sonew.sonew_directions
    return triton.sonew_directions if chosen is triton else None


def newton_schulz_for(device: torch.device) -> Callable[..., torch.Tensor]:
    """:func:`rankwise.updates.linalg.newton_schulz`, or its form with half the work for the symmetric products.

    Args:
        device: Where the tensors lie.
    """
    if kernels_for(device, torch.float32) is not triton:
        return newton_schulz
    from rankwise.kernels.triton.newton_schulz import newton_schulz as fused

    return fused


def low_rank_for(device: torch.device, dtype: torch.dtype) -> Callable[..., None] | None:
    """LDAdam's step on the fragments of many matrices at once, or None where there is no such form.

    Args:
        device: Where the tensors lie.
        dtype: Their type.

    Returns:
        As :func:`rankwise.kernels.triton.low_rank_step_`.
    """
    return triton.low_rank_step_ if kernels_for(device, dtype) is triton else None


def moments_for(device: torch.device, dtype: torch.dtype) -> updates.Moments:
    """:func:`rankwise.updates.ldadam.low_rank_moments`, or its form in one launch.

    Args:
        device: Where the tensors lie.
        dtype: Their type.
    """
    chosen: updates.Moments = updates.low_rank_moments
    if kernels_for(device, dtype) is triton:
        chosen = triton.low_rank_moments
    return chosen


@contextmanager
def using(module: ModuleType) -> Iterator[None]:
    """Use one module everywhere, to compare or to debug.

    Args:
        module: :mod:`.foreach`, :mod:`.blocked` or :mod:`.triton`.
    """
    global _forced
    before, _forced = _forced, module
    try:
        yield
    finally:
        _forced = before
