"""An optimizer's state as named vectors, independent of how many ranks hold it and where they cut it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rankwise.sharding.state import ChunkedVector, StorageError, load_vectors, stored_tensors
from rankwise.step.optimizer import ShardedOptimizer

__all__ = ["Vectors", "check_stored", "merge_vectors", "restore", "saved_vectors"]

Vectors = dict[str, Any]
"""Tensors, and :class:`ChunkedVector` of which other ranks hold the rest, by name."""


def saved_vectors(state_dict: Mapping[str, Any], flats: Sequence[Tensor]) -> Vectors:
    """One rank's part of a saved optimizer, by name.

    Args:
        state_dict: What :meth:`ShardedOptimizer.state_dict` returned on that rank.
        flats: The weights stored in the tensors of its param groups, flattened, in the same order; padding at the end
            may be cut off.

    Returns:
        ``weight/<key>`` and ``element/<state>/<key>`` as :class:`ChunkedVector`, ``matrix/<key>/<state>`` and
        ``step/<group>`` as tensors.
    """
    found: Vectors = {}
    for index, (record, flat) in enumerate(zip(state_dict["layout"], flats, strict=True)):
        state = state_dict["state"].get(index, {})
        if "step" in state:
            found[f"step/{record['group']}"] = state["step"].reshape(())
        for run, (key, shape, start, end, offset) in enumerate(record["runs"]):
            numel = prod(shape)
            _add(found, f"weight/{key}", numel, start, flat.reshape(-1)[offset : offset + end - start])
            for name, offsets in record["states"].items():
                first = offsets[run]
                if first is not None and name in state:
                    values = state[name].reshape(-1)[first : first + end - start]
                    _add(found, f"element/{name}/{key}", numel, start, values)
    for key, matrix in state_dict["matrix_states"].items():
        found.update({f"matrix/{key}/{name}": value for name, value in matrix.items()})
    return found


def merge_vectors(parts: Sequence[Vectors]) -> Vectors:
    """Join the parts of several ranks that one process read."""
    merged: Vectors = {}
    for part in parts:
        for name, value in part.items():
            if isinstance(value, ChunkedVector) and name in merged:
                merged[name].chunks.extend(value.chunks)
            else:
                merged[name] = value
    return merged


def restore(
    optimizer: ShardedOptimizer,
    folder: Path,
    group: dist.ProcessGroup | None,
    *,
    states: bool = True,
    strict: bool = True,
) -> None:
    """Load weights and states from ``folder`` into an optimizer whose units are planned, whatever its layout.

    Args:
        optimizer: Its tensors receive the weights; its states are replaced by the saved ones, which may be none.
        folder: Written by :func:`rankwise.sharding.state.save_vectors` from :func:`saved_vectors`.
        group: Ranks that call this together.
        states: False loads the weights alone and leaves the states as they are.
        strict: False leaves weights alone that were not saved.

    Raises:
        StorageError: A parameter was not saved, or with another shape, or the folder cannot be read.
    """
    check_stored(optimizer, folder, strict)
    stored = stored_tensors(folder)
    if states:
        optimizer.forget_states()
    wanted = _destinations(optimizer, stored, states)
    steps: dict[str, Tensor] = {}
    if states:
        owned = {key for key, owner in optimizer.owners().items() if owner == optimizer.rank}
        for name, (shape, dtype) in stored.items():
            if name.startswith("matrix/") and name.removeprefix("matrix/").rpartition("/")[0] in owned:
                wanted[name] = torch.empty(shape, dtype=dtype)
            elif name.startswith("step/"):
                steps[name] = torch.zeros((), dtype=dtype)
    load_vectors({**wanted, **steps}, folder, group)
    if states:
        counts = {int(name.removeprefix("step/")): value for name, value in steps.items()}
        optimizer.adopt(_matrix_states(wanted), counts)


def _destinations(optimizer: ShardedOptimizer, stored: Collection[str], states: bool) -> Vectors:
    """The optimizer's own weights and element states, those that were saved, to be filled in place."""
    wanted: Vectors = {}
    for tensor, runs in optimizer.storage():
        flat = tensor.detach().view(-1)
        for key, shape, start, end, offset, values_by_name in runs:
            values = {f"weight/{key}": flat[offset : offset + end - start]}
            if states:
                values.update({f"element/{name}/{key}": part for name, part in values_by_name.items()})
            for name, part in values.items():
                if name in stored:
                    _add(wanted, name, prod(shape), start, part)
    return wanted


def check_stored(optimizer: ShardedOptimizer, folder: Path, strict: bool = True) -> None:
    """Compare what was saved with all of the model's parameters, whichever rank holds them.

    Args:
        optimizer: Planned.
        folder: As for :func:`restore`.
        strict: Whether every parameter must have been saved.

    Raises:
        StorageError: A parameter was not saved, or with another shape, or the folder cannot be read.
    """
    stored = stored_tensors(folder)
    for key, shape in optimizer.planner.logical_shapes().items():
        found = stored.get(f"weight/{key}")
        if found is None and strict:
            raise StorageError(f"the checkpoint has no parameter '{key}'; it is of another model")
        if found is not None and found[0].numel() != prod(shape):
            raise StorageError(
                f"'{key}' has {found[0].numel()} elements in the checkpoint and {prod(shape)} in the model; it is of "
                "another model"
            )


def _matrix_states(vectors: Vectors) -> dict[str, dict[str, Tensor]]:
    found: dict[str, dict[str, Tensor]] = {}
    for name, value in vectors.items():
        if name.startswith("matrix/"):
            key, _, state = name.removeprefix("matrix/").rpartition("/")
            found.setdefault(key, {})[state] = value
    return found


def _add(vectors: Vectors, name: str, numel: int, start: int, values: Tensor) -> None:
    vectors.setdefault(name, ChunkedVector(numel, [])).chunks.append((start, values))
