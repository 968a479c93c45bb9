"""Element states in 8 bits, or of several types: where codes, exponents and wide values lie, and the way to floats.

Narrow values lie where a wider state's elements would. The exponents of all runs lie behind them, and behind these the
values of parameters that keep the state wide although they share a tensor with others: small ones, see
:data:`rankwise.states.optimizer_spec.FEWEST_CODED`. A rule asks for these parts at every step, and a checkpoint takes
them as they are. Whoever else asks finds the state opened: in a type in which it has the same values, and laid out as
all states are. It may be changed then, or be replaced by what was saved, in any type: the next step packs it again.
What nobody has changed keeps its values.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, reduce
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rankwise.kernels.low_precision_runs import BLOCK, ROOT, SIGNED, LowPrecisionRuns, blocks_of, is_coded, is_narrow
from rankwise.kernels.quantization import decode_, encode_

__all__ = [
    "OPENED",
    "PackedLayout",
    "StateRun",
    "PackedValues",
    "may_be_packed",
    "packed_in",
    "values_of",
]

OPENED = {SIGNED: torch.bfloat16, ROOT: torch.float32}
"""Types of the opened form, by that of the codes."""

_ALIGNED = 8
"""Bytes that the first one of a wide run is a multiple of."""

_AT_ONCE = 1 << 22
"""Elements that are opened at a time."""


def may_be_packed(state: Any) -> bool:
    """Whether a state may be in a packed form; of some in bfloat16 only their layout knows."""
    return isinstance(state, Tensor) and state.dim() == 1 and is_narrow(state.dtype)


class StateRun(NamedTuple):
    """An entry's part of a state.

    Attributes:
        offset: Where its first element lies in the opened state.
        numel: Elements.
        first: Place of the first one in its parameter.
        dtype: Type in which it is kept.
    """

    offset: int
    numel: int
    first: int
    dtype: torch.dtype


class PackedLayout:
    """Where codes, exponents and wide values of one state of one tensor lie.

    Args:
        dtype: The narrowest type of the runs, which the packed state has.
        size: Elements of the opened state, including those that are in no run.
        runs: The parts of the entries that keep the state, by offset.

    Attributes:
        firsts: Where the values of each run begin, by its offset: counted in elements of the run's type.
        exponents: Where the exponents of each coded run begin, likewise.
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
        """The narrowest floating-point type that has the values of all runs."""
        types = [OPENED.get(kept, kept) for kept in dict.fromkeys(run.dtype for run in self.runs)]
        return reduce(torch.promote_types, types, OPENED.get(self.dtype, self.dtype))

    def fits(self, state: Tensor) -> bool:
        """Whether a state is of this form."""
        return state.dtype == self.dtype and state.dim() == 1 and state.numel() == self.numel

    def is_like(self, other: PackedLayout) -> bool:
        """Whether what is packed by one has the same meaning for the other."""
        return (self.dtype, self.size, self.runs) == (other.dtype, other.size, other.runs)

    def fresh(self, device: torch.device) -> Tensor:
        """The packed form of a state of zeros."""
        return torch.zeros(self.numel, dtype=self.dtype, device=device)

    def packed(self, flat: Tensor) -> Tensor:
        """The packed form of a state of any floating-point type, rounded to the nearest."""
        kept = self.fresh(flat.device)
        self._write(kept, [(run, 0, flat[run.offset : run.offset + run.numel]) for run in self.runs])
        return kept

    def opened(self, kept: Tensor, shape: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
        """A new state of this shape with the values of a packed one.

        Args:
            kept: Of this form.
            shape: Shape of the opened state.
            dtype: Its type; None: the narrowest that has all values.
        """
        found = torch.zeros(tuple(shape), dtype=dtype or self.opened_type, device=kept.device)
        flat = found.view(-1)
        for some in self._portions():
            for run, first, numel in some:
                start = run.offset + first
                self.read(kept, start, flat[start : start + numel])
        return found

    def packed_again(self, theirs: Tensor, layout: PackedLayout, device: torch.device) -> Tensor:
        """The form of this layout of what another one has packed; some elements at a time are opened.

        Args:
            theirs: Packed by the other layout.
            layout: The other one, of as many elements.
            device: Where the new state lies.
        """
        kept = self.fresh(device)
        for some in self._portions():
            pieces = []
            for run, first, numel in some:
                wide = torch.promote_types(layout.opened_type, torch.float32)
                values = torch.zeros(numel, dtype=wide, device=theirs.device)
                layout.read(theirs, run.offset + first, values)
                pieces.append((run, first, values.to(device)))
            self._write(kept, pieces)
        return kept

    def read(self, kept: Tensor, start: int, values: Tensor) -> None:
        """Fill values, 1-D, with elements from ``start`` on; those in no run stay as they are."""
        end = start + values.numel()
        at = max(bisect_right(self._offsets, start) - 1, 0)
        found: list[Tensor] = []
        coded: list[tuple[StateRun, int, int]] = []
        while at < len(self.runs) and self.runs[at].offset < end:
            run = self.runs[at]
            low, high = max(start, run.offset), min(end, run.offset + run.numel)
            at += 1
            if low >= high:
                continue
            part, first = values[low - start : high - start], low - run.offset
            if is_coded(run.dtype):
                found.append(part)
                coded.append((run, first, high - low))
            else:
                own = self.firsts[run.offset] + first
                part.copy_(self.as_type(kept, run.dtype)[own : own + high - low])
        if coded:
            decode_(found, self._codes(kept, coded))

    def write(self, kept: Tensor, start: int, values: Tensor) -> None:
        """Keep the values of one run, which begins there, rounded to the nearest."""
        self._write(kept, [(self.runs[bisect_right(self._offsets, start) - 1], 0, values)])

    def _write(self, kept: Tensor, pieces: Sequence[tuple[StateRun, int, Tensor]]) -> None:
        """Keep values of parts of runs, each of whole blocks, from an element of the run on."""
        coded = [piece for piece in pieces if is_coded(piece[0].dtype)]
        for run, first, values in pieces:
            if not is_coded(run.dtype):
                own = self.firsts[run.offset] + first
                self.as_type(kept, run.dtype)[own : own + values.numel()].copy_(values)
        if coded:
            places = [(run, first, values.numel()) for run, first, values in coded]
            encode_([values for _, _, values in coded], self._codes(kept, places))

    @staticmethod
    def as_type(kept: Tensor, dtype: torch.dtype) -> Tensor:
        """A packed state as values of one type, some of which have another."""
        return kept if kept.dtype == dtype else kept.view(dtype)

    @cached_property
    def _offsets(self) -> list[int]:
        return [run.offset for run in self.runs]

    def _portions(self) -> Iterator[list[tuple[StateRun, int, int]]]:
        """Parts of runs, of whole blocks: run, first element, elements; not many elements at a time."""
        some: list[tuple[StateRun, int, int]] = []
        size = 0
        for run in self.runs:
            first = 0
            while first < run.numel:
                # To the end of a block of the parameter.
                numel = min(run.numel - first, _AT_ONCE - (run.first + first) % BLOCK)
                if some and size + numel > _AT_ONCE:
                    yield some
                    some, size = [], 0
                some.append((run, first, numel))
                first, size = first + numel, size + numel
        if some:
            yield some

    def _codes(self, kept: Tensor, parts: Sequence[tuple[StateRun, int, int]]) -> LowPrecisionRuns:
        signed, codes, blocks = kept.view(torch.int8), [], []
        for run, first, numel in parts:
            place = run.first + first
            block = self.exponents[run.offset] + place // BLOCK - run.first // BLOCK
            codes.append(kept[run.offset + first : run.offset + first + numel])
            blocks.append(signed[block : block + blocks_of(place, numel)])
        return LowPrecisionRuns(codes, blocks, [run.first + first for run, first, _ in parts], [0] * len(parts))

    def type_at(self, start: int) -> torch.dtype:
        """The type in which an element of a run is opened."""
        kept = self.runs[max(bisect_right(self._offsets, start) - 1, 0)].dtype
        return OPENED.get(kept, kept)

    # --- in checkpoints -----------------------------------------------------------------------------------------

    def record(self, shape: Sequence[int]) -> dict[str, Any]:
        """What :func:`packed_in` makes a layout of, in plain data, beside the runs of a tensor.

        Args:
            shape: Shape of the opened state.
        """
        return {"shape": list(shape), "types": [str(run.dtype).removeprefix("torch.") for run in self.runs]}


def packed_in(record: Mapping[str, Any], name: str) -> tuple[PackedLayout, tuple[int, ...]] | None:
    """The layout of a state in a checkpoint, and the shape it has when opened; None where it is saved opened.

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
    """A run of a packed state, which has memory of its own only while it is read or filled.

    Args:
        kept: The packed state.
        layout: How it is packed.
        start: Its first element in the opened state, that of a run.
        length: Its elements.
    """

    def __init__(self, kept: Tensor, layout: PackedLayout, start: int, length: int) -> None:
        self._kept, self._layout, self._start, self._length = kept, layout, start, length
        self._room: Tensor | None = None
        self._missing = length

    def opened(self) -> Tensor:
        """Its values, 1-D."""
        found = torch.empty(self._length, dtype=self._layout.type_at(self._start), device=self._kept.device)
        self._layout.read(self._kept, self._start, found)
        return found

    def like(self) -> Tensor:
        """A tensor of the opened values' type and shape, without any."""
        return torch.empty(self._length, dtype=self._layout.type_at(self._start), device="meta")

    def to_fill(self) -> Tensor:
        """Room for values, the same until all are there; they are packed then."""
        if self._room is None:
            wide = torch.promote_types(self._layout.type_at(self._start), torch.float32)
            self._room = torch.zeros(self._length, dtype=wide, device=self._kept.device)
        return self._room

    def filled(self, numel: int) -> None:
        """So many more values are there."""
        self._missing -= numel
        if self._missing <= 0:
            self.close()

    def close(self) -> None:
        """Pack what is there."""
        if self._room is not None:
            self._layout.write(self._kept, self._start, self._room)
            self._room = None


def values_of(state: Tensor, first: int, numel: int, layout: PackedLayout | None) -> Tensor | PackedValues:
    """A run of a saved state, by its first element when opened.

    Args:
        state: As saved.
        first: First element of the run.
        numel: Elements of the run.
        layout: How the state is packed; None: it is not.
    """
    return state.reshape(-1)[first : first + numel] if layout is None else PackedValues(state, layout, first, numel)


def _aligned(place: int) -> int:
    return -(-place // _ALIGNED) * _ALIGNED
