"""Combinations that cannot work are refused before the first step, with the reason and the nearest that does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from deepspeed.runtime.engine import DeepSpeedEngine

from rankwise.optimizers.base import ShardedOptimizer
from rankwise.optimizers.options import OptionError

__all__ = ["refuse_replaced", "refuse_unsupported"]


def refuse_unsupported(engine: DeepSpeedEngine, optimizer: ShardedOptimizer) -> None:
    """Refuse engine settings under which a rankwise optimizer would not do what it says.

    Args:
        engine: The engine, its wrapper built.
        optimizer: Its basic optimizer.

    Raises:
        OptionError: Names the key, its value, the reason and the fix.
    """
    for key, value, reason, fix in _conflicts(engine):
        raise OptionError(f"{type(optimizer).__name__} under DeepSpeed: {key}={value!r} is invalid: {reason}; {fix}")


def _conflicts(engine: DeepSpeedEngine) -> Iterator[tuple[str, Any, str, str]]:
    ratio = engine.zero_partial_offload()
    if engine.zero_offload_optimizer() is not None and ratio is not None and ratio != 1.0:
        yield (
            "zero_optimization.offload_optimizer.ratio",
            ratio,
            "DeepSpeed steps the part that stays on the device with torch.optim.AdamW, whatever the type says",
            "set ratio to 1.0",
        )
    if engine.zero_nvme_offload_optimizer():
        yield (
            "zero_optimization.offload_optimizer.device",
            "nvme",
            "DeepSpeed swaps one flat tensor's state at a time; matrix states are no part of it",
            "use device 'cpu'",
        )
    if engine.zenflow:
        yield (
            "zero_optimization.zenflow",
            True,
            "ZenFlow steps selected columns and the rest apart, so no whole matrix is ever updated",
            "remove the zenflow block",
        )
    if engine.super_offload():
        yield (
            "zero_optimization.offload_optimizer.super_offload",
            True,
            "SuperOffload runs Adam kernels of its own in place of the optimizer",
            "set super_offload to false",
        )
    if engine.has_moe_layers:
        yield (
            "expert layers",
            "deepspeed.moe",
            "expert groups have process groups of their own, which the layout does not cover yet",
            "use a dense model, or AdamW",
        )


def refuse_replaced(engine: DeepSpeedEngine) -> None:
    """Refuse an engine whose optimizer is not ours although one of ours was built for the same parameters.

    accelerate replaces a user's optimizer by DeepSpeedCPUAdam when the configuration offloads the optimizer, and keeps
    only lr and weight decay.

    Args:
        engine: The engine, its optimizer chosen.

    Raises:
        OptionError: Says which optimizer was replaced by which, and how to name the type in the JSON instead.
    """
    if isinstance(engine.basic_optimizer, ShardedOptimizer) or engine.basic_optimizer is None:
        return
    mine = {id(parameter) for parameter in engine.module.parameters()}
    for optimizer in list(ShardedOptimizer.instances):
        if any(id(parameter) in mine for parameter in optimizer.parameters_by_name.values()):
            raise OptionError(
                f"{type(optimizer).__name__} was built for this model, but the engine got "
                f"{type(engine.basic_optimizer).__name__}: a framework replaced it (accelerate does, under optimizer "
                "offload). Name the type in the JSON's optimizer block instead of passing an instance."
            )
