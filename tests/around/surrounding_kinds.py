"""What may surround a call of an optimizer, by name, and what a run of it leaves, to the bit."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

__all__ = [
    "FORBIDDEN",
    "SURROUNDINGS",
    "Around",
    "default_device",
    "default_dtype",
    "deterministic",
    "in_another_thread",
]

Around = Callable[[], AbstractContextManager[Any]]


class Rounds(TorchFunctionMode):
    """A mode of a user's that rounds what torch's functions return."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor) and found.dtype == torch.float32:
            return found.to(torch.bfloat16).float()
        return found


class Watches(TorchDispatchMode):
    """A mode of a user's that sees every operation."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@contextmanager
def default_device(name: str) -> Iterator[None]:
    """For the whole process, as scripts set it."""
    before = torch.get_default_device()
    torch.set_default_device(name)
    try:
        yield
    finally:
        torch.set_default_device(None if before.type == "cpu" else before)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def deterministic() -> Iterator[None]:
    """With memory that nobody has written to full of NaN."""
    before = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = before


@contextmanager
def rounded_products() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def autocast_elsewhere() -> Iterator[None]:
    """Of a device that this machine need not have."""
    torch.set_autocast_enabled("cuda", True)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", False)


@contextmanager
def warnings_as_errors() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@contextmanager
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2 if before == 1 else 1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def other_seed() -> Iterator[None]:
    """Random numbers from elsewhere, none of which is drawn."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(123_456)
        before = torch.get_rng_state()
        yield
        assert torch.equal(torch.get_rng_state(), before)


@contextmanager
def all_at_once() -> Iterator[None]:
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        default_device("meta"),
        Rounds(),
        default_dtype(torch.bfloat16),
        torch.inference_mode(),
    ):
        yield


def _hooked() -> AbstractContextManager[Any]:
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.bfloat16(), lambda tensor: tensor.float())


SURROUNDINGS: dict[str, Around] = {
    "autocast to bfloat16": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "autocast to float16": lambda: torch.autocast("cpu", dtype=torch.float16),
    "autocast elsewhere": autocast_elsewhere,
    "default device": lambda: default_device("meta"),
    "device as a context": lambda: torch.device("meta"),
    "default type float64": lambda: default_dtype(torch.float64),
    "default type bfloat16": lambda: default_dtype(torch.bfloat16),
    "default type float16": lambda: default_dtype(torch.float16),
    "inference mode": torch.inference_mode,
    "gradients recorded": torch.enable_grad,
    "gradients not recorded": torch.no_grad,
    "deterministic algorithms": deterministic,
    "rounded products": rounded_products,
    "a mode that rounds": Rounds,
    "a mode that watches": Watches,
    "a counter of operations": lambda: FlopCounterMode(display=False),
    "saved tensors hooked": _hooked,
    "anomalies sought": lambda: torch.autograd.set_detect_anomaly(True),
    "profiled": lambda: torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]),
    "warnings as errors": warnings_as_errors,
    "another seed": other_seed,
    "another number of threads": two_threads,
    "denormals flushed": lambda: flushed_denormals(),
    "all at once": all_at_once,
}
"""By name; each is entered anew for every call."""


@contextmanager
def flushed_denormals() -> Iterator[None]:
    """Of this thread; no number of the runs is one."""
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


def _among_fake_tensors(call: Callable[[], Any]) -> None:
    with FakeTensorMode():
        call()


def _while_traced(call: Callable[[], Any]) -> None:
    def traced(values: torch.Tensor) -> torch.Tensor:
        call()
        return values + 1

    make_fx(traced)(torch.ones(3, device="cpu"))


def _while_scripted(call: Callable[[], Any]) -> None:
    def traced(values: torch.Tensor) -> torch.Tensor:
        call()
        return values + 1

    torch.jit.trace(traced, torch.ones(3, device="cpu"), check_trace=False)


def _while_differentiated(call: Callable[[], Any]) -> None:
    def differentiated(values: torch.Tensor) -> torch.Tensor:
        call()
        return values.sum()

    torch.func.grad(differentiated)(torch.ones(3, device="cpu"))


FORBIDDEN: dict[str, Callable[[Callable[[], Any]], None]] = {
    "FakeTensorMode": _among_fake_tensors,
    "ProxyTorchDispatchMode": _while_traced,
    "transform of torch.func": _while_differentiated,
    "trace of torch.jit": _while_scripted,
}
"""Those in which a call must be refused before anything changes, by what the refusal names; they make the call."""


def in_another_thread(call: Callable[[], Any], around: Around = nullcontext) -> Any:
    """What a call returns, or raises, in a thread of its own."""
    found: list[Any] = []
    raised: list[BaseException] = []

    def work() -> None:
        try:
            with around():
                found.append(call())
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]
    return found[0]
