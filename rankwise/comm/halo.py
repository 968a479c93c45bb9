"""Exchanges the elements on either side of every shard, for updates that couple neighbours in a chain."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import accumulate, chain
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from rankwise.comm.message_format import Traffic
from rankwise.comm.neighbours import Transfer, rows_of, transfers
from rankwise.layout.layout import Layout

__all__ = ["Halo", "HaloExchange", "ReadField"]


class Halo(NamedTuple):
    """The neighbours of one shard; elements beyond the ends of the chain are zero.

    Attributes:
        left: (width,) elements before the shard's first.
        right: (width,) elements after its last.
        rows: (rows, 2, width) elements left and right of every row the shard touches, where it lies in a block of
            columns whose rows go on elsewhere; None otherwise.
    """

    left: Tensor
    right: Tensor
    rows: Tensor | None


ReadField = Callable[[Sequence[tuple[int, slice]]], Sequence[Tensor]]
"""Returns parts of a field, 1-D; a part is the index of a local shard and a range of its elements."""


class _Reading(NamedTuple):
    """Elements of a local shard, by its index, that are sent or copied: those at ``chosen`` of its ``part``."""

    shard: int
    part: slice
    chosen: Tensor


class HaloExchange:
    """Fetches the ``width`` elements on either side of every shard from the ranks that hold them.

    Sends one all-to-all of a few values per border, whatever the number of fields, and nothing at all when no selected
    parameter straddles ranks. Elements beyond the parameter's ends are zero. A halo may span several ranks.

    Attributes:
        active: Whether anything crosses ranks; the same on every rank, because all of them must join a collective.
        empty: Whether this rank has nothing to send, to fetch or to copy.
    """

    def __init__(
        self,
        layout: Layout,
        width: int,
        keys: Collection[str],
        device: torch.device,
        dtype: torch.dtype,
        by_row: bool = False,
    ) -> None:
        """Plan the messages once.

        Args:
            layout: The common layout.
            width: Elements needed on each side.
            keys: Parameters whose chains cross shard borders; the others get zero halos.
            device: Device of the fields.
            dtype: Type of the fields, also in messages.
            by_row: Whether chains end with the rows: elements of other rows than the shard's own are not fetched.
        """
        self.layout = layout
        self.traffic = Traffic()
        self.width = width
        self.keys = tuple(sorted(keys))
        self.by_row = by_row
        self._device, self._dtype = device, dtype
        plans = width and not layout.imagined
        planned, self.active = transfers(layout, self.keys, width, by_row) if plans else ([], False)
        by_ranks: dict[tuple[int, int], list[Transfer]] = {}
        for transfer in planned:
            by_ranks.setdefault(transfer.ranks, []).append(transfer)
        self._index = {shard: index for index, shard in enumerate(layout.mine)}
        self._rows = [rows_of(shard) for shard in layout.mine]
        *self._offsets, self._size = accumulate((2 * width * (1 + rows) for rows in self._rows), initial=0)
        me = layout.rank
        staying = by_ranks.pop((me, me), [])
        sent = [by_ranks.get((me, rank), []) for rank in range(layout.world_size)]
        received = [by_ranks.get((rank, me), []) for rank in range(layout.world_size)]
        self._local = list(map(self._reading, staying))
        self._send = [list(map(self._reading, parts)) for parts in sent]
        self._receive = [sum(len(part.slots) for part in parts) for parts in received]
        self._staying, self._arriving = self._slots(staying), self._slots(chain.from_iterable(received))
        self.empty = not self.active and not self._local

    def __call__(self, fields: Sequence[ReadField]) -> list[list[Halo]]:
        """Exchange the halos of several fields at once.

        Args:
            fields: Fields on the local shards, which are numbered as in ``layout.mine``.

        Returns:
            ``halos[f][i]`` of field ``f`` and shard ``i``, zero where nothing is to be fetched.
        """
        halos = torch.zeros(len(fields), self._size, dtype=self._dtype, device=self._device)
        if self._local:
            halos[:, self._staying] = torch.cat(self._read(fields, self._local), dim=1)
        if self.active:
            halos[:, self._arriving] = self._communicate(fields)
        return [[self._halo(row, index) for index in range(len(self._rows))] for row in halos]

    def _halo(self, row: Tensor, index: int) -> Halo:
        first, width, rows = self._offsets[index], self.width, self._rows[index]
        strips = row[first + 2 * width : first + 2 * width * (1 + rows)].view(rows, 2, width) if rows else None
        return Halo(row[first : first + width], row[first + width : first + 2 * width], strips)

    def _communicate(self, fields: Sequence[ReadField]) -> Tensor:
        """Exchange elements; returns the arriving ones, (fields, elements), in the order of ``self._arriving``."""
        count = len(fields)
        send_sizes = [count * sum(len(part.chosen) for part in parts) for parts in self._send]
        receive_sizes = [count * elements for elements in self._receive]
        values = iter(self._read(fields, [part for parts in self._send for part in parts]))
        outgoing = [torch.cat([next(values) for _ in parts], dim=1).reshape(-1) for parts in self._send if parts]
        send = torch.cat(outgoing) if outgoing else torch.empty(0, dtype=self._dtype, device=self._device)
        receive = torch.empty(sum(receive_sizes), dtype=self._dtype, device=self._device)
        self.traffic.count(send)
        dist.all_to_all_single(receive, send, receive_sizes, send_sizes, group=self.layout.group)
        parts = [part.view(count, -1) for part in receive.split(receive_sizes) if len(part)]
        return torch.cat(parts, dim=1) if parts else receive.view(count, 0)

    def _reading(self, part: Transfer) -> _Reading:
        first, last = int(part.positions.min()), int(part.positions.max())
        return _Reading(self._index[part.held], slice(first, last + 1), (part.positions - first).to(self._device))

    def _slots(self, parts: Iterable[Transfer]) -> Tensor:
        slots = [part.slots + self._offsets[self._index[part.wanting]] for part in parts]
        return torch.cat([torch.empty(0, dtype=torch.long, device="cpu"), *slots]).to(self._device)

    @staticmethod
    def _read(fields: Sequence[ReadField], parts: Sequence[_Reading]) -> list[Tensor]:
        """Read the elements of each transfer, (fields, elements)."""
        places = [(part.shard, part.part) for part in parts]
        columns = [field(places) for field in fields]
        return [
            torch.stack([values.index_select(0, part.chosen) for values in row])
            for part, row in zip(parts, zip(*columns, strict=True), strict=True)
        ]
