"""DeepSpeed's compiled collectives, which it builds, or waits for, on every CPU machine at start-up."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any

from rankwise.abandoned_locks import build_lock, settle

__all__ = ["guard_build", "unguard_build"]

_EXTENSION = "deepspeed_shm_comm"


def guard_build() -> None:
    """Keep DeepSpeed from waiting for ever for a lock that a killed process has left."""
    module = _comm_module()
    module.build_shm_op = _careful(module.build_shm_op)


def unguard_build() -> None:
    """Undo :func:`guard_build`, unless another function has taken its place."""
    module = _comm_module()
    module.build_shm_op = getattr(module.build_shm_op, "__wrapped__", module.build_shm_op)


def _comm_module() -> Any:
    importlib.import_module("deepspeed.comm")
    # Importing deepspeed.comm.torch by name yields torch itself, which that module re-exports.
    return sys.modules["deepspeed.comm.torch"]


def _careful(build: Callable[[], Any]) -> Callable[[], Any]:
    @functools.wraps(build)
    def careful() -> Any:
        from deepspeed.accelerator import get_accelerator

        if get_accelerator().device_name() == "cpu":
            settle(build_lock(_EXTENSION))
        return build()

    return careful
