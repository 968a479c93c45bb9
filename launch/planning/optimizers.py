"""This module builds the optimizer that a configuration names on a model without weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from rankwise.configs import deepspeed_config
from rankwise.launch.flags import read_flags
from rankwise.launch.run_configs import check_options, read_config
from rankwise.names import BY_NAME, BY_SPELLING
from rankwise.options.hints import misspelt
from rankwise.options.validation import check_keys
from rankwise.routing.fused_shape import FusedShape
from rankwise.routing.roles import annotate, attach_info, info_of
from rankwise.step.optimizer import ShardedOptimizer

__all__ = ["Chosen", "built", "chosen", "flag_value"]


@dataclass(frozen=True)
class Chosen:
    """An optimizer of ours and how it will run.

    Attributes:
        name: Name in lower case.
        params: Options in the file's form.
        deepspeed: The DeepSpeed configuration; None for Megatron's flags.
        flags: Megatron's flags, as words.
    """

    name: str
    params: Mapping[str, Any]
    deepspeed: Mapping[str, Any] | None = None
    flags: tuple[str, ...] = ()


def chosen(config: Path | None, optimizer: str | None, flags: list[str]) -> Chosen:
    """Return the optimizer that the command line names.

    Args:
        config: A DeepSpeed JSON, or a YAML file of Megatron's flags.
        optimizer: A name whose packaged options are taken instead of those of ``config``.
        flags: Typed flags of Megatron, which count before those of a file.

    Raises:
        ValueError: No optimizer of ours is named, or its options are wrong.
    """
    yaml = config is not None and config.suffix in (".yaml", ".yml")
    words = [*(read_flags(config) if yaml and config is not None else []), *flags]
    deepspeed = None if yaml or config is None else read_config(config)
    if words and deepspeed is None:
        picked = _of_flags(words, optimizer, flags)
    else:
        block = deepspeed_config(optimizer or "mars-m")["optimizer"] if optimizer or deepspeed is None else {}
        block = block or deepspeed.get("optimizer")  # type: ignore[union-attr]
        if not isinstance(block, Mapping) or "type" not in block:
            raise ValueError('config has no "optimizer" block with a "type"; add one or choose with --optimizer')
        picked = Chosen(str(block["type"]).lower(), dict(block.get("params") or {}), deepspeed or {})
    if picked.name not in BY_NAME:
        ours = f"{', '.join(BY_SPELLING)}, or of a file for --rules{misspelt(picked.name, BY_SPELLING)}"
        raise ValueError(f"the optimizer is {picked.name!r}: it must be one of ours, {ours}")
    check_options({"type": picked.name, "params": picked.params})
    return picked


def _of_flags(words: list[str], optimizer: str | None, typed: list[str]) -> Chosen:
    name = optimizer or flag_value(words, "--optimizer") or ""
    if name.lower() not in BY_NAME:
        raise ValueError(
            f"--optimizer is {name!r}: it must be one of ours, {', '.join(BY_NAME)}{misspelt(name, BY_NAME)}"
        )
    params: dict[str, Any] = {}
    # The flags of a file belong to the optimizer that it names.
    of_it = words if optimizer is None or flag_value(words, "--optimizer") == optimizer else typed
    table = BY_NAME[name.lower()].optimizer.options_type.table()
    prefix = f"--{BY_NAME[name.lower()].optimizer.options_type.flag('')}"
    ours = [word.partition("=")[0] for word in of_it if word.startswith(prefix)]
    check_keys([word.removeprefix(prefix).replace("-", "_") for word in ours], list(table), name)
    for key in table:
        values = _values_of(of_it, prefix + key.replace("_", "-"))
        if values is not None:
            params[key] = values
    return Chosen(name.lower(), params, None, tuple(words))


def _values_of(words: list[str], flag: str) -> Any:
    """Return what follows a flag the last time it is given: a value, a list, or True for nothing; None without it."""
    places = [index for index, word in enumerate(words) if word == flag or word.startswith(f"{flag}=")]
    if not places:
        return False if f"--no-{flag.removeprefix('--')}" in words else None
    place = places[-1]
    values = [words[place].partition("=")[2]] if "=" in words[place] else []
    for word in words[place + 1 :] if not values else []:
        if word.startswith("--"):
            break
        values.append(word)
    read = [_read(value) for value in values]
    return True if not read else read[0] if len(read) == 1 else read


def _read(text: str) -> Any:
    words = {"none": None, "true": True, "false": False}
    if text.lower() in words:
        return words[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def flag_value(words: list[str] | tuple[str, ...], flag: str) -> str | None:
    """Return the value of a flag, the last one if it is given several times."""
    value = _values_of(list(words), flag)
    return None if value is None or isinstance(value, bool) else str(value)


def built(picked: Chosen, model: nn.Module, fused: Mapping[str, FusedShape] = MappingProxyType({})) -> ShardedOptimizer:
    """Return the optimizer on a model's parameters, which may be on the meta device; MKOR has captured the model.

    Args:
        picked: Optimizer to build.
        model: The model.
        fused: Logical matrices of weights, by name, beyond those that modules show.

    Raises:
        ValueError: The optimizer refuses its options, or would take no matrix.
    """
    if picked.params.get("store_param_remainders"):
        model.to(torch.bfloat16)  # only bf16 weights have remainders
    annotate(model)
    for name, parts in fused.items():
        parameter = model.get_parameter(name)
        attach_info(parameter, replace(info_of(parameter, name, name), fused=parts))
    named = BY_NAME[picked.name]
    params = {key: value for key, value in picked.params.items() if value != "auto"}
    keywords = named.complete(params, picked.name, instead=named.optimizer.__name__)
    parameters = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    optimizer = named.optimizer(parameters, **keywords)  # type: ignore[arg-type]
    optimizer.capture(model)
    return optimizer
