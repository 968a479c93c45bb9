"""MKOR's matrices of which several ranks own slices: messages linear in the width, and no matrix is gathered.

Of a matrix whose rows are cut, a rank preconditions its own rows. It keeps the same part of the vectors of the rows'
factor inverse, ``W_L``, and some of the vectors of the other one, ``W_R``. With all of ``W_R``, which the ranks gather,
and the sum over them of ``W_L D``, of K x n, the rest is done by every rank for itself; so it is for columns, with the
sides in each other's places. The norm of the stabilizer is taken of the rows of J in turns.

Where messages are in codes of 8 bits, each rank sums a part of ``W_L D``, of terms in bfloat16, and the ranks gather
the codes of these parts and of ``W_R``. Factors move by exact vectors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rankwise.comm.message_format import WireFormat
from rankwise.comm.quantized_messages import wire_of
from rankwise.comm.slice_holders import Holders
from rankwise.mkor.rule import FactorNorm, rescale_to_norm
from rankwise.mkor.vector_windows import Window, factor_of, multiply_, window_norms
from rankwise.plan.step_costs import Joint
from rankwise.states.matrix_states import MatrixState

__all__ = ["SlicedWindows", "coded_wire", "exchanged", "sends_less"]

_SIDES = ("left", "right")


def exchanged(
    window: int,
    shape: tuple[int, int],
    axis: int,
    holders: int,
    widths: tuple[int, int],
    wire: WireFormat | None = None,
    matrices: int = 1,
) -> tuple[Joint, ...]:
    """The messages of a step for matrices of one shape: vectors to a gather, the sum of products, and that of norms.

    Args:
        window: K.
        shape: Rows and columns of the whole matrix.
        axis: The one that is cut.
        holders: Number of slices.
        widths: Bytes of an element in the sum, and of one of the vectors.
        wire: Format of codes; None: nothing is coded.
        matrices: Their number.
    """
    elements, (of_sum, of_vector) = matrices * window * shape[1 - axis], widths
    norms = Joint(16 * matrices)
    if wire is None:
        return Joint(elements // holders * of_vector, "gather"), Joint(elements * of_sum), norms
    part = _part(elements, holders, wire)
    codes = wire.bytes_of(part) + wire.bytes_of(elements // holders)
    return Joint(holders * part * of_sum, "scatter"), Joint(codes, "gather"), norms


def coded_wire(name: str | None, dtype: torch.dtype) -> WireFormat | None:
    """The format of messages of this name, if it has codes."""
    wire = wire_of(name, dtype)
    return wire if wire.block > 1 else None


def _part(elements: int, holders: int, wire: WireFormat) -> int:
    """Elements of the part of a sum that one rank has: whole blocks."""
    return -(-elements // (holders * wire.block)) * wire.block


def sends_less(
    window: int,
    shape: tuple[int, int],
    axis: int,
    holders: int,
    widths: tuple[int, int, float],
    wire: WireFormat | None = None,
) -> bool:
    """Whether slices send less than if one rank gathered the matrix and returned the result.

    Args:
        window: K.
        shape: Rows and columns of the whole matrix.
        axis: The one that is cut.
        holders: Number of slices.
        widths: As :func:`exchanged` takes them; and bytes of an element of the matrix on its way.
        wire: As :func:`exchanged` takes it.
    """
    *own, of_matrix = widths
    joint = exchanged(window, shape, axis, holders, (own[0], own[1]), wire)
    in_pairs = 2 * shape[0] * shape[1] / holders * (holders - 1) / holders * of_matrix
    return sum(message.passed(holders) for message in joint[:-1]) < in_pairs


@dataclass(frozen=True)
class SlicedWindows:
    """The factor inverses of matrices of one shape, of each of which every rank has a slice.

    Attributes:
        axis: The axis of the matrices that is cut.
        states: This rank's states of the slices.
        holders: The ranks that have the slices.
        narrow: Whether sums travel in bfloat16.
        wire: Format of codes; None: nothing is coded.
    """

    axis: int
    states: Sequence[MatrixState]
    holders: Holders
    narrow: bool
    wire: WireFormat | None = None

    @property
    def own(self) -> str:
        """The side that is cut with the matrices."""
        return _SIDES[self.axis]

    @property
    def other(self) -> str:
        """The side along which every rank has all of the matrices."""
        return _SIDES[1 - self.axis]

    def whole(self, place: int, own: Window | None, other: Window | None) -> MatrixState:
        """The states of one matrix with whole windows in the place of this rank's parts."""
        state = dict(self.states[place])
        for side, window in ((self.own, own), (self.other, other)):
            if window is not None:
                state[f"{side}_vectors"] = window.vectors
        return state

    def gathered(self, side: str, places: Sequence[int]) -> list[Window | None]:
        """Whole windows of one side of some of the matrices; None where the side has no factor."""
        name = f"{side}_vectors"
        if not places or name not in self.states[0]:
            return [None] * len(places)
        stored = torch.stack([self.states[place][name] for place in places])
        parts = self.holders.gather(stored.view(torch.uint8))  # not all that moves tensors knows all types
        # Along its own side a window is cut into parts of its vectors, along the other one into some of them.
        whole = torch.cat(parts.unbind(0), dim=-1 if self._is_cut(side) else -2).view(stored.dtype)
        weights = [self.states[place][f"{side}_weights"] for place in places]
        return list(map(Window, whole, weights))

    def keep(self, side: str, places: Sequence[int], windows: Sequence[Window | None]) -> None:
        """Take this rank's part of windows that have moved; their weights are the states' own."""
        own = [
            (self.states[place][f"{side}_vectors"], window.vectors)
            for place, window in zip(places, windows, strict=True)
            if window is not None
        ]
        if own:
            dim = 1 if self._is_cut(side) else 0
            parts = [vectors.tensor_split(self.holders.ranks, dim)[self.holders.rank] for _, vectors in own]
            torch._foreach_copy_([state for state, _ in own], parts)

    def norms(self, windows: Sequence[Window], norm: FactorNorm, product: torch.dtype | None) -> Tensor:
        """Do :func:`rankwise.mkor.vector_windows.window_norms`, each rank some rows of every J."""
        side, count, rank = windows[0].vectors.shape[-1], self.holders.ranks, self.holders.rank
        measured = window_norms(windows, norm, product, range(rank * side // count, (rank + 1) * side // count))
        # A rank may have no row, and a maximum overlook a NaN.
        return self.holders.largest(torch.where(measured.isfinite(), measured, torch.inf))

    def precondition(self, matrix: Tensor, other: Sequence[Any], product: torch.dtype, rescale: bool) -> Tensor:
        """Precondition slices of gradients.

        Args:
            matrix: (matrices, rows, columns), the slices; read only.
            other: Whole windows of the side that is not cut; not needed where messages are coded.
            product: Type of the products.
            rescale: Whether the results get the norms of the gradients.
        """
        own: list[Any] = [factor_of(state, self.own) for state in self.states]
        own_window = None if own[0] is None else Window.of(own)
        whole = matrix.to(product, copy=True)
        if self.wire is not None:
            self._multiply_coded_(whole, own_window, self.wire)
        else:
            other_window = None if other[0] is None else Window.of(list(other))
            self._multiply_(whole, own_window, other_window, self._sum)
        result = whole.to(matrix.dtype)
        if not rescale:
            return result
        own_norms = [torch.linalg.vector_norm(part, dim=(-2, -1), dtype=torch.float64) for part in (result, matrix)]
        norms = self.holders.add(torch.stack(own_norms).square()).sqrt().to(matrix.dtype)
        return rescale_to_norm(result, matrix, *norms)

    def _multiply_(
        self, whole: Tensor, own: Window | None, other: Window | None, add: Callable[[Tensor], Tensor]
    ) -> None:
        if self.axis == 0:
            multiply_(whole, own, other, (add, None))
        else:
            multiply_(whole, other, own, (None, add))

    def _multiply_coded_(self, whole: Tensor, own: Window | None, wire: WireFormat) -> None:
        """The side that is cut comes first: the vectors of the other one travel with its sums, in one message."""
        name, holders = f"{self.other}_vectors", self.holders
        vectors = [torch.stack([state[name] for state in self.states])] if name in self.states[0] else []
        arrived: list[Tensor] = []

        def add(values: Tensor) -> Tensor:
            flat = _padded(values.reshape(-1).to(torch.bfloat16), holders.ranks * wire.block)
            part, *arrived[:] = self._coded([holders.scatter(flat.view(holders.ranks, -1)), *vectors], wire)
            return part.reshape(-1)[: values.numel()].view_as(values).to(values.dtype)

        self._multiply_(whole, own, None, add)
        if vectors:
            (parts,) = arrived or self._coded(vectors, wire)
            weights = [state[f"{self.other}_weights"] for state in self.states]
            windows = map(Window, torch.cat(parts.unbind(0), dim=-2), weights)
            self._multiply_(whole, None, Window.of(list(windows)), add)

    def _coded(self, values: Sequence[Tensor], wire: WireFormat) -> list[Tensor]:
        """What all holders have, (holders, ...) for each, rounded alike for all of them."""
        filled = [_padded(value.reshape(-1).to(wire.joined), wire.block) for value in values]
        read = wire.read(self.holders.gather(wire.write(torch.cat(filled))).view(-1)).view(self.holders.ranks, -1)
        parts = zip(values, read.split([len(value) for value in filled], dim=1), strict=True)
        return [part[:, : value.numel()].reshape(self.holders.ranks, *value.shape) for value, part in parts]

    def _sum(self, values: Tensor) -> Tensor:
        wide = torch.bfloat16 if self.narrow else torch.promote_types(values.dtype, torch.float32)
        return self.holders.add(values.to(wide)).to(values.dtype)

    def _is_cut(self, side: str) -> bool:
        return side == self.own


def _padded(values: Tensor, block: int) -> Tensor:
    """Values with zeros behind them, as whole blocks."""
    missing = -len(values) % block
    return torch.cat([values, values.new_zeros(missing)]) if missing else values
