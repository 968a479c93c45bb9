"""Which form of the shared kernels runs, chosen by device and type.

On CPUs with a compiler they are C++ (:mod:`.native`); on CUDA, with Triton installed and in fp32, a launch serves all
shards (:mod:`.triton`); everything else takes ``torch._foreach_*`` (:mod:`.lists`). All of them do what the pure
functions of :mod:`rankwise.updates` and of the papers' rooms do, or oracles of the tests alone. What one paper alone
needs is chosen in its own room.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import ModuleType

import torch

from rankwise.kernels import lists, native, quantization, triton
from rankwise.kernels.native import compiled_quantization
from rankwise.kernels.native import tiled_newton_schulz as native_newton_schulz
from rankwise.kernels.native.products import products
from rankwise.kernels.orthogonal_step import OrthogonalStep
from rankwise.kernels.product_types import multiplies_bfloat16
from rankwise.updates.newton_schulz import newton_schulz

__all__ = [
    "FORMS",
    "TIMED",
    "OrthogonalStep",
    "is_for_cpus",
    "kernels_for",
    "newton_schulz_for",
    "orthogonal_steps_for",
    "product_dtype_for",
    "quantization_for",
    "using",
]

FORMS = ("run", "squared_norms")
"""Functions that every module offers, with the signatures of :mod:`.lists`."""

TIMED = "RANKWISE_TIME_PRODUCTS"
"""Environment variable: "1" has forms of products timed where several are in question; then runs are not repeatable to
the bit."""

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
        return native if native.is_available() else lists
    return triton if triton.is_available(device, dtype) else lists


def is_for_cpus(module: ModuleType) -> bool:
    """Whether a module's forms work on CPUs only, where reading a value is free."""
    return module is native


def newton_schulz_for(device: torch.device, timed: bool = False) -> Callable[..., torch.Tensor]:
    """:func:`rankwise.updates.newton_schulz.newton_schulz`, or its form with half the work for the symmetric products.

    Args:
        device: Where the tensors lie.
        timed: Whether forms of the products may be timed if :data:`TIMED` says so, see
            :mod:`rankwise.kernels.triton.chosen_products`.
    """
    chosen = kernels_for(device, torch.float32)
    if chosen is native:
        return native_newton_schulz.newton_schulz
    if chosen is not triton:
        return newton_schulz
    from rankwise.kernels.triton.symmetric_newton_schulz import newton_schulz as fused

    return partial(fused, timed=timed and _are_timed())


def orthogonal_steps_for(
    device: torch.device, dtype: torch.dtype, product: torch.dtype, cautious: bool = False, timed: bool = False
) -> Callable[[Sequence[OrthogonalStep]], None] | None:
    """What steps many matrices where they lie, or None where there is no such form.

    Args:
        device: Where the tensors lie.
        dtype: Their type.
        product: The type of the products.
        cautious: Whether decay depends on the step.
        timed: As for :func:`newton_schulz_for`.
    """
    chosen = kernels_for(device, dtype)
    if chosen is native and not cautious and native_newton_schulz.takes(dtype, product):
        return native_newton_schulz.orthogonal_steps_
    if chosen is not triton:
        return None
    from rankwise.kernels.triton.orthogonal_steps import orthogonal_steps_, takes

    if not takes(dtype, product):
        return None
    return partial(orthogonal_steps_, product=product, timed=timed and _are_timed())


def quantization_for(device: torch.device, dtype: torch.dtype) -> ModuleType:
    """The module whose functions on codes are the fastest, see :mod:`.quantization`.

    Args:
        device: Where the tensors lie.
        dtype: That of the values.
    """
    chosen = kernels_for(device, dtype)
    if chosen is native:
        return compiled_quantization
    if chosen is not triton:
        return quantization
    from rankwise.kernels.triton import launched_quantization

    return launched_quantization


def product_dtype_for(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """The type in which matrices of a type are multiplied fast where they lie, without a use for more digits.

    Args:
        device: Where the matrices lie.
        dtype: Their type.

    Returns:
        bfloat16 where its products are faster than float32's, torch's or our own; else float32. float64 for matrices of
        that type, whose digits were asked for.
    """
    if dtype == torch.float64:
        return dtype
    # The cheaper question first: the other one may have to compile.
    fast = multiplies_bfloat16(device) or (kernels_for(device, dtype) is native and products() is not None)
    return torch.bfloat16 if fast else torch.float32


def _are_timed() -> bool:
    return os.environ.get(TIMED) == "1"


@contextmanager
def using(module: ModuleType) -> Iterator[None]:
    """Use one module everywhere, to compare or to debug.

    Args:
        module: :mod:`.lists`, :mod:`.native` or :mod:`.triton`.
    """
    global _forced
    before, _forced = _forced, module
    try:
        yield
    finally:
        _forced = before
