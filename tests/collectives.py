"""Counts the collectives that code under test starts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor


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
