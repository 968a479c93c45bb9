"""LDAdam's matrix rule: owners follow a subspace, and every holder steps its own elements of the products."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from rankwise.comm.batch_messages import BatchPlan
from rankwise.comm.owner_plan import BATCH_ELEMENTS, Batch, MatrixTask, Reply
from rankwise.comm.slice_holders import Holders
from rankwise.kernels.lists import decay_
from rankwise.ldadam.dispatch import computes_stacks, steps_in_place_for
from rankwise.ldadam.in_place import LowRankStep
from rankwise.ldadam.signature import LowRankSignature
from rankwise.ldadam.sliced_matrices import step_slices
from rankwise.ldadam.subspaces import Subspaces
from rankwise.ldadam.working_shards import WorkingShards, in_reply, reply_of
from rankwise.states.matrix_states import MatrixState
from rankwise.step.matrices import MatrixRule, StepMatrices

__all__ = ["LDAdamRule"]


class LDAdamRule(MatrixRule):
    """One step of LDAdam's matrices.

    Args:
        matrices: The matrices.
        subspaces: Subspaces of the matrices that this rank owns.
        holders: Gives those that own slices of the same matrices as this rank.
    """

    def __init__(self, matrices: StepMatrices, subspaces: Subspaces, holders: Callable[[], Holders]) -> None:
        super().__init__(matrices)
        unit = self.unit
        self._subspaces, self._holders = subspaces, holders
        subspaces.on_device = self.on_device
        self._shards = WorkingShards(unit, self.weights)
        # Cautious decay has to know the directions.
        alone = unit.cautious or unit.is_offloaded
        self._steps_in_place = None if alone else steps_in_place_for(unit.device, unit.dtype)
        self._in_stacks = computes_stacks(unit.work_device, unit.dtype)

    def gather(self, in_place: Collection[int]) -> list[Tensor | None]:
        """``C``, the gradient with what is left of earlier ones; the weights have decayed then, unless cautiously."""
        for bucket in self.buckets:
            if not self.unit.cautious:
                decay_(bucket.weights, bucket.group["lr"], bucket.group["weight_decay"])
            self._shards.add(bucket, in_place if self._steps_in_place is not None else ())
        return self._shards.sources

    def states(self, task: MatrixTask) -> MatrixState:
        """Bases, moments and counts."""
        return self._subspaces.obtain(task)

    def reply(self, batch: Batch) -> Reply:
        """The factors, or elements of their products."""
        return reply_of(self.unit, self.groups, batch)

    def update(self, batch: Batch, tasks: Sequence[MatrixTask], stack: Tensor, spent: bool = False) -> Tensor:
        """Move bases and moments of matrices, or of slices together with the owners of the others."""
        if len(tasks) > 1 and not batch.partners and not self._in_stacks:
            rows = zip(tasks, stack.split(1), strict=True)
            return torch.cat([self.update(batch, [task], row) for task, row in rows])
        if batch.partners:
            group, reports = self.groups[batch.signature.group], self.unit.layout.rank == batch.partners[0]
            factors = step_slices(batch, tasks, stack, self._subspaces, group, self._holders(), reports)
        else:
            factors = self._subspaces.advance(tasks, stack)
        return in_reply(factors, batch.signature, self.reply(batch))

    def step(self, batch: Batch, indices: Sequence[int], results: Sequence[Tensor]) -> None:
        """Subtract a shard's elements of the products from its weights and its error buffer."""
        signature, as_factors = batch.signature, self.reply(batch).whole is not None
        self._shards.step(indices, results, signature, as_factors, self.groups[signature.group])

    def step_in_place(self, matrices: Sequence[BatchPlan]) -> Sequence[BatchPlan]:
        """Where there is a form that steps many at once: by it from their second step on, else in the way of others."""
        form = self._steps_in_place
        if form is None:
            return matrices
        ready: list[tuple[BatchPlan, LowRankStep]] = []
        others: list[BatchPlan] = []
        for matrix in matrices:
            state = self._subspaces.obtain(matrix.owned[0])
            job = self._shards.job(matrix, state, self.groups[matrix.batch.signature.group], form.takes)
            if job is not None:
                ready.append((matrix, job))
            else:
                others.append(matrix)
        if ready:
            self._subspaces.step_in_place([matrix.owned[0] for matrix, _ in ready], [job for _, job in ready], form)
        by_signature: dict[LowRankSignature, list[BatchPlan]] = {}
        for matrix in others:
            by_signature.setdefault(matrix.batch.signature, []).append(matrix)
        for alike in by_signature.values():
            most = max(1, BATCH_ELEMENTS // alike[0].length)
            for first in range(0, len(alike), most):
                self._step_others(alike[first : first + most])
        return ()

    def _step_others(self, matrices: Sequence[BatchPlan]) -> None:
        """Matrices of one signature that lie whole here, in the way of those that travel."""
        indices, signature = [matrix.local[0].shard for matrix in matrices], matrices[0].batch.signature
        sources = [self._shards.source(index) for index in indices]
        stack = sources[0].view(1, -1) if len(sources) == 1 else torch.stack(sources)
        factors = self._subspaces.advance([matrix.owned[0] for matrix in matrices], stack)
        self._shards.step(indices, list(factors), signature, True, self.groups[signature.group])
