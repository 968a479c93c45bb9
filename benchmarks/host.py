"""What a step costs the host: of many small tensors beside torch's AdamW, and of many fragments of one flat tensor.

The step runs as on a CUDA device with Triton, but that its tensors are small ones on the CPU, so that hardly anything
is computed, and that kernels are left out in place of being launched: what Triton itself takes to launch, some dozens
of microseconds a kernel, is not part of it. AdamW's lists go through tensor by tensor there.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import rankwise
from benchmarks.launches import recorded_launches
from benchmarks.step import environment
from rankwise.kernels import triton
from rankwise.kernels.forms import using
from rankwise.sharding import MatrixExchange
from rankwise.sharding.sources import LayoutSource, Slice, TensorContents

__all__ = ["CONTENDERS", "calls_of", "host_times"]

SIDE = 16
_BASE = "AdamW, foreach"
CONTENDERS: dict[str, Callable[[Any], Any]] = {
    _BASE: lambda parameters: torch.optim.AdamW(parameters, foreach=True),
    "MARS-AdamW": rankwise.MARS,
    "MARS-Lion": lambda parameters: rankwise.MARS(parameters, variant="lion"),
    "MARS-M": lambda parameters: rankwise.MARS(parameters, variant="muon"),
    "SONew, tridiagonal": rankwise.SONew,
    "LDAdam, rank 4": lambda parameters: rankwise.LDAdam(parameters, rank=4),
}


@contextmanager
def _as_on_a_device() -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(recorded_launches())
        stack.enter_context(using(triton))
        stack.enter_context(mock.patch.object(MatrixExchange, "one_by_one_on", ()))
        yield


def calls_of(name: str, count: int, fragments: bool) -> int:
    """Calls of functions, Python's and others, in a steady step: the same on every machine.

    Args:
        name: Key of :data:`CONTENDERS`.
        count: Of the tensors.
        fragments: Whether they are fragments of one instead.
    """
    found = 0

    def seen(frame: Any, event: str, argument: Any) -> None:
        nonlocal found
        found += event in ("call", "c_call")

    with _as_on_a_device():
        step = (_of_fragments if fragments else _of_tensors)(CONTENDERS[name], count)
        for _ in range(3):
            step()
        sys.setprofile(seen)
        try:
            step()
        finally:
            sys.setprofile(None)
    return found


def host_times(tensors: int = 300, rounds: int = 40, only: set[str] | None = None) -> list[dict[str, Any]]:
    """Processor time of steady steps, all in turns in one process, one thread.

    Args:
        tensors: Matrices, or fragments of the flat tensor.
        rounds: Steps of each that are timed.
        only: Names of :data:`CONTENDERS` beside AdamW.

    Returns:
        A row for each of ours: medians in seconds of a step of as many tensors, of as many fragments, and of a tenth of
        these; and the median ratio of the first to AdamW's step of the same round.
    """
    torch.set_num_threads(1)
    with _as_on_a_device():
        names = [name for name in CONTENDERS if only is None or name in only or name == _BASE]
        steps: dict[tuple[str, str], Callable[[], Any]] = {}
        for name in names:
            steps[name, "tensors"] = _of_tensors(CONTENDERS[name], tensors)
            if name == _BASE:
                continue
            for form, count in (("fragments", tensors), ("few", tensors // 10)):
                steps[name, form] = _of_fragments(CONTENDERS[name], count)
        times = _timed(steps, rounds)
    about = {"model": f"{tensors} matrices of {SIDE} x {SIDE}", **environment(torch.device("cpu"))}
    return [{**_row(name, times), **about} for name in names if name != _BASE]


def _row(name: str, times: dict[tuple[str, str], list[float]]) -> dict[str, Any]:
    median = statistics.median
    found = {f"{form}_seconds": median(values) for (of, form), values in times.items() if of == name}
    own, base = times[name, "tensors"], times[_BASE, "tensors"]
    ratio = median(mine / theirs for mine, theirs in zip(own, base, strict=True))
    return {"name": name, **found, "ratio": ratio, "adamw_seconds": median(base)}


def _timed(steps: dict[tuple[str, str], Callable[[], Any]], rounds: int) -> dict[tuple[str, str], list[float]]:
    found: dict[tuple[str, str], list[float]] = {key: [] for key in steps}
    for _ in range(3):
        for step in steps.values():
            step()
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            for key, step in steps.items():
                begin = time.process_time()
                step()
                found[key].append(time.process_time() - begin)
    finally:
        gc.enable()
    return found


def _filled(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def _of_tensors(build: Callable[[Any], Any], count: int) -> Callable[[], Any]:
    parameters = [(f"layers.{index}.weight", nn.Parameter(_filled(SIDE, SIDE))) for index in range(count)]
    for _, parameter in parameters:
        parameter.grad = _filled(SIDE, SIDE)
    optimizer = build(parameters)
    return lambda: optimizer.step()


def _of_fragments(build: Callable[[Any], Any], count: int) -> Callable[[], Any]:
    """The parameters lie in one flat tensor, as a framework's partition has them."""
    names = [f"layers.{index}.weight" for index in range(count)]
    optimizer = build([(name, nn.Parameter(_filled(SIDE, SIDE))) for name in names])
    flat = nn.Parameter(_filled(count * SIDE * SIDE))
    flat.grad = _filled(count * SIDE * SIDE)
    optimizer.param_groups[0]["params"] = [flat]
    optimizer.attach(_Flat(names))
    return lambda: optimizer.step()


class _Flat(LayoutSource):
    """One tensor with all parameters, one after the other."""

    group = None

    def __init__(self, names: list[str]) -> None:
        size = SIDE * SIDE
        self._slices = tuple(Slice(name, 0, size, index * size) for index, name in enumerate(names))

    def contents(self, tensor: Tensor) -> TensorContents:
        return TensorContents(0, self._slices)
