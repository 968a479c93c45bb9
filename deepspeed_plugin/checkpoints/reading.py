"""Reading files of checkpoints without running what they say, as far as DeepSpeed's format allows it."""

from __future__ import annotations

import logging
import pickle
import zipfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from deepspeed_plugin.checkpoints.errors import CheckpointError

__all__ = ["load_file", "read"]

logger = logging.getLogger(__name__)

# What DeepSpeed's own files hold besides tensors and plain data.
_OF_DEEPSPEED = (ZeroStageEnum, fragment_address, LossScaler, DynamicLossScaler)


def read(path: Path) -> dict[str, Any]:
    """Content of one of DeepSpeed's files.

    Raises:
        CheckpointError: It is missing, cut off or otherwise damaged.
    """
    try:
        content: dict[str, Any] = load_file(path)
    except (EOFError, OSError, RuntimeError, ValueError, pickle.UnpicklingError) as error:
        raise CheckpointError(
            f"{path} cannot be read: the checkpoint was not written to the end, or is damaged ({error}). Load an "
            "earlier tag."
        ) from error
    return content


def load_file(path: Path) -> Any:
    """What ``torch.save`` has written to ``path``, on the CPU.

    Files with tensors, plain data and DeepSpeed's own classes are read with ``weights_only=True``. DeepSpeed lets users
    put any object into a checkpoint, and reads it with ``weights_only=False``; such files are read so here too, and the
    classes are named once.

    Raises:
        Exception: As :func:`torch.load`, for files that are missing, cut off or damaged.
    """
    # Mapped, so that a rank reads only the bytes it needs; files in the old format cannot be.
    mapped = zipfile.is_zipfile(path)
    try:
        with safe_globals(list(_OF_DEEPSPEED)):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as refusal:
        _say_what_it_holds(path.name, _foreign_classes(path) if mapped else str(refusal))
    return torch.load(path, map_location="cpu", weights_only=False, mmap=mapped)


def _foreign_classes(path: Path) -> str:
    with safe_globals(list(_OF_DEEPSPEED)):
        return ", ".join(sorted(get_unsafe_globals_in_checkpoint(path)))


@cache
def _say_what_it_holds(name: str, classes: str) -> None:
    logger.warning(
        "%s holds objects of %s (of a client_state, say), which can only be read by running what the file says, as "
        "DeepSpeed does when it loads it: load no checkpoint that you do not trust.",
        name,
        classes,
    )
