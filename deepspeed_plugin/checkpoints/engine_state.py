"""What a checkpoint holds beside weights and optimizer states: counters, schedulers, samplers, scaler, buffers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepspeed.checkpoint.constants import UNIVERSAL_CHECKPOINT_INFO
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor

from deepspeed_plugin.checkpoints.errors import CheckpointError
from deepspeed_plugin.checkpoints.files import RECORD
from deepspeed_plugin.checkpoints.load_plan import Wanted

__all__ = [
    "client_state_of",
    "refuse_other_model",
    "restore_engine",
    "restore_module",
    "without_record",
]

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


def refuse_other_model(engine: DeepSpeedEngine, content: Mapping[str, Any]) -> None:
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


def restore_module(engine: DeepSpeedEngine, content: Mapping[str, Any], wanted: Wanted) -> None:
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
