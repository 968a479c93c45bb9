"""Gradients on their way through a preconditioner: what a rule after it sees of them, and when."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from rankwise.sharding import MatrixTask
from rankwise.step.first_order import FirstOrder
from rankwise.step.unit import Bucket, StepUnit

__all__ = ["Preconditioned"]


class Preconditioned:
    """The fragments of a step, with their raw gradients until a preconditioned one is received.

    Attributes:
        sources: The raw gradient of every local fragment, by index; None for one without.

    Args:
        unit: The unit of the step.
        buckets: All of its buckets.
        first_order: The rule that follows.
    """

    def __init__(self, unit: StepUnit, buckets: Sequence[Bucket], first_order: FirstOrder) -> None:
        self.sources: list[Tensor | None] = [None] * len(unit.entries)
        self._unit, self._buckets, self._first_order = unit, buckets, first_order
        self._places: dict[int, tuple[Bucket, int]] = {}
        self._stepped: set[int] = set()
        for bucket in buckets:
            for position, entry in enumerate(bucket.entries):
                self._places[entry.index] = (bucket, position)
                self.sources[entry.index] = bucket.grads[position]

    def receive(self, task: MatrixTask, index: int, piece: Tensor) -> None:
        """Keep a preconditioned gradient for the first-order rule; in the form in which an exchange delivers it.

        Args:
            task: Its matrix.
            index: Of the fragment.
            piece: Valid during the call only.
        """
        bucket, position = self._places[index]
        bucket.grads[position] = piece.clone()

    def step(self, task: MatrixTask, indices: Sequence[int], pieces: Sequence[Tensor]) -> None:
        """Let the first-order rule step fragments at once if it can: their gradients are still in the cache then.

        Args:
            task: Their matrix.
            indices: Of the fragments; those without a gradient are passed over.
            pieces: Their preconditioned gradients, valid during the call only.
        """
        for index, piece in zip(indices, pieces, strict=True):
            if self.sources[index] is None:
                continue
            if not self._first_order.is_elementwise:
                self.receive(task, index, piece)
                continue
            bucket, position = self._places[index]
            chosen = slice(position, position + 1)
            single = replace(bucket, entries=bucket.entries[chosen], weights=bucket.weights[chosen], grads=[piece])
            self._first_order.apply(self._unit, [single])
            self._stepped.add(index)

    def remaining(self) -> list[Bucket]:
        """What the first-order rule has yet to step."""
        return [self._rest(bucket) for bucket in self._buckets] if self._stepped else list(self._buckets)

    def _rest(self, bucket: Bucket) -> Bucket:
        places = [place for place, entry in enumerate(bucket.entries) if entry.index not in self._stepped]
        return replace(
            bucket,
            entries=[bucket.entries[place] for place in places],
            weights=[bucket.weights[place] for place in places],
            grads=[bucket.grads[place] for place in places],
        )
