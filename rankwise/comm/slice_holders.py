"""The ranks that own slices of the same matrices, and the messages between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from rankwise.comm.message_format import Traffic

__all__ = ["Holders", "holders_of"]


class Holders(NamedTuple):
    """What the holders of a matrix do together.

    Attributes:
        rank: Which of them this one is.
        add: Sums a tensor over the holders, alike for all of them.
        gather: Stacks the holders' tensors, (holders, ...), alike for all of them.
        ranks: Their number.
        largest: The largest of each number of a tensor over the holders, alike for all of them.
        scatter: Sums a tensor (holders, ...) over the holders, and gives each of them its part.
    """

    rank: int
    add: Callable[[Tensor], Tensor]
    gather: Callable[[Tensor], Tensor]
    ranks: int = 1
    largest: Callable[[Tensor], Tensor] = lambda values: values
    scatter: Callable[[Tensor], Tensor] = lambda values: values[0]


def holders_of(group: dist.ProcessGroup | None, traffic: Traffic) -> Holders:
    """The sums and gathers of the ranks that own slices of the same matrices.

    Args:
        group: Group of these ranks.
        traffic: Counts the messages.
    """

    def reduce(values: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
        values = values.contiguous()
        traffic.count(values)
        dist.all_reduce(values, operation, group=group)
        return values

    def add(values: Tensor) -> Tensor:
        return reduce(values, dist.ReduceOp.SUM)

    def gather(values: Tensor) -> Tensor:
        values = values.contiguous()
        traffic.count(values)
        result = values.new_empty(dist.get_world_size(group), *values.shape)
        dist.all_gather(list(result.unbind()), values, group=group)
        return result

    def largest(values: Tensor) -> Tensor:
        return reduce(values, dist.ReduceOp.MAX)

    def scatter(values: Tensor) -> Tensor:
        values = values.contiguous()
        traffic.count(values)
        if values.device.type == "cpu":  # not every version of gloo scatters sums
            dist.all_reduce(values, group=group)
            return values[dist.get_rank(group)]
        result = torch.empty_like(values[0])
        dist.reduce_scatter(result, list(values.unbind()), group=group)
        return result

    return Holders(dist.get_rank(group), add, gather, dist.get_world_size(group), largest, scatter)
