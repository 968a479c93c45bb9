"""Reading files of checkpoints: without running what they say, as far as DeepSpeed's format allows it, and whole.

torch stores a CRC-32 beside every tensor, and compares none when it reads.
"""

from __future__ import annotations

import logging
import pickle
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address
from torch import Tensor
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from rankwise.layout.agreement import together
from rankwise.layout.chunked_vectors import CheckpointError

__all__ = ["load_file", "read", "read_together", "require_intact"]

logger = logging.getLogger(__name__)

# What DeepSpeed's own files hold besides tensors and plain data.
_OF_DEEPSPEED = (ZeroStageEnum, fragment_address, LossScaler, DynamicLossScaler)
_CHUNK = 1 << 22
_Place = tuple[str | int, ...]
_T = TypeVar("_T")


def read_together(work: Callable[[], _T]) -> _T:
    """Read or write files on every rank; what fails on some fails on all, with the first reason. A collective.

    Raises:
        CheckpointError: On every rank, if ``work`` met bad files on any.
    """

    def with_own_errors() -> _T:
        try:
            return work()
        except OSError as error:
            raise CheckpointError(str(error)) from error

    return together(with_own_errors, dist.group.WORLD)


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
        "%s holds objects of %s (of a client_state, say), which can only be read by running code in the file, as "
        "DeepSpeed does on loading: do not load a checkpoint that you do not trust.",
        name,
        classes,
    )


# --- whether a file holds what was written ---------------------------------------------------------------------------


def require_intact(path: Path) -> None:
    """Read a file once and compare it with its checksums.

    Files in torch's old format, and those written with ``torch.serialization.set_crc32_options(False)``, have none.

    Args:
        path: One of the files of a checkpoint.

    Raises:
        CheckpointError: Names the file and the tensors in it that are not what was written.
    """
    if not zipfile.is_zipfile(path):
        return
    try:
        with zipfile.ZipFile(path) as archive:
            records = [record for record in archive.infolist() if record.CRC]
            damaged = [record.filename for record in records if not _is_intact(archive, record)]
    except (OSError, zipfile.BadZipFile) as error:
        raise CheckpointError(f"{path} is damaged ({error}): load an earlier tag.") from error
    if damaged:
        named = _named(path, {record.CRC for record in records})
        raise CheckpointError(
            f"{path} is damaged: {', '.join(named[:3]) or damaged[0]}{', …' if len(named) > 3 else ''} must have the "
            "checksum that was stored when it was written, but has another. Load an earlier tag."
        )


def _is_intact(archive: zipfile.ZipFile, record: zipfile.ZipInfo) -> bool:
    try:
        with archive.open(record) as stream:
            while stream.read(_CHUNK):
                pass  # the reader compares at the end
    except zipfile.BadZipFile:
        return False
    return True


def _named(path: Path, stored: set[int]) -> list[str]:
    """The tensors of a file whose bytes have none of the stored checksums, with the parameters they hold."""
    content = read(path)
    names = _names_by_position(content)
    found = []
    for place, tensor in _tensors(content, ()):
        storage = tensor.untyped_storage()
        if zlib.crc32(bytes(storage)) not in stored:
            at = next((part for part in reversed(place) if isinstance(part, int)), None)
            held = names.get(at, "") if at is not None and "matrix_states" not in place else ""
            found.append(".".join(map(str, place)) + held)
    return found


def _tensors(content: Any, place: _Place) -> Iterator[tuple[_Place, Tensor]]:
    if isinstance(content, Tensor):
        yield place, content
    elif isinstance(content, Mapping):
        for key, value in content.items():
            yield from _tensors(value, (*place, key))
    elif isinstance(content, list | tuple):
        for index, value in enumerate(content):
            yield from _tensors(value, (*place, index))


def _names_by_position(content: Any) -> dict[int, str]:
    """By the index of a flat tensor: the parameters in it, as our record of the layout has them."""
    layout = _find(content, "layout")
    found = {}
    for index, record in enumerate(layout if isinstance(layout, Sequence) else ()):
        keys = list(dict.fromkeys(run[0] for run in record.get("runs", ())))
        if keys:
            found[index] = f" (of {keys[0]})" if len(keys) == 1 else f" (of {keys[0]} … {keys[-1]})"
    return found


def _find(content: Any, key: str) -> Any:
    if not isinstance(content, Mapping):
        return None
    if key in content:
        return content[key]
    return next((found for value in content.values() if (found := _find(value, key)) is not None), None)
