"""What a CUDA graph does with a step, on any device: operations recorded once, and repeated on their memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from rankwise.kernels import graphs

_READS = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default, torch.ops.aten.nonzero.default}


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


class Recorder(TorchDispatchMode):
    """Executes operations and records them.

    A replay repeats them with the numbers the host passed then and the values that lie in the tensors now. Results go
    where they went: views stay views, and what was new memory is written again.

    Args:
        on_host: Tensors that a graph does not know, because they live on the CPU by design; told by their memory.
        reads: Whether values may be read to the host, as they were then.
    """

    def __init__(self, on_host: Iterable[Tensor] = (), reads: bool = False) -> None:
        super().__init__()
        self._exempt = {tensor.data_ptr() for tensor in on_host}
        self._reads = reads
        self._work: list[Callable[[], None]] = []
        self._kept: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = _tensors((args, kwargs))
        result = func(*args, **kwargs)
        if inputs and all(tensor.data_ptr() in self._exempt for tensor in inputs):
            return result
        if func in _READS:
            assert self._reads, f"{func} cannot be captured"
            return result
        self._kept.append(result)  # its address may be in a table
        if "empty" not in func.__name__ and func.namespace != "profiler":
            self._work.append(partial(_again, func, args, kwargs, _made_by(inputs, result)))
        return result

    def __len__(self) -> int:
        return len(self._work)

    def add(self, work: Callable[[], None]) -> None:
        """Record work that is no operation of torch, and do it."""
        with _disable_current_modes():
            work()
        self._work.append(work)

    @torch.no_grad()
    def replay(self) -> None:
        """Repeat everything."""
        for work in self._work:
            work()


def _made_by(inputs: list[Tensor], result: Any) -> list[tuple[int, Tensor]]:
    """The outputs that are no views of inputs, with their places."""
    known = {tensor.untyped_storage().data_ptr() for tensor in inputs}
    found = enumerate(_tensors(result))
    return [(place, t) for place, t in found if t.numel() and t.untyped_storage().data_ptr() not in known]


def _again(func: Any, args: Any, kwargs: Any, made: list[tuple[int, Tensor]]) -> None:
    result = func(*args, **kwargs)
    for leaf in tree_leaves(result):
        if isinstance(leaf, torch.ScriptObject):
            leaf.wait()  # a collective
    new = _tensors(result)
    for place, tensor in made:
        tensor.copy_(new[place])


@contextmanager
def capturing() -> Iterator[None]:
    """As if the streams of all devices were captured."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graphs, "is_capturing", lambda device: True)
        yield


@contextmanager
def launches_recorded(recorder: Recorder, modules: Iterable[ModuleType]) -> Iterator[None]:
    """Record the launches of Triton kernels, too."""
    with pytest.MonkeyPatch.context() as patch:
        for module in modules:
            if hasattr(module, "launch"):
                patch.setattr(module, "launch", _recorded(recorder, module.launch))
        yield


def _recorded(recorder: Recorder, launch: Callable[..., None]) -> Callable[..., None]:
    return lambda *arguments, **constants: recorder.add(partial(launch, *arguments, **constants))
