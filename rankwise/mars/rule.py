"""MARS's matrix rule: weights step along the orthogonal factors of their momenta, as Shampoo and Muon do."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rankwise.kernels.forms import OrthogonalStep, newton_schulz_for, orthogonal_steps_for
from rankwise.kernels.lists import decay_, subtract_scaled_
from rankwise.mars import formulas as updates
from rankwise.planning.unit import Bucket, StepUnit
from rankwise.sharding import Batch, MatrixTask
from rankwise.step.health import Health
from rankwise.step.matrices import MatrixRule

__all__ = ["MARSRule", "MomentumSignature"]


class MomentumSignature(NamedTuple):
    """What the matrices of a batch have in common.

    Attributes:
        rows: Of what is orthogonalised.
        columns: Of what is orthogonalised.
        logical: Shape of the weight.
        group: Position of the param group.
    """

    rows: int
    columns: int
    logical: tuple[int, int]
    group: int


class MARSRule(MatrixRule):
    """One step along orthogonalised momenta, which have been advanced already.

    Args:
        unit: The unit of the step.
        buckets: The fragments of all its matrices.
        groups: Param groups by position.
        variant: "shampoo" or "muon".
        product: Type of the products.
        health: Counts the matrices.
    """

    def __init__(
        self,
        unit: StepUnit,
        buckets: Sequence[Bucket],
        groups: Sequence[Mapping[str, Any]],
        variant: updates.MatrixVariant,
        product: torch.dtype,
        health: Health,
    ) -> None:
        self._unit, self._buckets, self._groups = unit, buckets, groups
        self._variant, self._product, self._health = variant, product, health
        self._weights: dict[int, Tensor] = {}
        self._steps_in_place = orthogonal_steps_for(unit.device, unit.dtype, product)
        self._taken: list[OrthogonalStep] = []

    def gather(self, in_place: Collection[int]) -> list[Tensor | None]:
        """The momenta; the weights have decayed then."""
        sources: list[Tensor | None] = [None] * len(self._unit.entries)
        for bucket in self._buckets:
            decay_(bucket.weights, bucket.group["lr"], bucket.group["weight_decay"])
            for entry, weight, exp_avg in zip(bucket.entries, bucket.weights, bucket.state("exp_avg"), strict=True):
                sources[entry.index] = exp_avg
                self._weights[entry.index] = weight
        return sources

    def update(self, batch: Batch, tasks: Sequence[MatrixTask], stack: Tensor) -> Tensor:
        """The directions of a stack of momenta."""
        self._health.add("matrices_updated", len(tasks))
        return self._directions(batch.signature, stack)

    def step(self, batch: Batch, indices: Sequence[int], results: Sequence[Tensor]) -> None:
        """Subtract the directions from the weights."""
        weights = [self._weights[index] for index in indices]
        subtract_scaled_(weights, list(results), self._groups[batch.signature.group]["lr"])

    def take(self, task: MatrixTask, indices: Sequence[int], values: Sequence[Tensor]) -> bool:
        """All of them; together at the end, where there is a form that steps many at once."""
        self._health.add("matrices_updated", 1)
        (index,), (exp_avg,) = indices, values
        weight, signature = self._weights[index], task.signature
        if self._steps_in_place is not None:
            self._taken.append(self._in_place(signature, exp_avg, weight))
        else:
            direction = self._directions(signature, exp_avg.view(1, -1))[0]
            subtract_scaled_([weight], [direction], self._groups[signature.group]["lr"])
        return True

    def finish(self) -> None:
        """Step what has been taken."""
        if self._steps_in_place is not None:
            self._steps_in_place(self._taken)

    def _directions(self, signature: MomentumSignature, exp_avgs: Tensor) -> Tensor:
        """Of momenta (matrices, elements)."""
        group = self._groups[signature.group]
        directions = updates.orthogonal_direction(
            exp_avgs.view(-1, signature.rows, signature.columns),
            self._variant,
            *signature.logical,
            beta1=group["betas"][0],
            eps=self._eps(group),
            ns_steps=group["ns_steps"],
            ns_dtype=self._product,
            orthogonalise=newton_schulz_for(self._unit.device),
        )
        return directions.reshape(len(exp_avgs), -1)

    def _in_place(self, signature: MomentumSignature, exp_avg: Tensor, weight: Tensor) -> OrthogonalStep:
        group, shape = self._groups[signature.group], (signature.rows, signature.columns)
        return OrthogonalStep(
            shape,
            exp_avg,
            weight,
            eps=updates.norm_offset(self._variant, group["betas"][0], self._eps(group)),
            factor=updates.shape_factor(self._variant, *signature.logical),
            lr=float(group["lr"]),
            steps=group["ns_steps"],
        )

    def _eps(self, group: Mapping[str, Any]) -> float | None:
        return group["eps"] if self._variant == "shampoo" else None
