"""Hugging Face's ``"auto"`` for betas becomes the Trainer's value if the user gave one, else the optimizer's own.

While it reads its arguments the Trainer replaces ``"auto"`` by ``[adam_beta1, adam_beta2]``, whose defaults are Adam's.
Afterwards nobody can tell them from what a user wrote. At that point one can also see that accelerate will not read the
JSON.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.util
import logging
import os
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from deepspeed_plugin.optimizer_block import types_by_spelling

__all__ = ["stop_watching", "watch"]

logger = logging.getLogger(__name__)
_MODULE = "transformers.integrations.deepspeed"
_CPU = "ACCELERATE_USE_CPU"
_METHOD = "trainer_config_process"
_ARGUMENTS = ("adam_beta1", "adam_beta2")


def watch() -> None:
    """Keep a type's own betas from now on, without loading the Trainer, which most programs never import."""
    if _MODULE in sys.modules:
        _wrap(sys.modules[_MODULE])
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def stop_watching() -> None:
    """Undo :func:`watch`."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Finder)]
    cls = getattr(sys.modules.get(_MODULE), "HfTrainerDeepSpeedConfig", None)
    original = getattr(getattr(cls, _METHOD, None), "_rankwise_original", None)
    if original is not None:
        setattr(cls, _METHOD, original)


class _Finder(importlib.abc.MetaPathFinder):
    """Wraps the Trainer's method as soon as something imports it."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                _wrap(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _wrap(module: ModuleType) -> None:
    cls = getattr(module, "HfTrainerDeepSpeedConfig", None)
    original = getattr(cls, _METHOD, None)
    if original is not None and not hasattr(original, "_rankwise_original"):
        setattr(cls, _METHOD, _keeping_betas(original))


def _keeping_betas(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def process(self: Any, args: Any, *rest: Any, **options: Any) -> Any:
        _warn_of_cpu(self.config)
        params = _params_of_ours(self.config)
        if params.get("betas") == "auto" and _are_defaults(args):
            del params["betas"]  # the type's own
        return original(self, args, *rest, **options)

    process._rankwise_original = original  # type: ignore[attr-defined]
    return process


def _warn_of_cpu(config: Any) -> None:
    """Warn if accelerate will not read the JSON, and trains without DeepSpeed and with the Trainer's optimizer."""
    block = config.get("optimizer")
    kind = block.get("type") if isinstance(block, dict) else None
    if kind in types_by_spelling() and os.environ.get(_CPU, "").lower() in ("1", "true", "yes", "y", "t", "on"):
        logger.warning(
            "optimizer.type=%r has no effect with %s=%s in the environment: accelerate then trains without DeepSpeed, "
            "and with the Trainer's own optimizer; remove the variable, and set DS_ACCELERATOR=cpu to train on CPUs",
            kind,
            _CPU,
            os.environ[_CPU],
        )


def _params_of_ours(config: Any) -> dict[str, Any]:
    block = config.get("optimizer")
    if not isinstance(block, dict) or not isinstance(block.get("params"), dict):
        return {}
    return block["params"] if block.get("type") in types_by_spelling() else {}


def _are_defaults(args: Any) -> bool:
    fields = getattr(type(args), "__dataclass_fields__", {})
    return all(name in fields and getattr(args, name) == fields[name].default for name in _ARGUMENTS)
