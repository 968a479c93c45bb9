"""Causal attention, whose keys and values may lie on all ranks of a context-parallel group; torch alone.

Sequences are cut as Megatron and Transformer Engine cut them: into twice as many chunks as there are ranks, of which
each has one from the front and one from the back, so that all have as much to attend to.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["attention"]


class _Gather(torch.autograd.Function):
    """Chunks of all ranks one after the other; the gradient of a rank's chunk is the sum of what all made of it."""

    @staticmethod
    def forward(ctx: Any, chunk: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        chunks = [torch.empty_like(chunk) for _ in range(group.size())]
        dist.all_gather(chunks, chunk.contiguous(), group=group)
        return torch.cat(chunks)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient.chunk(ctx.group.size())[ctx.group.rank()], None


def attention(query: Tensor, key: Tensor, value: Tensor, scale: float, group: dist.ProcessGroup | None) -> Tensor:
    """This rank's queries attend to all ranks' keys and values that are not later.

    Args:
        query: (tokens of this rank, sequences, heads, width of a head).
        key: The same of fewer heads, perhaps, each of which serves a run of the queries'.
        value: As the keys, of another width, perhaps.
        scale: Scale of the products.
        group: The context-parallel ranks; None if there is one.

    Returns:
        (tokens of this rank, sequences, heads times width of a value).
    """
    length, ranks = query.shape[0], 1 if group is None else group.size()
    places = [_places(length, rank, ranks) for rank in range(ranks)]
    mine = places[0 if group is None else group.rank()]
    if group is not None and ranks > 1:
        key, value = _Gather.apply(key, group), _Gather.apply(value, group)
    key, value = (side.repeat_interleave(query.shape[2] // side.shape[2], 2) for side in (key, value))
    scores = torch.einsum("qbhd,kbhd->bhqk", query, key) * scale
    weights = scores.float().masked_fill(torch.cat(places) > mine[:, None], -torch.inf).softmax(-1)
    return torch.einsum("bhqk,kbhd->qbhd", weights.to(query.dtype), value).flatten(2)


def _places(length: int, rank: int, ranks: int) -> Tensor:
    """Positions, in the whole sequence, of a rank's tokens."""
    if ranks == 1:
        return torch.arange(length)
    return torch.arange(length * ranks).view(2 * ranks, -1)[[rank, 2 * ranks - 1 - rank]].flatten()
