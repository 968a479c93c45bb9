"""After another optimizer: counts of what started afresh, and updates that grow to their size."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from rankwise.plan.step_unit import Bucket

__all__ = ["Transition"]

_KEY = "transition"


class Transition:
    """The end of another optimizer's steps, and what has begun there.

    Nothing of it touches a step of an optimizer that has followed none.

    Attributes:
        began: Number of steps that the other one had taken; 0 if there was none.
        length: Steps over which the updates of what began there grow to their size.
        afresh: Parameters whose states all began there, and count from there.
    """

    def __init__(self) -> None:
        self.end()

    def begin(self, began: int, length: int, afresh: Iterable[str]) -> None:
        """Another optimizer has taken ``began`` steps."""
        self.began, self.length, self.afresh = began, length, frozenset(afresh)

    def end(self) -> None:
        """The next step is not a continuation of another optimizer's."""
        self.begin(0, 0, ())

    def leave(self, names: Collection[str]) -> None:
        """Some parameters have begun afresh since, and count from there."""
        if self.began:
            self.afresh = self.afresh.difference(names)

    def state_dict(self) -> dict[str, Any]:
        """For checkpoints; empty where there was no other optimizer."""
        if not self.began:
            return {}
        return {_KEY: {"began": self.began, "length": self.length, "afresh": sorted(self.afresh)}}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` gave, among other things."""
        self.end()
        saved = state_dict.get(_KEY)
        if saved:
            self.begin(int(saved["began"]), int(saved["length"]), saved["afresh"])

    def before(self, name: str) -> int:
        """Steps that a parameter's count has from before its states began."""
        return self.began if name in self.afresh else 0

    @contextmanager
    def ramp(self, buckets: Sequence[Bucket]) -> Iterator[None]:
        """Scale what happens to the weights of what started afresh.

        Weights decay with the update. Whatever kernels change the weights, the scaled change is taken of the result,
        so that where the factor is 1, or there was no other optimizer, not a bit differs and nothing is copied. Only
        where the host knows no counts are the weights copied at every step.

        Args:
            buckets: Buckets of the step; their weights are changed while this lasts.
        """
        held: list[tuple[Tensor, Tensor, float | Tensor]] = []
        for bucket in buckets if self.length else ():
            if bucket.rule == "matrix" or bucket.entries[0].info.name in self.afresh:
                factors = self._factors(bucket)
                # There may be no factors, for none is needed.
                held += [(weight, weight.clone(), factor) for weight, factor in zip(bucket.weights, factors)]  # noqa: B905
        yield
        for weight, before, factor in held:
            weight.copy_(torch.lerp(before, weight, factor))

    def _factors(self, bucket: Bucket) -> Sequence[float | Tensor]:
        """Factors on this step's changes, by entry; none where all are 1."""
        taken = bucket.step + self.before(bucket.entries[0].info.name) - self.began
        if isinstance(taken, Tensor):
            # What has joined since is no part of the transition.
            factors = torch.where(taken > 0, (taken / self.length).clamp(max=1.0), 1.0)
            return list(factors.to(bucket.weights[0].dtype).unbind())
        return [taken / self.length] * len(bucket.entries) if 0 < taken < self.length else ()
