"""Exposed communication: how long a step of a sharded optimizer waits for messages."""

from __future__ import annotations

import functools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

from benchmarks.contenders import OURS, Contender, selected
from benchmarks.models import fill_gradients, layer_set
from benchmarks.step import environment, timed
from rankwise.layout.layout_source import LayoutSource, Slice, TensorContents

__all__ = ["FlatPiece", "Waits", "measure_communication"]

_WARMUP = 2
# With ``async_op`` they only start a message; otherwise they end when it is there.
_COLLECTIVES = ("all_gather", "all_gather_object", "all_reduce", "all_to_all_single", "reduce_scatter")


class Waits:
    """Sums up how long the code in its ``with`` blocks waits for messages.

    On CPUs that is time the process spends in calls that end when a message is there. On CUDA devices such calls return
    at once: there it is time in which the current stream stands still, between events before and after the call. Where
    the host is behind the device, its time for the call is part of that.

    Args:
        device: Where the messages are.

    Attributes:
        count: Count of the calls.
    """

    def __init__(self, device: torch.device) -> None:
        self.count = 0
        self._on_cuda = device.type == "cuda"
        self._seconds = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._inside = False
        self._replaced: list[tuple[Any, str, Callable[..., Any]]] = []

    @property
    def seconds(self) -> float:
        """The sum; of a CUDA device, once it is done."""
        return self._seconds + sum(begin.elapsed_time(end) for begin, end in self._events) / 1e3

    def __enter__(self) -> Waits:
        for owner, names in ((dist, _COLLECTIVES), (dist.Work, ("wait",))):
            for name in names:
                original = getattr(owner, name)
                self._replaced.append((owner, name, original))
                setattr(owner, name, self._timing(original))
        return self

    def __exit__(self, *_: object) -> None:
        while self._replaced:
            setattr(*self._replaced.pop())

    def _timing(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            # A collective that blocks waits for its work inside.
            if self._inside or kwargs.get("async_op"):
                return call(*args, **kwargs)
            self._inside = True
            try:
                return self._measured(call, args, kwargs)
            finally:
                self._inside = False

        return wrapper

    def _measured(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self.count += 1
        if self._on_cuda:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            result = call(*args, **kwargs)
            end.record()
            self._events.append((begin, end))
            return result
        start = time.perf_counter()
        result = call(*args, **kwargs)
        self._seconds += time.perf_counter() - start
        return result


class FlatPiece(LayoutSource):
    """A rank's share of all parameters laid end to end, as ZeRO cuts them: the optimizer's ``LayoutSource``.

    Args:
        model: Its parameters are cut into equal runs of elements, wherever a parameter ends.
        rank: Rank of this process.
        world: How many there are.

    Attributes:
        tensor: The share, padded with zeros.
    """

    replicated = False
    tensor_parallel = None

    def __init__(self, model: nn.Module, rank: int, world: int) -> None:
        self.group = dist.group.WORLD
        parameters = dict(model.named_parameters())
        size = -(-sum(parameter.numel() for parameter in parameters.values()) // world)
        begin, position, slices = rank * size, 0, []
        self.tensor = torch.zeros(size, device=next(iter(parameters.values())).device)
        for name, parameter in parameters.items():
            start, end = (min(max(edge - position, 0), parameter.numel()) for edge in (begin, begin + size))
            if start < end:
                slices.append(Slice(name, start, end, position + start - begin))
                self.tensor[slices[-1].offset :][: end - start] = parameter.detach().view(-1)[start:end]
            position += parameter.numel()
        self._contents = TensorContents(0, tuple(slices))

    def contents(self, tensor: Tensor) -> TensorContents:
        """See :class:`rankwise.layout.layout_source.LayoutSource`."""
        return self._contents


def measure_communication(
    model: str, device: torch.device, ranks: int, steps: int, names: Sequence[str] = (), threads: int = 1
) -> list[dict[str, Any]]:
    """Step every type with the parameters cut over several ranks.

    Args:
        model: Name of a parameter set.
        device: "cpu", with gloo processes, or "cuda", with NCCL and a device for each.
        ranks: How many.
        steps: Timed steps of each type; means are taken, so that MKOR's factor steps, one of ten, count.
        names: Which types; empty for all.
        threads: Threads of a process.

    Returns:
        A row per type. ``seconds`` until the step is done, of the slowest rank. ``waited_seconds``, of the rank that
        waits least, is what messages cost; ``most_waited_seconds``, of the one that waits most, has in it what that
        rank is ahead of the others. ``host_seconds``: until the host is free again; on CPUs without the waits.

    Raises:
        ValueError: There is no type of a name, or there are fewer devices than ranks.
    """
    chosen = selected(OURS, names)
    if device.type == "cuda" and torch.cuda.device_count() < ranks:
        raise ValueError(f"{ranks} ranks need as many CUDA devices; there are {torch.cuda.device_count()}")
    with tempfile.TemporaryDirectory() as folder:
        queue = mp.get_context("spawn").SimpleQueue()
        args = (ranks, model, device.type, steps, [c.name for c in chosen], threads, f"{folder}/store", queue)
        mp.spawn(_run, args=args, nprocs=ranks)
        return [queue.get() for _ in chosen]


def _run(
    rank: int, world: int, model: str, kind: str, steps: int, names: Sequence[str], threads: int, store: str, queue: Any
) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    torch.set_num_threads(threads)
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if kind == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=world)
    for contender in selected(OURS, names):
        mine = _measure(contender, model, device, rank, world, steps)
        everyone: list[Any] = [None] * world
        dist.all_gather_object(everyone, mine)
        if rank == 0:
            queue.put({"name": contender.name, "model": model, "ranks": world, **_row(everyone), **environment(device)})
    dist.barrier()
    dist.destroy_process_group()
    # Threads that gloo leaves behind can abort a process that ends in the usual way, when the rows are there already.
    os._exit(0)


def _row(everyone: Sequence[dict[str, float]]) -> dict[str, Any]:
    return {
        "seconds": max(mine["seconds"] for mine in everyone),
        "host_seconds": max(mine["host_seconds"] for mine in everyone),
        "waited_seconds": min(mine["waited_seconds"] for mine in everyone),
        "most_waited_seconds": max(mine["waited_seconds"] for mine in everyone),
        "waits": max(mine["waits"] for mine in everyone),
        "peak_bytes": max(mine["peak_bytes"] for mine in everyone),
        "parameters": everyone[0]["parameters"],
    }


def _measure(
    contender: Contender, name: str, device: torch.device, rank: int, world: int, steps: int
) -> dict[str, float]:
    """Means over the steps, of this rank."""
    model = layer_set(name, device)
    optimizer = contender.build(model)
    piece = FlatPiece(model, rank, world)
    optimizer.param_groups[0]["params"] = [piece.tensor]
    optimizer.attach(piece)
    generator = torch.Generator(device).manual_seed(rank)
    found: dict[str, list[float]] = {"seconds": [], "host_seconds": [], "waited_seconds": [], "waits": []}
    peak = 0
    for step in range(_WARMUP + steps):
        if optimizer.needs_capture:
            # For its statistics; the piece has gradients of its own.
            fill_gradients(model, step * world + rank)
            model.zero_grad(set_to_none=True)
        piece.tensor.grad = torch.randn(piece.tensor.shape, generator=generator, device=device).mul_(1e-3)
        dist.barrier()
        with Waits(device) as waits:
            seconds, host, allocated = timed(optimizer, device)
        if step >= _WARMUP:
            peak = max(peak, allocated)
            host = host if device.type == "cuda" else seconds - waits.seconds
            for key, value in zip(found, (seconds, host, waits.seconds, waits.count), strict=True):
                found[key].append(value)
    means = {key: statistics.fmean(values) for key, values in found.items()}
    return {**means, "peak_bytes": peak, "parameters": sum(parameter.numel() for parameter in model.parameters())}
