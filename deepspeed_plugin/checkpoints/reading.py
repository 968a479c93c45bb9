"""Files of checkpoints are read whole, and without running code in them as far as DeepSpeed's format allows it.

torch stores a CRC-32 beside every tensor, but compares none when it reads.
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

# DeepSpeed's own files hold objects of these classes besides tensors and plain data.
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
    """Return the content of one of DeepSpeed's files.

    Raises:
        CheckpointError: The file is missing, cut off or otherwise damaged.
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
    """Return what ``torch.save`` has written to ``path``, on the CPU.

    Files with tensors, plain data and DeepSpeed's own classes are read with ``weights_only=True``. DeepSpeed lets users
    put any object into a checkpoint, and reads it with ``weights_only=False``; such files are read so here, too, and a
    warning names the classes once.

    Raises:
        Exception: :func:`torch.load` fails, because the file is missing, cut off or damaged.
    """
    # The file is mapped, so that a rank reads only the bytes that it needs; files in the old format cannot be.
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
        CheckpointError: Tensors are not what was written; the message names the file and the tensors.
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
                pass  # the reader compares checksums at the end
    except zipfile.BadZipFile:
        return False
    return True


def _named(path: Path, stored: set[int]) -> list[str]:
    """Return the tensors of a file whose bytes have none of the stored checksums, with the parameters in them."""
    content = read(path)
    names = _names_by_position(content)
    damaged = []
    for place, tensor in _tensors(content, ()):
        storage = tensor.untyped_storage()
        if zlib.crc32(bytes(storage)) not in stored:
            at = next((part for part in reversed(place) if isinstance(part, int)), None)
            held = names.get(at, "") if at is not None and "matrix_states" not in place else ""
            damaged.append(".".join(map(str, place)) + held)
    return damaged


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
    """Return, for each flat tensor, a text with the parameters in it, from our record of the layout."""
    layout = _find(content, "layout")
    names = {}
    for index, record in enumerate(layout if isinstance(layout, Sequence) else ()):
        keys = list(dict.fromkeys(run[0] for run in record.get("runs", ())))
        if keys:
            names[index] = f" (of {keys[0]})" if len(keys) == 1 else f" (of {keys[0]} … {keys[-1]})"
    return names


def _find(content: Any, key: str) -> Any:
    if not isinstance(content, Mapping):
        return None
    if key in content:
        return content[key]
    return next((value_below for value in content.values() if (value_below := _find(value, key)) is not None), None)
