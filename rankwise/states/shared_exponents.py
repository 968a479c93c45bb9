"""Blocks of elements with a common exponent that lie on several ranks, or in several runs of one rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from rankwise.comm.message_format import Traffic
from rankwise.kernels.low_precision_runs import BLOCK, is_coded
from rankwise.layout.indices import DeviceIndices
from rankwise.layout.layout import Layout, Shard
from rankwise.states.element_states import StateTypes

__all__ = ["ExponentPlace", "SharedExponents"]

_LEAST = -128


class ExponentPlace(NamedTuple):
    """A block of one state.

    Attributes:
        key: Key of the parameter, or of the matrix of a stack.
        copy: Number of the copy, of several that ranks hold alike.
        columns: Columns of the shard, see :class:`rankwise.layout.layout.Shard`.
        block: Index of the block, counted from the parameter's beginning.
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
        layout: What all ranks store.
        types: Types of the element states, by key, for all keys; the same on every rank.
        indices: Puts indices on the device.
        traffic: Counts what is sent.
    """

    def __init__(
        self, layout: Layout, types: Mapping[str, StateTypes], indices: DeviceIndices, traffic: Traffic
    ) -> None:
        self._group, self._indices, self._traffic = layout.group, indices, traffic
        self._rows: dict[ExponentPlace, int] = {}
        self._travels = False
        for key in layout.shapes:
            coded = [state for state, dtype in types[key].items() if is_coded(dtype)]
            for copy, members in layout.copies[key].items() if coded else ():
                self._enter(key, copy, members, coded)

    def _enter(self, key: str, copy: int, members: Sequence[tuple[int, Shard]], states: Sequence[str]) -> None:
        ends: dict[tuple[int, int] | None, dict[int, int]] = {}
        for rank, part in members:
            rank_of_end = ends.setdefault(part.columns, {})
            rank_of_end[part.end] = rank
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
        """Row of a block in the message; None if the block is not shared."""
        return self._rows.get(ExponentPlace(part.key, part.copy, part.columns, first // BLOCK + at, state))

    def agree(self, exponents: Tensor, positions: Sequence[int], rows: Sequence[int]) -> Tensor:
        """Replace the exponents of shared blocks by the largest of all ranks, in place; a collective.

        Args:
            exponents: int8, exponents of this rank's blocks.
            positions: Indices of shared blocks.
            rows: Rows of the shared blocks in the message.
        """
        table = torch.full((len(self._rows),), _LEAST, dtype=torch.int32, device=self._indices.device)
        if positions:
            shared, places = self._indices.of(tuple(positions)), self._indices.of(tuple(rows))
            table.scatter_reduce_(0, places, exponents.index_select(0, shared).to(torch.int32), "amax")
        if self._travels:
            self._traffic.count(table)
            dist.all_reduce(table, dist.ReduceOp.MAX, group=self._group)
        if positions:
            exponents.index_copy_(0, shared, table.index_select(0, places).to(torch.int8))
        return exponents
