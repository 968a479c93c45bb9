"""``load_checkpoint`` collects facts of the run and of the checkpoint, decides what to do, and does it.

DeepSpeed itself loads a checkpoint of the same layout, ours included; :mod:`deepspeed_plugin.checkpoints.by_name` all
others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer

from deepspeed_plugin.affine_maps import is_stack
from deepspeed_plugin.auto_tp import tensor_ranks
from deepspeed_plugin.checkpoints.by_name import Checkpoint, load_by_name, without_record
from deepspeed_plugin.checkpoints.files import SavedCheckpoint, tag_in, zero_form
from deepspeed_plugin.checkpoints.load_plan import Order, Plan, Present, Wanted, decide
from deepspeed_plugin.checkpoints.reading import read_together, require_intact
from deepspeed_plugin.checkpoints.universal import UniversalCheckpoint
from deepspeed_plugin.experts import are_native, stacks_of
from deepspeed_plugin.layouts import DeepSpeedLayout
from deepspeed_plugin.pipeline import is_pipeline
from rankwise.layout.chunked_vectors import CheckpointError
from rankwise.states.param_remainders import REMAINDER
from rankwise.step.optimizer import ShardedOptimizer
from rankwise.step.reports import print_on_first_rank

__all__ = ["load_checkpoint"]

_Original = Callable[..., tuple[str | None, Any]]


def load_checkpoint(
    original: _Original, engine: DeepSpeedEngine, load_dir: str, tag: str | None = None, **options: Any
) -> tuple[str | None, Any]:
    """Run DeepSpeed's ``load_checkpoint``, or continue on another world size, stage or optimizer.

    Args:
        original: DeepSpeed's method.
        engine: The engine that loads.
        load_dir: DeepSpeed's argument: folder of the checkpoints.
        tag: DeepSpeed's argument: name of the checkpoint, or None for the latest.
        options: Further arguments, those of :class:`deepspeed_plugin.checkpoints.load_plan.Wanted`.

    Raises:
        CheckpointError: The checkpoint is damaged, or a move is not supported; the message says what to do instead.
    """
    wanted, present = Wanted(**options), _present_of(engine)

    def judged() -> tuple[Checkpoint | None, Plan]:
        checkpoint = _find(engine, load_dir, tag, wanted.states, present)
        plan = decide(None if checkpoint is None else checkpoint.known(wanted.states), present, wanted)
        if plan.judge and isinstance(checkpoint, SavedCheckpoint):
            rank = dist.get_rank(engine.seq_data_parallel_group)
            engine.basic_optimizer.saved.fit.refuse_foreign(checkpoint.optimizer(rank)[0])
        return checkpoint, plan

    # With an optimizer of ours the ranks agree before anything changes.
    checkpoint, plan = judged() if present.identity is None else read_together(judged)
    if plan.note is not None:
        print_on_first_rank(plan.note)
    loaded: tuple[str | None, Any]
    if checkpoint is not None and plan.by_name:
        loaded = load_by_name(engine, checkpoint, plan)
    else:
        loaded = _load_by_deepspeed(original, engine, load_dir, tag, plan)
    if (layout := _layout_of(engine)) is not None and loaded[0] is not None:
        layout.forget_gradients()  # of the weights that were replaced
    return loaded


# --- what is known of the run ----------------------------------------------------------------------------------------


def _present_of(engine: DeepSpeedEngine) -> Present:
    optimizer = engine.basic_optimizer
    identity = optimizer.identity if isinstance(optimizer, ShardedOptimizer) else None
    partitions = engine.optimizer is not optimizer and engine.zero_optimization()
    ranks: int = dist.get_world_size(engine.seq_data_parallel_group)
    frozen = [(name, weight) for name, weight in engine.module.named_parameters() if not weight.requires_grad]
    return Present(
        identity=identity,
        optimizer=identity or type(optimizer).__name__,
        stage=int(engine.zero_optimization_stage()) if partitions else 0,
        ranks=ranks if partitions else None,
        stages=int(engine.mp_world_size),
        tensor=tensor_ranks(engine),
        pipeline=is_pipeline(engine),
        experts=bool(engine.has_moe_layers) and are_native(engine.module),
        stacks=bool(stacks_of(engine.module)),
        partitioned=bool(engine.zero_optimization_partition_weights()),
        config=engine.config,
        sub_groups=_sub_groups_of(engine) if identity is not None else (),
        groups=len(optimizer.param_groups) if identity is not None else 0,
        frozen=next((name for name, _ in frozen), None),
        frozen_stack=next((name for name, weight in frozen if is_stack(weight)), None),
        alone=ranks == dist.get_world_size(),
        copies=isinstance(engine.optimizer, FP16_UnfusedOptimizer),
        order=_order_of(engine),
    )


def _sub_groups_of(engine: DeepSpeedEngine) -> tuple[int, ...]:
    """Return the first rank's elements of sub-groups on all ranks, as uneven tensor-parallel shards differ."""
    sizes = [tuple(getattr(engine.optimizer, "fp16_partitioned_groups_flat_numel", ()))]
    if sizes[0]:
        dist.broadcast_object_list(sizes, src=0)
    return sizes[0]


def _layout_of(engine: DeepSpeedEngine) -> DeepSpeedLayout | None:
    optimizer = engine.basic_optimizer
    layout = optimizer.planner.source if isinstance(optimizer, ShardedOptimizer) else None
    return layout if isinstance(layout, DeepSpeedLayout) else None


def _order_of(engine: DeepSpeedEngine) -> Order | None:
    layout = _layout_of(engine)
    groups = None if layout is None else layout.order()
    return None if groups is None else (tuple(engine.module.state_dict()), tuple(map(len, groups)))


# --- which checkpoint is meant, and whether its files hold what was written ------------------------------------------


def _find(engine: DeepSpeedEngine, load_dir: str, tag: str | None, states: bool, present: Present) -> Checkpoint | None:
    """Return the checkpoint, complete if its ``states`` are wanted; None if DeepSpeed handles and reports it alone.

    Raises:
        CheckpointError: States are wanted of an incomplete checkpoint; or the optimizer is ours, and there is no
            checkpoint, or a file that this rank reads is damaged.
    """
    if engine.load_universal_checkpoint():
        if present.identity is None:
            return UniversalCheckpoint.of_anybody(load_dir, tag)
        universal = UniversalCheckpoint.find(load_dir, tag, states, present.identity)
        _require_intact(universal.files)
        return universal
    try:
        saved = SavedCheckpoint.find(load_dir, tag)
    except CheckpointError:
        if present.identity is not None:
            raise
        saved = None
    if saved is None and present.identity is not None:
        _refuse_absent(Path(load_dir), tag)
    if saved is None or (present.identity is None and not saved.record):
        return None
    if states or saved.partitioned_weights or present.partitioned:
        saved.require_complete()
    if present.identity is not None:
        if states and saved.author is not None and saved.zero_files:
            saved.optimizer(dist.get_rank() % len(saved.zero_files))  # cut off or damaged files end here
        _require_intact(saved.files(states))
    return saved


def _require_intact(files: Sequence[Path]) -> None:
    """Check all files before anything changes, each on one rank."""
    for path in files[dist.get_rank() :: dist.get_world_size()]:
        require_intact(path)


def _refuse_absent(load_dir: Path, tag: str | None) -> None:
    """Refuse a name without a checkpoint; DeepSpeed reports a folder in which nothing was ever saved."""
    name = tag_in(load_dir) if tag is None else str(tag)
    if name is None:
        return
    tags = sorted(path.parent.name for path in load_dir.glob("*/mp_rank_00_model_states.pt"))
    tags += [path.parent.name for path in load_dir.glob("*/zero_pp_rank_0_mp_rank_00_model_states.pt")]
    where = f"tag={name!r}" if tag is not None else f"{load_dir / 'latest'} names {name!r}, which"
    if not name:
        where = f"{load_dir / 'latest'} is empty, which"
    held = f"it holds {', '.join(tags[-5:])}" if tags else "it holds no checkpoint"
    raise CheckpointError(
        f"{where} is invalid: it must be a checkpoint's folder in {load_dir} ({held}); pass the tag of one, or write "
        "it into 'latest'."
    )


# --- DeepSpeed loads -------------------------------------------------------------------------------------------------


def _load_by_deepspeed(
    original: _Original, engine: DeepSpeedEngine, load_dir: str, tag: str | None, plan: Plan
) -> tuple[str | None, Any]:
    with zero_form(engine):
        path, client_state = original(engine, load_dir, tag=tag, **vars(plan.wanted))
    if isinstance(engine.basic_optimizer, ShardedOptimizer) and not plan.wanted.states:
        for state in engine.basic_optimizer.state.values():
            if REMAINDER in state:
                state[REMAINDER].zero_()  # it belongs to the weights that were replaced
    if plan.refresh:
        # DeepSpeed copies the loaded weights to this wrapper's fp32 masters only if nothing else is loaded.
        engine.optimizer.refresh_fp32_params()
    return path, client_state if path is None else without_record(client_state)
