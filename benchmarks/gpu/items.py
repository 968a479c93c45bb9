"""The pieces that sections consist of, and what they find."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import torch

from benchmarks.gpu.peaks import Peaks, peaks_of
from benchmarks.step import environment

__all__ = ["Figure", "Found", "Item", "Place", "Skipped"]

_FLUSHED = 256 << 20  # Bytes, several times the largest cache.


class Skipped(Exception):  # noqa: N818 - it is none
    """An item cannot be measured here, for the reason given."""


@dataclass(frozen=True)
class Figure:
    """One number and where the model expects it.

    Attributes:
        name: What it is.
        value: None where it could not be had.
        unit: Unit of it.
        low: The least that is expected; None: nothing is.
        high: The most.
        goal: What it should not exceed one day; no surprise by itself.
    """

    name: str
    value: float | None
    unit: str
    low: float | None = None
    high: float | None = None
    goal: float | None = None

    @property
    def surprising(self) -> bool:
        """Whether it is outside."""
        below = self.low is not None and self.value is not None and self.value < self.low
        above = self.high is not None and self.value is not None and self.value > self.high
        # What is no number is below and above nothing.
        return self.value is None or self.value != self.value or below or above

    def line(self) -> str:
        """For the terminal."""
        value = "none" if self.value is None else f"{self.value:.4g} {self.unit}"
        ends = ["" if end is None else f"{end:.4g}" for end in (self.low, self.high)]
        expected = f" (expected {ends[0]} to {ends[1]})" if any(ends) else ""
        goal = "" if self.goal is None else f" (goal {self.goal:g})"
        return f"{'SURPRISE ' if self.surprising else ''}{self.name}: {value}{expected}{goal}"

    def row(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"surprising": self.surprising}


@dataclass(frozen=True)
class Found:
    """What an item found.

    Attributes:
        figures: With their ranges.
        rows: For the tables of :func:`benchmarks.performance.performance_page`.
    """

    figures: list[Figure]
    rows: list[dict[str, Any]] = field(default_factory=list)


class Item(NamedTuple):
    """A piece of a section that is measured at once.

    Attributes:
        name: Unique in its section.
        seconds: It should take on an H200.
        run: Measures.
        worth: Items of more worth come first; None: the section's.
        predict: What the model expects of an H200, in words; None: the ranges stand beside the figures alone.
    """

    name: str
    seconds: float
    run: Callable[[], Found]
    worth: float | None = None
    predict: Callable[[], str] | None = None


@dataclass(frozen=True)
class Place:
    """Where it is measured, and how large.

    Attributes:
        device: "cuda", or "cpu" to try the machinery.
        model: Name of the parameter set in place of the sections' own; "tiny" makes everything small.
    """

    device: torch.device
    model: str | None = None

    @property
    def on_cuda(self) -> bool:
        """Whether there is something to be measured, rather than tried."""
        return self.device.type == "cuda"

    @property
    def tiny(self) -> bool:
        """Whether everything is to be small."""
        return self.model == "tiny"

    @property
    def about(self) -> dict[str, Any]:
        """Device, versions, date."""
        return environment(self.device)

    @property
    def peaks(self) -> Peaks | None:
        """Peak rates of the device, where they are known."""
        return peaks_of(torch.cuda.get_device_name(self.device)) if self.on_cuda else None

    def models(self, *names: str) -> tuple[str, ...]:
        """Parameter sets of a section, or the one that was asked for."""
        return names if self.model is None else (self.model,)

    def seconds(self, call: Callable[[], object], rounds: int = 10, warm: int = 2) -> float:
        """Median time of a call; on a device between events, with nothing of it in the caches."""
        for _ in range(warm):
            call()
        if not self.on_cuda:
            start = time.perf_counter()
            call()
            return time.perf_counter() - start
        flush = torch.empty(_FLUSHED, dtype=torch.int8, device=self.device)
        times = []
        for _ in range(rounds):
            flush.zero_()
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            call()
            end.record()
            torch.cuda.synchronize(self.device)
            times.append(begin.elapsed_time(end) / 1e3)
        return statistics.median(times)
