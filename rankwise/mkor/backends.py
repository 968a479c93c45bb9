"""The first-order rules that follow MKOR's preconditioning."""

from __future__ import annotations

from torch import Tensor

from rankwise.kernels.passes import Pass, Scalars
from rankwise.plan.step_unit import Bucket, StepUnit, spans
from rankwise.step.first_order import adamw_step
from rankwise.updates.adamw import bias_corrections
from rankwise.updates.lamb import lamb_direction, trust_ratio
from rankwise.updates.sgd import sgd_direction

__all__ = ["FirstOrder"]


class FirstOrder:
    """Steps a bucket's shards by AdamW, LAMB or SGD.

    Args:
        backend: "adamw", "lamb" (bias-corrected, unbounded trust ratio over whole parameters) or "sgd".
        nesterov: Whether "sgd" has Nesterov momentum.
    """

    def __init__(self, backend: str, nesterov: bool) -> None:
        self.backend = backend
        self.nesterov = nesterov

    @property
    def states(self) -> tuple[str, ...]:
        """Names of the element states."""
        return ("momentum_buffer",) if self.backend == "sgd" else ("exp_avg", "exp_avg_sq")

    @property
    def rates(self) -> tuple[str, ...]:
        """Options that it reads from a param group. Schedulers look here for what they may cycle."""
        return ("weight_decay", "momentum") if self.backend == "sgd" else ("betas", "eps", "weight_decay")

    @property
    def is_elementwise(self) -> bool:
        """Whether any part of the buckets may be stepped alone."""
        return self.backend != "lamb"

    @property
    def is_adamw(self) -> bool:
        """Whether it does no more than :func:`adamw_step`."""
        return self.backend == "adamw"

    def apply(self, unit: StepUnit, buckets: list[Bucket]) -> None:
        """Update weights and states in place, given all buckets of the unit with their final gradients."""
        if self.backend == "lamb":
            self._lamb(unit, buckets)
            return
        for bucket in buckets:
            if self.backend == "adamw":
                adamw_step(unit, bucket)
            else:
                self._sgd(bucket)

    def _sgd(self, bucket: Bucket) -> None:
        group = bucket.group
        for weight, grad, buffer in zip(bucket.weights, bucket.grads, bucket.state("momentum_buffer"), strict=True):
            new, direction = sgd_direction(
                grad,
                None if bucket.count == 1 else buffer,
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
        squares = [unit.squared_norms(tensors) for tensors in (weights, directions)]
        norms = unit.sum_over_ranks(entries, *squares).sqrt()
        ratios = trust_ratio(norms[0], norms[1], max_weight_norm=None).to(unit.dtype)
        for bucket, span in spans(buckets):
            lr = bucket.group["lr"]
            fields = {"grad": directions[span], "param": bucket.weights}
            unit.run(Pass("step", fields, Scalars(lr=lr), ratios[span]))
