"""Exchanges the elements on either side of every shard, for updates that couple neighbours in a chain."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from rankwise.comm.message_format import Traffic
from rankwise.layout.layout import Layout, Shard

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


@dataclass(frozen=True)
class _Member:
    """A shard of a chain with its holder."""

    rank: int
    shard: Shard

    @property
    def first(self) -> int:
        """First element of the parameter that the shard may have."""
        return self.shard.places[0].offset

    @property
    def last(self) -> int:
        place = self.shard.places[-1]
        return place.offset + (place.rows - 1) * place.stride + place.width

    def positions(self, elements: Tensor) -> Tensor:
        """Positions in the shard of elements of the parameter; outside [0, numel) for those it does not have."""
        shard = self.shard
        if shard.columns is None:
            return elements - shard.start
        left, right = shard.columns
        rows = elements.div(shard.shape[-1], rounding_mode="floor")
        columns = elements - rows * shard.shape[-1]
        position = rows * (right - left) + columns - left - shard.start
        return torch.where((columns >= left) & (columns < right), position, -1)


ReadField = Callable[[Sequence[tuple[int, slice]]], Sequence[Tensor]]
"""Returns parts of a field, 1-D; a part is the index of a local shard and a range of its elements."""


@dataclass(frozen=True)
class _Transfer:
    """Elements of one shard that fill ``slots`` of another's halo: the elements ``source`` of its ``part``."""

    holder: int
    wanted_by: int
    held: Shard
    wanting: Shard
    part: slice
    source: Tensor
    slots: Tensor


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
        me, world = layout.rank, layout.world_size
        transfers = self._plan(sorted(keys)) if width and not layout.imagined else []
        self.active = any(transfer.holder != transfer.wanted_by for transfer in transfers)
        self._local = [part for part in transfers if part.holder == part.wanted_by == me]
        self._send = [[p for p in transfers if p.holder == me and p.wanted_by == rank != me] for rank in range(world)]
        self._receive = [
            [p for p in transfers if p.wanted_by == me and p.holder == rank != me] for rank in range(world)
        ]
        self._index = {shard: index for index, shard in enumerate(layout.mine)}
        self._rows = [_rows(shard) for shard in layout.mine]
        sizes = [2 * width * (1 + rows) for rows in self._rows]
        self._offsets = [sum(sizes[:index]) for index in range(len(sizes))]
        self._size = sum(sizes)
        arriving = [part for parts in self._receive for part in parts]
        self._arriving = self._slots(arriving)
        self._staying = self._slots(self._local)
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
        send_sizes, receive_sizes = self._sizes(self._send, count), self._sizes(self._receive, count)
        values = iter(self._read(fields, [part for parts in self._send for part in parts]))
        outgoing = [torch.cat([next(values) for _ in parts], dim=1).reshape(-1) for parts in self._send if parts]
        send = torch.cat(outgoing) if outgoing else torch.empty(0, dtype=self._dtype, device=self._device)
        receive = torch.empty(sum(receive_sizes), dtype=self._dtype, device=self._device)
        self.traffic.count(send)
        dist.all_to_all_single(receive, send, receive_sizes, send_sizes, group=self.layout.group)
        parts = [part.view(count, -1) for part in receive.split(receive_sizes) if len(part)]
        return torch.cat(parts, dim=1) if parts else receive.view(count, 0)

    def _read(self, fields: Sequence[ReadField], parts: Sequence[_Transfer]) -> list[Tensor]:
        """Read the elements of each transfer, (fields, elements)."""
        places = [(self._index[part.held], part.part) for part in parts]
        columns = [field(places) for field in fields]
        return [
            torch.stack([values.index_select(0, part.source) for values in row])
            for part, row in zip(parts, zip(*columns, strict=True), strict=True)
        ]

    def _slots(self, parts: Sequence[_Transfer]) -> Tensor:
        slots = [part.slots + self._offsets[self._index[part.wanting]] for part in parts]
        return torch.cat(slots) if slots else torch.empty(0, dtype=torch.long, device=self._device)

    @staticmethod
    def _sizes(by_rank: Sequence[Sequence[_Transfer]], count: int) -> list[int]:
        return [count * sum(len(part.slots) for part in parts) for parts in by_rank]

    # --- planning -----------------------------------------------------------------------------------------------

    def _plan(self, keys: Sequence[str]) -> list[_Transfer]:
        """All ranks' transfers, in the same order on every rank."""
        transfers: list[_Transfer] = []
        for key in keys:
            for copy in self.layout.copies.get(key, {}).values():
                members = sorted((_Member(rank, shard) for rank, shard in copy), key=lambda member: member.first)
                for index in range(len(members)):
                    transfers.extend(self._fetch(index, members))
        return transfers

    def _fetch(self, index: int, members: Sequence[_Member]) -> list[_Transfer]:
        """Transfers that fill the halo of one shard."""
        member = members[index]
        elements, slots = self._neighbours(member.shard)
        if len(members) == 1 or not len(elements):
            return []
        transfers = []
        for neighbour in _around(index, members, int(elements.min()), int(elements.max())):
            positions = neighbour.positions(elements)
            held = (positions >= 0) & (positions < neighbour.shard.numel)
            if held.any():
                first, last = int(positions[held].min()), int(positions[held].max())
                source, filled = (positions[held] - first).to(self._device), slots[held].to(self._device)
                part, ranks = slice(first, last + 1), (neighbour.rank, member.rank)
                transfers.append(_Transfer(*ranks, neighbour.shard, member.shard, part, source, filled))
        return transfers

    def _neighbours(self, shard: Shard) -> tuple[Tensor, Tensor]:
        """Elements of the parameter beside a shard, and their slots in its halo."""
        width, length = self.width, shard.row_length
        reach = _count(width)
        end = shard.end
        # Inside the shard's own block, neighbours lie before its first and after its last element.
        inside = torch.cat([shard.start - width + reach, end + reach])
        limits = (0, shard.block_numel)
        if len(shard.shape) > 1 and (self.by_row or shard.columns is not None):
            limits = (shard.start - shard.start % length, -(-end // length) * length)
        slots = _count(2 * width)
        valid = (inside >= limits[0]) & (inside < limits[1])
        elements, slots = _in_parameter(shard, inside[valid]), slots[valid]
        rows = _rows(shard)
        if not rows or shard.columns is None:
            return elements, slots
        # Beside the block, neighbours lie left and right of every row.
        total, (left, right) = shard.shape[-1], shard.columns
        first = (shard.start // length + _count(rows)).unsqueeze(1) * total
        beside = torch.cat([first + left - width + reach, first + right + reach], dim=1)
        low, high = (first, first + total) if self.by_row else (0, prod(shard.shape))
        valid = (beside >= low) & (beside < high)
        strips = 2 * width + _count(rows * 2 * width).view(rows, 2 * width)
        return torch.cat([elements, beside[valid]]), torch.cat([slots, strips[valid]])


def _count(length: int) -> Tensor:
    """The integers 0, 1, 2 … on the host, where positions are computed."""
    return torch.arange(length, dtype=torch.int64, device="cpu")


def _around(index: int, members: Sequence[_Member], lowest: int, highest: int) -> Iterator[_Member]:
    """Shards of a chain that may hold some of the elements from ``lowest`` to ``highest``.

    In a block of few columns the shard itself is one: beside its rows lie its own elements of the rows around them.
    """
    if any(member.shard.columns is not None for member in members):
        yield from (member for member in members if member.last > lowest)
        return
    before, after = index - 1, index + 1
    while before >= 0 and members[before].last > lowest:
        yield members[before]
        before -= 1
    while after < len(members) and members[after].first <= highest:
        yield members[after]
        after += 1


def _rows(shard: Shard) -> int:
    """Number of rows of a block of columns that a shard touches; 0 if its rows are whole."""
    if shard.columns is None:
        return 0
    length = shard.row_length
    return -(-shard.end // length) - shard.start // length


def _in_parameter(shard: Shard, elements: Tensor) -> Tensor:
    """Convert elements of a shard's block to elements of the parameter."""
    if shard.columns is None:
        return elements
    length = shard.row_length
    rows = elements.div(length, rounding_mode="floor")
    return rows * shard.shape[-1] + shard.columns[0] + elements - rows * length
