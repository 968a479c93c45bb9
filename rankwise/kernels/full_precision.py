"""Steps multiply float32 matrices in float32, whatever the process lets its model's products be rounded to.

``torch.set_float32_matmul_precision("high")``, and the switches that came after it, let tensor cores round the operands
to ten bits (TF32), "medium" to seven. That is meant for models, and spoils a basis or an inverse that is followed from
step to step. A step therefore switches to full precision and back. The device does not wait for it, and switches that
demand full precision already are left alone. Switches belong to the process: while a step lasts, other threads
multiply in full precision, too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

__all__ = ["full_precision"]

_OPERATIONS = (("cuda", "matmul"), ("mkldnn", "matmul"))
_REDUCED = ("tf32", "bf16")
# Before torch 2.9 there is no such getter, and only the older switch.
_get: Callable[[str, str], str] | None = getattr(torch._C, "_get_fp32_precision_getter", None)

_lock = threading.Lock()
_inside = 0
_restore: Callable[[], None] | None = None


@contextmanager
def full_precision() -> Iterator[None]:
    """Switch to full precision and, at the end or where the work raises, back to what was set before.

    If several threads are inside at once, the first one switches and the last one switches back.
    """
    global _inside, _restore
    with _lock:
        if _inside == 0:
            _restore = _switched() if _is_reduced() else None
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if _inside == 0 and _restore is not None:
                restore, _restore = _restore, None
                restore()


def _is_reduced() -> bool:
    if _get is None:
        return torch.get_float32_matmul_precision() != "highest"
    return any(_get(*operation) in _REDUCED for operation in _OPERATIONS)


def _switched() -> Callable[[], None]:
    """Switch to full precision, and return the function that switches back."""
    whole = _older()
    before = {} if _get is None else {operation: _get(*operation) for operation in _OPERATIONS}
    if whole is not None:
        # A user of the older switch goes on reading it: torch refuses that where the newer ones disagree with it.
        torch.set_float32_matmul_precision("highest")
    for operation in before:
        if _now(operation) in _REDUCED:
            _set(operation, "ieee")

    def restore() -> None:
        if whole is not None:
            torch.set_float32_matmul_precision(whole)
        for operation, value in before.items():
            if _now(operation) != value:
                # An operation without a value of its own follows a wider switch, which may hold the value already.
                _set(operation, "none")
            if _now(operation) != value:
                _set(operation, value)

    return restore


def _older() -> str | None:
    """Return what the older switch is set to; None where it reduces nothing, or the newer switches are used."""
    try:
        precision = torch.get_float32_matmul_precision()
    except RuntimeError:
        return None
    return None if precision == "highest" else precision


def _now(operation: tuple[str, str]) -> str:
    assert _get is not None
    return _get(*operation)


def _set(operation: tuple[str, str], value: str) -> None:
    torch._C._set_fp32_precision_setter(*operation, value)
