"""One process reads and writes ``torch_dist`` checkpoints here by the names of parameters, for other frameworks."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.serialization import load_common_state_dict, load_sharded_metadata
from torch import Tensor

from megatron_patches.cpu import cpu_megatron
from megatron_patches.param_groups import GROUP_KEYS
from megatron_patches.records import RECORD, at_place, find_records
from megatron_patches.whole_files import require_whole
from rankwise.checkpoint.memory_mapped import joined_stacks, mapped_like, mapped_tensors
from rankwise.checkpoint.named_checkpoint import (
    ConversionError,
    NamedCheckpoint,
    NamedGroup,
    NamedParameter,
    of_another,
)
from rankwise.layout.chunked_vectors import stored_tensors
from rankwise.saving.state_takeover import listed
from rankwise.states.matrix_states import base_name

__all__ = ["is_megatron", "read_megatron", "write_megatron"]

# A state may belong to a block, whose name follows it in brackets.
_STATE = re.compile(r"((?:[^.\[]|\[[^\]]*\])+)\.(.+)")
_UNKNOWN_PLACE = (
    "an earlier version wrote it (load it and save it again), or it is one of experts, or of matrices that each "
    "tensor-parallel rank has for itself, which are not converted"
)
_SETTINGS_APART = (*GROUP_KEYS, "params", RECORD)


def is_megatron(folder: Path) -> bool:
    """Whether a folder holds a ``torch_dist`` checkpoint, whoever's optimizer it was."""
    return (folder / ".metadata").is_file() and (folder / "metadata.json").is_file()


@contextmanager
def _one_process() -> Iterator[None]:
    """Provide what Megatron's functions ask for: a group of ranks, and CUDA or a stand-in."""
    begin = not dist.is_initialized()
    if begin:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with nullcontext() if torch.cuda.is_available() else cpu_megatron():
            yield
    finally:
        if begin:
            dist.destroy_process_group()


def read_megatron(folder: Path, scratch: Path) -> NamedCheckpoint:
    """Return what a checkpoint of ours holds.

    Args:
        folder: Folder of an iteration.
        scratch: Folder for temporary files with its tensors.

    Raises:
        ConversionError: None of our optimizers wrote it, or it does not say where weights are.
        ValueError: A file is missing or cut off.
        CheckpointError: A file cannot be read.
    """
    common, record = _opened(folder)
    stored = stored_tensors(folder)
    prefix = f"optimizer.rankwise.{record['identity']}."
    places: dict[str, Any] = record.get("weights", {})
    halves = {key.removeprefix(f"{prefix}weight.") for key in stored if key.startswith(f"{prefix}weight.")}
    trained = [name for names in record.get("members", ()) for name in sorted(names)]
    of_model = {places[name][0] for name in trained if name in places and name not in halves}
    values = mapped_tensors(folder, {*(key for key in stored if key.startswith(prefix)), *of_model}, scratch)
    states = {key.removeprefix(prefix): value for key, value in values.items() if key.startswith(prefix)}
    kinds = dict(_kinds(states, trained, scratch))
    parameters = {}
    for name in trained:
        main = kinds.get("weight", {}).get(name)
        if main is None and name not in places:
            raise ConversionError(f"{folder} does not say where the weight of {name!r} is: {_UNKNOWN_PLACE}")
        key, layer = places.get(name, ("", ()))
        weight = values[key][tuple(layer)] if main is None else main
        if key in stored:
            weight = weight.view(stored[key][0][len(layer) :])
        flat = {state: named[name] for state, named in kinds.items() if state != "weight" and name in named}
        states_of = {state: value.view(weight.shape) for state, value in flat.items()}
        parameters[name] = NamedParameter(weight, states_of, float(record["step"]))
    taken = {places[name][0] for name in places}
    left = sorted(key for key in load_sharded_metadata(str(folder)) if key not in taken and not key.startswith(prefix))
    return NamedCheckpoint(
        record["identity"], parameters, _matrices(states), _groups(record), dict(record["extra"]), left=left
    )


def _opened(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what all ranks share of a checkpoint, and the record of the one optimizer."""
    with _one_process():
        require_whole(str(folder))
    try:
        common = load_common_state_dict(str(folder))
    except Exception as error:  # a damaged file may raise any error
        raise ConversionError(
            f"{folder} cannot be read: it was not written to the end, or is damaged ({error})"
        ) from error
    records = [dict(record) for _, record in find_records(common)]
    if not records:
        raise of_another(folder)
    if len(records) > 1:
        raise ConversionError(f"{folder} has {len(records)} optimizers, of experts and of others: it is not converted")
    return common, records[0]


def _kinds(states: Mapping[str, Tensor], names: list[str], scratch: Path) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Yield element states by name, each with its values by parameter."""
    values_by_state: dict[str, dict[str, Tensor]] = {}
    for path, value in states.items():
        state, _, key = path.partition(".")
        if state != "matrix":
            values_by_state.setdefault(state, {})[key] = value
    for state, values in values_by_state.items():
        yield state, joined_stacks(values, names, scratch)


def _matrices(states: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    states_by_matrix: dict[str, dict[str, Tensor]] = {}
    for path, value in states.items():
        if path.startswith("matrix."):
            state, key = _of_matrix(path)
            states_by_matrix.setdefault(key, {})[state] = value
    shapes: dict[str, set[torch.Size]] = {}
    for matrix_states in states_by_matrix.values():
        for state, value in matrix_states.items():
            shapes.setdefault(state, set()).add(value.shape)
    # Megatron's tensors have at least one dimension.
    numbers = {state for state, sizes in shapes.items() if sizes == {torch.Size([1])}}
    return {
        key: {state: value.view(()) if state in numbers else value for state, value in matrix_states.items()}
        for key, matrix_states in states_by_matrix.items()
    }


def _of_matrix(path: str) -> tuple[str, str]:
    match = _STATE.fullmatch(path.removeprefix("matrix."))
    assert match is not None, path
    return match[1], match[2]


def _groups(record: Mapping[str, Any]) -> list[NamedGroup]:
    groups = []
    for group, names in zip(record["groups"], record["members"], strict=True):
        settings = {key: value for key, value in group.items() if key not in _SETTINGS_APART}
        # torch's schedules keep the rate from which they begin under this key.
        peak = {"initial_lr": group["max_lr"]} if group.get("max_lr") is not None else {}
        groups.append(NamedGroup({**settings, **peak}, sorted(names)))
    return groups


def write_megatron(named: NamedCheckpoint, folder: Path, like: Path, scratch: Path) -> None:
    """Write a checkpoint of the form of another one.

    Only a model says under which key a module stores its weight and what else it stores, and only a run what Megatron
    records of it: all that is taken from a checkpoint of theirs.

    Args:
        named: Content of the checkpoint.
        folder: New, empty folder.
        like: Checkpoint of the run that will continue, of the same optimizer and model, after any number of steps.
        scratch: Folder for temporary files.

    Raises:
        ConversionError: The two are not of one model and optimizer.
        CheckpointError: ``like`` cannot be read.
    """
    common, record = _opened(like)
    if record["identity"] != named.identity:
        raise ConversionError(f"{like} is of {record['identity']}, and what is to be converted of {named.identity}")
    step = named.one_step(named.parameters, "an optimizer of Megatron")
    # From 0.19 on, the common part is an object among the others.
    entries = {key: e for key, e in load_sharded_metadata(str(like)).items() if e.key != "common_state"}
    values = _values(named, record, entries, scratch)
    kept = [key for key, entry in entries.items() if key not in values and isinstance(entry, ShardedTensor)]
    values |= mapped_tensors(like, kept, scratch)
    record |= {"step": int(step), "extra": named.extra, "groups": _written_groups(named, record, like)}
    _count_on(common, int(step))
    place = next(place for place, _ in find_records(common))
    at_place(common, place)[RECORD] = record
    with _one_process():
        objects = {key: entry for key, entry in entries.items() if isinstance(entry, ShardedObject)}
        loaded = dist_checkpointing.load({"objects": dict(objects)}, str(like))["objects"] if objects else {}
        state = {
            "tensors": {key: _sharded(key, value) for key, value in values.items()},
            "objects": {key: _filled(entry, loaded[key]) for key, entry in objects.items()},
        }
        dist_checkpointing.save({**common, **state}, str(folder))


def _values(
    named: NamedCheckpoint, record: Mapping[str, Any], entries: Mapping[str, Any], scratch: Path
) -> dict[str, Tensor]:
    """Return new values for every sharded tensor of ``like`` that is a weight or a state."""
    prefix = f"optimizer.rankwise.{named.identity}."
    ours = {key.removeprefix(prefix): entry for key, entry in entries.items() if key.startswith(prefix)}
    places: Mapping[str, Any] = record.get("weights", {})
    _compare(set(named.parameters), set(places), "parameters")
    layers: dict[str, dict[tuple[int, ...], Tensor]] = {}
    for name, (at, layer) in places.items():
        layers.setdefault(at, {})[tuple(layer)] = named.parameters[name].weight
    weights = {at: _one(entries[at], at, by_layer, scratch) for at, by_layer in layers.items()}
    states = dict(_states(named, ours))
    _compare(set(states), set(ours), "states")
    return {**weights, **{f"{prefix}{path}": _fit(states[path], entry, path) for path, entry in ours.items()}}


def _states(named: NamedCheckpoint, wanted: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in named.parameters.items():
        half = f"weight.{name}" in wanted or f"weight.{name}[0]" in wanted
        for state, value in {**({"weight": parameter.weight} if half else {}), **parameter.states}.items():
            if value.dim() == 3 and f"{state}.{name}" not in wanted:
                yield from ((f"{state}.{name}[{place}]", matrix) for place, matrix in enumerate(value))
            else:
                yield f"{state}.{name}", value
    for key, kinds in named.matrices.items():
        yield from ((f"matrix.{kind}.{key}", value) for kind, value in kinds.items())


def _compare(given: set[str], wanted: set[str], what: str) -> None:
    for problem, names in (("lacks", wanted - given), ("has, and the form to be written has not,", given - wanted)):
        if names:
            raise ConversionError(
                f"what is to be converted {problem} the {what} {listed(sorted(names))}: both must be of one model, "
                "whose weights are divided into the same matrices (option 'blocks')"
            )


def _one(entry: Any, key: str, layers: Mapping[tuple[int, ...], Tensor], scratch: Path) -> Tensor:
    """Return the one tensor of all layers' weights."""
    if set(layers) == {()}:
        return _fit(layers[()], entry, key)
    whole = mapped_like(entry.global_shape, entry.dtype, scratch)
    for place, value in layers.items():
        whole[place] = _fit(value, None, key, whole[place])
    return whole


def _fit(value: Tensor, entry: Any, key: str, like: Tensor | None = None) -> Tensor:
    shape = tuple(entry.global_shape) if like is None else tuple(like.shape)
    dtype = entry.dtype if like is None else like.dtype
    # Runs of parameters that are no matrices, and numbers, have one dimension there.
    if tuple(value.shape) != shape and shape != (value.numel(),):
        raise ConversionError(f"{key} has the shape {tuple(value.shape)}, and {shape} in the form to be written")
    if value.dtype != dtype and not (value.is_floating_point() and dtype.is_floating_point):
        raise ConversionError(f"{key} has the type {value.dtype}, and {dtype} in the form to be written")
    return value.reshape(shape).to(dtype)


def _written_groups(named: NamedCheckpoint, record: Mapping[str, Any], like: Path) -> list[dict[str, Any]]:
    group_of = {name: group for group in named.groups for name in group.members}
    groups = []
    for group, names in zip(record["groups"], record["members"], strict=True):
        settings = [group_of[base_name(name, group_of)].settings for name in sorted(names)]
        if any(updated != settings[0] for updated in settings):
            raise ConversionError(
                f"the parameters of one param group of {like} ({', '.join(sorted(names)[:3])}, ...) have several "
                "settings in what is to be converted: make the groups alike"
            )
        updated = {key: value for key, value in (settings[0] if settings else {}).items() if key != "initial_lr"}
        groups.append({**group, **updated})
    return groups


def _count_on(common: dict[str, Any], step: int) -> None:
    """Scale counts of iterations and samples, as if that run had continued at its pace."""
    before = int(common.get("iteration") or 0)

    def scaled(holder: Any, name: str) -> None:
        values = holder if isinstance(holder, dict) else getattr(holder, "__dict__", {})
        if isinstance(values.get(name), int) and before:
            values[name] = values[name] * step // before

    scaled(common.get("opt_param_scheduler"), "num_steps")
    scaled(common.get("args"), "consumed_train_samples")
    common["iteration"] = step


def _sharded(key: str, value: Tensor) -> ShardedTensor:
    shape = tuple(value.shape)
    return ShardedTensor(
        key=key,
        data=value,
        dtype=value.dtype,
        local_shape=shape,
        global_shape=shape,
        global_offset=(0,) * len(shape),
        axis_fragmentations=(1,) * len(shape),
    )


def _filled(entry: ShardedObject, data: Any) -> ShardedObject:
    entry.data = data
    return entry
