"""Sections "step", "memory" and "multi": whole optimizers on the layers of Llama 1B and 7B."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import torch

from benchmarks.communication import measure_communication
from benchmarks.contenders import BASELINE, NARROW, OURS, Contender, others
from benchmarks.gpu.items import Figure, Found, Item, Place, Skipped
from benchmarks.gpu.peaks import PEAKS
from benchmarks.gpu.predictions import GOALS, counted_step, seconds_of_step
from benchmarks.models import fill_gradients, layer_set
from benchmarks.step import measure, timed

__all__ = ["memory_items", "multi_items", "ours", "step_items", "stepped"]

_TOO_WIDE = "LDAdam, rank 256"  # For a toy.
_LAYERS = "llama-7b-layers"
_PEAK = 0.66  # Bytes a parameter beyond states: half a GiB for an eighth of 7 B.


def ours(place: Place) -> list[Contender]:
    """The types of this project that the models of a place have matrices for."""
    return [contender for contender in OURS if not (place.tiny and contender.name == _TOO_WIDE)]


def narrow(place: Place) -> list[Contender]:
    """Contenders with states of a byte an element."""
    return [contender for contender in NARROW if not (place.tiny and contender.name.startswith(_TOO_WIDE))]


def step_items(place: Place) -> list[Item]:
    """Each type beside fused AdamW and torch's Muon, in turns; and what makes the host wait."""
    items = []
    for model in place.models(_LAYERS, "llama-1b"):
        rest = narrow(place) if model != "llama-1b" else []
        for contender in (*ours(place), *others(place.device), *rest):
            predict = partial(_prediction, contender.name, model)
            items.append(
                Item(f"{contender.name}, {model}", 15.0, partial(_step, place, contender, model), None, predict)
            )
        for contender in ours(place):
            items.append(Item(f"waits of {contender.name}, {model}", 8.0, partial(_waits, place, contender, model)))
            items.append(Item(f"profile of {contender.name}, {model}", 8.0, partial(_profile, place, contender, model)))
    return items


def _prediction(name: str, model: str) -> str:
    ends = seconds_of_step(counted_step(name, model), PEAKS["H200"])
    return "" if ends[0] is None or ends[1] is None else f"{ends[0] * 1e3:.1f} to {ends[1] * 1e3:.1f} ms"


def _step(place: Place, contender: Contender, model: str) -> Found:
    muon = [] if contender in others(place.device) else list(others(place.device)[:1])
    steps = 3 if place.tiny else 10
    (row,) = measure(model, place.device, steps, [contender.name], beside=muon)
    row |= {"model": model, **place.about}
    ends = seconds_of_step(counted_step(contender.name, model), place.peaks)
    low, high = (None if end is None else end * 1e3 for end in ends)
    parameters = row["parameters"]
    figures = [
        Figure("step", row["seconds"] * 1e3, "ms", low, high),
        Figure("host", row["host_seconds"] * 1e3, "ms", None, row["seconds"] * 1e3 if place.on_cuda else None),
        Figure("over fused AdamW", row["ratio"], "x", goal=GOALS.get(contender.name)),
        Figure("state", row["state_bytes"] / parameters, "bytes a parameter"),
    ]
    figures += [Figure(f"over {name}", ratio, "x") for name, ratio in row["over"].items()]
    return Found(figures, [row])


def stepped(place: Place, contender: Contender, model: str, steps: int) -> tuple[Any, Any]:
    """A model and its optimizer after some steps, with gradients for the next one."""
    network = layer_set(model, place.device)
    optimizer = contender.build(network)
    for index in range(steps):
        fill_gradients(network, index)
        optimizer.step()
        network.zero_grad(set_to_none=True)
    fill_gradients(network, steps)
    return network, optimizer


def _waits(place: Place, contender: Contender, model: str) -> Found:
    """Waits of the host in a steady step, as torch sees them."""
    _, optimizer = stepped(place, contender, model, 2)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        if place.on_cuda:
            torch.cuda.set_sync_debug_mode("warn")
        try:
            optimizer.step()
        finally:
            if place.on_cuda:
                torch.cuda.set_sync_debug_mode("default")
    # Of the debug mode itself torch warns, too.
    waits = [warning for warning in found if "called a synchron" in str(warning.message)]
    for where in sorted({f"{warning.filename}:{warning.lineno}" for warning in waits}):
        print(f"    the host waits at {where}")
    counts = counted_step(contender.name, model)
    most = counts.waits.total() if counts is not None else 0
    return Found([Figure("waits of the host", float(len(waits)), "a step", 0, most)])


def _profile(place: Place, contender: Contender, model: str) -> Found:
    """Kernels of a steady step, and how long the device has something to do."""
    from torch.profiler import ProfilerActivity, profile

    _, optimizer = stepped(place, contender, model, 2)
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if place.on_cuda else [])]) as found:
        optimizer.step()
        if place.on_cuda:
            torch.cuda.synchronize(place.device)
    on_device = [event for event in found.events() or [] if event.device_type == torch.autograd.DeviceType.CUDA]
    # Spans that the host names appear there, too.
    kernels = [event for event in on_device if not event.is_user_annotation]
    busy: dict[str, float] = {}
    for event in kernels:
        busy[event.name[:70]] = busy.get(event.name[:70], 0.0) + event.device_time / 1e3
    for name, milliseconds in sorted(busy.items(), key=lambda pair: -pair[1])[:8]:
        print(f"    {milliseconds:9.3f} ms {name}")
    counts = counted_step(contender.name, model)
    # One operation of torch may be several kernels, and some are copies.
    most = 2.0 * counts.launches if counts is not None and place.on_cuda else None
    return Found(
        [
            Figure("kernels", float(len(kernels)), "a step", None, most),
            Figure("device busy", sum(busy.values()), "ms"),
        ]
    )


def memory_items(place: Place) -> list[Item]:
    """The most that a step takes beyond weights, gradients and states."""
    return [
        Item(f"{contender.name}, {model}", 5.0, partial(_memory, place, contender, model))
        for model in place.models(_LAYERS)
        for contender in (BASELINE, *ours(place), *narrow(place), *others(place.device))
    ]


def _memory(place: Place, contender: Contender, model: str) -> Found:
    network, optimizer = stepped(place, contender, model, 2)
    parameters = sum(parameter.numel() for parameter in network.parameters())
    _, _, peak = timed(optimizer, place.device)
    most = _PEAK if place.on_cuda and contender in (*OURS, *NARROW) else None
    return Found([Figure("peak beyond state", peak / parameters, "bytes a parameter", None, most)])


def multi_items(place: Place) -> list[Item]:
    """Messages of a sharded step over NCCL, and how much of them the step waits for."""
    model = place.models(_LAYERS)[0]
    return [
        Item(f"{contender.name}, {model}", 40.0, partial(_multi, place, contender, model)) for contender in ours(place)
    ]


def _multi(place: Place, contender: Contender, model: str) -> Found:
    ranks = torch.cuda.device_count() if place.on_cuda else 0
    if ranks < 2:
        raise Skipped(f"messages between devices need two, here are {ranks}")
    (row,) = measure_communication(model, place.device, ranks, 10, [contender.name])
    share = row["waited_seconds"] / row["seconds"]
    # More than that exposed is no overlap.
    return Found([Figure("exposed communication", 100 * share, "% of the step", 0, 50)], [row])
