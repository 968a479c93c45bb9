"""A run is described by its logs, so that it can be compared with others."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

__all__ = ["AXES", "Curve", "LogError", "LoggedRun"]

AXES = ("steps", "tokens", "seconds")


class LogError(ValueError):
    """A path has no known log, or a log lacks what is asked for."""


@dataclass(frozen=True)
class Curve:
    """A quantity over optimizer steps, in their order; a step that was written twice has its last value.

    Attributes:
        steps: Steps that were done, in rising order.
        values: Values at these steps.
    """

    steps: tuple[float, ...] = ()
    values: tuple[float, ...] = ()

    @classmethod
    def of(cls, values: Mapping[float, float]) -> Curve:
        """Make a curve from values by step."""
        steps = tuple(sorted(values))
        return cls(steps, tuple(values[step] for step in steps))

    def at(self, step: float) -> float:
        """Return the value at a step, on the line between its neighbours; beyond the ends, on the nearest line."""
        if len(self.steps) == 1:
            return self.values[0] * step / self.steps[0] if self.steps[0] else self.values[0]
        right = min(max(bisect_right(self.steps, step), 1), len(self.steps) - 1)
        (x, y), (far, above) = ((self.steps[i], self.values[i]) for i in (right - 1, right))
        return y + (above - y) * (step - x) / (far - x)

    def reaches(self, level: float) -> float | None:
        """Return the step at which it first is at or below a level, on the line between points; None: never."""
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
    """The facts of a run that its logs have.

    Attributes:
        label: Name of the run in tables and pictures.
        source: Path of the logs.
        loss: Loss of training.
        validation: Loss on held-out text.
        seconds: Seconds of training since the start.
        tokens_per_step: Tokens of a step; None if unknown, so that there is no such axis.
        step_share: Share of the time that the optimizer's step takes.
        state_bytes: Bytes of the optimizer's states on the fullest rank.
        peak_bytes: Most bytes of the device's memory that were in use.
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
        """Return the run under another name."""
        return replace(self, label=label)

    @property
    def judged(self) -> Curve:
        """The loss that is compared: that of validation, if there is one."""
        return self.validation if self.validation.steps else self.loss

    @property
    def steps(self) -> float:
        """Number of steps of the whole run."""
        return max(self.loss.steps[-1:] + self.validation.steps[-1:], default=0.0)

    def axis(self, name: str) -> Callable[[float], float] | None:
        """Return the function that turns steps into one of :data:`AXES`; None if it is unknown."""
        if name == "steps":
            return float
        if name == "tokens":
            per_step = self.tokens_per_step
            return None if per_step is None else lambda step: step * per_step
        return self.seconds.at if self.seconds.steps else None

    def total(self, name: str) -> float | None:
        """Return the length of the whole run along an axis; None if it is unknown."""
        along = self.axis(name)
        return None if along is None else along(self.steps)
