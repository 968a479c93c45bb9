"""Checkpoints that are named only when every rank has written its files."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from deepspeed.checkpoint.constants import (
    UNIVERSAL_CHECKPOINT_INFO,
    UNIVERSAL_CHECKPOINT_VERSION_KEY,
    UNIVERSAL_CHECKPOINT_VERSION_VALUE,
)
from deepspeed.runtime.engine import DeepSpeedEngine

from deepspeed_plugin.checkpoints.errors import CheckpointError, read_together
from deepspeed_plugin.checkpoints.files import RECORD
from deepspeed_plugin.checkpoints.replaced_files import Replacement
from deepspeed_plugin.checkpoints.zero_file_form import zero_form
from deepspeed_plugin.layouts import DeepSpeedLayout
from rankwise.step.optimizer import ShardedOptimizer

__all__ = ["save_checkpoint"]


def save_checkpoint(
    original: Callable[..., bool],
    engine: DeepSpeedEngine,
    save_dir: str,
    tag: str | None = None,
    save_latest: bool = True,
    client_state: Mapping[str, Any] | None = None,
    **options: Any,
) -> bool:
    """DeepSpeed's ``save_checkpoint``, with ``latest`` written only when every rank's files are complete.

    DeepSpeed's rank 0 names the new checkpoint before the other ranks have finished theirs: a rank that dies in between
    leaves ``latest`` pointing at a checkpoint that cannot be loaded.

    Args:
        original: DeepSpeed's method, which ends in a barrier.
        engine: The engine that saves.
        save_dir: As for DeepSpeed, like the following.
        tag: Name of the checkpoint.
        save_latest: Whether ``latest`` is to name it.
        client_state: The user's own.
        options: Passed on.
    """
    optimizer, client_state = engine.basic_optimizer, dict(client_state or {})
    if not isinstance(optimizer, ShardedOptimizer):
        return original(engine, save_dir, tag=tag, client_state=client_state, save_latest=save_latest, **options)
    layout = optimizer.layout_source
    assert isinstance(layout, DeepSpeedLayout)
    # What lies where is part of the checkpoint, whether or not a step has been taken since the start or the last load.
    optimizer.plan_ahead(layout.units())
    name = f"global_step{engine.global_steps}" if tag is None else str(tag)
    client_state.update(_note(engine, optimizer, Path(save_dir) / name, client_state))
    named_here = not engine.checkpoint_engine.is_decoupled()
    replacement = Replacement(engine.checkpoint_engine, Path(save_dir) / name)
    with zero_form(engine), replacement.writing(engine):
        done = original(
            engine, save_dir, tag=tag, client_state=client_state, save_latest=save_latest and not named_here, **options
        )
    _put_in_place(Path(save_dir), name, replacement, named_here and save_latest and engine.global_rank == 0)
    return done


def _put_in_place(save_dir: Path, name: str, replacement: Replacement, named: bool) -> None:
    """Give the files and the checkpoint their names; where a disk is full all ranks hear of it, and nothing changes."""
    scratch = save_dir / ".latest"

    def settle() -> None:
        replacement.settle()
        if named:
            replacement.attempt(scratch, lambda: scratch.write_text(name))

    def put_name() -> None:
        replacement.finish()
        if named:
            scratch.replace(save_dir / "latest")

    try:
        # Each when the one before it is done on all ranks.
        read_together(dist.group.WORLD, settle)
        read_together(dist.group.WORLD, replacement.announce)
    except CheckpointError:
        replacement.discard()
        raise
    read_together(dist.group.WORLD, replacement.commit)
    read_together(dist.group.WORLD, put_name)


def _note(
    engine: DeepSpeedEngine, optimizer: ShardedOptimizer, folder: Path, client_state: Mapping[str, Any]
) -> dict[str, Any]:
    """Who wrote a checkpoint, which save it was, and where; and what DeepSpeed's converter insists on."""
    save: list[Any] = [uuid.uuid4().hex]
    dist.broadcast_object_list(save, src=0)
    needed = UNIVERSAL_CHECKPOINT_INFO not in client_state and not hasattr(engine.module, UNIVERSAL_CHECKPOINT_INFO)
    needed = needed and not engine.has_moe_layers  # there the key is DeepSpeed's own
    version = {UNIVERSAL_CHECKPOINT_VERSION_KEY: UNIVERSAL_CHECKPOINT_VERSION_VALUE}
    record = {"identity": optimizer.identity, "save": save[0], "folder": str(folder.resolve()), "added_info": needed}
    return {RECORD: record, **({UNIVERSAL_CHECKPOINT_INFO: version} if needed else {})}
