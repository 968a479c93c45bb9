"""One training run, from its description to a row of results."""

from __future__ import annotations

import math
import time
from typing import Any

import torch

from benchmarks.convergence.experiment import Run
from benchmarks.convergence.optimizers import make_optimizer
from benchmarks.convergence.tasks import make_task
from benchmarks.step import environment
from rankwise.step.optimizer import ShardedOptimizer
from rankwise.version import __version__

__all__ = ["schedule", "train"]

_WARMUP = 0.05
_DECAY = 0.2
_POINTS = 20


def schedule(step: int, steps: int, shape: str = "cosine") -> float:
    """Share of the peak learning rate at a step: linear over the first twentieth, then down to zero.

    Args:
        step: From 0.
        steps: Steps of the run.
        shape: "cosine", or "wsd": the peak up to the last fifth, which is linear.
    """
    warmup = max(1, round(_WARMUP * steps))
    if step < warmup:
        return (step + 1) / warmup
    if shape == "wsd":
        return min(1.0, (steps - step) / (_DECAY * steps))
    return 0.5 * (1.0 + math.cos(math.pi * (step - warmup) / (steps - warmup)))


def train(run: Run) -> dict[str, Any]:
    """Do a run.

    Returns:
        A row: the run, its figures at the end, the mean loss of each twentieth of its steps, seconds, bytes of the
        optimizer's states, and where it ran; of MKOR-H the step that dropped its factors, or None. A run whose loss
        stops being finite ends there, with ``diverged``.
    """
    task = make_task({key: value for key, value in run.task.items() if key != "schedule"}, run.seed)
    shape = run.task.get("schedule", "cosine")
    optimizer = make_optimizer(run.optimizer, task.model, run.lr, run.options)
    peaks = [group["lr"] for group in optimizer.param_groups]
    started = time.perf_counter()
    starts = _starts(run.steps)
    curve: list[float] = []
    total = torch.zeros(())
    error, switched_at = "", None
    for step in range(run.steps):
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak * schedule(step, run.steps, shape)
        if run.options.get("exact"):
            task.gradient(step + 1)
            optimizer.record_reference()
        optimizer.zero_grad()
        loss = task.gradient(step)
        hybrid = isinstance(optimizer, ShardedOptimizer) and optimizer.needs_loss
        if hybrid:
            optimizer.record_loss(loss)
        try:
            optimizer.step()
        except RuntimeError as raised:  # a factor that cannot be inverted, or too many steps that were not finite
            error = str(raised).splitlines()[0]
            break
        if hybrid and switched_at is None and optimizer.switched:
            switched_at = step
        total += loss
        if step + 1 in starts:
            curve.append(float(total) / (step + 1 - starts[starts.index(step + 1) - 1]))
            total.zero_()
            if not math.isfinite(curve[-1]):
                break
    seconds = time.perf_counter() - started
    figures = task.figures()
    diverged = bool(error) or not all(map(math.isfinite, (*figures.values(), *curve)))
    return {
        "run": {name: getattr(run, name) for name in ("task", "optimizer", "options", "lr", "steps", "seed")},
        "diverged": diverged,
        **({"error": error} if error else {}),
        **({"switched_at": switched_at} if hybrid else {}),
        **({} if diverged else figures),
        "curve": [] if diverged else [float(f"{value:.5g}") for value in curve],
        "seconds": round(seconds, 2),
        "state_bytes": _state_bytes(optimizer),
        "parameters": sum(parameter.numel() for parameter in task.model.parameters()),
        **_where(),
    }


def _starts(steps: int) -> list[int]:
    return [round(steps * part / _POINTS) for part in range(_POINTS + 1)]


def _state_bytes(optimizer: Any) -> int:
    """Bytes of all tensors that the optimizer keeps between steps, but counters."""
    if isinstance(optimizer, ShardedOptimizer):
        return sum(optimizer.state_bytes().values())
    found = [value for state in optimizer.state.values() for value in _tensors(state)]
    return sum(value.numel() * value.element_size() for value in found if value.numel() > 1)


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [found for part in value.values() for found in _tensors(part)]
    return []


def _where() -> dict[str, Any]:
    where = environment(torch.device("cpu"))
    return {key: where[key] for key in ("device", "threads", "torch", "python", "date")} | {"rankwise": __version__}
