"""Checkpoints that are named only when every rank has written its files."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
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
from deepspeed_plugin.checkpoints.stock_form import zero_form
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
    with zero_form(engine), _failures_held(engine) as failures:
        done = original(
            engine, save_dir, tag=tag, client_state=client_state, save_latest=save_latest and not named_here, **options
        )

    folder = Path(save_dir) / name

    def settle() -> None:
        if failures:
            raise _unwritable(folder, failures[0]) from failures[0]

    def put_name() -> None:
        if named_here and save_latest and engine.global_rank == 0:
            scratch = Path(save_dir) / ".latest"
            try:
                scratch.write_text(name)
                scratch.replace(Path(save_dir) / "latest")
            except OSError as error:
                raise _unwritable(scratch, error) from error

    # Where a disk is full all ranks hear of it, and the last name stays.
    read_together(dist.group.WORLD, settle)
    read_together(dist.group.WORLD, put_name)
    return done


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


def _unwritable(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"{path} cannot be written: {error}. 'latest' names the checkpoint it named before; make room, and save again."
    )


@contextmanager
def _failures_held(engine: DeepSpeedEngine) -> Iterator[list[OSError | RuntimeError]]:
    """Files that cannot be written, to be raised when all ranks are through: DeepSpeed saves end in a barrier."""
    writer, failures = engine.checkpoint_engine, list[OSError | RuntimeError]()
    original, own = writer.save, vars(writer).get("save")

    def save(*args: Any, **options: Any) -> Any:
        try:
            return original(*args, **options)
        except (OSError, RuntimeError) as error:  # torch's own writer raises the latter
            failures.append(error)
            return None

    writer.save = save
    try:
        yield failures
    finally:
        if own is None:
            del writer.save
        else:
            writer.save = own
