"""An optimizer's state as named vectors, independent of how many ranks hold it and where they cut it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rankwise.optimizers.base import ShardedOptimizer
from rankwise.sharding.state import ChunkedVector, load_vectors, stored_tensors

__all__ = ["merge_vectors", "restore", "saved_vectors"]

Vectors = dict[str, Any]


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
    param_groups: Sequence[Mapping[str, Any]],
) -> None:
    """Load weights and states from ``folder`` into an optimizer whose units are planned, whatever its layout.

    Args:
        optimizer: Its tensors receive the weights, its states are allocated as needed.
        folder: Written by :func:`rankwise.sharding.state.save_vectors` from :func:`saved_vectors`.
        group: Ranks that call this together.
        param_groups: The saved hyper-parameters, one dictionary per group.
    """
    stored = stored_tensors(folder)
    wanted: Vectors = {}
    for tensor, runs in optimizer.storage():
        flat = tensor.detach().view(-1)
        for key, shape, start, end, offset, states in runs:
            numel = prod(shape)
            _add(wanted, f"weight/{key}", numel, start, flat[offset : offset + end - start])
            for name, values in states.items():
                if f"element/{name}/{key}" in stored:
                    _add(wanted, f"element/{name}/{key}", numel, start, values)
    owned = {key for key, owner in optimizer.owners().items() if owner == optimizer.rank}
    matrices = {name: value for name, value in stored.items() if name.startswith("matrix/")}
    for name, (shape, dtype) in matrices.items():
        if name.removeprefix("matrix/").rpartition("/")[0] in owned:
            wanted[name] = torch.empty(shape, dtype=dtype)
    steps = {name: torch.zeros((), dtype=stored[name][1]) for name in stored if name.startswith("step/")}
    load_vectors({**wanted, **steps}, folder, group)
    optimizer.adopt(
        matrix_states=_matrix_states(wanted),
        steps={int(name.removeprefix("step/")): value for name, value in steps.items()},
        param_groups=param_groups,
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
