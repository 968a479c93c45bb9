"""The first-order rules that follow MKOR's preconditioning."""

from __future__ import annotations

import torch
from torch import Tensor

from rankwise.kernels import foreach
from rankwise.optimizers.unit import Bucket, StepUnit
from rankwise.updates.adamw import bias_corrections
from rankwise.updates.lamb import lamb_direction, trust_ratio
from rankwise.updates.sgd import sgd_direction

__all__ = ["FirstOrder"]


class FirstOrder:
    """AdamW, LAMB or SGD on a bucket's fragments.

    Args:
        backend: "adamw", "lamb" (bias-corrected, unbounded trust ratio over whole parameters) or "sgd".
        nesterov: Nesterov momentum of "sgd".
    """

    def __init__(self, backend: str, nesterov: bool) -> None:
        self.backend = backend
        self.nesterov = nesterov

    @property
    def states(self) -> tuple[str, ...]:
        """Names of the element states."""
        return ("momentum_buffer",) if self.backend == "sgd" else ("exp_avg", "exp_avg_sq")

    @property
    def needs_norms(self) -> bool:
        """Whether a step sums over whole parameters."""
        return self.backend == "lamb"

    def apply(self, unit: StepUnit, buckets: list[Bucket]) -> None:
        """Update weights and states in place.

        Args:
            unit: The unit of the step, for sums over ranks.
            buckets: All of its buckets, with their final gradients.
        """
        if self.backend == "lamb":
            self._lamb(unit, buckets)
            return
        for bucket in buckets:
            if self.backend == "adamw":
                self._adamw(bucket)
            else:
                self._sgd(bucket)

    @staticmethod
    def _adamw(bucket: Bucket) -> None:
        group = bucket.group
        foreach.adamw_(
            bucket.weights,
            bucket.grads,
            bucket.state("exp_avg"),
            bucket.state("exp_avg_sq"),
            lr=group["lr"],
            betas=group["betas"],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            step=bucket.step,
        )

    def _sgd(self, bucket: Bucket) -> None:
        group = bucket.group
        for weight, grad, buffer in zip(bucket.weights, bucket.grads, bucket.state("momentum_buffer"), strict=True):
            new, direction = sgd_direction(
                grad,
                None if bucket.step == 1 else buffer,
                weight,
                momentum=group["momentum"],
                nesterov=self.nesterov,
                weight_decay=group["weight_decay"],
            )
            buffer.copy_(new)
            weight.sub_(direction * group["lr"])

    @staticmethod
    def _lamb(unit: StepUnit, buckets: list[Bucket]) -> None:
        directions: list[Tensor] = []
        for bucket in buckets:
            group = bucket.group
            corrections = bias_corrections(group["betas"], bucket.step)
            moments = zip(bucket.state("exp_avg"), bucket.state("exp_avg_sq"), strict=True)
            for weight, grad, (exp_avg, exp_avg_sq) in zip(bucket.weights, bucket.grads, moments, strict=True):
                new, new_sq, direction = lamb_direction(
                    grad, exp_avg, exp_avg_sq, weight, group["betas"], group["eps"], group["weight_decay"], corrections
                )
                exp_avg.copy_(new)
                exp_avg_sq.copy_(new_sq)
                directions.append(direction)
        weights = [weight for bucket in buckets for weight in bucket.weights]
        entries = [entry for bucket in buckets for entry in bucket.entries]
        squares = [
            [norm.square() for norm in torch._foreach_norm(tensors, 2, dtype=torch.float64)] if tensors else []
            for tensors in (weights, directions)
        ]
        norms = unit.sum_over_ranks(entries, *squares).sqrt()
        ratios = trust_ratio(norms[0], norms[1], max_weight_norm=None).to(unit.dtype)
        foreach.scale_by_(directions, ratios)
        position = 0
        for bucket in buckets:
            span = slice(position, position + len(bucket.entries))
            position = span.stop
            foreach.decoupled_step_(bucket.weights, directions[span], bucket.group["lr"], 0.0)
