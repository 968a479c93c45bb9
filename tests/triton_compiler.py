"""Compiles the launches of the kernels for a CUDA device that need not be there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

TYPES = {
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int64: "i64",
    torch.uint8: "u8",
}


class Launch(NamedTuple):
    """A kernel and what it was to be called with."""

    kernel: Any
    arguments: tuple[Any, ...]
    constants: dict[str, Any]


def recorded(call: Callable[[], Any], modules: list[Any]) -> list[Launch]:
    """The launches of a call, none of which takes place."""
    launches: list[Launch] = []

    def record(kernel: Any, grid: tuple[int, ...], device: torch.device, *arguments: Any, **constants: Any) -> None:
        launches.append(Launch(kernel, arguments, constants))

    with pytest.MonkeyPatch.context() as patch:
        for module in modules:
            if hasattr(module, "launch"):
                patch.setattr(module, "launch", record)
        call()
    return launches


def _type(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return "*" + TYPES[value.dtype]
    return "fp32" if isinstance(value, float) else "i32" if abs(value) < 2**31 else "i64"


def compiled(launch: Launch) -> Any:
    """What Triton would run on an H100: aligned pointers, and integers specialised as it does itself."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    kernel, arguments, constants = launch
    names = kernel.arg_names
    values = {**dict(zip(names, arguments, strict=False)), **constants}
    fixed = {param.name for param in kernel.params if param.is_constexpr}
    fixed |= {name for name in names if type(values[name]) is int and values[name] == 1}
    signature = {name: "constexpr" if name in fixed else _type(values[name]) for name in names}

    def divisible(value: Any) -> bool:
        return isinstance(value, torch.Tensor) or (type(value) is int and value % 16 == 0)

    hints = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(names)
        if name not in fixed and divisible(values[name])
    }
    source = ASTSource(kernel, signature, {name: values[name] for name in names if name in fixed}, hints)
    options = {name: value for name, value in constants.items() if name not in names}
    return compile(source, target=GPUTarget("cuda", 90, 32), options=options)
