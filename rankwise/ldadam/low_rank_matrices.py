"""LDAdam's matrix rule: owners follow a subspace, and every holder steps its own elements of the products."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rankwise.comm.owner_plan import BATCH_ELEMENTS, Batch, MatrixTask, Reply
from rankwise.kernels.lists import decay_
from rankwise.ldadam.dispatch import steps_in_place_for
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
        # Products of stacks round otherwise.
        self.separately = self._steps_in_place is None
        self._taken: list[tuple[MatrixTask, int, LowRankStep]] = []
        self._others: dict[LowRankSignature, list[tuple[MatrixTask, int]]] = {}

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
        if batch.partners:
            factors = self._step_slices(batch, tasks, stack)
        else:
            factors = self._subspaces.advance(tasks, stack)
        return in_reply(factors, batch.signature, self.reply(batch))

    def step(self, batch: Batch, indices: Sequence[int], results: Sequence[Tensor]) -> None:
        """Subtract a shard's elements of the products from its weights and its error buffer."""
        self._step(batch.signature, indices, results, self.reply(batch).whole is not None)

    def take(self, task: MatrixTask, indices: Sequence[int], values: Sequence[Tensor]) -> bool:
        """Where there is a form that steps many matrices at once, from their second step on."""
        if self._steps_in_place is None:
            return False
        (index,), (source,) = indices, values
        state, group = self._subspaces.obtain(task, source), self.groups[task.signature.group]
        count = int(state["step"])
        ready = None
        # The kernel writes the momentum into the error with the beta1 that it was weighted with before.
        if count and (not group["error_feedback"] or float(state["beta1"]) == group["betas"][0]):
            takes = self._steps_in_place.takes
            ready = self._shards.in_place(index, task.signature, state, count + 1, group, takes)
        if ready is not None:
            self._taken.append((task, index, ready))
            return True
        self._shards.complete(index)
        self._others.setdefault(task.signature, []).append((task, index))
        return True

    def finish(self) -> None:
        """Step what has been taken."""
        if self._steps_in_place is not None and self._taken:
            self._step_taken(self._steps_in_place)
        for signature, others in self._others.items():
            chunk = max(1, BATCH_ELEMENTS // (signature.rows * signature.columns))
            for first in range(0, len(others), chunk):
                self._step_others(others[first : first + chunk])

    def _step_taken(self, form: StepsInPlace) -> None:
        keys, jobs = [task.key for task, *_ in self._taken], [ready for *_, ready in self._taken]
        outcome = self._subspaces.narrow.step_in_place(keys, jobs, form)
        left = set(outcome.left)
        stepped = [ready for place, (_, _, ready) in enumerate(self._taken) if place not in left]
        if stepped:
            torch._foreach_add_([ready.state["step"] for ready in stepped], 1)
        for ready in stepped:
            # With error feedback only matrices are taken that have it already.
            if not ready.group["error_feedback"]:
                ready.state["beta1"].fill_(ready.group["betas"][0])
        for place in sorted(left):
            task, index, _ = self._taken[place]
            self._step_others([(task, index)])
        if len(left) < len(self._taken):
            self.health.add("subspace_rotation", outcome.rotation, len(self._taken) - len(left))
        self.health.add("kept_bases", outcome.kept)

    def _step_others(self, matrices: Sequence[tuple[MatrixTask, int]]) -> None:
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
            signature, narrow = batch.signature, self._subspaces.narrow
            matrices = len(places) // slices
            return step_slices(keys, own, chosen, matrices, signature, group, self._holders(), report, narrow)

        if len(by_past) == 1:
            return stepped(range(len(tasks)), stack)
        places_in_order = [place for places in by_past.values() for place in places]
        order = torch.tensor(places_in_order, dtype=torch.int64, device=stack.device)
        return torch.cat([stepped(places, stack[places]) for places in by_past.values()])[order.argsort()]
