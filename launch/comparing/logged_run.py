"""A run as its logs tell it, and what of it can be compared with another's."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

__all__ = ["AXES", "Curve", "LogError", "LoggedRun"]

AXES = ("steps", "tokens", "seconds")


class LogError(ValueError):
    """A path without a log that is known, or a log without what is asked for."""


@dataclass(frozen=True)
class Curve:
    """A quantity over optimizer steps, in their order; a step that was written twice has its last value.

    Attributes:
        steps: Steps that were done, rising.
        values: At each of them.
    """

    steps: tuple[float, ...] = ()
    values: tuple[float, ...] = ()

    @classmethod
    def of(cls, values: Mapping[float, float]) -> Curve:
        """From values by step."""
        steps = tuple(sorted(values))
        return cls(steps, tuple(values[step] for step in steps))

    def at(self, step: float) -> float:
        """The value at a step, on the line between its neighbours; beyond the ends, on the nearest line."""
        if len(self.steps) == 1:
            return self.values[0] * step / self.steps[0] if self.steps[0] else self.values[0]
        right = min(max(bisect_right(self.steps, step), 1), len(self.steps) - 1)
        (x, y), (far, above) = ((self.steps[i], self.values[i]) for i in (right - 1, right))
        return y + (above - y) * (step - x) / (far - x)

    def reaches(self, level: float) -> float | None:
        """The step at which it first is at or below a level, on the line between points; None: never."""
        points = list(zip(self.steps, self.values, strict=True))
        for index, (step, value) in enumerate(points):
            if value <= level:
                if index == 0:
                    return step
                before, above = points[index - 1]
                return before + (step - before) * (above - level) / (above - value)
        return None


@dataclass(frozen=True)
class LoggedRun:
    """What is known of a run.

    Attributes:
        label: Its name in tables and pictures.
        source: Where it was read.
        loss: Loss of training.
        validation: Loss on text that was held out.
        seconds: Since the start, of training.
        tokens_per_step: None: unknown, so that there is no such axis.
        step_share: Step share of the time, in the optimizer's step.
        state_bytes: State bytes of the optimizer, of the fullest rank.
        peak_bytes: Most memory of the device that was in use.
    """

    label: str
    source: Path
    loss: Curve
    validation: Curve = field(default_factory=Curve)
    seconds: Curve = field(default_factory=Curve)
    tokens_per_step: float | None = None
    step_share: float | None = None
    state_bytes: float | None = None
    peak_bytes: float | None = None

    def named(self, label: str) -> LoggedRun:
        """The same under another name."""
        return replace(self, label=label)

    @property
    def judged(self) -> Curve:
        """The loss that counts: the validation's, if there is one."""
        return self.validation if self.validation.steps else self.loss

    @property
    def steps(self) -> float:
        """Steps of the whole run."""
        return max(self.loss.steps[-1:] + self.validation.steps[-1:], default=0.0)

    def axis(self, name: str) -> Callable[[float], float] | None:
        """What turns steps into one of :data:`AXES`; None where it is unknown."""
        if name == "steps":
            return float
        if name == "tokens":
            known = self.tokens_per_step
            return None if known is None else lambda step: step * known
        return self.seconds.at if self.seconds.steps else None

    def total(self, name: str) -> float | None:
        """The whole run along an axis."""
        along = self.axis(name)
        return None if along is None else along(self.steps)
