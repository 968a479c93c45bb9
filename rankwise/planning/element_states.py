"""Where per-element states lie in the tensors that store them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rankwise.kernels.graphs import refuse_capture
from rankwise.kernels.low_precision_runs import BLOCK, blocks_of, is_coded
from rankwise.kernels.run_views import RunPlace, RunPlan, RunViews
from rankwise.planning.entries import Entry, PlannedEntries
from rankwise.planning.quantized_states import OPENED, QuantizedLayout, QuantizedRun
from rankwise.sharding.dtensors import PLAIN, is_sharded, local_view, sharded_like
from rankwise.sharding.layout_source import real_view

__all__ = ["CodesPlan", "ElementStates", "EntryRuns", "StateTypes", "States", "offset_runs"]

StateTypes = Mapping[str, torch.dtype | None]
"""Type of every element state by name, in codes or wider; None is that of the computation."""

States = Mapping[Tensor, dict[str, Any]]
"""``Optimizer.state``: handed in at every call, because loading a checkpoint replaces it."""


@dataclass(frozen=True)
class _Slot:
    """One state of one tensor: laid out as the tensor itself, or compact if only some of its entries keep it.

    Attributes:
        dtype: Its type; of one that is kept in codes, when it is opened.
        compact_numel: Elements of a compact state, else None.
        numel: Elements of the state, compact or not.
        offsets: Where the entries' parts begin, by their index.
        coded: Coded of a state that is kept in codes, else None.
    """

    dtype: torch.dtype
    compact_numel: int | None
    numel: int
    offsets: Mapping[int, int]
    coded: QuantizedLayout | None = None


def _type_of(kept: torch.dtype | None, computed: torch.dtype) -> torch.dtype:
    return computed if kept is None else OPENED.get(kept, kept)


def _coded(kept: torch.dtype | None, numel: int, runs: Sequence[QuantizedRun]) -> QuantizedLayout | None:
    return QuantizedLayout(kept, numel, runs) if kept is not None and is_coded(kept) else None


class EntryRuns(NamedTuple):
    """Runs of entries.

    Attributes:
        tensors: Tensors of the unit, those that have any, in the order of the runs.
        runs: In them.
    """

    tensors: tuple[int, ...]
    runs: RunPlan


class CodesPlan(NamedTuple):
    """Where the codes and exponents of parts of entries lie, in their order.

    Attributes:
        tensors: Tensors of the unit, those that have any, in the order of the parts.
        codes: Index of every code in those states.
        exponents: Index of every exponent in them.
    """

    tensors: tuple[int, ...]
    codes: RunPlan
    exponents: RunPlan


def _runs_of_entries(entries: Iterable[Entry], first: Callable[[Entry], int]) -> EntryRuns:
    """Plan views of entries.

    Args:
        entries: In the order of the views.
        first: Where the run of one begins in its flat tensor.
    """
    tensors: list[int] = []
    places: list[list[RunPlace]] = []
    for entry in entries:
        shard = entry.shard
        if not tensors or tensors[-1] != shard.tensor:
            tensors.append(shard.tensor)
            places.append([])
        places[-1].append(RunPlace(first(entry), shard.numel, shard.spread))
    return EntryRuns(tuple(tensors), RunPlan(places))


def offset_runs(entries: Iterable[Entry]) -> EntryRuns:
    """Where entries lie in weights and gradients."""
    return _runs_of_entries(entries, lambda entry: entry.shard.offset)


class ElementStates:
    """Allocates the element states of a unit's tensors and finds each entry's part of them.

    Args:
        tensors: The tensors of the unit.
        entries: Its entries.
        spec: For every entry, the states its rule keeps.
        dtype: Type of the computation.
        of_empty: The states that sharded tensors have of which this rank holds an empty part, by their index.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        entries: Sequence[Entry],
        spec: Sequence[StateTypes],
        dtype: torch.dtype,
        of_empty: Mapping[int, StateTypes] | None = None,
    ) -> None:
        self._tensors = tensors
        self._sharded = any(map(is_sharded, tensors))
        self._spec = spec
        self._by_tensor: list[list[Entry]] = [[] for _ in tensors]
        for entry in entries:
            self._by_tensor[entry.shard.tensor].append(entry)
        self._slots: dict[tuple[int, str], _Slot] = {}
        for index, stored in enumerate(self._by_tensor):
            for name in dict.fromkeys(name for entry in stored for name in spec[entry.index]):
                numel = real_view(local_view(tensors[index])).numel()
                self._slots[(index, name)] = self._slot(numel, stored, name, dtype)
        self._empty = tuple(of_empty or ())
        for index, states in (of_empty or {}).items():
            for name, kept in states.items():
                self._slots[(index, name)] = _Slot(_type_of(kept, dtype), None, 0, {}, _coded(kept, 0, ()))

    def _slot(self, full: int, stored: Sequence[Entry], name: str, dtype: torch.dtype) -> _Slot:
        users = [entry for entry in stored if name in self._spec[entry.index]]
        state_dtype = self._spec[users[0].index][name]
        offsets, position = {}, 0
        compact = len(users) < len(stored)
        for entry in users:
            offsets[entry.index] = position if compact else entry.shard.offset
            position += entry.shard.numel
        numel, of_compact = (position, position) if compact else (full, None)
        runs = [QuantizedRun(offsets[entry.index], entry.shard.numel, entry.shard.start) for entry in users]
        return _Slot(_type_of(state_dtype, dtype), of_compact, numel, offsets, _coded(state_dtype, numel, runs))

    def views(self, states: States, name: str, entries: Iterable[Entry]) -> RunViews:
        """Views of a state on some entries, see :class:`RunPlan`, allocated on first use."""
        if isinstance(entries, PlannedEntries):
            planned = entries.once(("state", name), partial(self._plan, name))
        else:
            planned = self._plan(name, entries)
        return planned.runs.cut([self._flat(states, index, name) for index in planned.tensors])

    def _plan(self, name: str, entries: Iterable[Entry]) -> EntryRuns:
        return _runs_of_entries(entries, lambda entry: self._first(entry, self._slots[(entry.shard.tensor, name)]))

    def type_of(self, name: str, entry: Entry) -> torch.dtype:
        """In which type an entry keeps a state: that of the codes, where it is kept in codes."""
        slot = self._slots[(entry.shard.tensor, name)]
        return slot.dtype if slot.coded is None else slot.coded.dtype

    def codes(self, states: States, name: str, plan: CodesPlan) -> tuple[RunViews, RunViews]:
        """Codes and exponents of parts of entries that keep a state in codes; allocated on first use."""
        kept = [self._in_codes(states, index, name) for index in plan.tensors]
        return plan.codes.cut(kept), plan.exponents.cut([state.view(torch.int8) for state in kept])

    def plan_codes(self, name: str, parts: Iterable[tuple[Entry, slice]]) -> CodesPlan:
        """Where codes and exponents of parts of stored entries lie.

        Args:
            name: Name of the state.
            parts: In the order of the tensors; each begins with a block, or where its entry does.
        """
        tensors: list[int] = []
        codes: list[list[RunPlace]] = []
        exponents: list[list[RunPlace]] = []
        for entry, part in parts:
            index, start = entry.shard.tensor, entry.shard.start
            slot = self._slots[(index, name)]
            assert slot.coded is not None
            if not tensors or tensors[-1] != index:
                tensors.append(index)
                codes.append([])
                exponents.append([])
            offset, numel = slot.offsets[entry.index], part.stop - part.start
            block = slot.coded.exponents[offset] + (start + part.start) // BLOCK - start // BLOCK
            codes[-1].append(RunPlace(offset + part.start, numel))
            exponents[-1].append(RunPlace(block, blocks_of(start + part.start, numel)))
        return CodesPlan(tuple(tensors), RunPlan(codes), RunPlan(exponents))

    def allocate(self, states: States, index: int) -> None:
        """Make the states of one tensor that it does not have yet, each in the form that steps change."""
        for (at, name), slot in self._slots.items():
            if at == index:
                if slot.coded is None:
                    self._stored(states, index, name, slot)
                else:
                    self._in_codes(states, index, name)

    def allocate_empty(self, states: States, tensor: Tensor) -> None:
        """Make the states of a sharded tensor of which this rank has an empty part."""
        for index in self._empty:
            if self._tensors[index] is tensor:
                self.allocate(states, index)

    def opened(self, index: int, name: str, state: Any) -> Any:
        """A state of one tensor as :meth:`views` would find it, which itself stays as it is."""
        slot = self._slots.get((index, name))
        if slot is None or slot.coded is None or not isinstance(state, Tensor) or not slot.coded.fits(state):
            return state
        owner = self._tensors[index]
        return sharded_like(owner, slot.coded.opened(state, self._local_shape(owner, slot)))

    def flat(self, states: States, index: int, name: str) -> Tensor | None:
        """A state of one tensor in a row, allocated on first use; None if the tensor keeps no such state."""
        return self._flat(states, index, name) if (index, name) in self._slots else None

    def _flat(self, states: States, index: int, name: str) -> Tensor:
        stored = self._stored(states, index, name, self._slots[(index, name)])
        return stored if stored.dim() == 1 else stored.view(-1)

    @staticmethod
    def _first(entry: Entry, slot: _Slot) -> int:
        if entry.stored is None:
            return slot.offsets[entry.index]
        return slot.offsets[entry.stored.index] + entry.shard.offset - entry.stored.shard.offset

    def _stored(self, states: States, index: int, name: str, slot: _Slot) -> Tensor:
        """This rank's part of a state."""
        owner = self._tensors[index]
        state = states[owner]
        stored: Tensor | None = state.get(name)
        if stored is None:
            refuse_capture(owner.device, "the first step of a parameter")
            stored = torch.zeros(self._local_shape(owner, slot), dtype=slot.dtype, device=owner.device)
            state[name] = sharded_like(owner, stored)
            return stored
        cut = self._sharded and type(stored) not in PLAIN
        local: Tensor = stored._local_tensor if cut else stored  # type: ignore[attr-defined]
        if local.dtype != slot.dtype or local.device != owner.device or local.numel() != slot.numel:
            local = self._as_planned(local, owner, name, slot)
            state[name] = sharded_like(owner, local)
        elif cut and not local.is_contiguous():
            # As a checkpoint may have left a part of rows.
            local = local.contiguous()
            state[name] = sharded_like(owner, local)
        return local

    def _as_planned(self, stored: Tensor, owner: Tensor, name: str, slot: _Slot) -> Tensor:
        """A state in codes, of a checkpoint, or of before the model was brought to another type."""
        refuse_capture(owner.device, "the first step with states of another type")
        if slot.coded is not None and slot.coded.fits(stored):
            stored = slot.coded.opened(stored, self._local_shape(owner, slot))
        self._refuse_other_shape(stored, owner, name, slot)
        return stored.to(owner.device, slot.dtype)

    def _in_codes(self, states: States, index: int, name: str) -> Tensor:
        owner, slot = self._tensors[index], self._slots[(index, name)]
        layout, state = slot.coded, states[owner]
        assert layout is not None
        kept: Tensor | None = state.get(name)
        if kept is None or not layout.fits(kept) or kept.device != owner.device:
            refuse_capture(owner.device, "the first step of a parameter, or one with states of another type")
            if kept is None:
                kept = layout.fresh(owner.device)
            elif not layout.fits(kept):
                kept = local_view(kept)
                self._refuse_other_shape(kept, owner, name, slot)
                kept = layout.encoded(kept.reshape(-1))
            kept = state[name] = kept.to(owner.device)
        return kept

    def _refuse_other_shape(self, state: Tensor, owner: Tensor, name: str, slot: _Slot) -> None:
        # Codes that are not of this layout mean nothing.
        if state.numel() != slot.numel or is_coded(state.dtype):
            raise RuntimeError(
                f"the state {name!r} of a parameter has the shape {tuple(state.shape)}, but must have "
                f"{self._shape(owner, slot)}: it was replaced since the optimizer was built; build a new optimizer, or "
                "put the state of that shape back"
            )

    @classmethod
    def _local_shape(cls, owner: Tensor, slot: _Slot) -> tuple[int, ...]:
        return tuple(local_view(owner).shape) if is_sharded(owner) else cls._shape(owner, slot)

    @staticmethod
    def _shape(owner: Tensor, slot: _Slot) -> tuple[int, ...]:
        return tuple(real_view(owner).shape) if slot.compact_numel is None else (slot.compact_numel,)

    def shapes(self, index: int) -> dict[str, tuple[int, ...]]:
        """The shape of every state of one tensor."""
        owner = self._tensors[index]
        return {name: self._shape(owner, slot) for (at, name), slot in self._slots.items() if at == index}

    def offset(self, name: str, entry: Entry) -> int | None:
        """Where the entry's part of a state begins; None if its rule keeps no such state."""
        slot = self._slots.get((entry.shard.tensor, name))
        return None if slot is None else slot.offsets.get(entry.index)

    def of_entries(self, states: States, index: int) -> list[tuple[Entry, dict[str, Tensor]]]:
        """The entries in one tensor with views of their states, allocated if they were not."""
        return [
            (entry, {name: self.views(states, name, [entry])[0] for name in self._spec[entry.index]})
            for entry in self._by_tensor[index]
        ]

    def of_parameter(self, states: States, index: int, name: str, state: str) -> list[tuple[int, Tensor]]:
        """First elements of the runs of one parameter in one tensor, with views of a state its rule keeps."""
        found = []
        for entry in self._by_tensor[index]:
            if entry.info.name == name:
                # A matrix of a stack counts from its own first element.
                before = 0 if entry.key == name else int(entry.key[len(name) + 1 : -1]) * prod(entry.shard.shape)
                found.append((before + entry.shard.start, self.views(states, state, [entry])[0]))
        return found

    def record(self, names: Iterable[str], index: int) -> dict[str, Any]:
        """What one tensor and its states ``names`` store, in plain data.

        Returns:
            ``runs``, with key, shape, start, end and offset of each; and ``states``, with the offsets of the runs'
            parts by name, see :meth:`offset`.
        """
        entries = self._by_tensor[index]
        shards = [entry.shard for entry in entries]
        return {
            "runs": [[part.key, list(part.shape), part.start, part.end, part.offset] for part in shards],
            "states": {name: [self.offset(name, entry) for entry in entries] for name in names},
        }
