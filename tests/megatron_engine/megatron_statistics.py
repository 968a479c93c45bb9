"""The statistics MKOR has of a step of real Megatron, put together from all ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron_harness import Trainer
from megatron_weights import reduced_gradient
from torch import Tensor

from rankwise import MKOR
from rankwise.mkor.factor_steps import FactorSteps


def inner_optimizers(trainer: Trainer) -> list[MKOR]:
    """Ours, inside Megatron's wrappers."""
    return [wrapper.optimizer for wrapper in getattr(trainer.optimizer, "chained_optimizers", [trainer.optimizer])]


class Seen(NamedTuple):
    """Of one step, on rank 0: vectors and tokens by weight, unsharded gradients, and whether the step was done."""

    vectors: dict[str, tuple[Tensor, Tensor, float]]
    gradients: dict[str, Tensor]
    done: bool


def watch(trainer: Trainer, before: Callable[[Trainer], None] | None = None) -> Seen:
    """What MKOR's statistics are in one step, as every rank that has them says alike.

    Args:
        trainer: The step is its next.
        before: Called when the gradients are reduced, and have been looked at.
    """
    found: dict[str, tuple[Tensor, Tensor, float]] = {}
    gradients: dict[str, Tensor] = {}
    optimizers = inner_optimizers(trainer)

    def recording(factor_steps: FactorSteps, unit: Any, due: Any, groups: Any) -> Any:
        vectors = FactorSteps.reduced(factor_steps, unit, due, groups)
        found.update({key: (a.clone(), g.clone(), float(count)) for key, (a, g, count) in vectors.items()})
        return vectors

    for inner in optimizers:
        if not isinstance(inner, MKOR):
            continue
        inner.factor_steps.reduced = functools.partial(recording, inner.factor_steps)  # type: ignore[method-assign]

    def look(trainer: Trainer) -> None:
        gradients.update(trainer.weights(reduced_gradient)[0])
        if before is not None:
            before(trainer)

    done = trainer.train_step(look)[1] is not None
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, found)
    merged: dict[str, tuple[Tensor, Tensor, float]] = {}
    for theirs in everyone:
        for key, (a, g, count) in theirs.items():
            other = merged.setdefault(key, (a, g, count))
            assert torch.equal(other[0], a) and torch.equal(other[1], g) and other[2] == count
    return Seen(merged, gradients, done)
