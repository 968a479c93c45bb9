"""Counters of an optimizer's steps: they stay on the device, and are read only when somebody asks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["Health"]


class Health:
    """Sums and counts by name since the last reading; adding to them never waits for the device.

    Args:
        means: Metrics that are reported as means; all others are totals.
        totals: Metrics that are reported as totals over ranks.
    """

    def __init__(self, means: Sequence[str] = (), totals: Sequence[str] = ()) -> None:
        self._given = (tuple(means), tuple(totals))
        self._names = (*sorted(means), *sorted(totals))
        self._means = frozenset(means)
        self._sums: dict[str, Tensor | float] = dict.fromkeys(self._names, 0.0)
        self._counts: dict[str, int] = dict.fromkeys(self._names, 0)
        self._on_device: Tensor | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy counts its own steps.
        return type(self), self._given

    def accumulate_on(self, device: torch.device) -> None:
        """Add up on a device from now on, in memory that stays, so that replays of a captured step count, too."""
        if self._on_device is None:
            self._on_device = torch.zeros(len(self._names), 2, dtype=torch.float64, device=device)

    def add(self, name: str, value: Tensor | float, count: int = 1) -> None:
        """Add to a metric.

        Args:
            name: One of the names given to the constructor.
            value: A number or 0-d tensor: a total, or the sum of ``count`` observations of a mean.
            count: Observations in ``value``.
        """
        if self._on_device is not None:
            row = self._on_device[self._names.index(name)]
            row[0].add_(value)
            row[1].add_(count)
            return
        self._sums[name] = self._sums[name] + (value.detach() if isinstance(value, Tensor) else value)
        self._counts[name] += count

    def read(self, group: dist.ProcessGroup | None = None) -> dict[str, float]:
        """Report and start afresh; waits for the device.

        Args:
            group: Ranks that read together; totals and means are over all of them then.

        Returns:
            A number per metric; a mean without observations is left out.
        """
        rows = [[float(self._sums[name]), float(self._counts[name])] for name in self._names]
        if self._on_device is not None:
            added = self._on_device.tolist()
            rows = [
                [mine + theirs for mine, theirs in zip(*pair, strict=True)] for pair in zip(rows, added, strict=True)
            ]
            self._on_device.zero_()
        self._sums = dict.fromkeys(self._names, 0.0)
        self._counts = dict.fromkeys(self._names, 0)
        if group is not None and self._names:
            packed = torch.tensor(rows, dtype=torch.float64, device="cpu")
            if "gloo" not in dist.get_backend(group):
                packed = packed.to(torch.accelerator.current_accelerator() or "cpu")
            dist.all_reduce(packed, group=group)
            rows = packed.tolist()
        return {
            name: total / count if name in self._means else total
            for name, (total, count) in zip(self._names, rows, strict=True)
            if count or name not in self._means
        }
