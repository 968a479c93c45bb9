"""Loading by name: a checkpoint of other ranks, of another ZeRO stage or another cut, and universal ones.

The ranks' files are read as named vectors, laid down once by torch.distributed.checkpoint, and loaded from there. What
a checkpoint holds beside trained weights and optimizer states follows.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from deepspeed.checkpoint.constants import UNIVERSAL_CHECKPOINT_INFO
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor

from deepspeed_plugin.checkpoints.adamw_files import in_our_form
from deepspeed_plugin.checkpoints.files import RECORD, NamedStates, SavedCheckpoint
from deepspeed_plugin.checkpoints.load_plan import Plan, Wanted
from deepspeed_plugin.checkpoints.universal import UniversalCheckpoint
from deepspeed_plugin.experts import stacks_of
from deepspeed_plugin.layouts import DeepSpeedLayout, GroupedShapes
from rankwise.checkpoint.named_vectors import Vectors, merge_vectors, restore, saved_vectors
from rankwise.layout.agreement import together
from rankwise.layout.chunked_vectors import CheckpointError, VectorFolder, save_vectors
from rankwise.step.optimizer import ShardedOptimizer

__all__ = ["Checkpoint", "client_state_of", "load_by_name", "restore_engine", "vectors_of", "without_record"]

Checkpoint = SavedCheckpoint | UniversalCheckpoint

# What DeepSpeed keeps of a model file when it hands out the client state.
_NOT_CLIENT_STATE = (
    "module",
    "skipped_steps",
    "global_steps",
    "dp_world_size",
    "mp_world_size",
    "data_sampler",
    "random_ltd",
)


def load_by_name(engine: DeepSpeedEngine, found: Checkpoint, plan: Plan) -> tuple[str, dict[str, Any]]:
    """Collective: weights and states from where they lie by name, then what else the model file holds.

    Args:
        engine: The engine that loads.
        found: The checkpoint, with all of its files.
        plan: What is to be done.

    Returns:
        Path of the model file, and the client state.

    Raises:
        CheckpointError: Alike on every rank: the checkpoint is of another model, or cannot be read or laid down.
    """
    wanted = plan.wanted
    if wanted.strict:
        _refuse_other_model(engine, found.content)
    with _named_states(engine, found, plan) as named:
        _restore_module(engine, found.content, wanted)
        _fill(engine, named, wanted.strict)
    scaler = found.scaler_state() if wanted.states else {}
    return str(found.model_file), restore_engine(engine, found.content, scaler, wanted)


@contextmanager
def _named_states(engine: DeepSpeedEngine, found: Checkpoint, plan: Plan) -> Iterator[NamedStates]:
    """Weights and states by name: where they lie, or out of the ranks' files in a folder that is gone afterwards."""
    if isinstance(found, UniversalCheckpoint):
        if found.source is None:
            yield found.named
            return
        found = found.source
    group: dist.ProcessGroup = engine.seq_data_parallel_group
    ranks = range(dist.get_rank(group), found.world_size or 1, dist.get_world_size(group))
    optimizer: ShardedOptimizer = engine.basic_optimizer
    layout, keys = optimizer.planner.source, set[str]()
    order = layout.order() if plan.inherit else None  # type: ignore[attr-defined]
    if plan.inherit:
        optimizer.plan_ahead(layout.units())
        keys = {key for unit in optimizer.planned_units for key in unit.stored.shapes}
    with _scratch_folder(found.folder, group) as scratch:
        save_vectors(together(partial(vectors_of, found, ranks, order, keys), group), scratch, group)
        common = found.common if plan.wanted.states and not plan.inherit else None
        yield NamedStates(VectorFolder(scratch), common, plan.inherit)


def vectors_of(
    saved: SavedCheckpoint, ranks: range, order: GroupedShapes | None = None, keys: Collection[str] = ()
) -> Vectors:
    """What the files of some ranks hold, by name.

    Args:
        saved: The checkpoint, written by one of ours, or by AdamW or Muon.
        ranks: Ranks that wrote the files.
        order: Order of AdamW or Muon at stage 0, see :func:`deepspeed_plugin.checkpoints.adamw_files.in_our_form`.
        keys: Keys of the weights in the run that takes over.
    """
    if saved.author is None:
        return merge_vectors([saved_vectors(*in_our_form(saved, rank, order, keys)) for rank in ranks])
    return merge_vectors([saved_vectors(*saved.optimizer(rank)) for rank in ranks])


def _fill(engine: DeepSpeedEngine, named: NamedStates, strict: bool) -> None:
    """Load named weights and states into the engine's optimizer, and the weights into its model.

    As around DeepSpeed's own loading, ZeRO-3 lets go of gathered weights before and fetches the new ones after.
    """
    optimizer: ShardedOptimizer = engine.basic_optimizer
    layout = optimizer.planner.source
    assert isinstance(layout, DeepSpeedLayout)
    if engine._optimizer_has_ckpt_event_prologue():
        engine.optimizer.checkpoint_event_prologue()
    if named.common is not None:
        optimizer.saved.adopt_groups(optimizer.param_groups, named.common["param_groups"])
    optimizer.plan_ahead(layout.units())
    group: dist.ProcessGroup = engine.seq_data_parallel_group
    restore(optimizer, named.vectors, group, named.common, strict=strict, inherited=named.inherited)
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


# --- what a checkpoint holds beside trained weights and optimizer states ---------------------------------------------


def client_state_of(content: Mapping[str, Any], wanted: Wanted) -> dict[str, Any]:
    """What DeepSpeed would return of a model file."""
    dropped = {"module"} if wanted.load_module_only else set(_NOT_CLIENT_STATE)
    dropped |= {"lr_scheduler"} if wanted.load_lr_scheduler_states else set()
    dropped |= {"optimizer"} if wanted.load_optimizer_states else set()
    return without_record({key: value for key, value in content.items() if key not in dropped})


def without_record(client_state: Mapping[str, Any]) -> dict[str, Any]:
    """Client state as the user gave it, without what was added on saving."""
    ours = client_state.get(RECORD) or {}
    added = {RECORD, UNIVERSAL_CHECKPOINT_INFO} if ours.get("added_info") else {RECORD}
    return {key: value for key, value in client_state.items() if key not in added}


def _refuse_other_model(engine: DeepSpeedEngine, content: Mapping[str, Any]) -> None:
    """Refuse a model of other names.

    Args:
        engine: The engine that loads.
        content: The model file's.

    Raises:
        CheckpointError: Names what either lacks.
    """
    # DeepSpeed keeps experts in files of their own.
    apart = stacks_of(engine.module)
    names, saved = set(engine.module.state_dict()) - apart, set(content["module"]) - apart
    problems = [
        f"{text} {sorted(which)[:3]}"
        for text, which in (("it lacks", names - saved), ("the model lacks", saved - names))
        if which
    ]
    if problems:
        raise CheckpointError(
            f"the checkpoint is of another model: {'; '.join(problems)}; pass load_module_strict=False to load "
            "what fits."
        )


def _restore_module(engine: DeepSpeedEngine, content: Mapping[str, Any], wanted: Wanted) -> None:
    """Buffers and untrained weights, or whatever the user's own function loads; before the trained weights."""
    if wanted.custom_load_fn is None:
        _load_untrained(engine, content)
        return
    wanted.custom_load_fn(src=content["module"], dst=engine.module)
    # DeepSpeed's wrappers keep full-precision copies of weights, which follow those that were changed from outside.
    for name in ("refresh_fp32_params", "_restore_from_bit16_weights"):
        if hasattr(engine.optimizer, name):
            getattr(engine.optimizer, name)()
            return


def restore_engine(
    engine: DeepSpeedEngine, content: Mapping[str, Any], scaler: Mapping[str, Any], wanted: Wanted
) -> dict[str, Any]:
    """Counters, schedulers and samplers, unless only the module is wanted, and the loss scale.

    Args:
        engine: The engine that loads.
        content: The model file's.
        scaler: What ZeRO's wrapper saved; empty if it was not scaling, or is not wanted.
        wanted: The arguments of the call.

    Returns:
        The client state.
    """
    if not wanted.load_module_only:
        _restore_counters(engine, content, wanted)
    _restore_scaler(engine, scaler)
    return client_state_of(content, wanted)


def _restore_counters(engine: DeepSpeedEngine, content: Mapping[str, Any], wanted: Wanted) -> None:
    engine.global_steps = content["global_steps"]
    engine.global_samples = content.get("global_samples", engine.global_steps * engine.train_batch_size())
    engine.skipped_steps = content["skipped_steps"]
    engine.loaded_checkpoint_dp_world_size = content["dp_world_size"]
    engine.loaded_checkpoint_mp_world_size = content["mp_world_size"]
    saved = content.get("lr_scheduler")
    if wanted.load_lr_scheduler_states and engine.lr_scheduler is not None and saved is not None:
        engine.lr_scheduler.load_state_dict(saved)
    saved = content.get("random_ltd")
    if engine.random_ltd_enabled() and engine.random_ltd_scheduler is not None and saved is not None:
        engine.random_ltd_scheduler.load_state_dict(saved)
    saved = content.get("data_sampler")
    if engine.training_dataloader is not None and engine.curriculum_learning_enabled() and saved is not None:
        engine.training_dataloader.data_sampler.load_state_dict(saved)


def _load_untrained(engine: DeepSpeedEngine, content: Mapping[str, Any]) -> None:
    buffers = set(content.get("buffer_names") or ())
    parameters = engine.module.named_parameters(remove_duplicate=False)
    trained = {name for name, parameter in parameters if parameter.requires_grad}
    kept = {
        name: value
        for name, value in content["module"].items()
        # A module's extra state may be anything.
        if name in buffers or (name not in trained and (not isinstance(value, Tensor) or value.numel()))
    }
    engine.module.load_state_dict(kept, strict=False)


def _restore_scaler(engine: DeepSpeedEngine, saved: Mapping[str, Any]) -> None:
    """The loss scale with its counters, where both runs have one."""
    if saved.get("loss_scaler") is None or not engine.fp16_enabled():
        return
    wrapper = engine.optimizer
    if hasattr(wrapper, "loss_scaler"):
        wrapper.loss_scaler = saved["loss_scaler"]
        wrapper.dynamic_loss_scale = saved["dynamic_loss_scale"]
        wrapper.overflow = saved["overflow"]
