"""DeepSpeed on a host without a card."""

from __future__ import annotations

import importlib
import os
import sys

__all__ = ["choose_cpu"]


def choose_cpu() -> None:
    """Let DeepSpeed take the CPU, with float16, and leave out its own collectives; before it is imported elsewhere."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    importlib.import_module("deepspeed.comm")
    from deepspeed.accelerator import get_accelerator

    get_accelerator().is_fp16_supported = lambda: True
    # They serve inference alone. Every first rank would compile them, and one that is killed meanwhile leaves a lock.
    # Importing deepspeed.comm.torch by its name would give torch itself.
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
