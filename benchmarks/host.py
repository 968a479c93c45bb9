"""What a step costs the host: of many small tensors beside torch's AdamW, and of many shards of one flat tensor.

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
from benchmarks.launches import Records, recorded_launches
from benchmarks.step import environment
from rankwise.comm.exchange import MatrixExchange
from rankwise.kernels import triton
from rankwise.kernels.dispatch import using
from rankwise.layout.layout_source import LayoutSource, Slice, TensorContents
from rankwise.mkor import factor_steps, vector_windows

__all__ = ["CONTENDERS", "as_on_a_device", "calls_of", "host_times"]

SIDE = 16
_BASE = "AdamW, foreach"
_LONG = 1_000_000
CONTENDERS: dict[str, Callable[[Any], Any]] = {
    _BASE: lambda parameters: torch.optim.AdamW(parameters, foreach=True),
    "MARS-AdamW": rankwise.MARS,
    "MARS-Lion": lambda parameters: rankwise.MARS(parameters, variant="lion"),
    "MARS-M": lambda parameters: rankwise.MARS(parameters, variant="muon"),
    "SONew, tridiagonal": rankwise.SONew,
    "LDAdam, rank 4": lambda parameters: rankwise.LDAdam(parameters, rank=4),
    "MKOR": lambda parameters: rankwise.MKOR(parameters, update_interval=_LONG),
    "MKOR, factor step": lambda parameters: rankwise.MKOR(parameters, update_interval=1),
}


class _Steps:
    """A model of layers without a bias, and the steps of its optimizer.

    Args:
        build: Makes the optimizer.
        count: Count of the layers.
        shards: Whether the weights lie in one flat tensor, as a framework's partition has them.
    """

    def __init__(self, build: Callable[[Any], Any], count: int, shards: bool) -> None:
        self._layers = nn.ModuleList(nn.Linear(SIDE, SIDE, bias=False) for _ in range(count))
        named = list(self._layers.named_parameters())
        for _, parameter in named:
            parameter.data = _filled(SIDE, SIDE)
            parameter.grad = _filled(SIDE, SIDE)
        self._optimizer = build(named)
        self._captures = isinstance(self._optimizer, rankwise.MKOR)
        if self._captures:
            self._optimizer.capture(self._layers)
        if shards:
            flat = nn.Parameter(_filled(count * SIDE * SIDE))
            flat.grad = _filled(count * SIDE * SIDE)
            self._optimizer.param_groups[0]["params"] = [flat]
            self._optimizer.attach(_Flat([name for name, _ in named]))

    def prepare(self) -> None:
        """What a training loop does before the step, as far as the step depends on it."""
        if self._captures:
            inputs = _filled(SIDE, SIDE)
            sum(layer(inputs).square().mean() for layer in self._layers).backward()

    def step(self) -> None:
        """One step."""
        self._optimizer.step()


@contextmanager
def as_on_a_device() -> Iterator[Records]:
    """Steps take Triton's form, on tensors of the CPU, and leave its kernels out, which are recorded."""
    with ExitStack() as stack:
        records = stack.enter_context(recorded_launches())
        stack.enter_context(using(triton))
        stack.enter_context(mock.patch.object(MatrixExchange, "one_by_one_on", ()))
        stack.enter_context(mock.patch.dict(vector_windows._AT_ONCE, clear=True))
        # Of kernels that are left out nothing is to be expected.
        stack.enter_context(mock.patch.object(factor_steps, "refuse_broken_factors"))
        yield records


def calls_of(name: str, count: int, shards: bool) -> int:
    """Calls of functions, Python's and others, in a steady step: the same on every machine.

    Args:
        name: Key of :data:`CONTENDERS`.
        count: Count of the tensors.
        shards: Whether they are shards of one instead.
    """
    found = 0

    def seen(frame: Any, event: str, argument: Any) -> None:
        nonlocal found
        found += event in ("call", "c_call")

    with as_on_a_device():
        steps = _Steps(CONTENDERS[name], count, shards)
        for _ in range(3):
            steps.prepare()
            steps.step()
        steps.prepare()
        sys.setprofile(seen)
        try:
            steps.step()
        finally:
            sys.setprofile(None)
    return found


def host_times(tensors: int = 300, rounds: int = 40, only: set[str] | None = None) -> list[dict[str, Any]]:
    """Processor time of steady steps, all in turns in one process, one thread.

    Args:
        tensors: Matrices, or shards of the flat tensor.
        rounds: Steps of each that are timed.
        only: Names of :data:`CONTENDERS` beside AdamW.

    Returns:
        A row for each of ours: medians in seconds of a step of as many tensors, of as many shards, and of a tenth of
        these; and the median ratio of the first to AdamW's step of the same round.
    """
    torch.set_num_threads(1)
    with as_on_a_device():
        names = [name for name in CONTENDERS if only is None or name in only or name == _BASE]
        steps: dict[tuple[str, str], _Steps] = {}
        for name in names:
            steps[name, "tensors"] = _Steps(CONTENDERS[name], tensors, False)
            if name == _BASE:
                continue
            for form, count in (("shards", tensors), ("few", tensors // 10)):
                steps[name, form] = _Steps(CONTENDERS[name], count, True)
        times = _timed(steps, rounds)
    about = {"model": f"{tensors} matrices of {SIDE} x {SIDE}", **environment(torch.device("cpu"))}
    return [{**_row(name, times), **about} for name in names if name != _BASE]


def _row(name: str, times: dict[tuple[str, str], list[float]]) -> dict[str, Any]:
    median = statistics.median
    found = {f"{form}_seconds": median(values) for (of, form), values in times.items() if of == name}
    own, base = times[name, "tensors"], times[_BASE, "tensors"]
    ratio = median(mine / theirs for mine, theirs in zip(own, base, strict=True))
    return {"name": name, **found, "ratio": ratio, "adamw_seconds": median(base)}


def _timed(steps: dict[tuple[str, str], _Steps], rounds: int) -> dict[tuple[str, str], list[float]]:
    found: dict[tuple[str, str], list[float]] = {key: [] for key in steps}
    for _ in range(3):
        for each in steps.values():
            each.prepare()
            each.step()
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            for key, each in steps.items():
                each.prepare()
                begin = time.process_time()
                each.step()
                found[key].append(time.process_time() - begin)
    finally:
        gc.enable()
    return found


def _filled(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


class _Flat(LayoutSource):
    """One tensor with all parameters, one after the other."""

    group = None

    def __init__(self, names: list[str]) -> None:
        size = SIDE * SIDE
        self._slices = tuple(Slice(name, 0, size, index * size) for index, name in enumerate(names))

    def contents(self, tensor: Tensor) -> TensorContents:
        return TensorContents(0, self._slices)
