"""Element states in 8 bits, or of several types: where codes, exponents and wide values lie, and how they are read.

Narrow values lie where a wider state's elements would. The exponents of all runs follow, and then the values of
parameters that keep the state wide although they share a tensor with others: small ones, see
:data:`rankwise.states.optimizer_spec.FEWEST_CODED`. A rule reads these parts at every step, and a checkpoint saves them
as they are. Everybody else gets the state *opened*: in a type that represents its values, laid out as all states are.
The opened state may be changed, or replaced by one of any type; the next step packs it again. Values that nobody has
changed stay the same.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, reduce
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rankwise.kernels.low_precision_runs import BLOCK, ROOT, SIGNED, LowPrecisionRuns, blocks_of, is_coded, is_narrow
from rankwise.kernels.quantization import decode_, encode_

__all__ = ["OPENED", "PackedLayout", "StateRun", "PackedValues", "may_be_packed", "packed_in", "values_of"]

OPENED = {SIGNED: torch.bfloat16, ROOT: torch.float32}
"""Types of opened states, by the type of the codes."""

_ALIGNED = 8
"""Alignment in bytes of the first value of a wide run."""

_AT_ONCE = 1 << 22
"""Elements that are opened at a time."""


def may_be_packed(state: Any) -> bool:
    """Whether a state may be packed; for bfloat16 only the layout can tell."""
    return isinstance(state, Tensor) and state.dim() == 1 and is_narrow(state.dtype)


class StateRun(NamedTuple):
    """An entry's part of a state.

    Attributes:
        offset: Offset of its first element in the opened state.
        numel: Number of elements.
        first: Index of its first element in the parameter.
        dtype: Type in which it is kept.
    """

    offset: int
    numel: int
    first: int
    dtype: torch.dtype


class PackedLayout:
    """Where codes, exponents and wide values of one state of one tensor lie.

    Args:
        dtype: Narrowest type of the runs; the packed state has it.
        size: Elements of the opened state, including those that are in no run.
        runs: The parts of the entries that keep the state, by offset.

    Attributes:
        firsts: First value of each run, by the run's offset, counted in elements of the run's type.
        exponents: First exponent of each coded run, by the run's offset.
        numel: Elements of the packed state.
    """

    def __init__(self, dtype: torch.dtype, size: int, runs: Sequence[StateRun]) -> None:
        self.dtype, self.size, self.runs = dtype, size, tuple(sorted(runs))
        self.firsts: dict[int, int] = {}
        self.exponents: dict[int, int] = {}
        end = size
        for run in self.runs:
            if run.dtype == dtype:
                self.firsts[run.offset] = run.offset
                if is_coded(dtype):
                    self.exponents[run.offset] = end
                    end += blocks_of(run.first, run.numel)
        wide = [run for run in self.runs if run.dtype != dtype]
        if wide:
            place = _aligned(end * dtype.itemsize)
            for run in wide:
                self.firsts[run.offset] = place // run.dtype.itemsize
                place = _aligned(place + run.numel * run.dtype.itemsize)
            end = place // dtype.itemsize
        self.numel = end

    @cached_property
    def opened_type(self) -> torch.dtype:
        """The narrowest floating-point type that represents the values of all runs."""
        types = [OPENED.get(kept, kept) for kept in dict.fromkeys(run.dtype for run in self.runs)]
        return reduce(torch.promote_types, types, OPENED.get(self.dtype, self.dtype))

    def fits(self, state: Tensor) -> bool:
        """Whether a state is packed by this layout."""
        return state.dtype == self.dtype and state.dim() == 1 and state.numel() == self.numel

    def is_like(self, other: PackedLayout) -> bool:
        """Whether what one layout has packed means the same in the other."""
        return (self.dtype, self.size, self.runs) == (other.dtype, other.size, other.runs)

    def fresh(self, device: torch.device) -> Tensor:
        """Make the packed form of a state of zeros."""
        return torch.zeros(self.numel, dtype=self.dtype, device=device)

    def packed(self, flat: Tensor) -> Tensor:
        """Pack a 1-D state of any floating-point type, rounded to the nearest."""
        kept = self.fresh(flat.device)
        self._write(kept, [(run, 0, flat[run.offset : run.offset + run.numel]) for run in self.runs])
        return kept

    def opened(self, kept: Tensor, shape: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
        """Make an opened state of a packed one.

        Args:
            kept: The packed state.
            shape: Shape of the opened state.
            dtype: Type of the opened state; None: the narrowest that represents all values.
        """
        result = torch.zeros(tuple(shape), dtype=dtype or self.opened_type, device=kept.device)
        self.read(kept, 0, result.view(-1))
        return result

    def packed_again(self, theirs: Tensor, layout: PackedLayout, device: torch.device) -> Tensor:
        """Pack by this layout what another one, of as many elements, has packed; opens a portion at a time."""
        kept = self.fresh(device)
        for portion in self._portions(0, self.size):
            pieces = []
            for run, first, numel in portion:
                wide = torch.promote_types(layout.opened_type, torch.float32)
                values = torch.zeros(numel, dtype=wide, device=theirs.device)
                layout.read(theirs, run.offset + first, values)
                pieces.append((run, first, values.to(device)))
            self._write(kept, pieces)
        return kept

    def read(self, kept: Tensor, start: int, values: Tensor) -> None:
        """Fill 1-D values with the elements from ``start`` on; elements in no run are left as they are."""
        for portion in self._portions(start, start + values.numel()):
            parts = [(piece, values[piece[0].offset + piece[1] - start :][: piece[2]]) for piece in portion]
            coded = [(piece, part) for piece, part in parts if is_coded(piece[0].dtype)]
            for (run, first, numel), part in parts:
                if not is_coded(run.dtype):
                    place = self.firsts[run.offset] + first
                    part.copy_(self.as_type(kept, run.dtype)[place : place + numel])
            if coded:
                decode_([part for _, part in coded], self._codes(kept, [piece for piece, _ in coded]))

    def write(self, kept: Tensor, start: int, values: Tensor) -> None:
        """Store the values of the run that begins at ``start``, rounded to the nearest."""
        self._write(kept, [(self.runs[bisect_right(self._offsets, start) - 1], 0, values)])

    def _write(self, kept: Tensor, pieces: Sequence[tuple[StateRun, int, Tensor]]) -> None:
        """Store values of parts of runs, each of whole blocks, from an element of the run on."""
        coded = [piece for piece in pieces if is_coded(piece[0].dtype)]
        for run, first, values in pieces:
            if not is_coded(run.dtype):
                place = self.firsts[run.offset] + first
                self.as_type(kept, run.dtype)[place : place + values.numel()].copy_(values)
        if coded:
            places = [(run, first, values.numel()) for run, first, values in coded]
            encode_([values for _, _, values in coded], self._codes(kept, places))

    @staticmethod
    def as_type(kept: Tensor, dtype: torch.dtype) -> Tensor:
        """View a packed state as values of one type, which only some of its values have."""
        return kept if kept.dtype == dtype else kept.view(dtype)

    @cached_property
    def _offsets(self) -> list[int]:
        return [run.offset for run in self.runs]

    def _portions(self, start: int, end: int) -> Iterator[list[tuple[StateRun, int, int]]]:
        """Cut what runs have of [start, end) into portions of whole blocks: run, first element, number of elements."""
        portion: list[tuple[StateRun, int, int]] = []
        size = 0
        for run in self.runs[max(bisect_right(self._offsets, start) - 1, 0) : bisect_left(self._offsets, end)]:
            first, last = max(start - run.offset, 0), min(end - run.offset, run.numel)
            while first < last:
                # A portion ends with a block of the parameter.
                numel = min(last - first, _AT_ONCE - (run.first + first) % BLOCK)
                if portion and size + numel > _AT_ONCE:
                    yield portion
                    portion, size = [], 0
                portion.append((run, first, numel))
                first, size = first + numel, size + numel
        if portion:
            yield portion

    def _codes(self, kept: Tensor, parts: Sequence[tuple[StateRun, int, int]]) -> LowPrecisionRuns:
        signed, codes, blocks = kept.view(torch.int8), [], []
        for run, first, numel in parts:
            place = run.first + first
            block = self.exponents[run.offset] + place // BLOCK - run.first // BLOCK
            codes.append(kept[run.offset + first : run.offset + first + numel])
            blocks.append(signed[block : block + blocks_of(place, numel)])
        return LowPrecisionRuns(codes, blocks, [run.first + first for run, first, _ in parts], [0] * len(parts))

    def type_at(self, start: int) -> torch.dtype:
        """Type of an element when it is opened."""
        kept = self.runs[max(bisect_right(self._offsets, start) - 1, 0)].dtype
        return OPENED.get(kept, kept)

    # --- in checkpoints -----------------------------------------------------------------------------------------

    def record(self, shape: Sequence[int]) -> dict[str, Any]:
        """Describe the layout, and the shape of the opened state, in plain data for :func:`packed_in`."""
        return {"shape": list(shape), "types": [str(run.dtype).removeprefix("torch.") for run in self.runs]}


def packed_in(record: Mapping[str, Any], name: str) -> tuple[PackedLayout, tuple[int, ...]] | None:
    """Layout of a state in a checkpoint, and its shape when opened; None where it is saved opened.

    Args:
        record: What a tensor stores, see :meth:`rankwise.states.element_states.ElementStates.record`.
        name: Name of the state.
    """
    packed = record.get("packed", {}).get(name)
    if packed is None:
        return None
    places = zip(record["runs"], record["states"][name], strict=True)
    held = sorted((offset, end - start, start) for (_, _, start, end, _), offset in places if offset is not None)
    types = [getattr(torch, word) for word in packed["types"]]
    runs = [StateRun(*place, dtype) for place, dtype in zip(held, types, strict=True)]
    shape = tuple(packed["shape"])
    narrowest = min(types, key=lambda dtype: dtype.itemsize)
    return PackedLayout(narrowest, prod(shape), runs), shape


class PackedValues:
    """A run of a packed state, given as elements of the opened one; opened only while it is read or filled."""

    def __init__(self, kept: Tensor, layout: PackedLayout, start: int, length: int) -> None:
        self._kept, self._layout, self._start, self._length = kept, layout, start, length
        self._room: Tensor | None = None
        self._missing = length

    def opened(self) -> Tensor:
        """Return the opened values, 1-D."""
        values = torch.empty(self._length, dtype=self._layout.type_at(self._start), device=self._kept.device)
        self._layout.read(self._kept, self._start, values)
        return values

    def like(self) -> Tensor:
        """A tensor of the opened values' type and shape, on the meta device."""
        return torch.empty(self._length, dtype=self._layout.type_at(self._start), device="meta")

    def to_fill(self) -> Tensor:
        """Return a buffer for values, the same until it is full; they are packed then."""
        if self._room is None:
            wide = torch.promote_types(self._layout.type_at(self._start), torch.float32)
            self._room = torch.zeros(self._length, dtype=wide, device=self._kept.device)
        return self._room

    def filled(self, numel: int) -> None:
        """Note that ``numel`` more values were written."""
        self._missing -= numel
        if self._missing <= 0:
            self.close()

    def close(self) -> None:
        """Pack the values that were written."""
        if self._room is not None:
            self._layout.write(self._kept, self._start, self._room)
            self._room = None


def values_of(state: Tensor, first: int, numel: int, layout: PackedLayout | None) -> Tensor | PackedValues:
    """A run of a saved state, given as elements of the opened one; ``layout`` is None if it is not packed."""
    return state.reshape(-1)[first : first + numel] if layout is None else PackedValues(state, layout, first, numel)


def _aligned(place: int) -> int:
    return -(-place // _ALIGNED) * _ALIGNED
