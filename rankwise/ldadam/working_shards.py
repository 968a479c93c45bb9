"""LDAdam on a rank's own shards: what goes to the owners of the matrices, and what their answers do."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rankwise.comm.batch_messages import BatchPlan
from rankwise.comm.owner_plan import Batch, Reply
from rankwise.kernels.lists import add_, subtract_scaled_
from rankwise.layout.layout import Shard
from rankwise.ldadam.dispatch import shards_step_for
from rankwise.ldadam.in_place import LowRankStep
from rankwise.ldadam.low_rank_products import low_rank_rows, subtract_low_rank_
from rankwise.ldadam.signature import LowRankSignature
from rankwise.plan.notes import Note
from rankwise.plan.step_unit import Bucket, StepUnit
from rankwise.plan.work_device import OPERATIONS_PER_BYTE
from rankwise.states.matrix_states import MatrixState
from rankwise.step.first_order import step_and_decay
from rankwise.updates.adamw import Scalar

__all__ = ["WorkingShards", "in_reply", "reply_of", "split_factors"]


class WorkingShards:
    """Weights, gradients and error buffers of a step, by the index of their entry.

    Attributes:
        sources: What each matrix's owner gathers, the gradient with what is left of earlier ones; None for shards
            of other rules. Where the error buffer has the gradients' type it is the buffer itself.

    Args:
        unit: The unit of the step.
        weights: Weights of the shards.
    """

    def __init__(self, unit: StepUnit, weights: Mapping[int, Tensor]) -> None:
        self._unit, self._weights = unit, weights
        self.sources: list[Tensor | None] = [None] * len(unit.entries)
        self._errors: dict[int, Tensor] = {}
        self._missing: dict[int, Tensor] = {}  # gradients that their sources do not have yet

    def add(self, bucket: Bucket, later: Collection[int] = ()) -> None:
        """Enter the shards of a bucket.

        Args:
            bucket: Its weights and error buffers are changed in place by steps; gradients are only read.
            later: Shards of matrices that :meth:`job` will be asked for: whose gradients need not be in their buffers
                before.
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
            if errors is not None:
                self._errors[entry.index] = errors[place]

    def job(
        self, matrix: BatchPlan, state: MatrixState, group: Mapping[str, Any], takes: Callable[..., bool]
    ) -> LowRankStep | None:
        """What is to be done with a matrix that lies whole here, where that is known before the step.

        Args:
            matrix: The matrix.
            state: Its states.
            group: Hyper-parameters.
            takes: As in :class:`rankwise.ldadam.in_place.StepsInPlace`.

        Returns:
            None at the first step, and if no form takes such tensors; its gradient is in its source then.
        """
        index, signature, count = matrix.local[0].shard, matrix.batch.signature, int(state["step"])
        gradient, source, weight = self._missing.pop(index, None), self.source(index), self._weights[index]
        error = self._errors.get(index)
        error = None if error is source else error
        states = (state["basis"], state["exp_avg"], state["exp_avg_sq"])
        # Narrow ones are opened in the type of the computation.
        wide = states[0].dtype == states[1].dtype == states[2].dtype == weight.dtype
        tensors = (weight, source, *states) if wide else (weight, source)
        tensors = tensors if gradient is None else (*tensors, gradient)
        # The kernel writes the momentum into the error with the beta1 that it was weighted with before.
        known = count and (not group["error_feedback"] or float(state["beta1"]) == group["betas"][0])
        if known and takes(signature.rank, *tensors, error=error):
            shape = signature[:2]
            return LowRankStep(shape, signature.right, gradient, source, weight, state, count + 1, group, error)
        if gradient is not None:
            source.add_(gradient)
        return None

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
        arrived = list(zip(indices, results, strict=True))
        if not as_factors:
            self._step_by_elements(arrived, group)
        elif self._unit.cautious or not self._step_at_once(arrived, signature, group["lr"]):
            for index, result in arrived:
                if self._unit.collectives.place is None:
                    self._step_by_factors(index, result, signature, group)
                else:
                    # To the bits of a step whose elements a device sends.
                    self._step_by_elements([(index, self._elements(index, result, signature))], group)

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

    def _step_by_factors(
        self, index: int, result: Tensor, signature: LowRankSignature, group: Mapping[str, Any]
    ) -> None:
        part, weight = self._shard(index), self._weights[index]
        basis, (direction, *kept) = _own_factors(result, signature, part)
        if self._unit.cautious:
            # Decay looks at the signs of the elements, which are written out.
            elements = torch.zeros_like(weight)
            self._subtract(elements, basis, direction, signature, part)
            step_and_decay(self._unit, [weight], [elements.neg_()], group)
        else:
            self._subtract(weight, basis, direction * group["lr"], signature, part)
        if kept:
            self._subtract(self.source(index), basis, kept[0], signature, part)
            self._keep_error(index)

    def _elements(self, index: int, factors: Tensor, signature: LowRankSignature) -> Tensor:
        """A shard's elements of the products, as an owner would send them."""
        part = self._shard(index)
        basis, others = _own_factors(factors, signature, part)
        return low_rank_rows(basis, others, part.start, part.end, signature.rows, part.row_length, signature.right)

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


def split_factors(factors: Tensor, signature: LowRankSignature) -> tuple[Tensor, Tensor]:
    """Basis (..., short, rank) and the products' other factors (..., products, rank, long).

    Args:
        factors: (..., elements), what an owner sends of one or more matrices.
        signature: Signature of their batch.
    """
    elements = signature.short * signature.rank
    basis, others = factors[..., :elements], factors[..., elements:]
    return (
        basis.unflatten(-1, (signature.short, signature.rank)),
        others.unflatten(-1, (-1, signature.rank, signature.long)),
    )


_REPLIES: Note[dict[LowRankSignature, Reply]] = Note("what owners return of matrices of a signature")


def reply_of(unit: StepUnit, groups: Sequence[Mapping[str, Any]], batch: Batch) -> Reply:
    """The factors to every holder, or each one's elements of their products: whichever is less to send.

    Args:
        unit: The unit of the step.
        groups: Param groups by position.
        batch: Batch of its exchange; all of equal signature get the same answer.
    """
    replies = unit.notes.obtain(_REPLIES, dict)
    signature: LowRankSignature = batch.signature
    if signature not in replies:
        assert unit.exchange is not None
        products = 2 if groups[signature.group]["error_feedback"] else 1
        plan, layout = unit.exchange.plan, unit.exchange.layout
        receivers = elements = 0
        for key in (task.key for other in plan.batches if other.signature == signature for task in other.tasks):
            others = [held for holder, held in layout.elements(key).items() if holder != plan.owners[key]]
            receivers += len(others)
            elements += sum(others)
        length = signature.factors_length(products)
        fewer = receivers * length <= products * elements
        if unit.is_offloaded and 2 * signature.rank >= OPERATIONS_PER_BYTE * unit.dtype.itemsize:
            # The host would take longer for the products than their elements need to reach it.
            fewer = False
        replies[signature] = Reply(whole=length) if fewer else Reply(values=products)
    return replies[signature]


def in_reply(factors: Tensor, signature: LowRankSignature, reply: Reply) -> Tensor:
    """What owners return of (matrices, elements) factors: them, or (matrices, products * elements) their products."""
    if reply.whole is not None:
        return factors
    basis, others = split_factors(factors, signature)
    products = basis.unsqueeze(1) @ others
    return (products.mT if signature.right else products).flatten(1)
