"""The registry adds types to DeepSpeed's JSON, and wraps methods of its engine and configuration to serve them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS, DeepSpeedConfig
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero import utils as zero_utils
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from torch import Tensor, nn

from deepspeed_plugin.affine_maps import logical_shape
from deepspeed_plugin.auto_tp import uncut
from deepspeed_plugin.checkpoints import load_checkpoint, save_checkpoint
from deepspeed_plugin.engine import attach, backward, detach, prepare
from deepspeed_plugin.offloaded_states import offload_states, reload_states
from deepspeed_plugin.optimizer_block import (
    JSON_TYPES,
    check_block,
    resolve,
    types_by_spelling,
    unknown_type,
    validate_config,
)
from deepspeed_plugin.pipeline import is_pipeline
from deepspeed_plugin.sub_groups import sub_groups_of
from deepspeed_plugin.support import refuse_replaced, refuse_settings
from deepspeed_plugin.trainer_defaults import stop_watching, watch
from rankwise.abandoned_locks import unwatch_builds, watch_builds
from rankwise.names import CLASSES, LISTENERS, Named
from rankwise.options.validation import OptionError, called
from rankwise.routing.patterns import checked_later
from rankwise.states.parameter_table import idle_allowed
from rankwise.step.optimizer import ShardedOptimizer
from rankwise.step.working_tensors import deferred_steps

__all__ = [
    "JSON_TYPES",
    "build",
    "initialize",
    "is_registered",
    "register",
    "unregister",
    "validate_config",
]

_WRAPPED: Mapping[str, type] = {
    "_initialize_params": DeepSpeedConfig,
    "_configure_optimizer": DeepSpeedEngine,
    "_configure_tensor_parallel": DeepSpeedEngine,
    "_create_fp16_sub_groups": DeepSpeedZeroOptimizer_Stage3,
    "_is_supported_optimizer": DeepSpeedEngine,
    "backward": DeepSpeedEngine,
    "destroy": DeepSpeedEngine,
    "load_checkpoint": DeepSpeedEngine,
    "offload_states": DeepSpeedEngine,
    "reload_states": DeepSpeedEngine,
    "save_checkpoint": DeepSpeedEngine,
}
_originals: dict[str, Callable[..., Any]] = {}


def build(name: str, params: Any, **options: Any) -> ShardedOptimizer:
    """Construct the optimizer of a JSON block.

    Args:
        name: A key of :data:`JSON_TYPES`, or its lower-case spelling.
        params: Parameters or param groups that DeepSpeed hands over.
        options: The ``"params"`` of the block.

    Raises:
        OptionError: A key is unknown, a value is outside its range, or the model has nothing to update.
    """
    canonical = types_by_spelling()[name]
    with called(canonical):
        return JSON_TYPES[canonical].optimizer(params, **resolve(name, options))


def is_registered() -> bool:
    """Whether DeepSpeed knows the JSON types."""
    return bool(_originals)


def register() -> None:
    """Make the JSON types known to DeepSpeed; a second call changes nothing.

    It sets attributes on ``torch.optim`` (where DeepSpeed looks names up), appends our classes to the list of
    optimizers that ZeRO accepts, and wraps eleven methods: one to check the optimizer block first, two to learn
    parameter names and layouts, one to keep layers whole in ZeRO-3's sub-groups, one for its error message, one for the
    loss, two for checkpoints, two to move states off the device, and one to leave the model as it was. It also wraps
    torch's locks of builds, where DeepSpeed would wait for a dead process.
    """
    if _originals:
        return
    for spelling in types_by_spelling():
        if not _is_free(spelling):
            raise RuntimeError(
                f"torch.optim.{spelling} exists already; another package claims this name. Import only one of them."
            )
    for spelling in types_by_spelling():
        setattr(torch.optim, spelling, functools.partial(build, spelling))
    _support(CLASSES)
    LISTENERS.append(_hear_of_type)
    for name, owner in _WRAPPED.items():
        _originals[name] = getattr(owner, name)
    DeepSpeedConfig._initialize_params = _initialize_params
    DeepSpeedZeroOptimizer_Stage3._create_fp16_sub_groups = _create_sub_groups
    DeepSpeedEngine._configure_optimizer = _configure_optimizer
    DeepSpeedEngine._configure_tensor_parallel = _configure_tensor_parallel
    DeepSpeedEngine._is_supported_optimizer = _is_supported_optimizer
    DeepSpeedEngine.backward = _backward
    DeepSpeedEngine.destroy = _destroy
    DeepSpeedEngine.load_checkpoint = _load_checkpoint
    DeepSpeedEngine.offload_states = _offload_states
    DeepSpeedEngine.reload_states = _reload_states
    DeepSpeedEngine.save_checkpoint = _save_checkpoint
    watch_builds()
    watch()


def unregister() -> None:
    """Undo :func:`register`."""
    if not _originals:
        return
    LISTENERS.remove(_hear_of_type)
    for name, value in list(vars(torch.optim).items()):
        if isinstance(value, functools.partial) and value.func is build:
            delattr(torch.optim, name)
    _support(())
    for name, owner in _WRAPPED.items():
        setattr(owner, name, _originals.pop(name))
    unwatch_builds()
    stop_watching()


def _support(classes: Iterable[type[ShardedOptimizer]]) -> None:
    """Make these the classes of ours that ZeRO accepts, beside DeepSpeed's own."""
    supported = zero_utils.ZERO_SUPPORTED_OPTIMIZERS
    theirs = [cls for cls in supported if not issubclass(cls, ShardedOptimizer)]
    supported[:] = [*theirs, *dict.fromkeys(classes)]


def _is_free(name: str) -> bool:
    present = getattr(torch.optim, name, None)
    return present is None or getattr(present, "func", None) is build


def _hear_of_type(spelling: str, named: Named | None) -> None:
    """Add a type that :func:`rankwise.names.register` gets later to DeepSpeed's, or remove one that goes."""
    names = dict.fromkeys((spelling, spelling.lower()))
    if named is None:
        for name in names:
            delattr(torch.optim, name)
        _support(CLASSES)
        return
    if spelling.lower() in DEEPSPEED_OPTIMIZERS or not all(map(_is_free, names)):
        raise OptionError(
            f"register({spelling!r}) is invalid: DeepSpeed or torch.optim has an optimizer of this name; register "
            "yours under another one"
        )
    for name in names:
        setattr(torch.optim, name, functools.partial(build, name))
    _support([*CLASSES, named.optimizer])


def initialize(*args: Any, **kwargs: Any) -> Any:
    """Check the optimizer block, and run ``deepspeed.initialize``, which has the arguments and results.

    Raises:
        OptionError: :func:`validate_config` refuses the configuration.
    """
    register()
    given = inspect.signature(deepspeed.initialize).bind_partial(*args, **kwargs).arguments
    config = given.get("config") or given.get("config_params")
    config = config or getattr(given.get("args"), "deepspeed_config", None)
    if config is not None:
        validate_config(config)
    return deepspeed.initialize(*args, **kwargs)


def _initialize_params(config: DeepSpeedConfig, param_dict: Mapping[str, Any]) -> None:
    """Check the optimizer block before DeepSpeed's method reads it key by key."""
    check_block(param_dict)
    _originals["_initialize_params"](config, param_dict)


def _configure_tensor_parallel(engine: DeepSpeedEngine, model: nn.Module, *args: Any) -> Any:
    """Record the model before DeepSpeed's method cuts its weights."""
    uncut(model, logical_shape)
    return _originals["_configure_tensor_parallel"](engine, model, *args)


def _configure_optimizer(engine: DeepSpeedEngine, client_optimizer: Any, model_parameters: Any) -> None:
    """Attach names before DeepSpeed's method, and the layout after it."""
    if client_optimizer is None and engine.optimizer_name() in types_by_spelling():
        refuse_settings(engine, types_by_spelling()[engine.optimizer_name()])
    with checked_later(), idle_allowed() if is_pipeline(engine) else nullcontext():
        prepare(engine, client_optimizer)
        # Some wrappers step once on zero gradients while they are built, which must not make states.
        with deferred_steps():
            _originals["_configure_optimizer"](engine, client_optimizer, model_parameters)
        refuse_replaced(engine)
        if isinstance(engine.basic_optimizer, ShardedOptimizer):
            attach(engine, engine.basic_optimizer)


def _create_sub_groups(wrapper: DeepSpeedZeroOptimizer_Stage3, parameters: list[Tensor]) -> list[list[Tensor]]:
    """Run DeepSpeed's method, which would separate weights from biases, and keep layers whole."""
    return sub_groups_of(_originals["_create_fp16_sub_groups"], wrapper, parameters)


@functools.wraps(DeepSpeedEngine.backward)
def _backward(engine: DeepSpeedEngine, loss: Any, *args: Any, **options: Any) -> Any:
    return backward(_originals["backward"], engine, loss, *args, **options)


@functools.wraps(DeepSpeedEngine.destroy)
def _destroy(engine: DeepSpeedEngine) -> None:
    detach(engine)
    _originals["destroy"](engine)


def _load_checkpoint(engine: DeepSpeedEngine, load_dir: str, tag: str | None = None, *args: Any, **options: Any) -> Any:
    """Load a checkpoint as DeepSpeed does, and move our states to another world size or stage."""
    names = ("load_module_strict", "load_optimizer_states", "load_lr_scheduler_states", "load_module_only")
    options.update(zip((*names, "custom_load_fn"), args, strict=False))
    return load_checkpoint(_originals["load_checkpoint"], engine, load_dir, tag, **options)


def _save_checkpoint(engine: DeepSpeedEngine, save_dir: str, tag: str | None = None, *args: Any, **options: Any) -> Any:
    """Save a checkpoint as DeepSpeed does, but name it only when every rank has written its files."""
    options.update(zip(("client_state", "save_latest", "exclude_frozen_parameters"), args, strict=False))
    return save_checkpoint(_originals["save_checkpoint"], engine, save_dir, tag, **options)


@functools.wraps(DeepSpeedEngine.offload_states)
def _offload_states(engine: DeepSpeedEngine, *args: Any, **options: Any) -> None:
    options.update(zip(("include", "device", "pin_memory", "non_blocking"), args, strict=False))
    offload_states(_originals["offload_states"], engine, **options)


@functools.wraps(DeepSpeedEngine.reload_states)
def _reload_states(engine: DeepSpeedEngine, non_blocking: bool = False) -> None:
    reload_states(_originals["reload_states"], engine, non_blocking)


def _is_supported_optimizer(engine: DeepSpeedEngine, optimizer_name: str) -> bool:
    """Run DeepSpeed's check, and name the nearest type in place of its bare assertion."""
    if not _originals["_is_supported_optimizer"](engine, optimizer_name):
        raise OptionError(unknown_type(optimizer_name))
    return True
