"""Finds the elements on either side of every shard, and who has them: positions alone, on the host."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from rankwise.layout.layout import Layout, Shard

__all__ = ["Fetched", "Transfer", "fetched", "rows_of", "transfers"]


class Fetched(NamedTuple):
    """The elements that shards of one copy of a parameter fetch from each other; each tensor has one value for each.

    Attributes:
        holder: Index of the shard that has the element.
        position: Position of the element in that shard.
        wanting: Index of the shard whose halo it fills.
        slot: Position in that halo.
    """

    holder: Tensor
    position: Tensor
    wanting: Tensor
    slot: Tensor


class Transfer(NamedTuple):
    """What the halo of one shard gets of another.

    Attributes:
        held: The shard that has the elements.
        wanting: The shard whose halo they fill.
        ranks: Ranks of these two.
        positions: Positions of the elements in the shard that has them.
        slots: Positions in the halo.
    """

    held: Shard
    wanting: Shard
    ranks: tuple[int, int]
    positions: Tensor
    slots: Tensor


def transfers(layout: Layout, keys: Collection[str], width: int, by_row: bool) -> tuple[list[Transfer], bool]:
    """Plan the transfers of this rank; see :class:`rankwise.comm.halo.HaloExchange` for the arguments.

    Returns:
        The transfers, in an order that is the same on both of their ranks; and whether any crosses ranks, which all
        ranks know.
    """
    found: list[Transfer] = []
    crosses = False
    for key in keys:
        for copy in layout.copies.get(key, {}).values():
            if len(copy) > 1:
                ranks, shards = zip(*copy, strict=True)
                elements = fetched(shards, width, by_row)
                pairs = _integers(ranks)[torch.stack([elements.holder, elements.wanting])]
                crosses = crosses or bool((pairs[0] != pairs[1]).any())
                mine = (pairs == layout.rank).any(0)
                found += _between_two(shards, ranks, Fetched(*(column[mine] for column in elements)))
    return found, crosses


def _between_two(shards: Sequence[Shard], ranks: Sequence[int], elements: Fetched) -> Iterator[Transfer]:
    pairs, order = (elements.holder * len(shards) + elements.wanting).sort(stable=True)
    numbers, counts = pairs.unique_consecutive(return_counts=True)
    positions, slots = (column[order].split(counts.tolist()) for column in (elements.position, elements.slot))
    for number, held, filled in zip(numbers.tolist(), positions, slots, strict=True):
        holder, wanting = divmod(number, len(shards))
        yield Transfer(shards[holder], shards[wanting], (ranks[holder], ranks[wanting]), held, filled)


def rows_of(shard: Shard) -> int:
    """Number of rows of a block of columns that a shard touches; 0 if its rows are whole."""
    if shard.columns is None:
        return 0
    length = shard.row_length
    return -(-shard.end // length) - shard.start // length


def fetched(shards: Sequence[Shard], width: int, by_row: bool) -> Fetched:
    """Find the elements that shards, which tile a parameter, fetch from each other.

    A halo begins with the ``width`` elements before the shard and as many after it. Where the shard lies in a block of
    columns, those left and right of each of its rows follow.
    """
    elements, wanting, slot = _beside(shards, width, by_row)
    runs = [(number, run) for number, shard in enumerate(shards) for run in shard.places]
    holders, numels = _integers([holder for holder, _ in runs]), _integers([run.numel for _, run in runs])
    offsets, widths, rows, strides = _integers([run for _, run in runs]).T
    # The runs of a shard follow each other in it.
    before = numels.cumsum(0) - numels
    before -= before[torch.searchsorted(holders, holders)]
    number, row = _repeated(rows)
    first, order = (offsets[number] + row * strides[number]).sort()
    position = before[number] + row * widths[number]
    at = torch.searchsorted(first, elements, right=True) - 1
    return Fetched(holders[number[order[at]]], position[order[at]] + elements - first[at], wanting, slot)


def _beside(shards: Sequence[Shard], width: int, by_row: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Elements of the parameter beside shards, the indices of these shards, and positions in their halos."""
    shape, size = shards[0].shape, prod(shards[0].shape)
    total = shape[-1] if shape else 1
    start, end, length = _integers([(each.start, each.end, each.row_length) for each in shards]).T
    left = _integers([each.columns[0] if each.columns else 0 for each in shards])
    in_rows = _integers([len(shape) > 1 and (by_row or each.columns is not None) for each in shards]) > 0
    # Inside the shard's own block, neighbours lie before its first and after its last element.
    reach = _count(width)
    inside = torch.cat([start[:, None] - width + reach, end[:, None] + reach], dim=1)
    low = torch.where(in_rows, start - start % length, 0)
    high = torch.where(in_rows, -(-end // length) * length, _integers([each.block_numel for each in shards]))
    row = inside // length[:, None]
    within = row * total + left[:, None] + inside - row * length[:, None]
    shard, slot = ((inside >= low[:, None]) & (inside < high[:, None])).nonzero().T
    # Beside the block, they lie left and right of every row.
    owner, row = _repeated(_integers([rows_of(each) for each in shards]))
    first = ((start // length)[owner] + row)[:, None] * total
    strips = first + torch.cat([left[owner, None] - width + reach, (left + length)[owner, None] + reach], dim=1)
    valid = (strips >= first) & (strips < first + total) if by_row else (strips >= 0) & (strips < size)
    strip, at = valid.nonzero().T
    return (
        torch.cat([within[shard, slot], strips[strip, at]]),
        torch.cat([shard, owner[strip]]),
        torch.cat([slot, 2 * width * (1 + row[strip]) + at]),
    )


def _integers(values: Sequence[int] | Sequence[tuple[int, ...]]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device="cpu")


def _count(length: int) -> Tensor:
    """The integers from 0 on."""
    return torch.arange(length, dtype=torch.int64, device="cpu")


def _repeated(counts: Tensor) -> tuple[Tensor, Tensor]:
    """Each index as often as it counts, and how often it has come before."""
    index = _count(len(counts)).repeat_interleave(counts)
    return index, _count(len(index)) - (counts.cumsum(0) - counts)[index]
