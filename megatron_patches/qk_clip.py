"""With QK-clip, Megatron scales rows of attention weights after a step, and our full-precision copies follow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from megatron_patches.layouts import MegatronLayout
from rankwise.step.optimizer import living_optimizers

__all__ = ["main_weights_follow"]

# ``clip_qk`` scales the weights of these projections of Megatron's attention layers.
_CLIPPED = ("linear_qkv", "linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj")


class _RowFactors:
    """Stands for a weight's full-precision copy while layers are clipped, and learns what each row is scaled by.

    Megatron expects the copy to have the weight's shape, which shards of the distributed optimizer do not have. It
    would scale other elements than it means if their number can be divided so, and raise otherwise.

    Args:
        weight: Weight of the model, (rows, columns).
    """

    def __init__(self, weight: Parameter) -> None:
        self.data = torch.ones(weight.shape[0], 1, dtype=torch.float32, device=weight.device)
        self._unscaled = self.data._version

    @property
    def is_scaled(self) -> bool:
        """Whether the layer was clipped, which is known without waiting for the device."""
        return self.data._version != self._unscaled

    def scale(self, copy: Tensor, start: int, end: int, columns: int) -> None:
        """Scale a copy of the elements from ``start`` to ``end`` of the weight, in place."""
        first, last = start // columns, -(-end // columns)
        elements = self.data[first:last].expand(-1, columns).reshape(-1)
        copy.view(-1).mul_(elements[start - first * columns : end - first * columns])


@contextmanager
def main_weights_follow(chunks: Sequence[nn.Module]) -> Iterator[None]:
    """Scale our main weights, on whichever rank, as ``clip_qk`` scales weights inside the context.

    Args:
        chunks: The model chunks; Megatron handles those of its own optimizers.
    """
    sources = [inner.planner.source for inner in living_optimizers()]
    layouts = [source for source in sources if isinstance(source, MegatronLayout)]
    weights = [weight for weight in _clipped(chunks) if any(layout.knows(weight) for layout in layouts)]
    # Weights without the attribute are fp32 weights of the model itself, or another rank steps them.
    held = [(weight, weight.main_param) for weight in weights if hasattr(weight, "main_param")]
    factors = {weight: _RowFactors(weight) for weight, _ in held}
    for weight, stand_in in factors.items():
        weight.main_param = stand_in
    try:
        with _own_sizes(chunks, layouts):
            yield
    finally:
        for weight, main_weight in held:
            weight.main_param = main_weight
        for layout in layouts:
            for copy, weight, run in layout.main_weights():
                if weight in factors and factors[weight].is_scaled and not _is_model_memory(copy, weight):
                    factors[weight].scale(copy.data, run.start, run.stop, weight[0].numel())


@contextmanager
def _own_sizes(chunks: Sequence[nn.Module], layouts: Sequence[MegatronLayout]) -> Iterator[None]:
    """Give layers a tensor-parallel rank's sizes inside the context, as Megatron would use the whole's and raise."""
    whole: list[tuple[Any, int, int]] = []
    for layer in _layers(chunks):
        weight = getattr(getattr(layer, "linear_qkv", None), "weight", None)
        if isinstance(weight, Parameter) and any(layout.knows(weight) for layout in layouts):
            query, key = layer.query_projection_size, layer.kv_projection_size
            ways, remainder = divmod(query + 2 * key, weight.shape[0])
            if ways > 1 and not (remainder or query % ways or key % ways):
                whole.append((layer, query, key))
                layer.query_projection_size, layer.kv_projection_size = query // ways, key // ways
    try:
        yield
    finally:
        for layer, query, key in whole:
            layer.query_projection_size, layer.kv_projection_size = query, key


def _layers(chunks: Sequence[nn.Module]) -> Iterator[Any]:
    for chunk in chunks:
        yield from (layer for layer in chunk.modules() if hasattr(layer, "clip_qk"))


def _clipped(chunks: Sequence[nn.Module]) -> Iterator[Any]:
    for layer in _layers(chunks):
        for name in _CLIPPED:
            weight = getattr(getattr(layer, name, None), "weight", None)
            if isinstance(weight, Parameter):
                yield weight


def _is_model_memory(copy: Tensor, weight: Parameter) -> bool:
    return copy.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr()
