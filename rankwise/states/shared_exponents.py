"""Blocks of elements with a common exponent that lie on several ranks, or in several runs of one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from rankwise.comm.message_format import Traffic
from rankwise.kernels.low_precision_runs import BLOCK
from rankwise.layout.indices import DeviceIndices
from rankwise.layout.layout import Layout, Shard

__all__ = ["ExponentPlace", "SharedExponents"]

_LEAST = -128


class ExponentPlace(NamedTuple):
    """A block of one state.

    Attributes:
        key: Key of the parameter, or of the matrix of a stack.
        copy: Of its copies, which ranks hold alike.
        columns: As in :class:`rankwise.layout.layout.Shard`.
        block: Counted from the parameter's beginning.
        state: Name of the state.
    """

    key: str
    copy: int
    columns: tuple[int, int] | None
    block: int
    state: str


class SharedExponents:
    """Makes the exponents of cut blocks the largest of their parts: one small message a step.

    Args:
        layout: What is stored where, on all ranks.
        coded: The states in codes, by key; of all keys, the same on every rank.
        indices: Puts places on the device.
        traffic: Counts what is sent.
    """

    def __init__(
        self, layout: Layout, coded: Mapping[str, Sequence[str]], indices: DeviceIndices, traffic: Traffic
    ) -> None:
        self._group, self._indices, self._traffic = layout.group, indices, traffic
        self._rows: dict[ExponentPlace, int] = {}
        self._travels = False
        for key in layout.shapes:
            for copy, members in layout.copies[key].items() if coded.get(key) else ():
                self._enter(key, copy, members, coded[key])

    def _enter(self, key: str, copy: int, members: Sequence[tuple[int, Shard]], states: Sequence[str]) -> None:
        ends: dict[tuple[int, int] | None, dict[int, int]] = {}
        for rank, part in members:
            before = ends.setdefault(part.columns, {})
            before[part.end] = rank
        for rank, part in members:
            if part.start % BLOCK == 0:
                continue
            self._travels |= ends[part.columns].get(part.start, rank) != rank
            for state in states:
                place = ExponentPlace(key, copy, part.columns, part.start // BLOCK, state)
                self._rows.setdefault(place, len(self._rows))

    def __bool__(self) -> bool:
        return bool(self._rows)

    def row(self, part: Shard, state: str, first: int, at: int) -> int | None:
        """Where a block of a shard stands in the message; None if it is not shared.

        Args:
            part: The shard.
            state: Name of the state.
            first: An element of the parameter.
            at: Which block from that of the element on.
        """
        return self._rows.get(ExponentPlace(part.key, part.copy, part.columns, first // BLOCK + at, state))

    def agree(self, exponents: Tensor, positions: Sequence[int], rows: Sequence[int]) -> Tensor:
        """The exponents with those of shared blocks replaced by the largest of all ranks; a collective.

        Args:
            exponents: int8, of blocks of this rank.
            positions: Which of them are shared.
            rows: Row of each of these in the message.
        """
        table = torch.full((len(self._rows),), _LEAST, dtype=torch.int32, device=self._indices.device)
        if positions:
            own, places = self._indices.of(tuple(positions)), self._indices.of(tuple(rows))
            table.scatter_reduce_(0, places, exponents.index_select(0, own).to(torch.int32), "amax")
        if self._travels:
            self._traffic.count(table)
            dist.all_reduce(table, dist.ReduceOp.MAX, group=self._group)
        if positions:
            exponents.index_copy_(0, own, table.index_select(0, places).to(torch.int8))
        return exponents
