"""Counts the collectives that code under test starts, or all that reach PyTorch's process groups."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


@contextmanager
def recorded(*names: str, log: Callable[[str], None] | None = None) -> Iterator[dict[str, list[int]]]:
    """Record, for the named functions of ``torch.distributed``, the bytes each call sends to other ranks."""
    originals = {name: getattr(dist, name) for name in names}
    calls: dict[str, list[int]] = {name: [] for name in names}

    def wrap(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            message: Tensor = args[1] if name == "all_to_all_single" else args[0]
            calls[name].append(message.numel() * message.element_size())
            if log is not None:
                log(name)
            return originals[name](*args, **kwargs)

        return call

    for name in names:
        setattr(dist, name, wrap(name))
    try:
        yield calls
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


class Message(NamedTuple):
    """One collective: its operation, the payload this rank sends to others, and the ranks that take part."""

    operation: str
    bytes: int
    ranks: tuple[int, ...]


class Wire(TorchDispatchMode):
    """Records what is handed to process groups while it is entered, whoever calls under whatever name.

    The payload is that of `rankwise.comm.message_format.Traffic`: of an all-to-all what goes to others, else all.

    Attributes:
        messages: In order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[Message] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            handle = next(arg for arg in args if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg))
            ranks = dist.get_process_group_ranks(dist.ProcessGroup.unbox(handle))
            name = func.name().removeprefix("c10d::")
            self.messages.append(Message(name, _payload(name, args, ranks.index(dist.get_rank())), tuple(ranks)))
        return func(*args, **(kwargs or {}))


def _payload(name: str, args: Any, position: int) -> int:
    if name == "alltoall_base_":
        _, message, _, _, splits, *_ = args
        assert splits, "equal parts are not counted here"
        return int(message.element_size() * (sum(splits) - splits[position]))
    return _bytes(args[1] if "gather" in name or "scatter" in name else args[0])


def _bytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    return sum(map(_bytes, value))
