"""Loading a checkpoint of ours into another layout: other ranks, another ZeRO stage, another cut.

The ranks' files are read as named vectors, laid down once by torch.distributed.checkpoint, and loaded from there.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.checkpoint.constants import PARAM
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor

from deepspeed_plugin.checkpoints.adamw_files import in_our_form
from deepspeed_plugin.checkpoints.errors import CheckpointError, read_together
from deepspeed_plugin.checkpoints.files import NamedStates, SavedCheckpoint
from deepspeed_plugin.checkpoints.reading import read
from deepspeed_plugin.checkpoints.universal import UniversalCheckpoint
from deepspeed_plugin.layouts import DeepSpeedLayout, GroupedShapes
from rankwise.planning.param_remainders import NARROW
from rankwise.sharding.chunked_vectors import save_vectors
from rankwise.step.named_vectors import Vectors, merge_vectors, restore, saved_vectors, take_over_moments
from rankwise.step.optimizer import ShardedOptimizer
from rankwise.updates.remainders import split

__all__ = ["fill", "fill_weights", "laid_down", "vectors_of"]


def vectors_of(saved: SavedCheckpoint, ranks: range, order: GroupedShapes | None = None) -> Vectors:
    """What the files of some ranks hold, by name.

    Args:
        saved: The checkpoint, written by one of ours, or by AdamW or Muon.
        ranks: Ranks that wrote the files.
        order: Order of AdamW or Muon at stage 0, see :func:`deepspeed_plugin.checkpoints.adamw_files.in_our_form`.
    """
    if saved.author is None:
        return merge_vectors([saved_vectors(*in_our_form(saved, rank, order)) for rank in ranks])
    return merge_vectors([saved_vectors(*saved.optimizer(rank)) for rank in ranks])


@contextmanager
def laid_down(engine: DeepSpeedEngine, saved: SavedCheckpoint, states: bool) -> Iterator[NamedStates]:
    """Collective: what the files of a checkpoint hold, by name, in a folder that is gone afterwards.

    Args:
        engine: The engine that loads.
        saved: Written by one of ours, or by AdamW or Muon, on any ranks and at any stage.
        states: Whether states are wanted beside the weights.

    Raises:
        CheckpointError: Alike on every rank: files that cannot be read.
        StorageError: Alike on every rank: files that cannot be written.
    """
    group: dist.ProcessGroup = engine.seq_data_parallel_group
    ranks = range(dist.get_rank(group), saved.world_size or 1, dist.get_world_size(group))
    layout, inherited = engine.basic_optimizer.layout_source, saved.author is None
    assert isinstance(layout, DeepSpeedLayout)
    with _scratch_folder(saved.folder, group) as scratch:
        order = layout.order() if inherited else None
        save_vectors(read_together(group, lambda: vectors_of(saved, ranks, order)), scratch, group)
        yield NamedStates(scratch, saved.common if states and not inherited else {}, inherited)


def fill(engine: DeepSpeedEngine, named: NamedStates, states: bool, strict: bool) -> None:
    """Collective: load named states into the engine's optimizer and the weights into its model.

    Args:
        engine: The engine.
        named: What to load.
        states: Whether states are wanted beside the weights.
        strict: Whether every parameter must be there.

    Raises:
        CheckpointError: Alike on every rank: what was saved is of another model.
        StorageError: Alike on every rank: files that cannot be read.
    """
    optimizer: ShardedOptimizer = engine.basic_optimizer
    group: dist.ProcessGroup = engine.seq_data_parallel_group
    extra = named.common if states and not named.inherited else None
    with _open_engine(engine, None if extra is None else extra["param_groups"]):
        restore(optimizer, named.folder, group, extra, strict=strict)
        if states and named.inherited:
            take_over_moments(optimizer, named.folder, group)


def fill_weights(engine: DeepSpeedEngine, found: UniversalCheckpoint, strict: bool) -> None:
    """Collective: fill the optimizer's weights from the checkpoint's file of each parameter, and the model from them.

    Args:
        engine: The engine.
        found: The checkpoint.
        strict: Whether every parameter must be in it.

    Raises:
        CheckpointError: Alike on every rank: a file is missing, damaged or of another model.
    """
    optimizer: ShardedOptimizer = engine.basic_optimizer
    with _open_engine(engine) as layout:

        def copy() -> None:
            for members in layout.units():
                for tensor, _ in members:
                    for piece in layout.contents(tensor).slices:
                        numel = _numel(optimizer, piece.name)
                        weight = _full_weight(found.folder, piece.name, numel, found.content["module"], strict)
                        if weight is not None:
                            place = tensor.detach().view(-1)[piece.offset : piece.offset + piece.end - piece.start]
                            place.copy_(weight[piece.start : piece.end])

        read_together(engine.seq_data_parallel_group, copy)


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
    if not _rounds_to(weight, rounded.reshape(-1)):
        # DeepSpeed 0.19's converter mixes up parameters that round_robin_gradients had reordered.
        raise CheckpointError(
            f"{path} is not the weight that {folder.name} has in its model file: DeepSpeed's converter misplaces "
            "weights of runs with zero_optimization.round_robin_gradients; load the original checkpoint instead."
        )
    return weight


def _rounds_to(weight: Tensor, rounded: Tensor) -> bool:
    """Whether these are the weight's values in another type; in the middle of two, what is split goes to the larger."""
    found = weight.to(rounded.dtype) == rounded
    if rounded.dtype is NARROW:
        halves = torch.empty_like(rounded)
        split(weight.float(), halves, torch.empty_like(rounded, dtype=torch.int16))
        found |= halves == rounded
    return bool(found.all())


@contextmanager
def _open_engine(engine: DeepSpeedEngine, param_groups: Any = None) -> Iterator[DeepSpeedLayout]:
    """The engine's layout, planned; the weights the optimizer holds at the end are copied to the model.

    As around DeepSpeed's own loading, ZeRO-3 lets go of gathered weights before and fetches the new ones after.
    """
    optimizer: ShardedOptimizer = engine.basic_optimizer
    layout = optimizer.layout_source
    assert isinstance(layout, DeepSpeedLayout)
    if engine._optimizer_has_ckpt_event_prologue():
        engine.optimizer.checkpoint_event_prologue()
    if param_groups is not None:
        optimizer.saved.adopt_groups(optimizer.param_groups, param_groups)
    optimizer.plan_ahead(layout.units())
    yield layout
    layout.publish_weights()
    if engine._optimizer_has_ckpt_event_epilogue():
        engine.optimizer.checkpoint_event_epilogue()


@contextmanager
def _scratch_folder(beside: Path, group: dist.ProcessGroup) -> Iterator[Path]:
    """A folder that every rank sees, gone afterwards: in the checkpoint, or on this machine if all ranks run on it."""
    hosts: list[str] = [""] * dist.get_world_size(group)
    dist.all_gather_object(hosts, os.uname().nodename, group=group)
    first = dist.get_rank(group) == 0
    chosen: list[Any] = [None, None]
    if first:
        try:
            chosen[0] = _new_folder(beside, len(set(hosts)) == 1)
        except OSError as error:
            chosen[1] = (
                f"moving a checkpoint to another layout needs a folder that all ranks share: {beside} cannot be "
                f"written ({error}), and the ranks run on {len(set(hosts))} machines; make it writable or load a copy."
            )
    dist.broadcast_object_list(chosen, src=dist.get_global_rank(group, 0), group=group)
    if chosen[1] is not None:
        raise CheckpointError(chosen[1])
    try:
        yield Path(chosen[0])
        dist.barrier(group)
    finally:
        if first:
            shutil.rmtree(chosen[0], ignore_errors=True)


def _new_folder(beside: Path, one_machine: bool) -> str:
    try:
        return tempfile.mkdtemp(prefix=".resharding-", dir=beside)
    except OSError:
        if not one_machine:
            raise
        return tempfile.mkdtemp(prefix="resharding-")
