"""Whether a checkpoint's files hold what was written: torch stores a CRC-32 beside every tensor, and reads none."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from deepspeed_plugin.checkpoints.errors import CheckpointError
from deepspeed_plugin.checkpoints.reading import read

__all__ = ["require_intact"]

_CHUNK = 1 << 22
_Place = tuple[str | int, ...]


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
            "checksum that was stored when it was written, and has another. Load an earlier tag."
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
