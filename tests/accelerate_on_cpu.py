"""accelerate and the Trainer on CPU ranks of which each test chooses what they do with them."""

from __future__ import annotations

import os
from importlib import import_module
from importlib.util import find_spec

from cpu_deepspeed import choose_cpu

__all__ = ["accept_cpu", "forget_accelerate", "import_before_forking"]


def import_before_forking() -> None:
    """What accelerate imports to prepare a model, DeepSpeed too if it is there: once, and not in every rank."""
    if find_spec("deepspeed") is not None:
        choose_cpu()
        import_module("deepspeed")


def accept_cpu() -> None:
    """Let accelerate shard on CPU ranks: of itself it has FSDP on accelerators alone, and passes over its plugin."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    os.environ.update(ACCELERATE_TORCH_DEVICE="cpu", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    forget_accelerate()
    PartialState._prepare_backend = lambda *_, **__: ("gloo", DistributedType.MULTI_GPU)  # type: ignore[assignment]


def forget_accelerate() -> None:
    """A test that ran in the parent before may have left its choice of devices and engine in the module."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
