"""LDAdam's matrix rule: owners follow a subspace, and every holder steps its own elements of the products."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from torch import Tensor

from rankwise.kernels.lists import decay_
from rankwise.ldadam.forms import LowRankStep, steps_in_place_for
from rankwise.ldadam.fragments import Fragments
from rankwise.ldadam.joint import step_slices
from rankwise.ldadam.signature import LowRankSignature, in_reply, reply_of
from rankwise.ldadam.sliced_formulas import Holders
from rankwise.ldadam.subspaces import Subspaces
from rankwise.planning.unit import Bucket, StepUnit
from rankwise.sharding import Batch, MatrixTask, Reply
from rankwise.step.health import Health
from rankwise.step.matrices import MatrixRule

__all__ = ["LDAdamRule"]


class LDAdamRule(MatrixRule):
    """One step of LDAdam's matrices.

    Args:
        unit: See the base class, as of the following.
        buckets: Of the matrices.
        groups: Param groups.
        health: Counts.
        subspaces: Of the matrices that this rank owns.
        holders: Gives those that own slices of the same matrices as this rank.
    """

    separately = True

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
        self._fragments = Fragments(unit)
        self._steps_in_place = steps_in_place_for(unit.device, unit.dtype)
        self._taken: list[tuple[MatrixTask, int, LowRankStep]] = []

    def gather(self, in_place: Collection[int]) -> list[Tensor | None]:
        """``C``, the gradient with what is left of earlier ones; the weights have decayed then."""
        for bucket in self.buckets:
            decay_(bucket.weights, bucket.group["lr"], bucket.group["weight_decay"])
            self._fragments.add(bucket, in_place if self._steps_in_place is not None else ())
        return self._fragments.sources

    def reply(self, batch: Batch) -> Reply:
        """The factors, or elements of their products."""
        return reply_of(self.unit, self.groups, batch)

    def update(self, batch: Batch, tasks: Sequence[MatrixTask], stack: Tensor) -> Tensor:
        """Move bases and moments of matrices, or of slices together with the owners of the others."""
        if batch.partners:
            factors = self._step_slices(batch, tasks, stack)
        else:
            factors = self._subspaces.advance(tasks, stack)
        return in_reply(factors, batch.signature, self.reply(batch))

    def step(self, batch: Batch, indices: Sequence[int], results: Sequence[Tensor]) -> None:
        """Subtract a fragment's elements of the products from its weights and its error buffer."""
        self._step(batch.signature, indices, results, self.reply(batch).whole is not None)

    def take(self, task: MatrixTask, indices: Sequence[int], values: Sequence[Tensor]) -> bool:
        """Where there is a form that steps many matrices at once, from their second step on."""
        if self._steps_in_place is None:
            return False
        (index,), (source,) = indices, values
        state, group = self._subspaces.obtain(task, source), self.groups[task.signature.group]
        count = int(state["step"])
        # The kernel writes the momentum into the error with the beta1 that it was weighted with before.
        steady = not group["error_feedback"] or float(state["beta1"]) == group["betas"][0]
        ready = self._fragments.in_place(index, task.signature, state, count + 1, group) if count and steady else None
        if ready is None:
            self._fragments.complete(index)
            self._step_alone(task, index, source)
        else:
            self._taken.append((task, index, ready))
        return True

    def finish(self) -> None:
        """Step what has been taken."""
        if self._steps_in_place is None or not self._taken:
            return
        shares = self._steps_in_place([ready for _, _, ready in self._taken])
        kept = [share for share in shares if share is not None]
        for (task, index, ready), share in zip(self._taken, shares, strict=True):
            if share is None:
                self._step_alone(task, index, ready.source)
                continue
            ready.state["step"] += 1
            ready.state["beta1"].fill_(ready.group["betas"][0])
        if kept:
            self.health.add("subspace_rotation", len(kept) - sum(kept), len(kept))

    def _step_alone(self, task: MatrixTask, index: int, source: Tensor) -> None:
        """A matrix that lies whole here, in the way of the others; its source is complete."""
        factors = self._subspaces.advance([task], source.view(1, -1))
        self._step(task.signature, [index], [factors[0]], as_factors=True)

    def _step(
        self, signature: LowRankSignature, indices: Sequence[int], results: Sequence[Tensor], as_factors: bool
    ) -> None:
        self._fragments.step(indices, results, signature, as_factors, self.groups[signature.group]["lr"])

    def _step_slices(self, batch: Batch, tasks: Sequence[MatrixTask], stack: Tensor) -> Tensor:
        """The factors of slices that this rank owns."""
        states = [self._subspaces.obtain(task, stack) for task in tasks]
        matrices = len({task.whole for task in tasks})

        def report(rotation: Tensor) -> None:
            # One of the partners reports for all.
            if self.unit.layout.rank == batch.partners[0]:
                self._subspaces.report_rotation(rotation)

        group = self.groups[batch.signature.group]
        return step_slices(stack, states, matrices, batch.signature, group, self._holders(), report)
