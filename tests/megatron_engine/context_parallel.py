"""Context parallelism on CPU ranks: an attention of the tests' own, as Megatron's one for it needs Transformer Engine.

It gathers keys and values over the context-parallel group; all else of the model is Megatron's. Sequences are cut as
Megatron cuts them: into twice as many chunks as there are ranks, of which each has one from the front and one from the
back, so that all have as much to attend to.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import get_batch_on_this_cp_rank
from torch import Tensor

__all__ = ["GatheringAttention", "batch_of_this_rank", "with_gathering_attention"]


class _Gather(torch.autograd.Function):
    """Chunks of all ranks one after the other; the gradient of a rank's chunk is the sum of what all made of it."""

    @staticmethod
    def forward(ctx: Any, chunk: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        chunks = [torch.empty_like(chunk) for _ in range(dist.get_world_size(group))]
        dist.all_gather(chunks, chunk.contiguous(), group=group)
        return torch.cat(chunks)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient.chunk(dist.get_world_size(ctx.group))[dist.get_rank(ctx.group)], None


class GatheringAttention(MegatronModule):
    """Causal attention of this rank's queries to all ranks' keys and values."""

    def __init__(self, config: Any, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__(config=config)
        self.softmax_scale = softmax_scale or config.kv_channels**-0.5

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        """Tensors are (tokens of this rank, sequences, heads of this rank, width of a head)."""
        group, length = mpu.get_context_parallel_group(), query.shape[0]
        places = torch.cat([_places(length, rank, dist.get_world_size(group)) for rank in range(group.size())])
        keys, values = (
            _Gather.apply(side, group).repeat_interleave(query.shape[2] // side.shape[2], 2) for side in (key, value)
        )
        scores = torch.einsum("qbhd,kbhd->bhqk", query, keys) * self.softmax_scale
        later = places > _places(length, dist.get_rank(group), group.size())[:, None]
        weights = scores.float().masked_fill(later, -torch.inf).softmax(-1).to(query.dtype)
        return torch.einsum("bhqk,kbhd->qbhd", weights, values).flatten(2)


def _places(length: int, rank: int, ranks: int) -> Tensor:
    """Positions, in the whole sequence, of a rank's tokens."""
    front, back = torch.arange(length * ranks).view(2 * ranks, -1)[[rank, 2 * ranks - 1 - rank]]
    return torch.cat([front, back])


def with_gathering_attention(layers: Any) -> Any:
    """A layer's spec, or those of several, with that attention in place of Megatron's."""
    for layer in getattr(layers, "layer_specs", [layers]):
        layer.submodules.self_attention.submodules.core_attention = GatheringAttention
    return layers


def batch_of_this_rank(**tensors: Tensor) -> dict[str, Tensor]:
    """This rank's tokens of (sequences, tokens) tensors."""
    found: dict[str, Tensor] = get_batch_on_this_cp_rank(tensors)
    return found
