"""One process of plain PyTorch."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch

from benchmarks.frameworks.problem import Weights, one_process
from benchmarks.frameworks.tasks import Task

__all__ = ["opened", "train"]


def opened(task: Task) -> Any:
    """Nothing is to be opened."""
    return nullcontext()


def train(task: Task, kind: str, noise: float) -> Weights:
    """See :func:`.problem.one_process`; "start": the first weights."""
    settings = task.cell.settings
    dtype, rounded = (getattr(torch, settings.get(name, "float32")) for name in ("dtype", "rounded"))
    return one_process(None if kind == "start" else kind, task.place, dtype, rounded)
