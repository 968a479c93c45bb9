"""Reads saved tensors into files that are mapped into memory, so that a checkpoint need not fit into it."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Container, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from rankwise.layout.chunked_vectors import CheckpointError, load_vectors, own_errors, stored_tensors

__all__ = ["STACKED", "joined_stacks", "load_objects", "mapped_like", "mapped_tensors"]

STACKED = re.compile(r"(.+)\[(\d+)\]")
"""Name of one matrix of a stack."""


def mapped_like(shape: Iterable[int], dtype: torch.dtype, scratch: Path) -> Tensor:
    """Make a tensor whose values lie in an unnamed file in the folder ``scratch``, removed with the tensor.

    Raises:
        CheckpointError: The disk has no room.
    """
    size = torch.Size(shape)
    if not size.numel():
        return torch.empty(size, dtype=dtype, device="cpu")
    try:
        with tempfile.NamedTemporaryFile(dir=scratch) as file:
            return torch.from_file(file.name, shared=True, size=size.numel(), dtype=dtype).view(size)
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"{scratch}: {error}") from error


def mapped_tensors(folder: Path, names: Iterable[str], scratch: Path) -> dict[str, Tensor]:
    """Read whole tensors that torch.distributed.checkpoint has saved, into files in the folder ``scratch``.

    Raises:
        CheckpointError: A tensor is missing or cut off, or the disk has no room.
    """
    stored = stored_tensors(folder)
    tensors = {name: mapped_like(*stored[name], scratch) for name in names}
    load_vectors(tensors, folder, None)
    return tensors


def load_objects(folder: Path, names: Iterable[str]) -> dict[str, Any]:
    """Read what torch.distributed.checkpoint has saved beside tensors, by ``pickle``, as torch reads it.

    Raises:
        CheckpointError: An object is missing or cut off.
    """
    objects: dict[str, Any] = dict.fromkeys(names)
    with own_errors(folder):
        dcp.load(objects, checkpoint_id=folder, no_dist=True)
    return objects


def joined_stacks(tensors: Mapping[str, Tensor], whole: Container[str], scratch: Path) -> dict[str, Tensor]:
    """Join the matrices of stacks (``name[3]``) in ``scratch``; tensors in ``whole`` only look like some.

    Raises:
        CheckpointError: A matrix of a stack is missing, or the disk has no room.
    """
    joined: dict[str, Tensor] = {}
    stacks: dict[str, dict[int, Tensor]] = {}
    for name, value in tensors.items():
        match = None if name in whole else STACKED.fullmatch(name)
        if match is None:
            joined[name] = value
        else:
            stacks.setdefault(match[1], {})[int(match[2])] = value
    for name, parts in stacks.items():
        if sorted(parts) != list(range(len(parts))):
            raise CheckpointError(f"{name!r} has the matrices {sorted(parts)}, but others are missing")
        joined[name] = mapped_like((len(parts), *parts[0].shape), parts[0].dtype, scratch)
        for place, value in parts.items():
            joined[name][place].copy_(value)
    return joined
