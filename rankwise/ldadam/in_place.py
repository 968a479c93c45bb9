"""LDAdam's matrices that lie whole on their owner, stepped where they lie and all together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from rankwise.ldadam.fragments import Fragments
from rankwise.ldadam.native import Job, ldadam_steps_
from rankwise.sharding import MatrixTask
from rankwise.step.matrix_states import MatrixState

__all__ = ["SubspacesInPlace"]


class SubspacesInPlace:
    """Collects matrices during an exchange and steps them after it.

    Args:
        fragments: Of the step.
        groups: Param groups by position.
        obtain: The states of a task's matrix.
        plainly: Steps a matrix in any other way, its source complete.
    """

    def __init__(
        self,
        fragments: Fragments,
        groups: Sequence[Mapping[str, Any]],
        obtain: Callable[[MatrixTask, Tensor], MatrixState],
        plainly: Callable[[MatrixTask, int, Tensor], None],
    ) -> None:
        self._fragments, self._groups, self._obtain, self._plainly = fragments, groups, obtain, plainly
        self._queued: list[tuple[MatrixTask, int, Job]] = []

    def take(self, task: MatrixTask, indices: Sequence[int], parts: Sequence[Tensor]) -> None:
        """In the form in which an exchange hands over matrices that lie whole on their owner."""
        (index,), (source,) = indices, parts
        state, group = self._obtain(task, source), self._groups[task.signature.group]
        count = int(state["step"])
        # The kernel writes the momentum into the error with the beta1 that it was weighted with before.
        steady = not group["error_feedback"] or float(state["beta1"]) == group["betas"][0]
        job = self._fragments.job(index, task.signature, state, count + 1, group) if count and steady else None
        if job is None:
            self._fragments.complete(index)
            self._plainly(task, index, source)
        else:
            self._queued.append((task, index, job))

    def step(self) -> list[float]:
        """Step what has been taken.

        Returns:
            For each matrix stepped here, the share of its old subspace that lies in the new one.
        """
        if not self._queued:
            return []
        kept = ldadam_steps_([job for _, _, job in self._queued])
        for (task, index, job), share in zip(self._queued, kept, strict=True):
            if share is None:
                self._plainly(task, index, job.source)
                continue
            job.state["step"] += 1
            job.state["beta1"].fill_(job.group["betas"][0])
        return [share for share in kept if share is not None]
