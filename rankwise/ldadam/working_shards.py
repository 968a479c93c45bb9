"""LDAdam on a rank's own shards: what goes to the owners of the matrices, and what their answers do."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rankwise.kernels.lists import add_, subtract_scaled_
from rankwise.layout.layout import Shard
from rankwise.ldadam.dispatch import shards_step_for
from rankwise.ldadam.in_place import LowRankStep
from rankwise.ldadam.low_rank_products import low_rank_rows, subtract_low_rank_
from rankwise.ldadam.signature import LowRankSignature, split_factors
from rankwise.plan.step_unit import Bucket, StepUnit
from rankwise.states.matrix_states import MatrixState
from rankwise.step.first_order import step_and_decay
from rankwise.updates.adamw import Scalar

__all__ = ["WorkingShards"]


class WorkingShards:
    """Weights, gradients and error buffers of a step, by the index of their entry.

    Attributes:
        sources: What each matrix's owner gathers, the gradient with what is left of earlier ones; None for shards
            of other rules. Where the error buffer has the gradients' type it is the buffer itself.

    Args:
        unit: The unit of the step.
    """

    def __init__(self, unit: StepUnit) -> None:
        self._unit = unit
        self.sources: list[Tensor | None] = [None] * len(unit.entries)
        self._weights: dict[int, Tensor] = {}
        self._errors: dict[int, Tensor] = {}
        self._missing: dict[int, Tensor] = {}  # gradients that their sources do not have yet

    def add(self, bucket: Bucket, later: Collection[int] = ()) -> None:
        """Enter the shards of a bucket.

        Args:
            bucket: Its weights and error buffers are changed in place by steps; gradients are only read.
            later: Shards that :meth:`in_place` or :meth:`complete` will be asked for: whose gradients need not be
                in their buffers before.
        """
        feedback = bucket.group["error_feedback"]
        coded = feedback and bucket.narrow.is_coded(bucket, "error")
        errors = bucket.narrow.kept(bucket, "error") if feedback and not coded else None
        sources = grads = bucket.grads
        if coded:
            sources = errors = bucket.narrow.open_onto(bucket, "error", self._unit.spends)
        elif errors is not None and errors and errors[0].dtype == grads[0].dtype:
            indices = [entry.index for entry in bucket.entries]
            self._missing |= {index: grad for index, grad in zip(indices, grads, strict=True) if index in later}
            now = [place for place, index in enumerate(indices) if index not in self._missing]
            add_([errors[place] for place in now], [grads[place] for place in now])
            sources = errors
        elif errors is not None:
            sources = [
                torch.add(grad, error, out=grad if self._unit.spends(entry, grad) else torch.empty_like(grad))
                for entry, grad, error in zip(bucket.entries, grads, errors, strict=True)
            ]
        for place, entry in enumerate(bucket.entries):
            self.sources[entry.index] = sources[place]
            self._weights[entry.index] = bucket.weights[place]
            if errors is not None:
                self._errors[entry.index] = errors[place]

    def complete(self, index: int) -> None:
        """Put a shard's gradient into its buffer, unless it is there."""
        gradient = self._missing.pop(index, None)
        if gradient is not None:
            self.source(index).add_(gradient)

    def in_place(
        self,
        index: int,
        signature: LowRankSignature,
        state: MatrixState,
        step: int,
        group: Mapping[str, Any],
        takes: Callable[..., bool],
    ) -> LowRankStep | None:
        """A whole matrix to be stepped where it lies.

        Args:
            index: Index of its one shard.
            signature: Signature of its batch.
            state: Its states.
            step: Steps applied including this one.
            group: Hyper-parameters.
            takes: As in :class:`rankwise.ldadam.in_place.StepsInPlace`.

        Returns:
            None if no form takes such tensors.
        """
        gradient, source, weight = self._missing.get(index), self.source(index), self._weights[index]
        error = self._errors.get(index)
        error = None if error is source else error
        states = (state["basis"], state["exp_avg"], state["exp_avg_sq"])
        # Narrow ones are opened in the type of the computation.
        wide = states[0].dtype == states[1].dtype == states[2].dtype == weight.dtype
        tensors = (weight, source, *states) if wide else (weight, source)
        if not takes(signature.rank, *tensors, *(() if gradient is None else (gradient,)), error=error):
            return None
        self._missing.pop(index, None)
        shape = signature[:2]
        return LowRankStep(shape, signature.right, gradient, source, weight, state, step, group, error)

    def step(
        self,
        indices: Sequence[int],
        results: Sequence[Tensor],
        signature: LowRankSignature,
        as_factors: bool,
        group: Mapping[str, Any],
    ) -> None:
        """Step shards of matrices of one shape and group.

        Args:
            indices: Which.
            results: For each, what the owner of its matrix sent.
            signature: Signature of the batch.
            as_factors: Whether the results are the factors, or the shards' own elements of their products.
            group: As the step reads it.
        """
        arrived, lr = list(zip(indices, results, strict=True)), group["lr"]
        if not as_factors:
            self._step_by_elements(arrived, group)
        elif self._unit.cautious:
            for index, result in arrived:
                self._step_cautiously(index, result, signature, group)
        elif not self._step_at_once(arrived, signature, lr):
            for index, result in arrived:
                self._step_by_factors(index, result, signature, lr)

    def _step_by_elements(self, arrived: list[tuple[int, Tensor]], group: Mapping[str, Any]) -> None:
        products = [result.view(-1, *self._weights[index].shape) for index, result in arrived]
        weights, directions = [self._weights[index] for index, _ in arrived], [product[0] for product in products]
        if self._unit.cautious:
            step_and_decay(self._unit, weights, directions, group)
        else:
            subtract_scaled_(weights, directions, group["lr"])
        for (index, _), product in zip(arrived, products, strict=True):
            if index in self._errors:
                self.source(index).sub_(product[1])
                self._keep_error(index)

    def _step_at_once(self, arrived: list[tuple[int, Tensor]], signature: LowRankSignature, lr: Scalar) -> bool:
        """In one launch, where there is a kernel for it."""
        fused = shards_step_for(self._unit.device, self._unit.dtype)
        parts = [self._shard(index) for index, _ in arrived]
        if fused is None or any(part.columns is not None or part.spread is not None for part in parts):
            return False
        indices = [index for index, _ in arrived]
        feedback = indices[0] in self._errors
        from rankwise.ldadam.cuda.low_rank_step import Factors

        factors = []
        for index, result in arrived:
            basis, others = split_factors(result, signature)
            kept = others[1] if feedback else None
            factors.append(Factors(self._shard(index).start, basis, others[0], kept))
        fused(
            [self._weights[index] for index in indices],
            factors,
            [self.source(index) for index in indices] if feedback else None,
            [self._errors[index] for index in indices] if feedback else None,
            cols=signature.columns,
            right=signature.right,
            lr=lr,
            weight_decay=0.0,  # applied before the gradients were sent
        )
        return True

    def _step_by_factors(self, index: int, result: Tensor, signature: LowRankSignature, lr: Scalar) -> None:
        part = self._shard(index)
        basis, (direction, *kept) = _own_factors(result, signature, part)
        self._subtract(self._weights[index], basis, direction * lr, signature, part)
        if kept:
            self._subtract(self.source(index), basis, kept[0], signature, part)
            self._keep_error(index)

    def _step_cautiously(
        self, index: int, result: Tensor, signature: LowRankSignature, group: Mapping[str, Any]
    ) -> None:
        """As by factors, with the elements of the direction written out: decay looks at their signs."""
        part, weight = self._shard(index), self._weights[index]
        basis, (other, *kept) = _own_factors(result, signature, part)
        direction = torch.zeros_like(weight)
        self._subtract(direction, basis, other, signature, part)
        step_and_decay(self._unit, [weight], [direction.neg_()], group)
        if kept:
            self._subtract(self.source(index), basis, kept[0], signature, part)
            self._keep_error(index)

    def _subtract(self, run: Tensor, basis: Tensor, other: Tensor, signature: LowRankSignature, part: Shard) -> None:
        """Subtract a shard's elements of a product of two factors."""
        place = (part.start, part.end, signature.rows, part.row_length, signature.right)
        if part.spread is not None:
            run.sub_(low_rank_rows(basis, other, *place).view(run.shape))
            return
        subtract_low_rank_(run, basis, other, *place)

    def _shard(self, index: int) -> Shard:
        assert self._unit.exchange is not None
        return self._unit.exchange.layout.mine[index]

    def source(self, index: int) -> Tensor:
        """What the owner of a shard's matrix gathers of it."""
        source = self.sources[index]
        assert source is not None
        return source

    def _keep_error(self, index: int) -> None:
        if self._errors[index] is not self.source(index):
            self._errors[index].copy_(self.source(index))


def _own_factors(factors: Tensor, signature: LowRankSignature, part: Shard) -> tuple[Tensor, Tensor]:
    """Basis and the products' other factors of one matrix, for the columns that a rank holds."""
    basis, others = split_factors(factors, signature)
    if part.columns is None:
        return basis, others
    block = slice(*part.columns)
    return (basis[block], others) if signature.right else (basis, others[..., block])
