"""The one place where Triton's untyped decorator and launches enter the typed code."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import triton
import triton.language as tl

__all__ = ["ELEMENTS", "ceil_div", "device_scalar", "has_wide_products", "jit", "launch"]

ELEMENTS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
"""What a kernel calls a type."""


def jit(function: Callable[..., Any]) -> Any:
    """A Triton kernel, or a function that kernels call."""
    return triton.jit(function)


def launch(kernel: Any, grid: tuple[int, ...], device: torch.device, *arguments: Any, **constants: Any) -> None:
    """Start a kernel on ``device``, whichever is current; an empty grid starts nothing."""
    if min(grid) == 0:
        return
    # Triton launches on the current device, not on that of the arguments.
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        kernel[grid](*arguments, **constants)


def device_scalar(value: float | torch.Tensor, device: torch.device) -> float | torch.Tensor:
    """What a kernel takes for a number that is a float or a 0-d tensor, perhaps one of another device or type."""
    if isinstance(value, torch.Tensor):
        return value.detach().to(device=device, dtype=torch.float32, non_blocking=True)
    return float(value)


def has_wide_products(device: torch.device) -> bool:
    """Whether tiles are multiplied from shared memory, as since Hopper, which leaves registers for larger ones."""
    if device.type != "cuda" or torch.version.hip is not None:
        return True
    return torch.cuda.get_device_capability(device) >= (9, 0)


def ceil_div(numerator: int, denominator: int) -> int:
    """Quotient, rounded up."""
    return -(-numerator // denominator)
