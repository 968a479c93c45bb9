"""JSON optimizer types, and the four methods of DeepSpeed's engine that are wrapped to serve them."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero import utils as zero_utils

from deepspeed_plugin.checkpoint import load_checkpoint, save_checkpoint
from deepspeed_plugin.engine import attach, prepare
from deepspeed_plugin.json_file import read_config
from deepspeed_plugin.pipeline import is_pipeline
from deepspeed_plugin.support import refuse_replaced, refuse_settings
from rankwise import MARS, MKOR, LDAdam, SONew
from rankwise.optimizers.base import ShardedOptimizer, deferred_steps
from rankwise.optimizers.groups import idle_allowed
from rankwise.optimizers.options import OptionError, Options, check_keys

__all__ = ["JSON_TYPES", "build", "initialize", "is_registered", "register", "unregister", "validate_config"]

JSON_TYPES: Mapping[str, tuple[type[ShardedOptimizer], Mapping[str, Any]]] = {
    "MARS": (MARS, {}),
    "MARS-AdamW": (MARS, {"variant": "adamw"}),
    "MARS-Lion": (MARS, {"variant": "lion"}),
    "MARS-Shampoo": (MARS, {"variant": "shampoo"}),
    "MARS-M": (MARS, {"variant": "muon"}),
    "SONew": (SONew, {}),
    "LDAdam": (LDAdam, {}),
    "MKOR": (MKOR, {}),
    "MKOR-H": (MKOR, {"hybrid": True}),
}
"""Optimizer class and preset options of each ``"type"``; the lower-case spelling works too."""

_CLASSES = (MARS, SONew, LDAdam, MKOR)
# Values the Hugging Face integrations fill in; under bare DeepSpeed they mean the class's default.
_AUTO_KEYS = ("lr", "betas", "eps", "weight_decay")
_WRAPPED = ("_configure_optimizer", "_is_supported_optimizer", "load_checkpoint", "save_checkpoint")
_originals: dict[str, Callable[..., Any]] = {}


def _types_by_spelling() -> dict[str, str]:
    return {spelling: name for name in JSON_TYPES for spelling in (name, name.lower())}


def build(name: str, params: Any, **options: Any) -> ShardedOptimizer:
    """Construct the optimizer of a JSON block.

    Args:
        name: A key of :data:`JSON_TYPES`, or its lower-case spelling.
        params: Parameters or param groups, as DeepSpeed hands them over.
        options: The ``"params"`` of the block.

    Raises:
        OptionError: An unknown key, a value outside its range, or a model with nothing to update.
    """
    cls, _ = JSON_TYPES[_types_by_spelling()[name]]
    return cls(params, **_resolve(name, options))


def _resolve(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Check a JSON block's params and turn them into constructor keywords."""
    canonical = _types_by_spelling()[name]
    cls, preset = JSON_TYPES[canonical]
    valid = [key for key in inspect.signature(cls.__init__).parameters if key not in ("self", "params")]
    check_keys(options, [key for key in valid if key not in preset], f"optimizer type '{canonical}'")
    resolved = dict(preset)
    for key, value in options.items():
        if value == "auto":
            if key not in _AUTO_KEYS:
                raise OptionError(
                    f"optimizer type '{canonical}': {key}='auto' is invalid: only {', '.join(_AUTO_KEYS)} may be 'auto'"
                    "; write a value or leave the key out"
                )
            continue
        resolved[key] = tuple(value) if isinstance(value, list) else value
    options_type: type[Options] = cls.options_type
    options_type(**resolved)
    return resolved


def validate_config(config: str | Path | Mapping[str, Any]) -> None:
    """Check the ``"optimizer"`` block of a DeepSpeed configuration before anything is started.

    Args:
        config: The JSON's path or its content, in whatever form DeepSpeed takes it.

    Raises:
        OptionError: The file cannot be read, the type is unknown, or one of ours has a bad key or value.
    """
    block = read_config(config).get("optimizer")
    if not isinstance(block, Mapping) or "type" not in block:
        return
    name = str(block["type"])
    if name in _types_by_spelling():
        _resolve(name, block.get("params") or {})
    elif not _known_to_deepspeed(name):
        raise OptionError(_unknown_type(name))


def _known_to_deepspeed(name: str) -> bool:
    return name.lower() in DEEPSPEED_OPTIMIZERS or getattr(torch.optim, name, None) is not None


def _unknown_type(name: str) -> str:
    spellings = {candidate.lower(): candidate for candidate in (*JSON_TYPES, *DEEPSPEED_OPTIMIZERS)}
    near = difflib.get_close_matches(name.lower(), spellings, n=1, cutoff=0.4)
    hint = f"did you mean '{spellings[near[0]]}'?" if near else f"rankwise adds {', '.join(JSON_TYPES)}."
    return f"optimizer.type='{name}' is invalid: neither DeepSpeed, torch.optim nor rankwise has it; {hint}"


def is_registered() -> bool:
    """Whether DeepSpeed knows the JSON types."""
    return bool(_originals)


def register() -> None:
    """Make the JSON types known to DeepSpeed; a second call changes nothing.

    Sets attributes on ``torch.optim`` (where DeepSpeed looks names up), appends our classes to the list of optimizers
    that ZeRO accepts, and wraps four engine methods: one to learn parameter names and layouts, one for its error
    message, two for checkpoints.
    """
    if _originals:
        return
    for spelling in _types_by_spelling():
        if getattr(torch.optim, spelling, None) is not None:
            raise RuntimeError(
                f"torch.optim.{spelling} exists already; another package claims this name. Import only one of them."
            )
    for spelling in _types_by_spelling():
        setattr(torch.optim, spelling, functools.partial(build, spelling))
    zero_utils.ZERO_SUPPORTED_OPTIMIZERS.extend(_CLASSES)
    for name in _WRAPPED:
        _originals[name] = getattr(DeepSpeedEngine, name)
    DeepSpeedEngine._configure_optimizer = _configure_optimizer
    DeepSpeedEngine._is_supported_optimizer = _is_supported_optimizer
    DeepSpeedEngine.load_checkpoint = _load_checkpoint
    DeepSpeedEngine.save_checkpoint = _save_checkpoint


def unregister() -> None:
    """Undo :func:`register`."""
    if not _originals:
        return
    for spelling in _types_by_spelling():
        delattr(torch.optim, spelling)
    for cls in _CLASSES:
        zero_utils.ZERO_SUPPORTED_OPTIMIZERS.remove(cls)
    for name in _WRAPPED:
        setattr(DeepSpeedEngine, name, _originals.pop(name))


def initialize(*args: Any, **kwargs: Any) -> Any:
    """``deepspeed.initialize`` with the optimizer block checked first; arguments and results are DeepSpeed's own.

    Raises:
        OptionError: See :func:`validate_config`.
    """
    register()
    given = inspect.signature(deepspeed.initialize).bind_partial(*args, **kwargs).arguments
    config = given.get("config") or given.get("config_params")
    config = config or getattr(given.get("args"), "deepspeed_config", None)
    if config is not None:
        validate_config(config)
    return deepspeed.initialize(*args, **kwargs)


def _configure_optimizer(engine: DeepSpeedEngine, client_optimizer: Any, model_parameters: Any) -> None:
    """DeepSpeed's method, with names attached before it and the layout after it."""
    if client_optimizer is None and engine.optimizer_name() in _types_by_spelling():
        refuse_settings(engine, engine.optimizer_name())
    with idle_allowed() if is_pipeline(engine) else nullcontext():
        prepare(engine, client_optimizer)
        # Some wrappers step once on zero gradients while they are built: no state may come from that.
        with deferred_steps():
            _originals["_configure_optimizer"](engine, client_optimizer, model_parameters)
        refuse_replaced(engine)
        if isinstance(engine.basic_optimizer, ShardedOptimizer):
            attach(engine, engine.basic_optimizer)


def _load_checkpoint(engine: DeepSpeedEngine, load_dir: str, tag: str | None = None, *args: Any, **options: Any) -> Any:
    """DeepSpeed's method, which also moves our states to another world size or stage."""
    names = ("load_module_strict", "load_optimizer_states", "load_lr_scheduler_states", "load_module_only")
    options.update(zip((*names, "custom_load_fn"), args, strict=False))
    return load_checkpoint(_originals["load_checkpoint"], engine, load_dir, tag, **options)


def _save_checkpoint(engine: DeepSpeedEngine, save_dir: str, tag: str | None = None, *args: Any, **options: Any) -> Any:
    """DeepSpeed's method, which also names the checkpoint only when every rank has written its files."""
    options.update(zip(("client_state", "save_latest", "exclude_frozen_parameters"), args, strict=False))
    return save_checkpoint(_originals["save_checkpoint"], engine, save_dir, tag, **options)


def _is_supported_optimizer(engine: DeepSpeedEngine, optimizer_name: str) -> bool:
    """DeepSpeed's method, with a message that names the nearest type instead of a bare assertion."""
    if not _originals["_is_supported_optimizer"](engine, optimizer_name):
        raise OptionError(_unknown_type(optimizer_name))
    return True
