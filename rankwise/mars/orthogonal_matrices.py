"""MARS's matrix rule: weights step along the orthogonal factors of their momenta, as Shampoo and Muon do."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rankwise.comm.batch_messages import BatchPlan
from rankwise.comm.owner_plan import Batch, MatrixTask
from rankwise.kernels.dispatch import (
    OrthogonalStep,
    newton_schulz_for,
    orthogonal_product_for,
    orthogonal_steps_for,
)
from rankwise.kernels.lists import decay_, subtract_scaled_
from rankwise.kernels.orthogonal_step import Square
from rankwise.mars import formulas
from rankwise.mars.options import MARSOptions
from rankwise.plan.step_unit import StepUnit
from rankwise.step.first_order import step_and_decay
from rankwise.step.matrices import MatrixRule, StepMatrices

__all__ = ["MARSRule", "MomentumSignature", "steps_in_place"]


class MomentumSignature(NamedTuple):
    """What the matrices of a batch have in common.

    Attributes:
        rows: Rows of the matrix that is orthogonalised.
        columns: Columns of the matrix that is orthogonalised.
        logical: Shape of the weight, (outputs, inputs).
        group: Position of the param group.
    """

    rows: int
    columns: int
    logical: tuple[int, int]
    group: int


def steps_in_place(unit: StepUnit, product: torch.dtype) -> Callable[[Sequence[OrthogonalStep]], None] | None:
    """What steps a unit's matrices where they lie, or None."""
    if unit.is_offloaded:
        return None
    return orthogonal_steps_for(unit.device, unit.dtype, product, unit.layout.is_whole_run)


class MARSRule(MatrixRule):
    """One step along orthogonalised momenta, which have been advanced already.

    Args:
        matrices: Matrices whose momenta are orthogonalised.
        options: Options with the variant "shampoo" or "muon".
        product: Type of the products.
        squares: Squared norms of momenta, by the shards' index, where they are known.
    """

    def __init__(
        self, matrices: StepMatrices, options: MARSOptions, product: torch.dtype, squares: Mapping[int, Square]
    ) -> None:
        super().__init__(matrices)
        self._squares = squares
        self._product, self._is_free = product, options.ns_dtype == "auto"
        self._variant: formulas.MatrixVariant = options.variant  # type: ignore[assignment]
        self._scaled_as: formulas.Scale = options.scale  # type: ignore[assignment]
        self._steps_in_place = steps_in_place(self.unit, product)

    def gather(self, in_place: Collection[int]) -> list[Tensor | None]:
        """The momenta; weights that are not stepped in place have decayed then, unless they do so cautiously."""
        later = in_place if self._steps_in_place is not None else ()
        for bucket in self.buckets if not self.unit.cautious else ():
            pairs = zip(bucket.entries, bucket.weights, strict=True)
            weights = [weight for entry, weight in pairs if entry.index not in later]
            decay_(weights, bucket.group["lr"], bucket.group["weight_decay"])
        self._momenta = self.by_shard(lambda bucket: bucket.state("exp_avg"))
        return self.listed(self._momenta)

    def update(self, batch: Batch, tasks: Sequence[MatrixTask], stack: Tensor, spent: bool = False) -> Tensor:
        """The directions of a stack of momenta."""
        return self._directions(batch.signature, stack)

    def step(self, batch: Batch, indices: Sequence[int], results: Sequence[Tensor]) -> None:
        """Subtract the directions from the weights."""
        weights = [self.weights[index] for index in indices]
        directions = [result.view(weight.shape) for weight, result in zip(weights, results, strict=True)]
        self._descend(weights, directions, batch.signature)

    def step_in_place(self, matrices: Sequence[BatchPlan]) -> Sequence[BatchPlan]:
        """All of them; together, where there is a form that steps many at once."""
        alike: dict[MomentumSignature, list[int]] = {}
        for plan in matrices:
            alike.setdefault(plan.batch.signature, []).append(plan.local[0].shard)
        if self._steps_in_place is not None:
            self._steps_in_place([self._in_place(signature, indices) for signature, indices in alike.items()])
            return ()
        for signature, indices in alike.items():
            for index in indices:
                direction = self._directions(signature, self._momenta[index].view(1, -1))[0]
                self._descend([self.weights[index]], [direction], signature)
        return ()

    def _descend(self, weights: list[Tensor], directions: list[Tensor], signature: MomentumSignature) -> None:
        group = self.groups[signature.group]
        if self.unit.cautious:
            step_and_decay(self.unit, weights, directions, group)
        else:
            subtract_scaled_(weights, directions, group["lr"])

    def _directions(self, signature: MomentumSignature, exp_avgs: Tensor) -> Tensor:
        """Orthogonal directions of a stack of momenta, (matrices, elements)."""
        group, matrices = self.groups[signature.group], exp_avgs.view(-1, signature.rows, signature.columns)
        eps, factor = self._numbers_of(signature)
        orthogonalise = newton_schulz_for(exp_avgs.device, self.unit.layout.is_whole_run)
        product = self._product_of(signature)
        directions = orthogonalise(matrices, group["ns_steps"], product, eps, group["ns_coefficients"])
        return (directions * factor).reshape(len(exp_avgs), -1)

    def _product_of(self, signature: MomentumSignature) -> torch.dtype:
        shape = signature.rows, signature.columns
        return orthogonal_product_for(self.unit.work_device, self._product, *shape) if self._is_free else self._product

    def _numbers_of(self, signature: MomentumSignature) -> tuple[float, float]:
        """What is added to the norm of a momentum, and what its orthogonal factor is multiplied by."""
        group = self.groups[signature.group]
        own_eps = group["eps"] if self._variant == "shampoo" else None
        eps = formulas.norm_offset(self._variant, group["betas"][0], own_eps)
        return eps, formulas.shape_factor(self._variant, *signature.logical, self._scaled_as)

    def _in_place(self, signature: MomentumSignature, indices: Sequence[int]) -> OrthogonalStep:
        group, shape = self.groups[signature.group], (signature.rows, signature.columns)
        eps, factor = self._numbers_of(signature)
        return OrthogonalStep(
            shape,
            [self._momenta[index] for index in indices],
            [self.weights[index] for index in indices],
            eps=eps,
            factor=factor,
            lr=group["lr"],
            steps=group["ns_steps"],
            coefficients=group["ns_coefficients"],
            weight_decay=group["weight_decay"],
            cautious=self.unit.cautious,
            product=self._product_of(signature),
            squares=[self._squares.get(index) for index in indices],
        )
