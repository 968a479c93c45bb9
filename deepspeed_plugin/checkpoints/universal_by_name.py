"""One process reads and writes universal checkpoints here by the names of parameters, for other frameworks."""

from __future__ import annotations

import uuid
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from deepspeed.checkpoint.constants import (
    CAT_DIM,
    PARAM,
    UNIVERSAL_CHECKPOINT_INFO,
    UNIVERSAL_CHECKPOINT_VERSION_KEY,
    UNIVERSAL_CHECKPOINT_VERSION_VALUE,
)
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from torch import Tensor

from deepspeed_plugin.checkpoints.files import RECORD
from deepspeed_plugin.checkpoints.reading import require_intact
from deepspeed_plugin.checkpoints.universal import COMMON, FOLDER, PARAMETERS, UniversalCheckpoint
from rankwise.checkpoint.memory_mapped import STACKED, joined_stacks, mapped_tensors
from rankwise.checkpoint.named_checkpoint import (
    ConversionError,
    NamedCheckpoint,
    NamedGroup,
    NamedParameter,
    of_another,
)
from rankwise.checkpoint.named_vectors import of_matrices
from rankwise.layout.chunked_vectors import save_vectors

__all__ = ["is_universal", "read_universal", "write_universal"]

_OURS = ("param_groups", "rankwise", "save", PARAMETERS)
_MOMENTS = ("exp_avg", "exp_avg_sq")


def is_universal(folder: Path) -> bool:
    """Whether a folder holds a universal checkpoint, whoever's optimizer it was."""
    return (folder / "zero").is_dir()


def read_universal(folder: Path, scratch: Path) -> NamedCheckpoint:
    """Return what a universal checkpoint holds that ``rankwise universal`` or a conversion made.

    Args:
        folder: Folder of the checkpoint.
        scratch: Folder for temporary files with its tensors.

    Raises:
        ConversionError: None of our optimizers wrote it, or its states are not in it.
        CheckpointError: A file is missing or damaged, with our states or others.
    """
    universal = UniversalCheckpoint.of_anybody(folder.parent, folder.name)
    if universal is None:
        raise ConversionError(f"{folder} lacks the model file of a universal checkpoint: it was not written to the end")
    require_intact(universal.model_file)
    identity = universal.record.get("identity")
    if identity is None:
        raise of_another(folder)
    universal = UniversalCheckpoint.find(folder.parent, folder.name, True, identity)
    common = None if universal.states is None else universal.states.common
    if universal.states is None or common is None or PARAMETERS not in common:
        raise ConversionError(
            f"{folder} does not have the states of {identity} by name: convert the original checkpoint again with "
            "'rankwise universal'"
        )
    vectors = mapped_tensors(folder / FOLDER, universal.states.vectors, scratch)
    parameters: dict[str, NamedParameter] = {}
    groups = []
    for index, (settings, shapes) in enumerate(zip(common["param_groups"], common[PARAMETERS], strict=True)):
        step = float(vectors.get(f"step/{index}", 0.0))
        members = dict(_parameters(vectors, shapes, step, scratch))
        parameters |= members
        groups.append(NamedGroup({key: value for key, value in settings.items() if key != "params"}, list(members)))
    trained = set(parameters)
    module = {name: value for name, value in universal.content["module"].items() if _is_kept(name, value, trained)}
    tied = universal.content.get("shared_params") or {}
    module |= {name: parameters[first].weight for name, first in tied.items() if first in parameters}
    extra = {key: value for key, value in common.items() if key not in _OURS}
    return NamedCheckpoint(identity, parameters, of_matrices(vectors), groups, extra, module)


def _is_kept(name: str, value: Any, trained: set[str]) -> bool:
    # A tensor without elements stands for a weight that ZeRO-3 has cut.
    return name not in trained and (not isinstance(value, Tensor) or value.numel() > 0)


def _parameters(
    vectors: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], step: float, scratch: Path
) -> Iterator[tuple[str, NamedParameter]]:
    kinds: dict[str, dict[str, Tensor]] = {}
    for path, value in vectors.items():
        kind, _, below = path.partition("/")
        state, _, key = below.partition("/") if kind == "element" else ("", "", below)
        if kind in ("weight", "element") and key in shapes:
            kinds.setdefault(state, {})[key] = value.view(shapes[key])
    # A conversion also has whole stacks.
    whole = {state: joined_stacks(values, (), scratch) for state, values in kinds.items()}
    for name in dict.fromkeys(STACKED.sub(r"\1", key) for key in shapes):
        if name not in whole.get("", {}):
            raise ConversionError(f"the checkpoint has no weight of {name!r}")
        states = {state: values[name] for state, values in whole.items() if state and name in values}
        yield name, NamedParameter(whole[""][name], states, step)


def write_universal(named: NamedCheckpoint, folder: Path) -> None:
    """Write a universal checkpoint, to be loaded at any stage on any ranks.

    Args:
        named: Content of the checkpoint.
        folder: New, empty folder.

    Raises:
        ConversionError: The parameters of a group have several counts.
        CheckpointError: It cannot be written.
    """
    vectors: dict[str, Tensor] = {}
    for index, group in enumerate(named.groups):
        members = {name: named.parameters[name] for name in group.members}
        wide = [name for name, parameter in members.items() if parameter.weight.dtype == torch.float64]
        if wide:
            raise ConversionError(f"{wide[0]!r} is float64: DeepSpeed keeps float32, so it must be converted before")
        step = named.one_step(members, "a param group of DeepSpeed")
        vectors[f"step/{index}"] = torch.tensor(step, dtype=torch.float32, device="cpu")
        for name, parameter in members.items():
            vectors |= _vectors(name, parameter)
    for key, state in named.matrices.items():
        vectors |= {f"matrix/{key}/{name}": value for name, value in state.items()}
    save_vectors(vectors, folder / FOLDER, None)
    save = uuid.uuid4().hex
    shapes = [{name: tuple(named.parameters[name].weight.shape) for name in group.members} for group in named.groups]
    groups = [{**group.settings, "params": [index]} for index, group in enumerate(named.groups)]
    common = {**named.extra, "param_groups": groups, "rankwise": named.identity, "save": save, PARAMETERS: shapes}
    torch.save(common, folder / FOLDER / COMMON)
    for name, parameter in named.parameters.items():
        _write_for_others(parameter.weight, folder / "zero" / name)
    _write_common(named, folder, save)


def _vectors(name: str, own: NamedParameter) -> Iterator[tuple[str, Tensor]]:
    """Yield what is stored of a parameter: its weight in full precision, and its states."""
    values = {f"weight/{name}": own.weight.float()}
    values |= {f"element/{state}/{name}": value for state, value in own.states.items()}
    for path, value in values.items():
        yield path, value.reshape(-1)
        if value.dim() == 3:
            # One rule asks for a stack's matrices, another for the whole stack; which it is, depends on the model.
            yield from ((f"{path}[{place}]", matrix.reshape(-1)) for place, matrix in enumerate(value))


def _write_for_others(weight: Tensor, folder: Path) -> None:
    """Write DeepSpeed's files of a weight, with a fresh Adam's states, which take no room."""
    folder.mkdir(parents=True)
    torch.save({PARAM: weight.float().clone(), CAT_DIM: 0}, folder / "fp32.pt")
    nothing = torch.zeros((), dtype=torch.float32, device="cpu")
    for moment in _MOMENTS:
        torch.save({PARAM: nothing.expand(weight.shape), CAT_DIM: 0}, folder / f"{moment}.pt")
    torch.save(nothing.clone(), folder / "step.pt")


def _write_common(named: NamedCheckpoint, folder: Path, save: str) -> None:
    scaler = {"loss_scaler": LossScaler(1.0), "dynamic_loss_scale": False, "overflow": False, "clip_grad": 0.0}
    groups = [{"params": [index]} for index in range(len(named.groups))]
    zero = {"zero_stage": ZeroStageEnum.optimizer_states, "param_groups": groups, "partition_count": [1] * len(groups)}
    torch.save({**scaler, **zero}, folder / "zero" / "optimizer_state.pt")
    weights = {name: parameter.weight for name, parameter in named.parameters.items()}
    version = {UNIVERSAL_CHECKPOINT_VERSION_KEY: UNIVERSAL_CHECKPOINT_VERSION_VALUE}
    shapes = [OrderedDict((name, weights[name].shape) for name in group.members) for group in named.groups]
    tied = _tied(named)
    content = {
        "module": OrderedDict({**weights, **named.module}),
        "buffer_names": [n for n, value in named.module.items() if isinstance(value, Tensor) and n not in tied],
        "optimizer": None,
        "param_shapes": shapes,
        **dict.fromkeys(
            ("frozen_param_shapes", "frozen_param_fragments", "lr_scheduler", "data_sampler", "random_ltd")
        ),
        "shared_params": tied,
        **{"skipped_steps": 0, "global_steps": named.step, "dp_world_size": 1, "mp_world_size": 1, "ds_config": {}},
        RECORD: {"identity": named.identity, "save": save, "folder": str(folder), "added_info": True},
        UNIVERSAL_CHECKPOINT_INFO: version,
    }
    torch.save(content, folder / "mp_rank_00_model_states.pt")


def _tied(named: NamedCheckpoint) -> dict[str, str]:
    """Return further names of parameters, which a checkpoint of torch's shows only by equal values."""
    tied = {}
    for other, value in named.module.items():
        for name, parameter in named.parameters.items():
            if (
                isinstance(value, Tensor)
                and value.shape == parameter.weight.shape
                and torch.equal(value, parameter.weight)
            ):
                tied[other] = name
                break
    return tied
