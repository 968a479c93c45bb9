"""Triton's untyped decorator and launches enter the typed code here."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import triton
import triton.language as tl

__all__ = ["CODES", "ELEMENTS", "ceil_div", "count_of", "device_scalar", "jit", "launch"]

ELEMENTS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
"""Triton's names of types."""

CODES = {torch.bfloat16: tl.bfloat16, torch.int8: tl.int8, torch.uint8: tl.uint8}
"""Triton's names of the types of narrow states."""


def jit(function: Callable[..., Any]) -> Any:
    """Make a Triton kernel, or a function that kernels call, which any ``count`` fits, as that changes every step."""
    names = [name for name in inspect.signature(function).parameters if name == "count"]
    return triton.jit(function, do_not_specialize=names)


def launch(kernel: Any, grid: tuple[int, ...], device: torch.device, *arguments: Any, **constants: Any) -> None:
    """Start a kernel on ``device``, whichever is current; an empty grid starts nothing."""
    if min(grid) == 0:
        return
    # Triton launches on the current device, not on that of the arguments.
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        kernel[grid](*arguments, **constants)


def device_scalar(value: float | torch.Tensor, device: torch.device) -> float | torch.Tensor:
    """Return a kernel's argument for a number: a float, or a 0-d tensor, which may come from another device or type."""
    if isinstance(value, torch.Tensor):
        return value.detach().to(device=device, dtype=torch.float32, non_blocking=True)
    return float(value)


def count_of(step: int | torch.Tensor | None, runs: int, device: torch.device) -> int | torch.Tensor:
    """Return a kernel's argument for the step's number in noise: an integer, or a tensor with one for each run."""
    if isinstance(step, torch.Tensor):
        return step.to(device=device, dtype=torch.int64, non_blocking=True).expand(runs).contiguous()
    return step or 0


def ceil_div(numerator: int, denominator: int) -> int:
    """Return the quotient, rounded up."""
    return -(-numerator // denominator)
