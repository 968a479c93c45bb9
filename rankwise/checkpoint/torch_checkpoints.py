"""Reads and writes ``{"model": ..., "optimizer": ...}`` as torch.distributed.checkpoint saves it, in one process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from rankwise.checkpoint.memory_mapped import load_objects, mapped_tensors
from rankwise.checkpoint.named_checkpoint import (
    ConversionError,
    NamedCheckpoint,
    NamedGroup,
    NamedParameter,
    of_another,
)
from rankwise.layout.chunked_vectors import own_errors
from rankwise.saving.states_by_parameter import (
    MATRIX,
    RECORD,
    WITH_STATES,
    extras_of,
    matrices_of,
    record_texts,
    steps_taken,
    under_parameters,
)
from rankwise.states.param_remainders import REMAINDER
from rankwise.updates.remainders import join

__all__ = ["is_torch_checkpoint", "read_torch", "write_torch"]

_MODEL, _STATE, _GROUPS = "model.", "optimizer.state.", "optimizer.param_groups."
_OF_MEMBERS = ("params", "param_names")


def is_torch_checkpoint(folder: Path) -> bool:
    """Whether a folder has such a checkpoint, whichever optimizer wrote it."""
    if not (folder / ".metadata").is_file():
        return False
    with own_errors(folder):
        names = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    return any(name.startswith(_MODEL) for name in names) and any(name.startswith("optimizer.") for name in names)


def read_torch(folder: Path, scratch: Path) -> NamedCheckpoint:
    """Read such a checkpoint, which may be flattened; its tensors lie in files in the folder ``scratch``.

    Raises:
        ConversionError: None of our optimizers wrote it.
        CheckpointError: A file is missing or cut off.
    """
    with own_errors(folder):
        stored = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    tensors = {name for name, kind in stored.items() if isinstance(kind, TensorStorageMetadata)}
    of_groups = [name for name in stored if name.startswith(_GROUPS)]
    values = load_objects(folder, [name for name in stored if name not in tensors])
    values |= mapped_tensors(folder, tensors, scratch)
    groups, texts = _groups({name: values[name] for name in of_groups})
    record = extras_of(texts)
    identity = record.pop(RECORD, None)
    expected = record.pop(WITH_STATES, 0)
    if identity is None:
        raise of_another(folder)
    module = {name.removeprefix(_MODEL): value for name, value in values.items() if name.startswith(_MODEL)}
    trained = [name for group in groups for name in group.members]
    parameters = {name: NamedParameter(module.pop(name)) for name in trained if name in module}
    matrices = _take_states(parameters, values)
    if expected and not matrices:
        raise ConversionError(f"{folder} lacks the states of matrices, but {expected} had some: save all states")
    return NamedCheckpoint(str(identity), parameters, matrices, groups, record, module)


def _groups(values: Mapping[str, Any]) -> tuple[list[NamedGroup], list[dict[str, Any]]]:
    """The param groups, and the saved options of each with the record of the optimizer."""
    options_of: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        place, _, option = name.removeprefix(_GROUPS).rpartition(".")
        options_of.setdefault(place, {})[option] = value
    if options_of and all(place.isdecimal() for place in options_of):
        ordered = [options_of[place] for place in sorted(options_of, key=int)]
        members = [list(group.get("params", ())) for group in ordered]
    else:
        ordered, members = _by_settings(options_of)
    settings = [{key: value for key, value in group.items() if key not in (*_OF_MEMBERS, RECORD)} for group in ordered]
    return [NamedGroup(*both) for both in zip(settings, members, strict=True)], ordered


def _by_settings(found: Mapping[str, Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[list[str]]]:
    """Group the parameters of a flattened dictionary, which has the settings of each parameter."""
    groups: list[dict[str, Any]] = []
    members: list[list[str]] = []
    for name, settings in found.items():
        options = {key: value for key, value in settings.items() if key not in _OF_MEMBERS}
        if options not in groups:
            groups.append(options)
            members.append([])
        members[groups.index(options)].append(name)
    return groups, members


def _take_states(parameters: dict[str, NamedParameter], values: Mapping[str, Any]) -> dict[str, dict[str, Tensor]]:
    """Give the parameters their states, and return the states of matrices."""
    states_of: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        if key.startswith(_STATE):
            name, state = _split(key.removeprefix(_STATE), parameters)
            states_of.setdefault(name, {})[state] = value
    matrices: dict[str, dict[str, Tensor]] = {}
    for name, states in states_of.items():
        matrices |= matrices_of(name, states)
        for state, value in states.items():
            if state == "step":
                parameters[name].step = float(value)
            elif state == REMAINDER:
                parameters[name].weight = join(parameters[name].weight, value)
            elif state != MATRIX and not state.startswith(f"{MATRIX}."):
                parameters[name].states[state] = value
    return matrices


def _split(path: str, names: Mapping[str, Any]) -> tuple[str, str]:
    """Split a path into a parameter and its state; the longest name counts."""
    places = [place for place, letter in enumerate(path) if letter == "."]
    for place in reversed(places):
        if path[:place] in names:
            return path[:place], path[place + 1 :]
    raise ConversionError(f"the checkpoint has the state {path!r} of a parameter that no param group has")


def write_torch(named: NamedCheckpoint, folder: Path) -> None:
    """Write such a checkpoint into a new folder, as ``torch.distributed.checkpoint.save`` would.

    Raises:
        CheckpointError: The folder cannot be written.
    """
    matrices = under_parameters(named.matrices, {key: named.owner(key) for key in named.matrices})
    states = {
        name: {
            **parameter.states,
            "step": torch.tensor(parameter.step, dtype=torch.float32, device="cpu"),
            **matrices.get(name, {}),
        }
        for name, parameter in named.parameters.items()
    }
    members = [{"params": group.members} for group in named.groups]
    texts = record_texts(named.identity, len(named.matrices), steps_taken(states), named.extra, members)
    groups = list(_written_groups(named, texts))
    model = {**named.module, **{name: parameter.weight for name, parameter in named.parameters.items()}}
    with own_errors(folder):
        dcp.save(
            {"model": model, "optimizer": {"state": states, "param_groups": groups}}, checkpoint_id=folder, no_dist=True
        )


def _written_groups(named: NamedCheckpoint, texts: list[str]) -> Iterator[dict[str, Any]]:
    for group, text in zip(named.groups, texts, strict=True):
        yield {**group.settings, **{key: list(group.members) for key in _OF_MEMBERS}, RECORD: text}
