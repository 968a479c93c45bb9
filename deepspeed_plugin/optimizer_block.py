"""This module reads a configuration, and checks its ``"optimizer"`` block before anything is built."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import hjson
import torch
from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS
from deepspeed.runtime.config_utils import dict_raise_error_on_duplicate_keys

from rankwise.names import BY_SPELLING, SPELLINGS, Named
from rankwise.options.hints import nearest, shown
from rankwise.options.validation import OptionError, called, check_given
from rankwise.rule_modules import VARIABLE
from rankwise.step.optimizer import ShardedOptimizer

__all__ = [
    "JSON_TYPES",
    "check_block",
    "read_config",
    "resolve",
    "types_by_spelling",
    "unknown_type",
    "validate_config",
]

JSON_TYPES: Mapping[str, Named] = BY_SPELLING
"""Optimizer class and preset options of each ``"type"``; users may also write it in lower case."""

# Hugging Face's integrations fill in these values where they are "auto"; bare DeepSpeed takes the class's defaults.
_AUTO_KEYS = ("lr", "betas", "eps", "weight_decay")
_BLOCK_KEYS = ("type", "params", "legacy_fusion")


def types_by_spelling() -> dict[str, str]:
    """Return a type's own spelling, by each spelling that is accepted."""
    return SPELLINGS


def validate_config(config: str | Path | Mapping[str, Any]) -> None:
    """Check the ``"optimizer"`` block of a DeepSpeed configuration before anything is started.

    Args:
        config: Path or content of the JSON, in any form that DeepSpeed takes.

    Raises:
        OptionError: The file cannot be read, the type is unknown, or a block of ours has a bad key or value.
    """
    content = read_config(config)
    check_block(content)
    block = content.get("optimizer") or {}
    name = block.get("type")
    if name is not None and name not in types_by_spelling() and not _known_to_deepspeed(name):
        raise OptionError(unknown_type(name))


def check_block(config: Mapping[str, Any]) -> None:
    """Check the ``"optimizer"`` block if it has one of our types, or a misspelt key ``"type"``.

    Args:
        config: The whole configuration.

    Raises:
        OptionError: The block is invalid; the message names the key.
    """
    if "optimizer" not in config:
        return
    block = config["optimizer"]
    if not isinstance(block, Mapping):
        _refuse("optimizer", block, "it must be an object", 'write {"type": ..., "params": {...}}, or leave it out')
    name = block.get("type")
    if name is None:
        _refuse_misspelt_type(block)
        return
    if not isinstance(name, str):
        _refuse("optimizer.type", name, "it must be the name of an optimizer", f"write e.g. {next(iter(JSON_TYPES))!r}")
    if name not in types_by_spelling():
        return
    params = block.get("params")
    if params is not None and not isinstance(params, Mapping):
        _refuse("optimizer.params", params, "it must be an object of options", 'write e.g. {"lr": 1e-3}')
    _refuse_beside_params(block, types_by_spelling()[name])
    resolve(name, params or {})


def _refuse(key: str, value: Any, rule: str, fix: str) -> None:
    raise OptionError(f"{key}={shown(value)} is invalid: {rule}; {fix}")


def _refuse_misspelt_type(block: Mapping[str, Any]) -> None:
    """Refuse a misspelt ``"type"``: without a type DeepSpeed builds no optimizer, and says nothing."""
    for key, value in block.items():
        if nearest(key, ["type"]) or (isinstance(value, str) and value in types_by_spelling()):
            raise OptionError(f"optimizer has no key {shown(key)}: did you mean 'type'?")


def _refuse_beside_params(block: Mapping[str, Any], canonical: str) -> None:
    """Refuse keys beside ``"params"``, which DeepSpeed does not read: the optimizer would run with its defaults."""
    for key in block:
        if key in _BLOCK_KEYS:
            continue
        if key in JSON_TYPES[canonical][0].options_type.names():
            raise OptionError(
                f"optimizer.{key}={shown(block[key])} is invalid: options of type '{canonical}' are read inside "
                f'"params" alone; move it there'
            )
        near = nearest(key, _BLOCK_KEYS)
        hint = f"did you mean '{near}'?" if near else f"its keys are {', '.join(_BLOCK_KEYS)}; options go into params"
        raise OptionError(f"optimizer has no key {shown(key)}: {hint}")


def _chosen_by_the_machine(cls: type[ShardedOptimizer]) -> list[str]:
    """Return options whose default is "auto", which the optimizer resolves itself."""
    return [key for key, declared in cls.options_type.table().items() if declared.default == "auto"]


def resolve(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Check a JSON block's params and turn them into constructor keywords.

    Args:
        name: A key of :data:`JSON_TYPES`, or its lower-case spelling.
        options: The ``"params"``.

    Raises:
        OptionError: A key is unknown, a value is outside its range, or nothing would read it.
    """
    canonical = types_by_spelling()[name]
    owner = f"optimizer type '{canonical}'"
    named = JSON_TYPES[canonical]
    cls = named.optimizer
    completed = named.complete(options, owner, instead=cls.__name__)
    automatic = (*_AUTO_KEYS, *_chosen_by_the_machine(cls))
    left_out = [key for key, value in options.items() if isinstance(value, str) and value == "auto"]
    for key in left_out:
        if key not in automatic:
            raise OptionError(
                f"{owner}: {key}='auto' is invalid: only {', '.join(automatic)} may be 'auto'"
                "; write a value or leave the key out"
            )
    resolved = {key: value for key, value in completed.items() if key not in left_out}
    with called(canonical):
        checked = cls.options_type(**resolved)
    for key, reason in checked.beyond_engines().items():
        raise OptionError(
            f"{owner}: {key}={resolved[key]!r} is invalid under DeepSpeed: an engine runs one backward pass per step, "
            f"{reason}; leave it out"
        )
    # Integrations may fill in a value that nothing reads, as long as it is the default.
    written = {key: value for key, value in options.items() if key not in _AUTO_KEYS}
    check_given(written, checked.unread(), owner)
    return resolved


def _known_to_deepspeed(name: str) -> bool:
    return name.lower() in DEEPSPEED_OPTIMIZERS or getattr(torch.optim, name, None) is not None


def unknown_type(name: str) -> str:
    """Return the message about an unknown type."""
    spellings = [*JSON_TYPES, *DEEPSPEED_OPTIMIZERS]
    near = nearest(name, spellings)
    hint = f"did you mean '{near}'?" if near else f"rankwise adds {', '.join(JSON_TYPES)}, and what {VARIABLE} names."
    return f"optimizer.type={shown(name)} is invalid: neither DeepSpeed, torch.optim nor rankwise has it; {hint}"


def read_config(config: str | Path | Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the content of what ``deepspeed.initialize`` takes as ``config``.

    Args:
        config: A path, the content itself, or the JSON text in URL-safe base64, as launchers pass it on.

    Raises:
        OptionError: It is none of these, a key appears twice, or the JSON is broken; the message has the place.
    """
    if isinstance(config, Mapping):
        return config
    try:
        content = hjson.loads(_text(str(config)), object_pairs_hook=dict_raise_error_on_duplicate_keys)
    except (OSError, ValueError) as error:
        raise OptionError(f"DeepSpeed configuration {_short(config)} cannot be read: {error}") from error
    if not isinstance(content, Mapping):
        raise OptionError(f"DeepSpeed configuration {_short(config)} holds no JSON object; enclose the keys in {{ }}")
    return content


def _text(config: str) -> str:
    try:
        is_file = Path(config).is_file()
    except OSError:  # a base64 text is too long for a file name
        is_file = False
    if is_file:
        return Path(config).read_text(encoding="utf-8")
    try:
        return base64.b64decode(config, altchars=b"-_", validate=True).decode("utf-8")
    except (binascii.Error, UnicodeDecodeError, ValueError):
        raise FileNotFoundError("there is no such file, and it is no base64 text either") from None


def _short(config: str | Path) -> str:
    text = str(config)
    return repr(text if len(text) <= 200 else f"{text[:197]}...")
