"""Per-parameter sums of any number of quantities in one collective."""

from __future__ import annotations

from collections.abc import Collection

import torch
import torch.distributed as dist
from torch import Tensor

from rankwise.comm.message_format import Traffic
from rankwise.layout.layout import Layout

__all__ = ["ShardSums"]


class ShardSums:
    """Turns per-shard partial sums into per-parameter sums with at most one all-reduce.

    Parameters of which every holder has a whole copy are summed there; the message has only straddlers.

    Attributes:
        straddlers: Number of parameters in the message.
        trivial: Whether every sum has one term, of a shard of this rank.
    """

    def __init__(self, layout: Layout, device: torch.device, keys: Collection[str]) -> None:
        """Plan the message for the sums of ``keys`` once; the columns of other parameters stay local."""
        self.layout = layout
        self.traffic = Traffic()
        slots = {key: index for index, key in enumerate(key for key in layout.straddlers if key in keys)}
        self.straddlers = len(slots)
        for shard in layout.mine:
            slots.setdefault(shard.key, len(slots))
        self._size = len(slots)
        keys_here = [shard.key for shard in layout.mine]
        one_each = not self.straddlers and len(set(keys_here)) == len(keys_here)
        # One copy is counted of a parameter that several ranks hold alike.
        first = {shard.key: layout.first_copy(shard.key) for shard in layout.mine}
        counted = [slots[shard.key] >= self.straddlers or shard.copy == first[shard.key] for shard in layout.mine]
        self.trivial = one_each and all(counted)
        self._counted = None if all(counted) else torch.tensor(counted, dtype=torch.bool, device=device)
        self._slot = torch.tensor([slots[shard.key] for shard in layout.mine], dtype=torch.long, device=device)

    def __call__(self, partial: Tensor) -> Tensor:
        """Sum over all shards of each parameter, on all ranks.

        Args:
            partial: (quantities, local shards) partial sums; shards in the order of ``layout.mine``.

        Returns:
            (quantities, local shards): every shard's column holds its whole parameter's sums.
        """
        if self._counted is not None:
            partial = partial * self._counted
        totals = partial.new_zeros(partial.shape[0], self._size).index_add_(1, self._slot, partial)
        if self.straddlers:
            shared = totals[:, : self.straddlers].contiguous()
            self.traffic.count(shared)
            dist.all_reduce(shared, group=self.layout.group)
            totals[:, : self.straddlers] = shared
        return totals.index_select(1, self._slot)
