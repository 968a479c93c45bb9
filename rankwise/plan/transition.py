"""Continues the training of another optimizer: step counts of new states, and updates that grow to full size."""

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
    """The end of another optimizer's steps, and the parameters whose states began there.

    An optimizer that has followed none takes its steps without it.

    Attributes:
        began: Number of steps that the other optimizer had taken; 0 if there was none.
        length: Steps over which updates by new states grow to full size.
        afresh: Parameters all of whose states began there, and count their steps from there.
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
        """Note that some parameters have begun anew since; they count their steps from now on."""
        if self.began:
            self.afresh = self.afresh.difference(names)

    def state_dict(self) -> dict[str, Any]:
        """For checkpoints; empty where there was no other optimizer."""
        if not self.began:
            return {}
        return {_KEY: {"began": self.began, "length": self.length, "afresh": sorted(self.afresh)}}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what :meth:`state_dict` returned; other keys are ignored."""
        self.end()
        saved = state_dict.get(_KEY)
        if saved:
            self.begin(int(saved["began"]), int(saved["length"]), saved["afresh"])

    def before(self, name: str) -> int:
        """Steps in a parameter's count that were taken before its states began."""
        return self.began if name in self.afresh else 0

    @contextmanager
    def ramp(self, buckets: Sequence[Bucket]) -> Iterator[None]:
        """Scale the changes of weights whose states began with the transition; weight decay is scaled with them.

        The change is scaled after the kernels made it. Where the factor is 1, nothing is copied and no bit differs; but
        where the host does not know the step counts, weights are copied at every step.
        """
        held: list[tuple[Tensor, Tensor, float | Tensor]] = []
        for bucket in buckets if self.length else ():
            if bucket.rule == "matrix" or bucket.entries[0].info.name in self.afresh:
                factors = self._factors(bucket)
                # An empty list of factors means that none of the weights is scaled.
                held += [(weight, weight.clone(), factor) for weight, factor in zip(bucket.weights, factors)]  # noqa: B905
        yield
        for weight, before, factor in held:
            weight.copy_(torch.lerp(before, weight, factor))

    def _factors(self, bucket: Bucket) -> Sequence[float | Tensor]:
        """Factors of this step's changes, by entry; empty where all are 1."""
        taken = bucket.step + self.before(bucket.entries[0].info.name) - self.began
        if isinstance(taken, Tensor):
            # A parameter that was added since has a count below the transition's, and is not scaled.
            factors = torch.where(taken > 0, (taken / self.length).clamp(max=1.0), 1.0)
            return list(factors.to(bucket.weights[0].dtype).unbind())
        return [taken / self.length] * len(bucket.entries) if 0 < taken < self.length else ()
