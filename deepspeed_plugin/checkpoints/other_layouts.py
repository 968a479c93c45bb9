"""Loading a checkpoint of ours into another layout: other ranks, another ZeRO stage, another cut.

The ranks' files are read as named vectors, laid down once by torch.distributed.checkpoint, and loaded from there.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine

from deepspeed_plugin.checkpoints.adamw_files import in_our_form
from deepspeed_plugin.checkpoints.errors import CheckpointError, read_together
from deepspeed_plugin.checkpoints.files import NamedStates, SavedCheckpoint
from deepspeed_plugin.layouts import DeepSpeedLayout, GroupedShapes
from rankwise.checkpoint.named_vectors import Vectors, merge_vectors, restore, saved_vectors, take_over_moments
from rankwise.layout.chunked_vectors import VectorFolder, save_vectors
from rankwise.step.optimizer import ShardedOptimizer

__all__ = ["fill", "laid_down", "vectors_of"]


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
    layout, inherited = engine.basic_optimizer.planner.source, saved.author is None
    assert isinstance(layout, DeepSpeedLayout)
    with _scratch_folder(saved.folder, group) as scratch:
        order = layout.order() if inherited else None
        save_vectors(read_together(group, lambda: vectors_of(saved, ranks, order)), scratch, group)
        yield NamedStates(
            VectorFolder(scratch), saved.common if states and not inherited else None, states and inherited
        )


def fill(engine: DeepSpeedEngine, named: NamedStates, strict: bool) -> None:
    """Collective: load named weights and states into the engine's optimizer, and the weights into its model.

    Args:
        engine: The engine.
        named: What to load.
        strict: Whether every parameter must be there.

    Raises:
        CheckpointError: Alike on every rank: what was saved is of another model.
        StorageError: Alike on every rank: files that cannot be read.
    """
    optimizer: ShardedOptimizer = engine.basic_optimizer
    group: dist.ProcessGroup = engine.seq_data_parallel_group
    with _open_engine(engine, None if named.common is None else named.common["param_groups"]):
        restore(optimizer, named.vectors, group, named.common, strict=strict)
        if named.inherited:
            take_over_moments(optimizer, named.vectors, group)


@contextmanager
def _open_engine(engine: DeepSpeedEngine, param_groups: Any = None) -> Iterator[None]:
    """The optimizer is planned; the weights it holds at the end are copied to the model.

    As around DeepSpeed's own loading, ZeRO-3 lets go of gathered weights before and fetches the new ones after.
    """
    optimizer: ShardedOptimizer = engine.basic_optimizer
    layout = optimizer.planner.source
    assert isinstance(layout, DeepSpeedLayout)
    if engine._optimizer_has_ckpt_event_prologue():
        engine.optimizer.checkpoint_event_prologue()
    if param_groups is not None:
        optimizer.saved.adopt_groups(optimizer.param_groups, param_groups)
    optimizer.plan_ahead(layout.units())
    yield
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
