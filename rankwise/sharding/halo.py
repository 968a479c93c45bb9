"""The elements on either side of every fragment, for updates that couple neighbours in a chain."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from .layout import Layout
from .traffic import Traffic

__all__ = ["HaloExchange"]


@dataclass(frozen=True, order=True)
class _Run:
    """Elements [first, last) of a parameter, held by ``holder`` and wanted by another fragment."""

    key: str
    first: int
    last: int
    holder: int


@dataclass(frozen=True)
class _Fill:
    """Where a run lands: left or right of local fragment ``position``, at ``at`` (position -1: of another rank's)."""

    position: int
    side: int
    at: int
    run: _Run


class HaloExchange:
    """Fetches the ``width`` elements on either side of every fragment from the ranks that hold them.

    One all-to-all of a few values per border, whatever the number of fields; nothing at all when no selected
    parameter straddles ranks. Elements beyond the parameter's ends are zero. A halo may span several ranks.

    Attributes:
        active: Whether anything crosses ranks; the same on every rank, as all of them must join a collective.
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
            keys: Parameters whose chains cross fragment borders; the others get zero halos.
            device: Where the fields live.
            dtype: Their type, also on the wire.
            by_row: Chains end with the rows: elements of other rows than the fragment's own are not fetched.
        """
        self.layout = layout
        self.traffic = Traffic()
        self.width = width
        self._by_row = by_row
        self._device, self._dtype = device, dtype
        self._position = {(fragment.key, fragment.start): i for i, fragment in enumerate(layout.mine)}
        me, world = layout.rank, layout.world_size
        fills: list[list[_Fill]] = [[] for _ in range(world)]
        if width and not layout.replicated:
            for key in sorted(keys):
                self._plan_parameter(key, fills)
        wanted = [sorted({fill.run for fill in fills[rank]}) for rank in range(world)]
        self._mine = fills[me]
        self._receive = [run for holder in range(world) for run in wanted[me] if run.holder == holder != me]
        self._send = [run for rank in range(world) for run in wanted[rank] if run.holder == me != rank]
        self._receive_sizes = self._sizes(
            [[run for run in wanted[me] if run.holder == holder != me] for holder in range(world)]
        )
        self._send_sizes = self._sizes(
            [[run for run in wanted[rank] if run.holder == me != rank] for rank in range(world)]
        )
        self._source = {run: self._find(run) for run in {*self._send, *(r for r in wanted[me] if r.holder == me)}}
        self.active = any(run.holder != rank for rank in range(world) for run in wanted[rank])
        self.empty = not self.active and not self._mine

    def __call__(self, fields: Sequence[Sequence[Tensor]]) -> list[list[tuple[Tensor, Tensor]]]:
        """Exchange the halos of several fields at once.

        Args:
            fields: ``fields[f][i]`` is field ``f`` on local fragment ``i`` (1-D, in the order of ``layout.mine``).

        Returns:
            ``halos[f][i] = (left, right)``: 1-D tensors of ``width`` elements.
        """
        count = len(fields)
        sides = torch.zeros(2, count, len(self.layout.mine), self.width, dtype=self._dtype, device=self._device)
        values = self._communicate(fields) if self.active else {}
        for fill in self._mine:
            found = values.get(fill.run)
            if found is None:
                found = self._read(fields, fill.run)
            sides[fill.side, :, fill.position, fill.at : fill.at + found.shape[1]] = found
        return [[(sides[0, f, i], sides[1, f, i]) for i in range(len(self.layout.mine))] for f in range(count)]

    def _plan_parameter(self, key: str, fills: list[list[_Fill]]) -> None:
        """Find the neighbours of every fragment of a parameter, by walking along its fragments in order."""
        spans = sorted(
            (piece.start, piece.end, holder) for holder, pieces in self.layout.holders[key].items() for piece in pieces
        )
        if len(spans) == 1:
            return
        shape = self.layout.shapes[key]
        row = shape[-1] if self._by_row and len(shape) > 1 else spans[-1][1]
        for index, (start, end, rank) in enumerate(spans):
            position = self._position[(key, start)] if rank == self.layout.rank else -1
            low, high = max(start - self.width, start - start % row), min(end + self.width, -(-end // row) * row)
            before, after = index - 1, index + 1
            while before >= 0 and spans[before][1] > low:
                first, last, holder = max(spans[before][0], low), spans[before][1], spans[before][2]
                at = first - (start - self.width)
                fills[rank].append(_Fill(position, 0, at, _Run(key, first, last, holder)))
                before -= 1
            while after < len(spans) and spans[after][0] < high:
                first, last, holder = spans[after][0], min(spans[after][1], high), spans[after][2]
                fills[rank].append(_Fill(position, 1, first - end, _Run(key, first, last, holder)))
                after += 1

    def _find(self, run: _Run) -> tuple[int, int, int]:
        for fragment in self.layout.holders[run.key][self.layout.rank]:
            if fragment.start <= run.first and run.last <= fragment.end:
                position = self._position[(run.key, fragment.start)]
                return position, run.first - fragment.start, run.last - fragment.start
        raise AssertionError(f"halo run {run} is not on this rank")

    def _read(self, fields: Sequence[Sequence[Tensor]], run: _Run) -> Tensor:
        position, first, last = self._source[run]
        return torch.stack([field[position][first:last] for field in fields])

    def _communicate(self, fields: Sequence[Sequence[Tensor]]) -> dict[_Run, Tensor]:
        count = len(fields)
        outgoing = [self._read(fields, run).reshape(-1) for run in self._send]
        send = torch.cat(outgoing) if outgoing else torch.empty(0, dtype=self._dtype, device=self._device)
        receive = torch.empty(count * sum(self._receive_sizes), dtype=self._dtype, device=self._device)
        self.traffic.count(send)
        dist.all_to_all_single(
            receive,
            send,
            [count * size for size in self._receive_sizes],
            [count * size for size in self._send_sizes],
            group=self.layout.group,
        )
        found: dict[_Run, Tensor] = {}
        position = 0
        for run in self._receive:
            size = count * (run.last - run.first)
            found[run] = receive[position : position + size].view(count, run.last - run.first)
            position += size
        return found

    @staticmethod
    def _sizes(runs: list[list[_Run]]) -> list[int]:
        return [sum(run.last - run.first for run in group) for group in runs]
