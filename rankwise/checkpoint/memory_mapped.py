"""Saved tensors in files that are mapped into memory: a checkpoint is read without being held."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Container, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from rankwise.layout.chunked_vectors import StorageError, load_vectors, own_errors, stored_tensors

__all__ = ["STACKED", "joined_stacks", "load_objects", "mapped_like", "mapped_tensors"]

STACKED = re.compile(r"(.+)\[(\d+)\]")
"""The name of one matrix of a stack."""


def mapped_like(shape: Iterable[int], dtype: torch.dtype, scratch: Path) -> Tensor:
    """A tensor whose values lie in a file of its own, which has no name any more: it is gone when the tensor is.

    Args:
        shape: Its shape.
        dtype: Its type.
        scratch: The folder whose disk is used.

    Raises:
        StorageError: There is no room.
    """
    size = torch.Size(shape)
    if not size.numel():
        return torch.empty(size, dtype=dtype, device="cpu")
    try:
        with tempfile.NamedTemporaryFile(dir=scratch) as file:
            return torch.from_file(file.name, shared=True, size=size.numel(), dtype=dtype).view(size)
    except (OSError, RuntimeError) as error:
        raise StorageError(f"{scratch}: {error}") from error


def mapped_tensors(folder: Path, names: Iterable[str], scratch: Path) -> dict[str, Tensor]:
    """Tensors that torch.distributed.checkpoint has saved, whole, by the names that they have there.

    Args:
        folder: The checkpoint.
        names: Which ones.
        scratch: As for :func:`mapped_like`.

    Raises:
        StorageError: One is missing or cut off, or there is no room.
    """
    stored = stored_tensors(folder)
    found = {name: mapped_like(*stored[name], scratch) for name in names}
    load_vectors(found, folder, None)
    return found


def load_objects(folder: Path, names: Iterable[str]) -> dict[str, Any]:
    """What torch.distributed.checkpoint has saved beside tensors, as it reads them itself: by ``pickle``.

    Args:
        folder: The checkpoint.
        names: Which ones.

    Raises:
        StorageError: One is missing or cut off.
    """
    found: dict[str, Any] = dict.fromkeys(names)
    with own_errors(folder):
        dcp.load(found, checkpoint_id=folder, no_dist=True)
    return found


def joined_stacks(tensors: Mapping[str, Tensor], whole: Container[str], scratch: Path) -> dict[str, Tensor]:
    """Tensors by name, those of the matrices of a stack (``name[3]``) as one.

    Args:
        tensors: By name.
        whole: Names that end so and are no part of a stack.
        scratch: As for :func:`mapped_like`.

    Raises:
        StorageError: A matrix of a stack is missing, or there is no room.
    """
    found: dict[str, Tensor] = {}
    stacks: dict[str, dict[int, Tensor]] = {}
    for name, value in tensors.items():
        match = None if name in whole else STACKED.fullmatch(name)
        if match is None:
            found[name] = value
        else:
            stacks.setdefault(match[1], {})[int(match[2])] = value
    for name, parts in stacks.items():
        if sorted(parts) != list(range(len(parts))):
            raise StorageError(f"{name!r} has the matrices {sorted(parts)}, but others are missing")
        found[name] = mapped_like((len(parts), *parts[0].shape), parts[0].dtype, scratch)
        for place, value in parts.items():
            found[name][place].copy_(value)
    return found
