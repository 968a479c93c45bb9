"""``load_checkpoint``: find the checkpoint, decide, and do what was decided, one step after the other.

DeepSpeed itself loads a checkpoint of the same layout, ours included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from deepspeed.checkpoint.constants import UNIVERSAL_CHECKPOINT_INFO
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor

from deepspeed_plugin.checkpoints.errors import CheckpointError, own_error, read_together
from deepspeed_plugin.checkpoints.files import RECORD, NamedStates, SavedCheckpoint
from deepspeed_plugin.checkpoints.finding import Checkpoint, find, present_of
from deepspeed_plugin.checkpoints.load_plan import Plan, Wanted, Way, decide
from deepspeed_plugin.checkpoints.other_layouts import fill, laid_down
from deepspeed_plugin.checkpoints.universal import UniversalCheckpoint, UniversalWeights
from deepspeed_plugin.checkpoints.zero_file_form import zero_form
from rankwise.states.param_remainders import forget_remainders
from rankwise.step.optimizer import ShardedOptimizer
from rankwise.step.reports import print_on_first_rank

__all__ = ["client_state_of", "load_checkpoint", "restore_engine"]

_Original = Callable[..., tuple[str | None, Any]]

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


def load_checkpoint(
    original: _Original, engine: DeepSpeedEngine, load_dir: str, tag: str | None = None, **options: Any
) -> tuple[str | None, Any]:
    """DeepSpeed's ``load_checkpoint``, which also continues on another world size, stage or optimizer.

    Args:
        original: DeepSpeed's method.
        engine: The engine that loads.
        load_dir: As for DeepSpeed, like the following.
        tag: Which checkpoint; the latest by default.
        options: See :class:`deepspeed_plugin.checkpoints.load_plan.Wanted`.

    Raises:
        CheckpointError: A move that is not supported, with what to do instead, or a damaged checkpoint.
    """
    found, plan = _decided(engine, load_dir, tag, Wanted(**options))
    if plan.note is not None:
        print_on_first_rank(plan.note)
    if plan.way is Way.DEEPSPEED or found is None:
        return _by_deepspeed(original, engine, load_dir, tag, found, plan)
    return _by_name(engine, found, plan)


def _decided(engine: DeepSpeedEngine, load_dir: str, tag: str | None, wanted: Wanted) -> tuple[Checkpoint | None, Plan]:
    """The checkpoint, and what is to be done; with an optimizer of ours the ranks agree before anything changes."""
    present = present_of(engine)

    def look() -> tuple[Checkpoint | None, Plan]:
        found, known = find(engine, load_dir, tag, wanted.states, present)
        plan = decide(known, present, wanted)
        if plan.judge and isinstance(found, SavedCheckpoint):
            own = dist.get_rank(engine.seq_data_parallel_group)
            engine.basic_optimizer.saved.fit.refuse_foreign(found.optimizer(own)[0])
        return found, plan

    return look() if present.identity is None else read_together(dist.group.WORLD, look)


def _by_deepspeed(
    original: _Original,
    engine: DeepSpeedEngine,
    load_dir: str,
    tag: str | None,
    found: Checkpoint | None,
    plan: Plan,
) -> tuple[str | None, Any]:
    with zero_form(engine):
        path, client_state = original(engine, load_dir, tag=tag, **vars(plan.wanted))
    if isinstance(engine.basic_optimizer, ShardedOptimizer) and not plan.wanted.states:
        forget_remainders(engine.basic_optimizer.state.values())
    if plan.refresh:
        # DeepSpeed copies the loaded weights to this wrapper's fp32 masters only when nothing else is loaded.
        engine.optimizer.refresh_fp32_params()
    return path, client_state if path is None else _without_record(client_state)


def _by_name(engine: DeepSpeedEngine, found: Checkpoint, plan: Plan) -> tuple[str, dict[str, Any]]:
    """Collective: weights and states from where they lie by name, then what else the model file holds."""
    wanted = plan.wanted
    if wanted.strict:
        _refuse_other_model(engine, found.content)
    with own_error(), _named_states(engine, found, plan.way, wanted.states) as named:
        _restore_module(engine, found.content, wanted)
        fill(engine, named, wanted.strict)
    scaler = found.scaler_state() if wanted.states else {}
    return str(found.model_file), restore_engine(engine, found.content, scaler, wanted)


@contextmanager
def _named_states(engine: DeepSpeedEngine, found: Checkpoint, way: Way, states: bool) -> Iterator[NamedStates]:
    """Weights and states by name."""
    if isinstance(found, UniversalCheckpoint) and way is not Way.MOVE:
        yield found.states if found.states is not None else NamedStates(UniversalWeights(found))
        return
    saved = found.source if isinstance(found, UniversalCheckpoint) else found
    assert saved is not None
    with laid_down(engine, saved, states) as named:
        yield named


# --- what a checkpoint holds beside trained weights and optimizer states ---------------------------------------------


def client_state_of(content: Mapping[str, Any], wanted: Wanted) -> dict[str, Any]:
    """What DeepSpeed would return of a model file."""
    dropped = {"module"} if wanted.load_module_only else set(_NOT_CLIENT_STATE)
    dropped |= {"lr_scheduler"} if wanted.load_lr_scheduler_states else set()
    dropped |= {"optimizer"} if wanted.load_optimizer_states else set()
    return _without_record({key: value for key, value in content.items() if key not in dropped})


def _without_record(client_state: Mapping[str, Any]) -> dict[str, Any]:
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
    names, saved = set(engine.module.state_dict()), set(content["module"])
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
    if wanted.custom_load_fn is not None:
        wanted.custom_load_fn(src=content["module"], dst=engine.module)
        _refresh_full_precision(engine)
    else:
        _load_untrained(engine, content)


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


def _refresh_full_precision(engine: DeepSpeedEngine) -> None:
    """Take over weights of the model that were changed from outside."""
    wrapper = engine.optimizer
    for name in ("refresh_fp32_params", "_restore_from_bit16_weights"):
        if hasattr(wrapper, name):
            getattr(wrapper, name)()
            return


def _restore_scaler(engine: DeepSpeedEngine, saved: Mapping[str, Any]) -> None:
    """The loss scale with its counters, where both runs have one."""
    if saved.get("loss_scaler") is None or not engine.fp16_enabled():
        return
    wrapper = engine.optimizer
    if hasattr(wrapper, "loss_scaler"):
        wrapper.loss_scaler = saved["loss_scaler"]
        wrapper.dynamic_loss_scale = saved["dynamic_loss_scale"]
        wrapper.overflow = saved["overflow"]
