"""Section "steady": a steady step leaves no memory behind, asks the driver for none, and runs on a user's stream."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.contenders import Contender
from benchmarks.gpu.items import Figure, Found, Item, Place
from benchmarks.gpu.step_items import narrow, ours, stepped

__all__ = ["Living", "steady_items"]

_WARMUP = 3
_STEPS = 3


class Living(TorchDispatchMode):
    """Counts the bytes of tensors that were made while it was entered and are still there."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                self._made.setdefault(StorageWeakRef(storage), storage.nbytes())
        return result

    @property
    def bytes(self) -> int:
        """Of those that are there."""
        self._made = {reference: size for reference, size in self._made.items() if not reference.expired()}
        return sum(self._made.values())


def steady_items(place: Place) -> list[Item]:
    """Each type: what steps after the first ones keep."""
    model = place.models("gpt2-small")[0]
    return [
        Item(f"{contender.name}, {model}", 6.0, partial(_steady, place, contender, model))
        for contender in (*ours(place), *narrow(place))
    ]


def _steady(place: Place, contender: Contender, model: str) -> Found:
    network, optimizer = stepped(place, contender, model, _WARMUP)
    figures = []
    if place.on_cuda:
        counts = []
        for _ in range(_STEPS):
            torch.cuda.synchronize(place.device)
            counts.append((torch.cuda.memory_allocated(place.device), _driver_calls(place.device)))
            optimizer.step()
        torch.cuda.synchronize(place.device)
        counts.append((torch.cuda.memory_allocated(place.device), _driver_calls(place.device)))
        # The allocator's cache may grow in the step that first needs a size; not in later ones.
        figures.append(Figure("allocations by the driver", float(counts[-1][1] - counts[1][1]), "in two steps", 0, 0))
        figures.append(Figure("bytes that stay", float(counts[-1][0] - counts[1][0]), "in two steps", 0, 0))
        figures.append(_on_a_stream(place, optimizer, network))
    else:
        figures.append(Figure("bytes that stay", float(kept_bytes(optimizer)), "in two steps", 0, 0))
    return Found(figures)


def kept_bytes(optimizer: Any) -> int:
    """By how much the bytes of living tensors grow in two steady steps.

    Args:
        optimizer: Its gradients are there, and some steps were taken.
    """
    with Living() as living:
        optimizer.step()  # May replace tensors from before, of which nothing is known.
        before = living.bytes
        for _ in range(_STEPS - 1):
            optimizer.step()
        return living.bytes - before


def _driver_calls(device: torch.device) -> int:
    found = torch.cuda.memory_stats(device)
    return int(found.get("num_device_alloc", 0)) + int(found.get("num_alloc_retries", 0))


def _on_a_stream(place: Place, optimizer: Any, network: Any) -> Figure:
    """Two steps on another stream than the current one, which waits for it, as a user's own overlap does."""
    side = torch.cuda.Stream(place.device)
    side.wait_stream(torch.cuda.current_stream(place.device))
    with torch.cuda.stream(side):
        for _ in range(2):
            optimizer.step()
    torch.cuda.current_stream(place.device).wait_stream(side)
    finite = all(bool(parameter.isfinite().all()) for parameter in network.parameters())
    return Figure("finite after steps on another stream", float(finite), "", 1, 1)
