"""What one rank's step needs beyond weights, gradients and states, counted on meta tensors: no device, no processes.

The step runs as on a CUDA device with Triton (:mod:`benchmarks.counts`), on the partition that ZeRO would give to the
rank; the other ranks are there by what they hold alone. Every storage counts from its making to its end.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from benchmarks.counts import META, TYPES, Values
from benchmarks.launches import recorded_launches
from benchmarks.models import layer_set
from rankwise.estimate import estimate, imagined_contents
from rankwise.kernels import triton
from rankwise.kernels.dispatch import using
from rankwise.layout.even_cuts import EvenCuts
from rankwise.layout.layout import Shard
from rankwise.layout.layout_source import LayoutSource, TensorContents
from rankwise.step.optimizer import ShardedOptimizer

__all__ = ["StepMemory", "counted_memory", "memory_page"]


@dataclass(frozen=True)
class StepMemory:
    """Memory of one rank in a step, in bytes.

    Attributes:
        state: The optimizer's states.
        beyond: The most there is beside weights, gradients and states at any time of a step, with what is kept from
            one step to the next.
        predicted: What :func:`rankwise.estimate.estimate` says of that.
        predicted_state: What it says of the states.
        parameters: Elements of the rank.
    """

    state: int
    beyond: int
    predicted: int
    predicted_state: int
    parameters: int


class _Storages(Values):
    """Adds up what is there, but for some weights.

    Args:
        weights: They stay.
    """

    def __init__(self, weights: Sequence[Tensor]) -> None:
        super().__init__(None)
        self._live: dict[int, Any] = {weight.untyped_storage()._cdata: weight for weight in weights}
        self.now = self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.device == META:
                self._see(leaf.untyped_storage())
        return result

    def _see(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._live:
            return

        def gone(_: Any) -> None:
            del self._live[key]
            self.now -= size

        self._live[key] = weakref.ref(storage, gone)
        self.now += size
        self.most = max(self.most, self.now)


class _Partition(LayoutSource):
    """One flat tensor of one rank."""

    spends_gradients = True

    def __init__(self, tensor: Tensor, contents: TensorContents, group: Any) -> None:
        self.group, self._tensor, self._contents = group, tensor, contents

    def contents(self, tensor: Tensor) -> TensorContents:
        """See the base class."""
        assert tensor is self._tensor
        return self._contents


class _Sent:
    """A message that has arrived."""

    def wait(self) -> None:
        """At once."""


@contextmanager
def _company(ranks: Sequence[Sequence[Shard]], rank: int) -> Iterator[Any]:
    """A group of ranks that say what this one says, but for what they hold."""

    def tell(found: list[Any], own: Any, group: Any = None) -> None:
        shards = isinstance(own[0], tuple) and len(own[0]) > 0 and isinstance(own[0][0], Shard)
        found[:] = [(tuple(theirs), None) if shards else own for theirs in ranks]

    replaced: dict[str, Any] = {
        "get_world_size": lambda group=None: len(ranks),
        "get_rank": lambda group=None: rank,
        "get_backend": lambda group=None: "nccl",
        "all_gather_object": tell,
        "all_reduce": lambda *given, **more: _Sent(),
        "all_to_all_single": lambda *given, **more: _Sent(),
    }
    with ExitStack() as stack:
        for name, function in replaced.items():
            stack.enter_context(mock.patch.object(dist, name, function))
        yield object()


def counted_memory(name: str, model: str, world: int = 1, stage: int = 1, rank: int = 0) -> StepMemory:
    """Count a steady step of one rank.

    Args:
        name: Key of :data:`benchmarks.counts.TYPES`.
        model: Key of :data:`benchmarks.models.MODELS`.
        world: Number of ranks; one has the parameters themselves.
        stage: ZeRO stage of several.
        rank: Whose step.
    """
    build, before = TYPES[name]
    network = layer_set(model, META)
    with recorded_launches(), using(triton), ExitStack() as stack:
        optimizer: ShardedOptimizer = build(network)
        tensors = weights = list(network.parameters())
        if world > 1:
            tensors = [stack.enter_context(_partitioned(optimizer, world, stage, rank))]
        storages = stack.enter_context(_Storages([*weights, *tensors]))
        for _ in range(before):
            _gradients(network, tensors)
            optimizer.step()
        _gradients(network, tensors)
        storages.most = storages.now
        optimizer.step()
        state = sum(_states(optimizer).values())
        beyond = storages.most - state - sum(tensor.nbytes for tensor in tensors)
        found = estimate(optimizer)[rank]
    elements = sum(tensor.numel() for tensor in tensors)
    return StepMemory(state, beyond, found.scratch_bytes, found.state_bytes, elements)


@contextmanager
def _partitioned(optimizer: ShardedOptimizer, world: int, stage: int, rank: int) -> Iterator[Tensor]:
    """What the rank has in place of the parameters."""
    (found,) = imagined_contents(optimizer, world, stage)
    contents = [[found.contents(each)] for each in range(world)] if isinstance(found, EvenCuts) else found
    (unit,) = optimizer.imagine([contents])
    own = contents[rank][0]
    size = max(piece.offset + piece.end - piece.start for piece in own.slices)
    flat = nn.Parameter(torch.empty(size, device=META))
    with _company(unit.layout.ranks, rank) as group:
        optimizer.param_groups[0]["params"] = [flat]
        optimizer.attach(_Partition(flat, own, group))
        yield flat


def _gradients(network: nn.Module, tensors: Sequence[Tensor]) -> None:
    linear = [module for module in network.modules() if isinstance(module, nn.Linear)]
    outputs = [module(torch.empty(1, module.in_features, device=META)) for module in linear]
    torch.autograd.backward(outputs, [torch.empty_like(output) for output in outputs])
    for parameter in network.parameters():
        parameter.grad = None
    for tensor in tensors:
        tensor.grad = torch.empty_like(tensor)


def _states(optimizer: ShardedOptimizer) -> dict[int, int]:
    """Bytes of every storage."""
    owners = [*optimizer.state.values(), *optimizer.matrix_states.values()]
    tensors = [value for state in owners for value in state.values() if isinstance(value, Tensor)]
    return {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors if tensor.is_meta}


PLACES = (
    ("alone, an eighth of the layers", "llama-7b-layers", 1, 1),
    ("ZeRO-1, 8 ranks", "llama-7b", 8, 1),
    ("ZeRO-3, 8 ranks", "llama-7b", 8, 3),
)
_HEAD = """# What a step needs beside its states

This page says how much scratch memory a step needs: the peak beside weights, gradients and optimizer states, in MiB,
with what is kept from one step to the next. `rankwise.estimate` predicts it (`scratch_bytes`), and `rankwise plan
--json` has it for every rank. No device has measured it so far.

The figures are of rank 3 of 8 that train Llama 7B (0.8 B parameters each) with fp32 masters. They are counted on meta
tensors, as the step would run on a CUDA device with Triton, where no allocator rounds anything. Made with

```
python -m benchmarks memory --page docs/step-memory.md
```

"""


def memory_page() -> str:
    """A table of all types, in Markdown."""
    lines = ["| type | " + " | ".join(words for words, *_ in PLACES) + " |", "|---|" + "---|" * len(PLACES)]
    for name in TYPES:
        # Nobody needs the gradients of partitions after the step.
        places = PLACES[:1] if name.endswith("gradients kept") else PLACES
        found = [counted_memory(name, model, world, stage, min(3, world - 1)) for _, model, world, stage in places]
        cells = [f"{one.beyond / 2**20:,.0f} (predicted {one.predicted / 2**20:,.0f})" for one in found]
        cells += ["-"] * (len(PLACES) - len(cells))
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return _HEAD + "\n".join(lines) + "\n"
