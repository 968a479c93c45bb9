"""Runs the Triton kernels on CPU tensors, in Triton's interpreter."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest


def kernel_modules() -> list[ModuleType]:
    shared = importlib.import_module("rankwise.kernels.triton")
    rooms = [importlib.import_module(f"rankwise.{room}") for room in ("ldadam", "mars", "mkor", "sonew")]
    return [
        importlib.import_module(module.name)
        for package in (shared, *rooms)
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
        if package is shared or module.name.split(".")[2].startswith("cuda")
    ]


_interpreted: dict[Any, Any] = {}


def interpreted(function: Any) -> Any:
    """The interpreted form of a compiled kernel or of a function that kernels call."""
    from triton.runtime.interpreter import InterpretedFunction

    # Not by the compiled kernel itself, whose hash goes over all it calls, perhaps interpreted already.
    if function.fn not in _interpreted:
        _interpreted[function.fn] = InterpretedFunction(function.fn)
    return _interpreted[function.fn]


def _repair_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter keeps bfloat16 as its bits: products of them come out as those of integers, rounding up to the
    next power of two gives half of it, and the smallest numbers are widened to others."""
    import numpy as np
    import torch
    import triton.language as tl
    from triton.runtime import interpreter as machine

    convert, dot = machine._convert_float, machine.InterpreterBuilder.create_dot

    def converted(value: Any, source: Any, target: Any, rounding: Any) -> Any:
        if (source, target) == (tl.float32, tl.bfloat16):
            exact = torch.from_numpy(np.array(value, dtype=np.float32))
            return exact.bfloat16().view(torch.int16).numpy().view(np.uint16)
        if (source, target) == (tl.bfloat16, tl.float32):
            return (np.array(value).astype(np.uint32) << 16).view(np.float32)
        return convert(value, source, target, rounding)

    def product(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        if a.dtype == tl.bfloat16:
            wide = [(x.data.astype(np.uint32) << 16).view(np.float32) for x in (a, b)]
            a, b = (machine.TensorHandle(x, tl.float32) for x in wide)
        return dot(self, a, b, *rest)

    monkeypatch.setattr(machine, "_convert_float", converted)
    monkeypatch.setattr(machine.InterpreterBuilder, "create_dot", product)


def _check_claims(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a kernel says that an address is a multiple of 16, which a GPU believes and the interpreter ignores."""
    from triton.runtime.interpreter import TensorHandle

    set_attribute = TensorHandle.set_attr

    def checked(self: Any, name: str, values: Any) -> None:
        assert name != "tt.divisibility" or (self.data % values[0] == 0).all(), f"{self.data} by {values}"
        set_attribute(self, name, values)

    monkeypatch.setattr(TensorHandle, "set_attr", checked)


def _check_overflow(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter's own check of sums and products of integers takes ten operations of its language for one, and
    tells nobody. Unsigned ones are draws of random numbers, which go round on purpose."""
    import numpy as np
    from triton.runtime import interpreter as machine

    exact = {"add": np.add, "sub": np.subtract, "mul": np.multiply}

    def checked(a: Any, b: Any, operation: Any) -> None:
        kind, name = a.type.scalar, operation.__name__
        if kind.int_bitwidth < 64 and kind.is_int_signed():
            found = exact[name](a.handle.data.astype(np.int64), b.handle.data.astype(np.int64))
            least, most = kind.get_int_min_value(), kind.get_int_max_value()
            assert least <= found.min() and found.max() <= most, f"{kind} overflow detected for operation {name}"

    if hasattr(machine, "interpreter_semantic"):
        monkeypatch.setattr(machine.interpreter_semantic, "binary_op_sanitize_overflow_impl", checked)


def _tidy_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo what a call of a device function changes in Triton's language, which it leaves so: nothing compiles then.

    A function that is called by a kernel changes nothing that the kernel has changed: to look for it anew at each call
    takes longer than most calls. Versions that undo nothing at all give nothing to undo it with.
    """
    import inspect

    import triton.language as tl
    from triton.runtime import interpreter as machine

    change, opened = machine._patch_lang, []

    @functools.cache
    def languages_of(function: Any) -> list[ModuleType]:
        modules = [value for value in function.__globals__.values() if inspect.ismodule(value)]
        return [module for module in modules if module in (tl, tl.core)]

    def changed(function: Any) -> Any:
        languages = languages_of(function)
        if languages and all(any(value in before for _, before in opened) for value in languages):
            return _Unchanged
        scope = change(function)
        if scope is None:
            return None

        def restore() -> None:
            # Those of the functions that were called in between first.
            while opened:
                last, _ = opened.pop()
                type(last).restore(last)
                if last is scope:
                    return

        scope.restore = restore
        opened.append((scope, languages))
        return scope

    monkeypatch.setattr(machine, "_patch_lang", changed)


class _Unchanged:
    """A scope of changes that has none."""

    @staticmethod
    def restore() -> None: ...


@pytest.fixture
def interpreter(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels run in the interpreter during the test, and are what they were before it and after it.

    The usual switch, TRITON_INTERPRET, is looked at when a kernel is defined, and so it would have to be set before
    anything imports triton, for the whole process and its other tests.
    """
    pytest.importorskip("triton")
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder
    from triton.runtime.jit import JITFunction

    if not hasattr(InterpreterBuilder, "get_int1_ty"):
        pytest.skip("the interpreter of this Triton has no booleans")
    # Imported before the switch: a kernel defined under it would stay in the interpreter.
    modules = (tl, tl.standard, *kernel_modules())
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    for module in modules:
        for name, value in list(vars(module).items()):
            if isinstance(value, JITFunction):
                monkeypatch.setattr(module, name, interpreted(value))
    _repair_bfloat16(monkeypatch)
    _check_claims(monkeypatch)
    _check_overflow(monkeypatch)
    _tidy_up(monkeypatch)
    yield


@pytest.fixture
def launches(interpreter: None, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels launched so far."""
    from triton.runtime.interpreter import InterpretedFunction

    names: list[str] = []
    run = InterpretedFunction.run

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        names.append(self.fn.__name__)
        return run(self, *args, **kwargs)

    monkeypatch.setattr(InterpretedFunction, "run", counted)
    return names
