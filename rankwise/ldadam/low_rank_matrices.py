"""LDAdam's matrix rule: owners follow a subspace, and every holder steps its own elements of the products."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rankwise.comm.batch_messages import BatchPlan
from rankwise.comm.owner_plan import BATCH_ELEMENTS, Batch, MatrixTask, Reply
from rankwise.kernels.lists import decay_
from rankwise.ldadam.dispatch import computes_stacks, steps_in_place_for
from rankwise.ldadam.in_place import LowRankStep, StepsInPlace
from rankwise.ldadam.signature import LowRankSignature, in_reply, reply_of
from rankwise.ldadam.sliced_formulas import Holders
from rankwise.ldadam.sliced_matrices import step_slices
from rankwise.ldadam.subspaces import Subspaces
from rankwise.ldadam.working_shards import WorkingShards
from rankwise.plan.step_unit import Bucket, StepUnit
from rankwise.step.health import Health
from rankwise.step.matrices import MatrixRule

__all__ = ["LDAdamRule"]

_Matrix = tuple[MatrixTask, int]
"""A matrix that lies whole here, and the index of its shard."""


class LDAdamRule(MatrixRule):
    """One step of LDAdam's matrices.

    Args:
        unit: Unit of the step.
        buckets: Buckets of the matrices.
        groups: Param groups by position.
        health: Receives the counts of the step.
        subspaces: Subspaces of the matrices that this rank owns.
        holders: Gives those that own slices of the same matrices as this rank.
    """

    def __init__(
        self,
        unit: StepUnit,
        buckets: Sequence[Bucket],
        groups: Sequence[Mapping[str, Any]],
        health: Health,
        subspaces: Subspaces,
        holders: Callable[[], Holders],
    ) -> None:
        super().__init__(unit, buckets, groups, health)
        self._subspaces, self._holders = subspaces, holders
        self._shards = WorkingShards(unit)
        # Cautious decay has to know the directions.
        self._steps_in_place = None if unit.cautious else steps_in_place_for(unit.device, unit.dtype)
        self._in_stacks = computes_stacks(unit.device, unit.dtype)

    def gather(self, in_place: Collection[int]) -> list[Tensor | None]:
        """``C``, the gradient with what is left of earlier ones; the weights have decayed then, unless cautiously."""
        for bucket in self.buckets:
            if not self.unit.cautious:
                decay_(bucket.weights, bucket.group["lr"], bucket.group["weight_decay"])
            self._shards.add(bucket, in_place if self._steps_in_place is not None else ())
        return self._shards.sources

    def reply(self, batch: Batch) -> Reply:
        """The factors, or elements of their products."""
        return reply_of(self.unit, self.groups, batch)

    def update(self, batch: Batch, tasks: Sequence[MatrixTask], stack: Tensor, spent: bool = False) -> Tensor:
        """Move bases and moments of matrices, or of slices together with the owners of the others."""
        if len(tasks) > 1 and not batch.partners and not self._in_stacks:
            rows = zip(tasks, stack.split(1), strict=True)
            return torch.cat([self.update(batch, [task], row) for task, row in rows])
        advanced = self._step_slices(batch, tasks, stack) if batch.partners else self._subspaces.advance(tasks, stack)
        return in_reply(advanced, batch.signature, self.reply(batch))

    def step(self, batch: Batch, indices: Sequence[int], results: Sequence[Tensor]) -> None:
        """Subtract a shard's elements of the products from its weights and its error buffer."""
        self._step(batch.signature, indices, results, self.reply(batch).whole is not None)

    def step_in_place(self, matrices: Sequence[BatchPlan]) -> Sequence[BatchPlan]:
        """Where there is a form that steps many at once: by it from their second step on, else in the way of others."""
        form = self._steps_in_place
        if form is None:
            return matrices
        others: dict[LowRankSignature, list[_Matrix]] = {}
        jobs: list[tuple[_Matrix, LowRankStep]] = []
        for plan in matrices:
            matrix = plan.owned[0], plan.local[0].shard
            job = self._job(*matrix, form)
            if job is not None:
                jobs.append((matrix, job))
            else:
                others.setdefault(plan.batch.signature, []).append(matrix)
        if jobs:
            for place in self._subspaces.step_in_place([task for (task, _), _ in jobs], [job for _, job in jobs], form):
                task, index = jobs[place][0]
                others.setdefault(task.signature, []).append((task, index))
        for signature, alike in others.items():
            most = BATCH_ELEMENTS // (signature.rows * signature.columns) if self._in_stacks else 1
            for first in range(0, len(alike), max(1, most)):
                self._step_others(alike[first : first + max(1, most)])
        return ()

    def _job(self, task: MatrixTask, index: int, form: StepsInPlace) -> LowRankStep | None:
        """What is to be done with a matrix, if the form takes it; else its gradient is in its source then."""
        state = self._subspaces.obtain(task, self._shards.source(index))
        count, group, job = int(state["step"]), self.groups[task.signature.group], None
        # The kernel writes the momentum into the error with the beta1 that it was weighted with before.
        if count and (not group["error_feedback"] or float(state["beta1"]) == group["betas"][0]):
            job = self._shards.in_place(index, task.signature, state, count + 1, group, form.takes)
        if job is None:
            self._shards.complete(index)
        return job

    def _step_others(self, matrices: Sequence[_Matrix]) -> None:
        """Matrices of one signature that lie whole here, in the way of those that travel."""
        tasks, indices = [task for task, _ in matrices], [index for _, index in matrices]
        sources = [self._shards.source(index) for index in indices]
        factors = self._subspaces.advance(tasks, sources[0].view(1, -1) if len(sources) == 1 else torch.stack(sources))
        self._step(tasks[0].signature, indices, list(factors), as_factors=True)

    def _step(
        self, signature: LowRankSignature, indices: Sequence[int], results: Sequence[Tensor], as_factors: bool
    ) -> None:
        self._shards.step(indices, results, signature, as_factors, self.groups[signature.group])

    def _step_slices(self, batch: Batch, tasks: Sequence[MatrixTask], stack: Tensor) -> Tensor:
        """The factors of slices that this rank owns."""
        states = [self._subspaces.obtain(task, stack) for task in tasks]
        slices = len(tasks) // len({task.whole for task in tasks})
        # Matrices whose gradients were missing at different steps are at different counts, alike for all partners.
        by_past: dict[tuple[int, float], list[int]] = {}
        for first in range(0, len(tasks), slices):
            past = int(states[first]["step"]), float(states[first]["beta1"])
            by_past.setdefault(past, []).extend(range(first, first + slices))

        def report(rotation: Tensor) -> None:
            # One of the partners reports for all.
            if self.unit.layout.rank == batch.partners[0]:
                self._subspaces.report_rotation(rotation)

        def stepped(places: Sequence[int], own: Tensor) -> Tensor:
            chosen, group = [states[place] for place in places], self.groups[batch.signature.group]
            whole = batch.signature.cut == "short"
            keys = [str(tasks[place].whole) if whole else tasks[place].key for place in places]
            signature, keep = batch.signature, self._subspaces.keep
            matrices = len(places) // slices
            return step_slices(keys, own, chosen, matrices, signature, group, self._holders(), report, keep)

        if len(by_past) == 1:
            return stepped(range(len(tasks)), stack)
        places_in_order = [place for places in by_past.values() for place in places]
        order = torch.tensor(places_in_order, dtype=torch.int64, device=stack.device)
        return torch.cat([stepped(places, stack[places]) for places in by_past.values()])[order.argsort()]
