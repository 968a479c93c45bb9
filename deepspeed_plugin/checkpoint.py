"""Checkpoints that are named only when complete, and can be resumed on other ranks, stages and with other optimizers.

DeepSpeed itself loads a checkpoint of the same layout, ours included; :mod:`deepspeed_plugin.resharding` does the rest,
:mod:`deepspeed_plugin.universal` loads universal checkpoints.
"""

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
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.utils import log_dist

from deepspeed_plugin.intact import require_intact
from deepspeed_plugin.layouts import DeepSpeedLayout
from deepspeed_plugin.pipeline import is_pipeline
from deepspeed_plugin.resharding import reshard, together
from deepspeed_plugin.restoring import Wanted, without_record
from deepspeed_plugin.saved import RECORD, CheckpointError, SavedCheckpoint, tag_in
from deepspeed_plugin.stock_form import stock_form
from deepspeed_plugin.universal import author_of, load_universal
from rankwise.step.optimizer import ShardedOptimizer

__all__ = ["CheckpointError", "SavedCheckpoint", "load_checkpoint", "save_checkpoint"]


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
    with _file_form(engine), _failures_held(engine) as failures:
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
    together(dist.group.WORLD, settle)
    together(dist.group.WORLD, put_name)
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


@contextmanager
def _file_form(engine: DeepSpeedEngine) -> Iterator[None]:
    """The form of states in ZeRO's files; stage 0, which DeepSpeed cannot convert, has none."""
    optimizer = engine.basic_optimizer
    if isinstance(optimizer, ShardedOptimizer) and engine.zero_optimization():
        with stock_form(optimizer):
            yield
    else:
        yield


def load_checkpoint(
    original: Callable[..., tuple[str | None, Any]],
    engine: DeepSpeedEngine,
    load_dir: str,
    tag: str | None = None,
    **options: Any,
) -> tuple[str | None, Any]:
    """DeepSpeed's ``load_checkpoint``, which also continues on another world size, stage or optimizer.

    Args:
        original: DeepSpeed's method.
        engine: The engine that loads.
        load_dir: As for DeepSpeed, like the following.
        tag: Which checkpoint; the latest by default.
        options: See :class:`deepspeed_plugin.restoring.Wanted`.

    Raises:
        CheckpointError: A move that is not supported, with what to do instead, or a damaged checkpoint.
    """
    wanted, ours = Wanted(**options), _identity(engine)
    if engine.load_universal_checkpoint():
        if ours is not None:
            return load_universal(engine, load_dir, tag, wanted)
        theirs = author_of(load_dir, tag)
        if theirs is not None and wanted.states:
            _announce_fresh(engine, f"the universal checkpoint in {load_dir}", theirs)
        return _loaded(original(engine, load_dir, tag=tag, **options))
    saved = _find(engine, load_dir, tag, wanted)
    if saved is None:
        return _loaded(original(engine, load_dir, tag=tag, **options))
    fresh = wanted.states and saved.author != ours
    if fresh:
        _announce_fresh(engine, saved.folder.name, saved.author)
        options["load_optimizer_states"] = False
    by_name = ours is not None and saved.author is not None and _by_name(engine, saved, wanted, fresh)
    if by_name and (fresh or not wanted.states) and _weights_by_deepspeed_alone(engine, saved):
        by_name, options["load_optimizer_states"] = False, False  # with it, DeepSpeed would expect them with the states
    if wanted.states:
        _refuse_other_stages(engine, saved, by_name and not fresh)
        if by_name and not fresh:
            _refuse_moved_experts(engine, saved)
    if by_name and not is_pipeline(engine) and not engine.has_moe_layers:
        return reshard(engine, saved, Wanted(**options))
    if fresh:
        _refuse_wrong_weights(engine, saved)
    elif ours is not None and wanted.states and saved.zero_files and _shares_its_files(engine):
        _refuse_foreign_states(engine, saved)
    with _file_form(engine):
        result = original(engine, load_dir, tag=tag, **options)
    if fresh and isinstance(engine.optimizer, FP16_UnfusedOptimizer):
        # DeepSpeed copies the loaded weights to this wrapper's fp32 masters only when nothing else is loaded.
        engine.optimizer.refresh_fp32_params()
    return _loaded(result)


def _find(engine: DeepSpeedEngine, load_dir: str, tag: str | None, wanted: Wanted) -> SavedCheckpoint | None:
    """The checkpoint, if one of our optimizers wrote or loads it; complete, if its states are wanted."""
    states = wanted.states
    ours = _identity(engine) is not None

    def look() -> SavedCheckpoint | None:
        saved = SavedCheckpoint.find(load_dir, tag)
        if saved is None and ours:
            _refuse_absent(Path(load_dir), tag)
        if saved is None or not (ours or saved.record):
            return None
        at_three = saved.partitioned_weights or engine.zero_optimization_partition_weights()
        if states or at_three:
            saved.require_complete()
        if ours and states and saved.author is not None and saved.zero_files:
            saved.optimizer(engine.global_rank % len(saved.zero_files))  # cut off or damaged files end here
        if ours:
            # All of them before anything changes, each by one rank.
            for path in saved.files(states)[dist.get_rank() :: dist.get_world_size()]:
                require_intact(path)
        return saved

    if ours:
        return together(dist.group.WORLD, look)
    try:
        SavedCheckpoint.find(load_dir, tag)
    except CheckpointError:
        return None  # DeepSpeed will say it
    return look()


def _refuse_absent(load_dir: Path, tag: str | None) -> None:
    """Refuse a name without a checkpoint; a folder in which nothing was ever saved is DeepSpeed's to report."""
    name = tag_in(load_dir) if tag is None else str(tag)
    if name is None:
        return
    found = sorted(path.parent.name for path in load_dir.glob("*/mp_rank_00_model_states.pt"))
    found += [path.parent.name for path in load_dir.glob("*/zero_pp_rank_0_mp_rank_00_model_states.pt")]
    where = f"tag={name!r}" if tag is not None else f"{load_dir / 'latest'} names {name!r}, which"
    if not name:
        where = f"{load_dir / 'latest'} is empty, which"
    held = f"it holds {', '.join(found[-5:])}" if found else "it holds no checkpoint"
    raise CheckpointError(
        f"{where} is invalid: it must be a checkpoint's folder in {load_dir} ({held}); pass the tag of one, or write "
        "it into 'latest'."
    )


def _by_name(engine: DeepSpeedEngine, saved: SavedCheckpoint, wanted: Wanted, fresh: bool) -> bool:
    """Whether a checkpoint of ours cannot be left to DeepSpeed, which loads by position in the ranks' files."""
    if fresh:
        return True
    if not wanted.states:
        # Without optimizer states DeepSpeed takes another tag's weights at ZeRO-3, or none.
        return saved.partitioned_weights or engine.zero_optimization_partition_weights()
    return (saved.world_size, saved.stage) != _present(engine) or _cut(saved.config) != _cut(engine.config)


def _weights_by_deepspeed_alone(engine: DeepSpeedEngine, saved: SavedCheckpoint) -> bool:
    """Whether weights alone are wanted that only DeepSpeed can load, and it will: frozen ones at ZeRO-3, left in place.

    It takes the others from full precision through the model's own.
    """
    frozen = any(not parameter.requires_grad for parameter in engine.module.parameters())
    in_place = saved.partitioned_weights and (saved.world_size, saved.stage) == _present(engine)
    return frozen and in_place and tag_in(saved.folder.parent) == saved.folder.name


def _refuse_other_stages(engine: DeepSpeedEngine, saved: SavedCheckpoint, moved: bool) -> None:
    """Refuse to move between pipelines: the states of the other stages' layers are in other files."""
    theirs, ours = int(saved.content.get("mp_world_size", 1)), int(engine.mp_world_size)
    if theirs != ours or (moved and (ours > 1 or is_pipeline(engine))):
        raise CheckpointError(
            f"{saved.folder.name} was written by {theirs} pipeline stages at ZeRO stage {saved.stage} with "
            f"{saved.world_size or 'any number of'} data-parallel ranks each, this run has {ours} pipeline stages; "
            "continue a pipeline on the same stages, ranks and ZeRO stage, or load the weights alone "
            "(load_module_only=True)."
        )


def _refuse_moved_experts(engine: DeepSpeedEngine, saved: SavedCheckpoint) -> None:
    """Refuse to move experts: ranks hold different ones under the same name."""
    if engine.has_moe_layers:
        raise CheckpointError(
            f"{saved.folder.name} was written at ZeRO stage {saved.stage} on {saved.world_size or 'any number of'} "
            "ranks; states of expert layers continue on the same stage and ranks only. Resume there, or load the "
            "weights alone (load_module_only=True)."
        )


def _shares_its_files(engine: DeepSpeedEngine) -> bool:
    """Whether the ZeRO files belong to these data-parallel ranks alone; other stages of a pipeline have files too."""
    ranks: int = dist.get_world_size(engine.seq_data_parallel_group)
    return ranks == dist.get_world_size()


def _refuse_foreign_states(engine: DeepSpeedEngine, saved: SavedCheckpoint) -> None:
    """Refuse on all ranks what the optimizer of any would refuse of its file, when the others have taken theirs."""
    rank = dist.get_rank(engine.seq_data_parallel_group)
    optimizer: ShardedOptimizer = engine.basic_optimizer
    together(engine.seq_data_parallel_group, lambda: optimizer.saved.refuse_foreign(saved.optimizer(rank)[0]))


def _refuse_wrong_weights(engine: DeepSpeedEngine, saved: SavedCheckpoint) -> None:
    """Refuse what DeepSpeed cannot load without optimizer states: other stages' weights, and at ZeRO-3 other tags."""
    if saved.partitioned_weights != engine.zero_optimization_partition_weights():
        raise CheckpointError(
            f"{saved.folder.name}: changing the optimizer and moving to or from ZeRO-3 at once is not supported; move "
            "with the optimizer that wrote it, save, and change the optimizer then."
        )
    named = tag_in(saved.folder.parent)
    if saved.partitioned_weights and named != saved.folder.name:
        raise CheckpointError(
            f"at ZeRO-3 DeepSpeed reads the weights of the tag in 'latest' ({named}), not of {saved.folder.name}, "
            f"when the optimizer changes; write {saved.folder.name} into it first."
        )


def _identity(engine: DeepSpeedEngine) -> str | None:
    optimizer = engine.basic_optimizer
    return optimizer.identity if isinstance(optimizer, ShardedOptimizer) else None


def _present(engine: DeepSpeedEngine) -> tuple[int | None, int]:
    if engine.optimizer is engine.basic_optimizer or not engine.zero_optimization():
        return None, 0
    return dist.get_world_size(engine.seq_data_parallel_group), int(engine.zero_optimization_stage())


def _cut(config: Mapping[str, Any]) -> tuple[Any, ...]:
    """Settings on which it depends, besides stage and ranks, what lies where in ZeRO's files, and their names."""
    block = config.get("zero_optimization") or {}
    sizes = ("round_robin_gradients", "parameter_alignment", "sub_group_size")
    types = [(config.get(key) or {}).get("enabled") or False for key in ("bf16", "bfloat16", "fp16")]
    return (*(block.get(key) for key in sizes), *types, config.get("data_types"))


def _loaded(result: tuple[str | None, Any]) -> tuple[str | None, Any]:
    path, client_state = result
    return (path, client_state) if path is None else (path, without_record(client_state))


def _announce_fresh(engine: DeepSpeedEngine, checkpoint: str, theirs: str | None) -> None:
    name = _identity(engine) or type(engine.basic_optimizer).__name__
    log_dist(
        f"rankwise: {checkpoint} was written by {theirs or 'another optimizer'}; its weights are kept, the state of "
        f"{name} starts fresh.",
        ranks=[0],
    )
