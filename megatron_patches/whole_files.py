"""This module checks that a checkpoint's files are whole, as Megatron reads into weights and states in place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core.dist_checkpointing.serialization import load_common_state_dict
from megatron.core.package_info import __version__
from torch.distributed.checkpoint import FileSystemReader

from rankwise.layout.agreement import together

__all__ = ["common_state", "require_whole"]


def common_state(folder: str) -> Mapping[str, Any]:
    """Return what all ranks share of a checkpoint.

    Args:
        folder: Folder of the checkpoint.

    Raises:
        ValueError: A later version of Megatron wrote it, to a place that this one does not read.
    """
    try:
        state: Mapping[str, Any] = load_common_state_dict(folder)
    except Exception as error:
        if (Path(folder) / ".metadata").is_file() and not (Path(folder) / "common.pt").exists():
            raise ValueError(
                f"{folder} has no common.pt, without which megatron-core {__version__} reads no checkpoint: 0.19 and "
                "later write it elsewhere; go on with the version that wrote it, or a later one"
            ) from error
        raise
    return state


def require_whole(folder: str) -> None:
    """Refuse a checkpoint of which a file is missing or cut off, before anything of it is read.

    Rank 0 compares sizes only: damage inside a file shows when it is read. A collective of all ranks.

    Args:
        folder: Folder of the checkpoint; if it has no ``torch_dist`` files, it is not judged.

    Raises:
        ValueError: On all ranks: a file is missing or cut off; the message has the file and both sizes.
    """

    def look() -> None:
        problems = list(_problems(Path(folder))) if dist.get_rank() == 0 else []
        if problems:
            further = f", and {len(problems) - 1} more" if len(problems) > 1 else ""
            raise ValueError(
                f"{problems[0]}{further}: the checkpoint was not written to the end, or is damaged; load an "
                "earlier one. Nothing was read"
            )

    together(look, dist.group.WORLD)


def _problems(folder: Path) -> Iterator[str]:
    if not (folder / ".metadata").is_file():
        return
    ends: dict[str, int] = {}
    for place in (FileSystemReader(folder).read_metadata().storage_data or {}).values():
        ends[place.relative_path] = max(ends.get(place.relative_path, 0), place.offset + place.length)
    for name, end in ends.items():
        file = folder / name
        size = file.stat().st_size if file.is_file() else None
        if size is None:
            yield f"{file} is missing"
        elif size < end:
            yield f"{file} has {size} bytes and must have {end}"
