"""This module chooses which form of the shared kernels runs, by device and type.

CPUs with a compiler take C++ (:mod:`.native`). CUDA with Triton takes launches that serve all shards in fp32
(:mod:`.triton`). Everything else takes ``torch._foreach_*`` (:mod:`.lists`). Tests compare each form with the pure
functions of :mod:`rankwise.updates` and of the papers' rooms. A room chooses the forms of what it alone needs.
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
from rankwise.kernels.orthogonal_step import OrthogonalStep
from rankwise.kernels.product_types import multiplies_bfloat16
from rankwise.updates.newton_schulz import newton_schulz
from rankwise.updates.polynomial_steps import LONG

__all__ = [
    "FORMS",
    "TIMED",
    "OrthogonalStep",
    "is_for_cpus",
    "kernels_for",
    "newton_schulz_for",
    "orthogonal_product_for",
    "orthogonal_steps_for",
    "product_dtype_for",
    "quantization_for",
    "using",
]

FORMS = ("run", "squared_norms")
"""Functions that every module offers, with the signatures of :mod:`.lists`."""

TIMED = "RANKWISE_TIME_PRODUCTS"
"""Environment variable: "1" lets forms of products be timed where there are several. A run then does not repeat to the
bit."""

_forced: ModuleType | None = None


def kernels_for(device: torch.device, dtype: torch.dtype) -> ModuleType:
    """Return the module whose :data:`FORMS` are the fastest."""
    if _forced is not None:
        return _forced
    if device.type == "cpu":
        return native if native.is_available() else lists
    return triton if triton.is_available(device, dtype) else lists


def is_for_cpus(module: ModuleType) -> bool:
    """Whether a module's forms work on CPUs only, where reading a value is free."""
    return module is native


def newton_schulz_for(device: torch.device, timed: bool = False) -> Callable[..., torch.Tensor]:
    """Return the fastest form of :func:`rankwise.updates.newton_schulz.newton_schulz`.

    Args:
        device: Where the tensors lie.
        timed: Whether :mod:`rankwise.kernels.triton.chosen_products` may time the products if :data:`TIMED` is set.
    """
    chosen = kernels_for(device, torch.float32)
    if chosen is not triton:
        return newton_schulz
    from rankwise.kernels.triton.symmetric_newton_schulz import newton_schulz as fused

    return partial(fused, timed=timed and _are_timed())


def orthogonal_steps_for(
    device: torch.device, dtype: torch.dtype, product: torch.dtype, timed: bool = False
) -> Callable[[Sequence[OrthogonalStep]], None] | None:
    """Return what steps many matrices where they lie, or None where there is no such form.

    Args:
        device: Where the tensors lie.
        dtype: Their type.
        product: The type of the products.
        timed: Whether the products may be timed if :data:`TIMED` is set.
    """
    if kernels_for(device, dtype) is not triton:
        return None
    from rankwise.kernels.triton.orthogonal_steps import orthogonal_steps_, takes

    if not takes(dtype, product):
        return None
    return partial(orthogonal_steps_, product=product, timed=timed and _are_timed())


def orthogonal_product_for(
    device: torch.device, product: torch.dtype, rows: int | None = None, columns: int | None = None
) -> torch.dtype:
    """Return the type in which matrices of a shape are orthogonalised where nobody has chosen one.

    GPUs multiply float16 as fast as bfloat16. It has the digits that Gram matrices need, on which long matrices take
    less work. ``product`` is what :func:`product_dtype_for` returns; without a shape matrices are long.
    """
    is_long = rows is None or columns is None or max(rows, columns) >= LONG * min(rows, columns)
    gains = is_long and device.type in ("cuda", "meta") and product == torch.bfloat16
    return torch.float16 if gains else product


def quantization_for(device: torch.device, dtype: torch.dtype) -> ModuleType:
    """Return the module whose functions on codes are the fastest; :mod:`.quantization` describes them."""
    chosen = kernels_for(device, dtype)
    if chosen is native:
        return compiled_quantization
    if chosen is not triton:
        return quantization
    from rankwise.kernels.triton import launched_quantization

    return launched_quantization


def product_dtype_for(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """Return the type in which matrices are multiplied fast where more digits would be of no use.

    Returns:
        bfloat16 where torch's products are faster in it than in float32, else float32. Matrices in float64 are
        multiplied in float64, whose digits were asked for.
    """
    if dtype == torch.float64:
        return dtype
    return torch.bfloat16 if multiplies_bfloat16(device) else torch.float32


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
