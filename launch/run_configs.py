"""The options of ``rankwise train`` become the DeepSpeed configuration of every run."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rankwise.configs import OPTIMIZERS, deepspeed_config, model_config_path
from rankwise.launch.settings import Settings
from rankwise.names import BY_NAME, BY_SPELLING, is_ours
from rankwise.options.hints import misspelt
from rankwise.options.validation import check_given

__all__ = ["check_framework", "check_options", "planned_configs", "planned_runs", "read_config", "split_names"]


def split_names(values: list[str]) -> list[str]:
    """Return optimizer names from options that may hold several, separated by commas or spaces.

    Args:
        values: Values of the options; ``all`` stands for every optimizer.

    Returns:
        Names in the order given, in lower case, without duplicates.

    Raises:
        ValueError: A name is unknown.
    """
    names: list[str] = []
    for name in " ".join(values).replace(",", " ").lower().split():
        if name != "all" and name not in OPTIMIZERS:
            choices = f"{', '.join(OPTIMIZERS)}, all{misspelt(name, OPTIMIZERS)}"
            raise ValueError(f"optimizer is {name!r}: it must be one of {choices}")
        names += list(OPTIMIZERS) if name == "all" else [name]
    return list(dict.fromkeys(names))


def planned_runs(settings: Settings, ranks: int) -> list[Settings]:
    """Return the settings of a run for each optimizer, in a folder of its own below the output.

    Args:
        settings: Settings that were typed.
        ranks: Number of processes.

    Raises:
        ValueError: A name, the configuration or a value of it is wrong, or does not suit the framework.
    """
    names = split_names(settings.optimizer or [])
    if not names and settings.config is None:
        names = ["adamw", "mars-m"]
    configs = planned_configs(None if settings.config is None else read_config(settings.config), names, settings)
    check_framework(settings.framework, ranks, settings.tensor_parallel, configs)
    return [
        replace(settings, label=label, output=settings.output / label, deepspeed=deepspeed)
        for label, deepspeed in configs.items()
    ]


def check_framework(framework: str, ranks: int, tensor_parallel: int, configs: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse what a framework cannot run.

    Args:
        framework: ``"deepspeed"`` or ``"megatron"``.
        ranks: Number of processes.
        tensor_parallel: Number of ranks that each matrix is cut over.
        configs: Result of :func:`planned_configs`.

    Raises:
        ValueError: The framework is not installed, or a value does not suit it.
    """
    package, extra = ("megatron.core", "megatron") if framework == "megatron" else ("deepspeed", "deepspeed")
    if importlib.util.find_spec(package.split(".")[0]) is None or importlib.util.find_spec(package) is None:
        raise ValueError(f"framework is {framework!r} and {package} is not installed: pip install 'rankwise[{extra}]'")
    if tensor_parallel > 1 and framework != "megatron":
        raise ValueError(f"tp is {tensor_parallel} and framework is {framework!r}: it needs --framework megatron")
    if ranks % tensor_parallel:
        raise ValueError(f"tp is {tensor_parallel} and ranks is {ranks}: it must divide the number of ranks")
    if framework != "megatron":
        return
    for config in configs.values():
        if config.get("zero_optimization", {}).get("stage") == 3:
            raise ValueError(
                "stage is 3 and framework is 'megatron', whose distributed optimizer is stages 1 and 2: use --stage 2"
            )
        if "train_micro_batch_size_per_gpu" not in config:
            raise ValueError(
                "config has no 'train_micro_batch_size_per_gpu', which framework 'megatron' needs: add it, or pass "
                "--micro-batch"
            )
        for precision in ("bf16", "fp16"):
            if config.get(precision, {}).get("enabled"):
                raise ValueError(f"config enables {precision}; the run under 'megatron' is fp32: leave it out")


def read_config(path: Path) -> dict[str, Any]:
    """Read a DeepSpeed JSON file, which may have comments and trailing commas if DeepSpeed is installed.

    Raises:
        ValueError: The file is not a JSON object.
    """
    try:
        reader = importlib.import_module("hjson")
    except ModuleNotFoundError:  # the module comes with DeepSpeed
        reader = json
    try:
        config = reader.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_unique)
    except (OSError, ValueError) as error:
        raise ValueError(f"config is {str(path)!r}, which is no readable JSON file: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"config is {str(path)!r}, which holds no JSON object")
    return config


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique: dict[str, Any] = {}
    for key, value in pairs:
        if key in unique:
            raise ValueError(f"the key {key!r} stands twice")
        unique[key] = value
    return unique


def planned_configs(
    config: dict[str, Any] | None, optimizers: list[str], settings: Settings
) -> dict[str, dict[str, Any]]:
    """Return DeepSpeed configurations that differ in their ``optimizer`` blocks only.

    Args:
        config: The user's configuration, or None for the packaged one.
        optimizers: Names whose packaged block replaces the configuration's, unless that has this type; if empty, the
            configuration's stays.
        settings: Values from the command line that replace the configuration's; None leaves them.

    Returns:
        Configurations by label of the run, in the order asked for.

    Raises:
        ValueError: There is no ``optimizer`` block, or one of its options is unknown or out of range.
    """
    stage = 2 if settings.stage is None else settings.stage
    base = deepspeed_config("adamw", stage) if config is None else config
    block = base.get("optimizer")
    written = {str(block["type"]).lower(): block} if isinstance(block, dict) and "type" in block else {}
    if not optimizers and not written:
        raise ValueError('config has no "optimizer" block with a "type"; add one or choose with --optimizer')
    blocks = {name: written.get(name) or _ready_block(name, settings.values_of) for name in optimizers or written}
    configs = {label: _with_values(base, block, settings) for label, block in blocks.items()}
    for planned in configs.values():
        check_options(planned["optimizer"])
    return configs


def _ready_block(name: str, model: str) -> dict[str, Any]:
    """Return the packaged block of an optimizer, for a model if its files have this optimizer."""
    published = model and name != "mars" and (name == "adamw" or is_ours(name))
    config = read_config(model_config_path(model, name)) if published else deepspeed_config(name)
    block: dict[str, Any] = config["optimizer"]
    return block


def check_options(block: Mapping[str, Any]) -> None:
    """Check the options of an ``optimizer`` block of one of our types, without importing a framework.

    Args:
        block: Block with ``type`` and perhaps ``params``; frameworks judge blocks of other types.

    Raises:
        ValueError: An option is wrong; the message names the key, the value and the fix.
    """
    params = block.get("params") or {}
    if not isinstance(params, Mapping):
        raise ValueError(f'optimizer.params is {params!r}: it must be an object of options, e.g. {{"lr": 1e-3}}')
    name = str(block["type"]).lower()
    if name not in BY_NAME:
        return
    named = BY_NAME[name]
    spelling = next(spelling for spelling in BY_SPELLING if spelling.lower() == name)
    owner = f"optimizer type {spelling!r}"
    keywords = named.complete(params, owner, instead=named.optimizer.__name__)
    # Integrations fill in values that are "auto".
    written = {key: value for key, value in keywords.items() if value != "auto"}
    checked = named.optimizer.options_type(**written)
    check_given({key: params[key] for key in params if key in written}, checked.unread(), owner)


def _with_values(base: dict[str, Any], block: dict[str, Any], settings: Settings) -> dict[str, Any]:
    config = copy.deepcopy(base)
    config["optimizer"] = copy.deepcopy(block)
    if settings.lr is not None:
        config["optimizer"].setdefault("params", {})["lr"] = settings.lr
    if settings.stage is not None:
        config.setdefault("zero_optimization", {})["stage"] = settings.stage
    for key, value in (
        ("train_micro_batch_size_per_gpu", settings.micro_batch),
        ("gradient_accumulation_steps", settings.accumulation),
    ):
        if value is not None:
            config[key] = value
            config.pop("train_batch_size", None)  # DeepSpeed derives it from the other two and the ranks
    if settings.bf16:
        config["bf16"] = {"enabled": True}
    config.pop("scheduler", None)  # the reference script has its own scheduler for all optimizers
    config.setdefault("steps_per_print", 10**9)  # the progress bar shows steps
    return config
