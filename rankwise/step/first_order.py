"""AdamW for every fallback, and the step along directions that a rule has found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from rankwise.kernels.passes import STATES, Pass, Scalars
from rankwise.plan.step_unit import Bucket, StepUnit

__all__ = ["adamw_step", "fallback_step", "step_and_decay"]


def adamw_step(unit: StepUnit, bucket: Bucket, factors: Tensor | None = None, **overrides: Any) -> None:
    """Step a bucket's shards by AdamW, with the element states ``exp_avg`` and ``exp_avg_sq``.

    Args:
        unit: The unit of the step.
        bucket: Bucket whose weights and states are updated in place.
        factors: (entries,) factors of the gradients; None for 1.
        overrides: ``lr``, ``betas``, ``eps`` or ``weight_decay``, where they are not those of the param group.
    """
    hyper = {name: bucket.group[name] for name in ("lr", "betas", "eps", "weight_decay")}
    scalars = Scalars(**{**hyper, **overrides}, step=bucket.step)
    for update in bucket.passes("adamw", STATES["adamw"], scalars, factors):
        unit.run(update)


def step_and_decay(unit: StepUnit, weights: list[Tensor], directions: list[Tensor], group: Mapping[str, Any]) -> None:
    """Step along directions, which may be overwritten, with the decay of the group; weights change in place."""
    scalars = Scalars(lr=group["lr"], weight_decay=group["weight_decay"])
    unit.run(Pass("step", {"grad": directions, "param": weights}, scalars))


def fallback_step(unit: StepUnit, buckets: Sequence[Bucket]) -> list[Bucket]:
    """Step what takes the fallback by AdamW, and return the other buckets, which are yet to be stepped."""
    for bucket in buckets:
        if bucket.rule == "fallback":
            adamw_step(unit, bucket)
    return [bucket for bucket in buckets if bucket.rule == "matrix"]
