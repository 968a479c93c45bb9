"""Loading a checkpoint of ours into another layout: other ranks, another ZeRO stage, another cut.

The ranks' files are read as named vectors, laid down once by torch.distributed.checkpoint, and loaded from there.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine

from deepspeed_plugin.checkpoints.adamw_files import vectors_of_moments
from deepspeed_plugin.checkpoints.errors import CheckpointError, read_together
from deepspeed_plugin.checkpoints.files import SavedCheckpoint
from deepspeed_plugin.layouts import DeepSpeedLayout
from rankwise.sharding.chunked_vectors import save_vectors
from rankwise.step.named_vectors import Vectors, check_stored, merge_vectors, restore, saved_vectors, take_over_moments
from rankwise.step.optimizer import ShardedOptimizer

__all__ = ["NamedStates", "fill", "laid_down", "open_engine", "vectors_of"]


@dataclass(frozen=True)
class NamedStates:
    """Weights and states by name, on disk.

    Attributes:
        folder: Written by :func:`rankwise.sharding.chunked_vectors.save_vectors`.
        common: What does not depend on the layout: ``param_groups`` and the optimizer's own extra state; empty where
            states are not wanted, or are another's.
        inherited: Whether the states are moments of AdamW or Muon.
    """

    folder: Path
    common: Mapping[str, Any]
    inherited: bool = False


def vectors_of(saved: SavedCheckpoint, ranks: range) -> Vectors:
    """What the files of some ranks hold, by name."""
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
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    ranks = range(rank, saved.world_size or 1, world)
    with _scratch_folder(saved.folder, group) as scratch:
        inherited = saved.author is None
        vectors = (
            vectors_of_moments(engine, saved, ranks)
            if inherited
            else read_together(group, lambda: vectors_of(saved, ranks))
        )
        save_vectors(vectors, scratch, group)
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
    own = states and not named.inherited
    with open_engine(engine, named.common["param_groups"] if own else None):
        # Before anything changes; and no rank gives up, and removes the folder, while others still look.
        read_together(group, lambda: check_stored(optimizer, named.folder, strict))
        restore(optimizer, named.folder, group, states=own, strict=strict)
        if own:
            optimizer.load_extra_state(named.common)
        elif states:
            take_over_moments(optimizer, named.folder, group)


@contextmanager
def open_engine(engine: DeepSpeedEngine, param_groups: Any = None) -> Iterator[DeepSpeedLayout]:
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
