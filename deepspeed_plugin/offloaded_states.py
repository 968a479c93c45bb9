"""``engine.offload_states()`` and ``reload_states()`` move matrix states off the device and back with the others.

DeepSpeed moves what ``optimizer.state`` has, at stages 1 and 2; at stage 3 it refuses all optimizers but its own Adam.
Matrix states are in a place of their own. DeepSpeed brings all states back to the device, even step counts, which were
on the host before; here each state goes back to where it was.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from deepspeed.runtime.zero.offload_states import offload_optimizer_states
from torch import Tensor

from rankwise.step.optimizer import ShardedOptimizer

__all__ = ["offload_states", "reload_states"]

_PLACES = "_rankwise_places"
"""Attribute of an engine whose states are away, with the place of each state before."""


def offload_states(original: Callable[..., None], engine: DeepSpeedEngine, **options: Any) -> None:
    """Run DeepSpeed's method, and move the states that it does not know of.

    Args:
        original: DeepSpeed's method.
        engine: The engine.
        options: ``include``, ``device``, ``pin_memory`` and ``non_blocking``.
    """
    optimizer = _ours(engine)
    places = {} if optimizer is None else {place: value.device for place, _, value in _tensors(optimizer)}
    original(engine, **options)
    if optimizer is None or _PLACES in engine.__dict__ or not _are_away(engine):
        return
    setattr(engine, _PLACES, places)
    non_blocking = options.get("non_blocking", False)
    matrices = SimpleNamespace(state=optimizer.matrix_states.everything())
    offload_optimizer_states(matrices, "cpu", options.get("pin_memory", True), non_blocking)
    if not non_blocking:
        get_accelerator().synchronize()
    # Only this makes the memory that the states left available to others.
    get_accelerator().empty_cache()


def reload_states(original: Callable[..., None], engine: DeepSpeedEngine, non_blocking: bool = False) -> None:
    """Run DeepSpeed's method, and bring back what :func:`offload_states` moved beyond it.

    Args:
        original: DeepSpeed's method.
        engine: The engine.
        non_blocking: Whether copies may overlap; they have ended when this returns, as in DeepSpeed.
    """
    original(engine, non_blocking=non_blocking)
    optimizer, places = _ours(engine), engine.__dict__.pop(_PLACES, None)
    if optimizer is None or places is None:
        return
    device, waiting = torch.device(get_accelerator().current_device_name()), []
    for place, holder, value in list(_tensors(optimizer)):
        waiting.append(value)
        holder[place[1]] = value.to(places.get(place, device), non_blocking=non_blocking)
    if non_blocking:
        get_accelerator().synchronize()


def _ours(engine: DeepSpeedEngine) -> ShardedOptimizer | None:
    optimizer = getattr(engine, "basic_optimizer", None)
    return optimizer if isinstance(optimizer, ShardedOptimizer) else None


def _are_away(engine: DeepSpeedEngine) -> bool:
    return OffloadStateTypeEnum.optim_states in engine.optimizer.offloaded_states


def _holders(optimizer: ShardedOptimizer) -> Iterator[tuple[Hashable, dict[str, Any]]]:
    """Yield the states of every tensor, and of every matrix by its name."""
    yield from optimizer.state.items()
    yield from optimizer.matrix_states.everything().items()


def _tensors(optimizer: ShardedOptimizer) -> Iterator[tuple[tuple[Hashable, str], dict[str, Any], Tensor]]:
    """Yield each state's place (owner and name), the dictionary that holds it, and the state."""
    for owner, holder in _holders(optimizer):
        for name, value in holder.items():
            if isinstance(value, Tensor):
                yield (owner, name), holder, value
