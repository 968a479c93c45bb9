"""Products of float32 in float32, whatever the process lets its model's be rounded to.

``torch.set_float32_matmul_precision("high")``, and the switches that came after it, let tensor cores round the operands
to ten bits (TF32), "medium" to seven: meant for models, and not for what follows a basis or an inverse from step to
step. A step switches to full precision and back; nothing waits, and of what is switched to it already nothing is
touched. The switches are the process's: products of other threads are in full precision, too, while a step lasts.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

__all__ = ["full_precision"]

_OPERATIONS = (("cuda", "matmul"), ("mkldnn", "matmul"))
_REDUCED = ("tf32", "bf16")
# Absent before torch 2.9, where the one older switch says it all.
_get: Callable[[str, str], str] | None = getattr(torch._C, "_get_fp32_precision_getter", None)

_lock = threading.Lock()
_inside = 0
_restore: Callable[[], None] | None = None


@contextmanager
def full_precision() -> Iterator[None]:
    """Switch to full precision, and back to what it was, also where the work raises.

    Where several threads are inside at once the first one switches and the last one switches back.
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
    """Switch; and what undoes it."""
    whole = _older()
    before = {} if _get is None else {operation: _get(*operation) for operation in _OPERATIONS}
    if whole is not None:
        # Whoever used the older switch gets it: torch refuses to read it where the newer ones say otherwise.
        torch.set_float32_matmul_precision("highest")
    for operation in before:
        if _now(operation) in _REDUCED:
            _set(operation, "ieee")

    def restore() -> None:
        if whole is not None:
            torch.set_float32_matmul_precision(whole)
        for operation, value in before.items():
            if _now(operation) != value:
                # Where a wider switch says the same it goes on saying so.
                _set(operation, "none")
            if _now(operation) != value:
                _set(operation, value)

    return restore


def _older() -> str | None:
    """What the older switch is at; None: at nothing, or the newer ones are used."""
    try:
        found = torch.get_float32_matmul_precision()
    except RuntimeError:
        return None
    return None if found == "highest" else found


def _now(operation: tuple[str, str]) -> str:
    assert _get is not None
    return _get(*operation)


def _set(operation: tuple[str, str], value: str) -> None:
    torch._C._set_fp32_precision_setter(*operation, value)
