"""Loading a checkpoint of ours into another layout: other ranks, another ZeRO stage, another cut.

The ranks' files are read as named vectors, laid down once by torch.distributed.checkpoint, and loaded from there.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine

from deepspeed_plugin.layouts import DeepSpeedLayout
from deepspeed_plugin.restoring import Wanted, refuse_module, restore_engine, restore_module, restore_scaler
from deepspeed_plugin.saved import CheckpointError, SavedCheckpoint
from rankwise.sharding import together as all_together
from rankwise.sharding.state import StorageError, save_vectors
from rankwise.step.optimizer import ShardedOptimizer
from rankwise.step.portable import Vectors, check_stored, merge_vectors, restore, saved_vectors

__all__ = ["fill", "open_engine", "own_error", "reshard", "together", "vectors_of"]

_T = TypeVar("_T")


def together(group: dist.ProcessGroup | None, work: Callable[[], _T]) -> _T:
    """Read or write files on every rank, which may fail on some of them; then it fails on all, with the first reason.

    Raises:
        CheckpointError: On every rank, if ``work`` met bad files on any.
    """

    def with_own_errors() -> _T:
        try:
            return work()
        except (StorageError, OSError) as error:
            raise CheckpointError(str(error)) from error

    return all_together(with_own_errors, group)


def vectors_of(saved: SavedCheckpoint, ranks: range) -> Vectors:
    """What the files of some ranks hold, by name."""
    return merge_vectors([saved_vectors(*saved.optimizer(rank)) for rank in ranks])


def reshard(engine: DeepSpeedEngine, saved: SavedCheckpoint, wanted: Wanted) -> tuple[str, dict[str, Any]]:
    """Collective: lay the saved state down by name, load it in this engine's layout, restore the engine's counters.

    Args:
        engine: The engine that loads, its optimizer one of ours.
        saved: Written by one of ours; by the same one unless states are not wanted.
        wanted: What to load of it.

    Returns:
        As DeepSpeed: the path and the client state.

    Raises:
        CheckpointError: Alike on every rank: files that cannot be read or written, another model, frozen parameters.
    """
    group: dist.ProcessGroup = engine.seq_data_parallel_group
    refuse_module(engine, saved.content, wanted, saved.partitioned_weights)
    with _scratch_folder(saved.folder, group) as scratch:
        rank, world = dist.get_rank(group), dist.get_world_size(group)
        ranks = range(rank, saved.world_size or 1, world)
        vectors = together(group, lambda: vectors_of(saved, ranks))
        with own_error():
            save_vectors(vectors, scratch, group)
        state, _ = together(group, lambda: saved.optimizer(0))
        restore_module(engine, saved.content, wanted)
        fill(engine, scratch, state, wanted)
    restore_engine(engine, saved.content, wanted)
    if wanted.states:
        restore_scaler(engine, saved.wrapper_state() if saved.fp16 else {})
    return str(saved.model_file), wanted.client_state(saved.content)


def fill(engine: DeepSpeedEngine, folder: Path, common: Mapping[str, Any], wanted: Wanted) -> None:
    """Collective: load named vectors into the engine's optimizer and the weights into its model.

    Args:
        engine: The engine.
        folder: Written by :func:`rankwise.sharding.state.save_vectors`.
        common: What does not depend on the layout: ``param_groups`` and the optimizer's own extra state.
        wanted: Whether states are wanted beside the weights.
    """
    optimizer: ShardedOptimizer = engine.basic_optimizer
    if wanted.states and len(common["param_groups"]) != len(optimizer.param_groups):
        raise CheckpointError(
            f"the checkpoint has {len(common['param_groups'])} param groups, the engine {len(optimizer.param_groups)}; "
            "build them as they were when it was saved, or load with load_optimizer_states=False."
        )
    group: dist.ProcessGroup = engine.seq_data_parallel_group
    with open_engine(engine, common["param_groups"] if wanted.states else None), own_error():
        # Before anything changes; and no rank gives up, and removes the folder, while others still look.
        together(group, lambda: check_stored(optimizer, folder, wanted.strict))
        restore(optimizer, folder, group, states=wanted.states, strict=wanted.strict)
        if wanted.states:
            optimizer.load_extra_state(common)


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
def own_error() -> Iterator[None]:
    """Storage errors as ours."""
    try:
        yield
    except StorageError as error:
        raise CheckpointError(str(error)) from error


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
