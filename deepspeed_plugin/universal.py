"""DeepSpeed's universal checkpoints: a folder per parameter, for any number of ranks and any stage.

DeepSpeed's converter knows Adam's states only. Ours lie beside its files, by name, in a folder ``rankwise`` that
:func:`convert` adds; where the converter ran alone, they are read from the checkpoint it was made of.
"""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from deepspeed.checkpoint import ds_to_universal
from deepspeed.checkpoint.constants import PARAM
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.utils import log_dist
from torch import Tensor

from deepspeed_plugin.intact import require_intact
from deepspeed_plugin.pipeline import is_pipeline
from deepspeed_plugin.resharding import fill, open_engine, own_error, reshard, together, vectors_of
from deepspeed_plugin.restoring import Wanted, refuse_module, restore_engine, restore_module, restore_scaler
from deepspeed_plugin.saved import RECORD, CheckpointError, SavedCheckpoint, newest_model_file, read, tag_in
from rankwise.sharding.state import save_vectors
from rankwise.step.optimizer import ShardedOptimizer
from rankwise.step.portable import Vectors

__all__ = ["author_of", "convert", "load_universal"]

_FOLDER, _COMMON = "rankwise", "common.pt"
_LAYOUT_KEYS = ("state", "layout", "matrix_states")


def convert(source: str | Path, target: str | Path, workers: int = 2) -> None:
    """Make a universal checkpoint with DeepSpeed's converter, and add our optimizer's states to it.

    Args:
        source: Folder of a tag, written by ``save_checkpoint`` at ZeRO stage 1, 2 or 3.
        target: Folder to write; ``latest_universal`` beside it will name it.
        workers: Processes of the converter.

    Raises:
        CheckpointError: There is no checkpoint in ``source``, files of it are missing or damaged, or stage 0 wrote it.
    """
    source, target = Path(source).resolve(), Path(target).resolve()
    saved = SavedCheckpoint.at(source)
    if saved is None:
        raise CheckpointError(f"{source} holds no checkpoint; name the folder of a tag, such as …/global_step100.")
    saved.require_complete()
    for path in saved.files(states=True):
        require_intact(path)
    if not saved.zero_files:
        raise CheckpointError(
            f"{source} was written at stage 0 and needs no conversion: it can be loaded at any stage on any ranks."
        )
    author = saved.author
    if author is not None and (int(saved.content.get("mp_world_size", 1)) > 1 or saved.content.get("num_experts")):
        raise CheckpointError(
            f"{source} was written by a pipeline or holds expert layers, whose {author} states cannot be converted; "
            "DeepSpeed's own ds_to_universal converts the weights alone."
        )
    ds_to_universal.main(
        Namespace(
            input_folder=str(source),
            output_folder=str(target),
            num_extract_workers=workers,
            num_merge_workers=workers,
            keep_temp_folder=False,
            strict=True,
            inject_missing_state=True,
        )
    )
    if author is None:
        return
    vectors = vectors_of(saved, range(len(saved.zero_files)))
    if (saved.config.get("zero_optimization") or {}).get("round_robin_gradients"):
        _correct_weights(vectors, target / "zero")
    with own_error():
        save_vectors(vectors, target / _FOLDER, None)
    state, _ = saved.optimizer(0)
    common = {key: value for key, value in state.items() if key not in _LAYOUT_KEYS}
    torch.save({**common, "save": saved.record.get("save")}, target / _FOLDER / _COMMON)


@torch.no_grad()
def _correct_weights(vectors: Vectors, folder: Path) -> None:
    """Write the weights again: DeepSpeed 0.19's converter misplaces what round_robin_gradients had reordered."""
    parts: dict[str, list[tuple[int, Tensor]]] = {}
    for name, vector in vectors.items():
        kind, _, key = name.partition("/")
        if kind == "weight":
            stacked = re.fullmatch(r"(.+)\[(\d+)\]", key)
            parameter, position = (stacked[1], int(stacked[2])) if stacked else (key, 0)
            flat = torch.empty(vector.numel)
            for start, values in vector.chunks:
                flat[start : start + values.numel()] = values
            parts.setdefault(parameter, []).append((position, flat))
    for parameter, found in parts.items():
        path = folder / parameter / "fp32.pt"
        content = read(path)
        whole = torch.cat([flat for _, flat in sorted(found, key=lambda part: part[0])])
        torch.save({**content, PARAM: whole.view(content[PARAM].shape)}, path)


def author_of(load_dir: str, tag: str | None) -> str | None:
    """Which of our optimizers a universal checkpoint is of; None for anybody else's."""
    tag = tag_in(load_dir, "latest_universal") if tag is None else str(tag)
    model_file = None if tag is None else newest_model_file(Path(load_dir) / tag)
    return None if model_file is None else (read(model_file).get(RECORD) or {}).get("identity")


def load_universal(
    engine: DeepSpeedEngine, load_dir: str, tag: str | None, wanted: Wanted
) -> tuple[str, dict[str, Any]]:
    """Collective: load a universal checkpoint, whoever wrote it, into an engine with one of our optimizers.

    Args:
        engine: The engine, at any stage.
        load_dir: Folder with ``latest_universal``.
        tag: Which folder in it; by default the one named there.
        wanted: The arguments of ``load_checkpoint``.

    Returns:
        As DeepSpeed: the path and the client state.

    Raises:
        CheckpointError: Alike on every rank: not a universal checkpoint, damaged, or of another model.
    """
    if is_pipeline(engine) or engine.has_moe_layers:
        raise CheckpointError(
            "universal checkpoints of pipelines and of expert layers cannot be loaded with a rankwise optimizer; "
            "continue from the original checkpoint on the same ranks, and remove checkpoint.load_universal."
        )
    group = engine.seq_data_parallel_group
    folder, model_file, content = together(group, lambda: _look(load_dir, tag))
    optimizer: ShardedOptimizer = engine.basic_optimizer
    refuse_module(engine, content, wanted, model_file.name.startswith("zero_pp_rank"))
    record = content.get(RECORD) or {}
    if wanted.states and record.get("identity") == optimizer.identity:
        common = together(group, lambda: _own_states(folder, record))
        if common is not None:
            restore_module(engine, content, wanted)
            fill(engine, folder / _FOLDER, common, wanted)
            return _finish(engine, folder, model_file, content, wanted)
        source = together(group, lambda: _source(folder, record))
        if source is not None:
            log_dist(f"rankwise: {folder.name} holds weights; states are read from {source.folder}.", ranks=[0])
            reshard(engine, source, wanted)
            return str(model_file), wanted.client_state(content)
    if wanted.states:
        log_dist(_why_fresh(folder, record, optimizer), ranks=[0])
    restore_module(engine, content, wanted)
    _load_weights(engine, folder, content, wanted)
    return _finish(engine, folder, model_file, content, wanted)


def _look(load_dir: str, tag: str | None) -> tuple[Path, Path, dict[str, Any]]:
    tag = tag_in(load_dir, "latest_universal") if tag is None else str(tag)
    if tag is None:
        raise CheckpointError(
            f"checkpoint.load_universal is set, but {load_dir} has no 'latest_universal'; convert a checkpoint with "
            "'rankwise universal', name a tag, or remove the setting: checkpoints of rankwise optimizers move to other "
            "ranks and stages without it."
        )
    folder = Path(load_dir) / tag
    model_file = newest_model_file(folder)
    if model_file is None or not (folder / "zero" / "optimizer_state.pt").is_file():
        raise CheckpointError(
            f"{folder} is not a universal checkpoint, which checkpoint.load_universal asks for; convert it with "
            "'rankwise universal', or remove the setting."
        )
    return folder, model_file, read(model_file)


def _own_states(folder: Path, record: Mapping[str, Any]) -> dict[str, Any] | None:
    """What ``convert`` added, unless it is of an earlier conversion into the same folder."""
    path = folder / _FOLDER / _COMMON
    common = read(path) if path.is_file() else None
    return common if common is not None and common["save"] == record["save"] else None


def _source(folder: Path, record: Mapping[str, Any]) -> SavedCheckpoint | None:
    """The checkpoint that was converted, where it was saved or beside the universal one, if it is still the same."""
    written = Path(record["folder"])
    for candidate in (folder.parent / written.name, written):
        if candidate.is_dir():
            saved = SavedCheckpoint.at(candidate)
            if saved is not None and saved.record.get("save") == record["save"] and not saved.missing:
                return saved
    return None


def _why_fresh(folder: Path, record: Mapping[str, Any], optimizer: ShardedOptimizer) -> str:
    if record.get("identity") == optimizer.identity:
        reason = (
            f"was converted by DeepSpeed's tool, which leaves the state of {optimizer.identity} behind, and "
            f"{record['folder']}, of which it was made, is no longer there ('rankwise universal' takes it along)"
        )
    else:
        reason = f"was written by {record.get('identity', 'another optimizer')}"
    return f"rankwise: {folder.name} {reason}; its weights are kept, the state of {optimizer.identity} starts fresh."


def _finish(
    engine: DeepSpeedEngine, folder: Path, model_file: Path, content: Mapping[str, Any], wanted: Wanted
) -> tuple[str, dict[str, Any]]:
    restore_engine(engine, content, wanted)
    if wanted.states:
        restore_scaler(engine, read(folder / "zero" / "optimizer_state.pt"))
    return str(model_file), wanted.client_state(content)


def _load_weights(engine: DeepSpeedEngine, folder: Path, content: Mapping[str, Any], wanted: Wanted) -> None:
    """Fill the optimizer's weights from the folder's file of each parameter."""
    optimizer: ShardedOptimizer = engine.basic_optimizer
    with open_engine(engine) as layout:

        def copy() -> None:
            for members in layout.units():
                for tensor, _ in members:
                    for piece in layout.contents(tensor).slices:
                        numel = _numel(optimizer, piece.name)
                        weight = _full_weight(folder, piece.name, numel, content["module"], wanted.strict)
                        if weight is not None:
                            place = tensor.detach().view(-1)[piece.offset : piece.offset + piece.end - piece.start]
                            place.copy_(weight[piece.start : piece.end])

        together(engine.seq_data_parallel_group, copy)


def _numel(optimizer: ShardedOptimizer, name: str) -> int:
    """Elements of a parameter before ZeRO-3 replaced it by a placeholder."""
    parameter = optimizer.parameters_by_name[name]
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def _full_weight(folder: Path, name: str, numel: int, module: Mapping[str, Tensor], strict: bool) -> Tensor | None:
    path = folder / "zero" / name / "fp32.pt"
    if not path.is_file():
        if strict:
            raise CheckpointError(f"{path} is missing: the checkpoint is of another model, or damaged.")
        return None
    content: Any = read(path)
    weight: Tensor = (content[PARAM] if isinstance(content, Mapping) else content).reshape(-1)
    if weight.numel() != numel:
        raise CheckpointError(
            f"'{name}' has {weight.numel()} elements in {folder.name} and {numel} in the model; it is of another model."
        )
    rounded = module.get(name)
    if rounded is None or rounded.numel() != numel:
        return weight  # ZeRO-3's placeholder
    if not torch.equal(weight.to(rounded.dtype), rounded.reshape(-1)):
        # DeepSpeed 0.19's converter mixes up parameters that round_robin_gradients had reordered.
        raise CheckpointError(
            f"{path} is not the weight that {folder.name} has in its model file: DeepSpeed's converter misplaces "
            "weights of runs with zero_optimization.round_robin_gradients; load the original checkpoint instead."
        )
    return weight
