"""One training run, from its description to a row of results."""

from __future__ import annotations

import fcntl
import gc
import hashlib
import math
import os
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.convergence.experiment import Run
from benchmarks.convergence.optimizers import make_optimizer
from benchmarks.convergence.tasks import make_task
from benchmarks.step import environment
from rankwise.step.optimizer import ShardedOptimizer
from rankwise.version import __version__

__all__ = ["Place", "schedule", "step_milliseconds", "train"]

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


@dataclass(frozen=True)
class Place:
    """Where runs are done, and how a run that takes longer goes on later.

    Attributes:
        device: Device of model, data and optimizer.
        end: End of ``time.monotonic()``, at which a run is put aside.
        folder: Folder of the runs that were put aside; None: every run is done at once.
        every: Seconds between two times that a run is saved there.
    """

    device: torch.device = torch.device("cpu")
    end: float = math.inf
    folder: Path | None = None
    every: float = 60.0

    @property
    def name(self) -> str:
        """Name of the device."""
        return str(environment(self.device)["device"])

    def file(self, run: Run, device: str = "") -> Path | None:
        """Where a run is put aside; other devices have other files, for they round otherwise.

        Args:
            run: The run.
            device: Name of the device, where it is known; to find it opens one.
        """
        if self.folder is None:
            return None
        text = run.key + (device or self.name) + torch.__version__ + __version__
        return self.folder / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.pt"


class _Course:
    """A run on its way: task, optimizer, and what has been seen of the losses."""

    def __init__(self, run: Run, device: torch.device) -> None:
        self.run, self.device = run, device
        if device.index is not None:
            torch.cuda.set_device(device)  # where graphs are made
        self.task = make_task({key: value for key, value in run.task.items() if key != "schedule"}, run.seed, device)
        self.optimizer = make_optimizer(run.optimizer, self.task.model, run.lr, run.options)
        self.peaks = [group["lr"] for group in self.optimizer.param_groups]
        self.step, self.curve, self.seconds, self.error = 0, list[float](), 0.0, ""
        self.total = torch.zeros((), device=device)
        self.hybrid = isinstance(self.optimizer, ShardedOptimizer) and self.optimizer.needs_loss
        self.switched_at: int | None = None
        # Hooks do not run when a graph is replayed.
        if not getattr(self.optimizer, "needs_capture", False):
            self.task.capture()

    @property
    def over(self) -> bool:
        lost = bool(self.error) or bool(self.curve) and not math.isfinite(self.curve[-1])
        return lost or self.step == self.run.steps

    def advance(self) -> None:
        """Take a step."""
        run, task, optimizer, step = self.run, self.task, self.optimizer, self.step
        for group, peak in zip(optimizer.param_groups, self.peaks, strict=True):
            group["lr"] = peak * schedule(step, run.steps, run.task.get("schedule", "cosine"))
        if run.options.get("exact"):
            task.gradient(step + 1)
            optimizer.record_reference()
        if not task.keeps_gradients:
            optimizer.zero_grad()
        loss = task.gradient(step)
        if self.hybrid:
            optimizer.record_loss(loss)
        try:
            optimizer.step()
        except RuntimeError as raised:
            if not self._is_lost(raised, loss):
                raise
            self.error = str(raised).splitlines()[0]
            return
        if self.hybrid and self.switched_at is None and optimizer.switched:
            self.switched_at = step
        self.total += loss
        self.step += 1
        starts = _starts(run.steps)
        if self.step in starts:
            self.curve.append(float(self.total) / (self.step - starts[starts.index(self.step) - 1]))
            self.total.zero_()

    def _is_lost(self, raised: RuntimeError, loss: Tensor) -> bool:
        """Whether an error of a step says that the training is lost, and not the device, a library or a compiler."""
        if isinstance(raised, torch.linalg.LinAlgError) or "not finite" in str(raised):
            return True
        gradients = [param.grad for param in self.task.model.parameters() if param.grad is not None]
        return not all(bool(torch.isfinite(one).all()) for one in (loss, *gradients))

    def save(self, path: Path) -> None:
        """Write all that the rest of the run depends on; the file is whole or not there."""
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = {name: getattr(self, name) for name in _KEPT}
        kept |= {"key": self.run.key, "model": self.task.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        kept["random"] = torch.get_rng_state()
        if self.device.type == "cuda":
            kept["random there"] = torch.cuda.get_rng_state(self.device)
        new = path.with_suffix(f".{os.getpid()}")
        try:
            torch.save(kept, new)
            new.replace(path)
        finally:
            new.unlink(missing_ok=True)

    def load(self, path: Path) -> None:
        """Go on from what :meth:`save` wrote."""
        kept = torch.load(path, map_location="cpu", weights_only=True)
        self.task.model.load_state_dict(kept["model"])
        self.optimizer.load_state_dict(kept["optimizer"])
        for name in _KEPT:
            setattr(self, name, kept[name])
        self.total = self.total.to(self.device)
        self.task.begin_at(self.step)
        torch.set_rng_state(kept["random"])
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(kept["random there"], self.device)


_KEPT = ("step", "curve", "total", "seconds", "error", "switched_at")


def train(run: Run, place: Place = Place()) -> dict[str, Any] | None:  # noqa: B008 - it is frozen
    """Do a run, or go on with it.

    Args:
        run: It.
        place: Where, and until when.

    Returns:
        A row: the run, its figures at the end, the mean loss of each twentieth of its steps, seconds, bytes of the
        optimizer's states, and where it ran; of MKOR-H the step that dropped its factors, or None. A run whose loss
        stops being finite ends there, with ``diverged``. None: the run was put aside, and goes on when it is called
        again, on CPUs bit for bit; or another process is doing it. What was put aside is the caller's to delete, once
        he has the row in safety.

    Raises:
        RuntimeError: The device, a library or a compiler failed: that says nothing of the optimizer.
        OSError: The run cannot be put aside at the end; on its way that costs nothing but safety.
    """
    try:
        with _claimed(place.file(run)) as is_ours:
            return _trained(run, place) if is_ours else None
    finally:
        if place.device.type == "cuda":
            # What hooks and graphs hold in circles would stay beside the runs of this process that follow.
            gc.collect()
            torch.cuda.empty_cache()


def _still_at(path: Path, opened: int) -> bool:
    """Whether a path still leads to an open file; its owner may have removed it before it was locked anew."""
    try:
        return os.path.samestat(os.fstat(opened), path.stat())
    except FileNotFoundError:
        return False


@contextmanager
def _claimed(path: Path | None) -> Iterator[bool]:
    """Whether no other process is on a run that is put aside in a file; none can be until the end of the block."""
    if path is None:
        yield True
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".lock")
    while True:
        with beside.open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            if not _still_at(beside, lock.fileno()):
                continue
            try:
                yield True
            finally:
                beside.unlink(missing_ok=True)
            return


def _trained(run: Run, place: Place) -> dict[str, Any] | None:
    course, path = _Course(run, place.device), place.file(run)
    if not getattr(course.optimizer, "resumes", hasattr(course.optimizer, "state_dict")):
        path = None
    if path is not None and path.exists():
        try:
            course.load(path)
        except Exception:  # whatever a broken file holds: the run begins again, and gives the same figures
            course = _Course(run, place.device)
    began, saved = time.perf_counter() - course.seconds, time.monotonic()
    while not course.over:
        now = time.monotonic()
        if path is not None and (now > place.end or now - saved > place.every):
            course.seconds = time.perf_counter() - began
            try:
                course.save(path)
            except (OSError, RuntimeError):  # torch's writer raises the latter on a full disk
                if now > place.end:
                    raise
            if now > place.end:
                return None
            saved = time.monotonic()
        course.advance()
    return _row(course, time.perf_counter() - began)


def _row(course: _Course, seconds: float) -> dict[str, Any]:
    if course.device.type == "cuda":
        torch.cuda.synchronize(course.device)
    figures = course.task.figures()
    diverged = bool(course.error) or not all(map(math.isfinite, (*figures.values(), *course.curve)))
    return {
        "run": {name: getattr(course.run, name) for name in ("task", "optimizer", "options", "lr", "steps", "seed")},
        "diverged": diverged,
        **({"error": course.error} if course.error else {}),
        **({"switched_at": course.switched_at} if course.hybrid else {}),
        **({} if diverged else figures),
        "curve": [] if diverged else [float(f"{value:.5g}") for value in course.curve],
        "seconds": round(seconds, 2),
        "state_bytes": _state_bytes(course.optimizer),
        "parameters": sum(parameter.numel() for parameter in course.task.model.parameters()),
        **_where(course.device),
    }


def step_milliseconds(run: Run, device: torch.device, steps: int = 20) -> float:
    """Median time of a whole step, in milliseconds, of a process that has the device to itself.

    Args:
        run: Its task, optimizer and options count.
        device: Device.
        steps: Steps that are timed, after a quarter as many that are not.
    """
    course, times = _Course(run, device), []
    for _ in range(steps + steps // 4 + 1):
        began = time.perf_counter()
        course.advance()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(1e3 * (time.perf_counter() - began))
    return statistics.median(times[-steps:])


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


def _where(device: torch.device) -> dict[str, Any]:
    where = environment(device)
    names = ("device", "device_type", "threads", "torch", "python", "date")
    return {name: where[name] for name in names} | {"rankwise": __version__}
