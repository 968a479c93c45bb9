"""What is known of the run, which checkpoint is meant, and whether its files are there and hold what was written."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer

from deepspeed_plugin.auto_tp import tensor_ranks
from deepspeed_plugin.checkpoints.errors import CheckpointError
from deepspeed_plugin.checkpoints.files import SavedCheckpoint, cut_of, tag_in
from deepspeed_plugin.checkpoints.load_plan import Order, Present, Saved, Universal
from deepspeed_plugin.checkpoints.reading import require_intact
from deepspeed_plugin.checkpoints.universal import UniversalCheckpoint
from deepspeed_plugin.layouts import DeepSpeedLayout
from deepspeed_plugin.pipeline import is_pipeline
from rankwise.step.optimizer import ShardedOptimizer

__all__ = ["Checkpoint", "find", "present_of"]


Checkpoint = SavedCheckpoint | UniversalCheckpoint


def present_of(engine: DeepSpeedEngine) -> Present:
    """What :func:`deepspeed_plugin.checkpoints.load_plan.decide` has to know of the engine."""
    optimizer = engine.basic_optimizer
    identity = optimizer.identity if isinstance(optimizer, ShardedOptimizer) else None
    partitions = engine.optimizer is not optimizer and engine.zero_optimization()
    ranks: int = dist.get_world_size(engine.seq_data_parallel_group)
    frozen = (name for name, parameter in engine.module.named_parameters() if not parameter.requires_grad)
    return Present(
        identity=identity,
        optimizer=identity or type(optimizer).__name__,
        stage=int(engine.zero_optimization_stage()) if partitions else 0,
        ranks=ranks if partitions else None,
        stages=int(engine.mp_world_size),
        tensor=tensor_ranks(engine),
        pipeline=is_pipeline(engine),
        experts=bool(engine.has_moe_layers),
        partitioned=bool(engine.zero_optimization_partition_weights()),
        cut=cut_of(engine.config, _sub_groups_of(engine) if identity is not None else ()),
        groups=len(optimizer.param_groups) if identity is not None else 0,
        frozen=next(frozen, None),
        alone=ranks == dist.get_world_size(),
        copies=isinstance(engine.optimizer, FP16_UnfusedOptimizer),
        order=_order_of(engine),
    )


def _sub_groups_of(engine: DeepSpeedEngine) -> tuple[int, ...]:
    """Elements of the first rank's sub-groups, on every rank: of uneven tensor-parallel shards others have others."""
    found = [tuple(getattr(engine.optimizer, "fp16_partitioned_groups_flat_numel", ()))]
    if found[0]:
        dist.broadcast_object_list(found, src=0)
    return found[0]


def _order_of(engine: DeepSpeedEngine) -> Order | None:
    layout = getattr(engine.basic_optimizer, "layout_source", None)
    groups = layout.order() if isinstance(layout, DeepSpeedLayout) else None
    return None if groups is None else (tuple(engine.module.state_dict()), tuple(map(len, groups)))


def find(
    engine: DeepSpeedEngine, load_dir: str, tag: str | None, states: bool, present: Present
) -> tuple[Checkpoint, Saved | Universal] | tuple[None, None]:
    """The checkpoint, if one of our optimizers wrote or loads it, and what is known of it.

    It is complete, if its states are wanted.

    Args:
        engine: The engine that loads.
        load_dir: As for DeepSpeed.
        tag: As for DeepSpeed.
        states: Whether optimizer states are wanted.
        present: What is known of the engine.

    Raises:
        CheckpointError: Where the optimizer is ours: there is none, or what this rank looks at of it is damaged.
    """
    found: Checkpoint | None
    if engine.load_universal_checkpoint():
        found = _universal(load_dir, tag, states, present)
    elif present.identity is not None:
        found = _for_ours(Path(load_dir), tag, states, present)
    else:
        found = _for_others(load_dir, tag, states, present)
    return (None, None) if found is None else (found, found.known(states))


def _for_others(load_dir: str, tag: str | None, states: bool, present: Present) -> SavedCheckpoint | None:
    try:
        saved = SavedCheckpoint.find(load_dir, tag)
    except CheckpointError:
        return None  # DeepSpeed will say it
    if saved is None or not saved.record:
        return None
    _require_complete(saved, states, present)
    return saved


def _for_ours(load_dir: Path, tag: str | None, states: bool, present: Present) -> SavedCheckpoint | None:
    saved = SavedCheckpoint.find(load_dir, tag)
    if saved is None:
        _refuse_absent(load_dir, tag)
        return None
    _require_complete(saved, states, present)
    if states and saved.author is not None and saved.zero_files:
        saved.optimizer(dist.get_rank() % len(saved.zero_files))  # cut off or damaged files end here
    _require_intact(saved.files(states))
    return saved


def _universal(load_dir: str, tag: str | None, states: bool, present: Present) -> UniversalCheckpoint | None:
    if present.identity is None:
        return UniversalCheckpoint.of_anybody(load_dir, tag)
    found = UniversalCheckpoint.find(load_dir, tag, states, present.identity)
    _require_intact(found.files)
    return found


def _require_intact(files: Sequence[Path]) -> None:
    """All of them before anything changes, each by one rank."""
    for path in files[dist.get_rank() :: dist.get_world_size()]:
        require_intact(path)


def _require_complete(saved: SavedCheckpoint, states: bool, present: Present) -> None:
    if states or saved.partitioned_weights or present.partitioned:
        saved.require_complete()


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
