"""Time of the optimizer step alone, side by side in one process."""

from __future__ import annotations

import json
import platform
import statistics
import time
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from benchmarks.contenders import BASELINE, NARROW, OURS, Contender, official, others, selected
from benchmarks.models import fill_gradients, layer_set

__all__ = ["environment", "measure", "merged", "race", "timed"]

_ADAMW_BYTES = 28.0
_WARMUP = 2


def environment(device: torch.device) -> dict[str, Any]:
    """What the figures depend on: device, threads, versions, date; ``triton`` is None where it is not installed."""
    cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if cuda else _processor(),
        "device_type": device.type,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]}, {len(names)} cores" if names else platform.processor()


class _Runner:
    """One contender with a model of its own."""

    def __init__(self, contender: Contender, model: str, device: torch.device) -> None:
        self.contender = contender
        self.model = layer_set(model, device)
        fill_gradients(self.model, 0)
        self.optimizer = contender.build(self.model)
        self.seconds: list[float] = []
        self.host_seconds: list[float] = []
        self.peak = 0

    def step(self, seed: int, recorded: bool) -> None:
        self.model.zero_grad(set_to_none=True)
        fill_gradients(self.model, seed)
        device = next(self.model.parameters()).device
        elapsed, host, peak = timed(self.optimizer, device)
        if recorded:
            self.seconds.append(elapsed)
            self.host_seconds.append(host)
            self.peak = max(self.peak, peak)

    @property
    def state_bytes(self) -> int:
        """Element states and, of ours, matrix states."""
        total = sum(_nbytes(state) for state in self.optimizer.state.values())
        matrix_states = getattr(self.optimizer, "matrix_states", None)
        return total + (0 if matrix_states is None else matrix_states.nbytes)


def _nbytes(value: Any) -> int:
    if hasattr(value, "__tensor_flatten__"):
        # What a tensor consists of that is codes and scales.
        return sum(_nbytes(getattr(value, name)) for name in value.__tensor_flatten__()[0])
    if isinstance(value, torch.Tensor):
        return value.nbytes
    if isinstance(value, dict):
        return sum(_nbytes(part) for part in value.values())
    return 0


def timed(optimizer: torch.optim.Optimizer, device: torch.device) -> tuple[float, float, int]:
    """Time one step.

    Args:
        optimizer: Its gradients are there.
        device: Where they are.

    Returns:
        Seconds until the step is done, seconds until the host is free again, and, of a CUDA device, the bytes it
        allocated at the peak beyond what was there before.
    """
    if device.type != "cuda":
        start = time.perf_counter()
        optimizer.step()
        elapsed = time.perf_counter() - start
        return elapsed, elapsed, 0
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start = time.perf_counter()
    begin.record()
    optimizer.step()
    end.record()
    host = time.perf_counter() - start
    torch.cuda.synchronize(device)
    return begin.elapsed_time(end) / 1e3, host, torch.cuda.max_memory_allocated(device) - before


def race(contenders: Sequence[Contender], model: str, device: torch.device, steps: int) -> list[dict[str, Any]]:
    """Step contenders in turns, so that whatever else the machine does falls on all of them.

    Args:
        contenders: The first is what the others are compared with.
        model: Name of a parameter set.
        device: Where to run.
        steps: Timed steps of each.

    Returns:
        A row for each: median seconds, the range, host seconds, bytes of states and of the step's peak, parameters.
    """
    runners = [_Runner(contender, model, device) for contender in contenders]
    for index in range(_WARMUP + steps):
        for runner in runners:
            runner.step(index + 1, index >= _WARMUP)
    return [_row(runner, runners[0]) for runner in runners]


def _row(runner: _Runner, reference: _Runner) -> dict[str, Any]:
    parameters = sum(parameter.numel() for parameter in runner.model.parameters())
    # Pairs of neighbouring steps: a slow spell of the machine hits both.
    ratios = [own / other for own, other in zip(runner.seconds, reference.seconds, strict=True)]
    floor = runner.contender.bytes_per_parameter
    ratio = statistics.median(ratios)
    return {
        "name": runner.contender.name,
        "seconds": statistics.median(runner.seconds),
        "range": [min(runner.seconds), max(runner.seconds)],
        "mean": statistics.fmean(runner.seconds),
        "host_seconds": statistics.median(runner.host_seconds),
        "ratio": ratio,
        "floor_ratio": None if floor is None else floor / _ADAMW_BYTES,
        "of_floor": None if floor is None else ratio * _ADAMW_BYTES / floor,
        "state_bytes": runner.state_bytes,
        "peak_bytes": runner.peak,
        "parameters": parameters,
    }


def merged(output: Path, row: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of a JSON file and a new one, in the place of that of the same name, model, device and ranks."""
    rows = json.loads(output.read_text()) if output.exists() else []
    key = ("name", "model", "device", "ranks")
    return [old for old in rows if any(old.get(part) != row.get(part) for part in key)] + [row]


def measure(
    model: str,
    device: torch.device,
    steps: int,
    names: Sequence[str] = (),
    rivals: Path | None = None,
    beside: Sequence[Contender] = (),
) -> Iterator[dict[str, Any]]:
    """Race every type of ours against fused AdamW, and against its published implementation where there is one.

    Args:
        model: Name of a parameter set.
        device: Where to run.
        steps: Timed steps of each contender.
        names: Which types; empty for all.
        rivals: Folder with the published implementations.
        beside: Further ones that step in turns with each type.

    Yields:
        Rows of :func:`race`, ours with ``official_ratio`` where a rival ran: its mean time over ours; and with
        ``over``: its median time over that of each beside it.
    """
    for contender in selected(
        (*OURS, *others(device), *NARROW), names or [each.name for each in (*OURS, *others(device))]
    ):
        entrants = [BASELINE, contender, *beside]
        if rivals is not None and contender.rival is not None:
            entrants.append(official(contender.rival, rivals))
        baseline, own, *further = race(entrants, model, device, steps)
        published = further[len(beside) :]
        own["over"] = {row["name"]: own["seconds"] / row["seconds"] for row in further[: len(beside)]}
        own |= {f"adamw_{key}": baseline[key] for key in ("seconds", "host_seconds", "peak_bytes")}
        if published:
            own["official_seconds"] = published[0]["seconds"]
            own["official_of_adamw"] = published[0]["ratio"]
            own["official_ratio"] = published[0]["mean"] / own["mean"]
            own["official_state_bytes"] = published[0]["state_bytes"]
        yield own
