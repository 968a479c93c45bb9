"""Where per-element states lie in the tensors that store them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rankwise.intervals import Run
from rankwise.kernels.graphs import refuse_capture
from rankwise.kernels.low_precision_runs import BLOCK, blocks_of, is_coded
from rankwise.kernels.run_views import RunPlan, RunViews, TensorRuns
from rankwise.layout.dtensors import PLAIN, is_sharded, local_view, sharded_like
from rankwise.layout.layout_source import real_view
from rankwise.states.entries import Entry, PlannedEntries
from rankwise.states.packed_states import PackedLayout, PackedValues, StateRun

__all__ = ["CodesPlan", "ElementStates", "StateTypes", "States", "offset_runs"]

StateTypes = Mapping[str, torch.dtype | None]
"""Type of every element state by name, in codes or wider; None means the type of the computation."""

States = Mapping[Tensor, dict[str, Any]]
"""``Optimizer.state``: handed in at every call, because loading a checkpoint replaces it."""


@dataclass(frozen=True)
class _Slot:
    """One state of one tensor: laid out as the tensor itself, or compact if only some of its entries keep it.

    Attributes:
        dtype: Type of the state; of a packed state, its type when opened.
        is_compact: Whether only some of the entries keep it.
        numel: Elements of the state, compact or not.
        offsets: Offsets of the entries' parts, by the entries' index.
        packed: Layout of a state that is kept in codes, or in several types; else None.
    """

    dtype: torch.dtype
    is_compact: bool
    numel: int
    offsets: Mapping[int, int]
    packed: PackedLayout | None = None


def _slot(numel: int, compact: bool, offsets: Mapping[int, int], runs: Sequence[StateRun], kept: torch.dtype) -> _Slot:
    """Make the slot of a state; ``kept`` is the type of a state without runs."""
    # Types are chosen by parameter, so one tensor may keep several types.
    types = list(dict.fromkeys(run.dtype for run in runs)) or [kept]
    narrowest = min(types, key=lambda dtype: dtype.itemsize)
    packed = PackedLayout(narrowest, numel, runs) if len(types) > 1 or is_coded(narrowest) else None
    dtype = narrowest if packed is None else packed.opened_type
    return _Slot(dtype, compact, numel, offsets, packed)


class CodesPlan(NamedTuple):
    """Where the codes and exponents of parts of entries lie, in the order of the parts.

    Attributes:
        tensors: Indices in the unit of the tensors that have parts.
        codes: Index of every code in those states.
        exponents: Index of every exponent in those states.
    """

    tensors: tuple[int, ...]
    codes: RunPlan
    exponents: RunPlan


def offset_runs(entries: Iterable[Entry]) -> TensorRuns[int]:
    """Plan views of entries in weights and gradients."""
    return TensorRuns.of((entry.shard.tensor, entry.shard.stored(entry.shard.offset)) for entry in entries)


class ElementStates:
    """Allocates the element states of a unit's tensors and finds each entry's part of them.

    Args:
        tensors: The tensors of the unit.
        entries: The entries of the unit.
        spec: For every entry, the states its rule keeps.
        dtype: Type of the computation.
        of_empty: States of the sharded tensors of which this rank holds an empty part, by index of the tensor.
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
        # By index of the tensor, and by name of the state.
        self._slots: list[dict[str, _Slot]] = [{} for _ in tensors]
        self._dtype = dtype
        for index, stored in enumerate(self._by_tensor):
            for name in dict.fromkeys(name for entry in stored for name in spec[entry.index]):
                numel = real_view(local_view(tensors[index])).numel()
                self._slots[index][name] = self._slot(numel, stored, name)
        self._empty = tuple(of_empty or ())
        for index, states in (of_empty or {}).items():
            for name, kept in states.items():
                self._slots[index][name] = _slot(0, False, {}, (), dtype if kept is None else kept)

    def _slot(self, full: int, stored: Sequence[Entry], name: str) -> _Slot:
        users = [entry for entry in stored if name in self._spec[entry.index]]
        offsets, position = {}, 0
        compact = len(users) < len(stored)
        for entry in users:
            offsets[entry.index] = position if compact else entry.shard.offset
            position += entry.shard.numel
        runs = [
            StateRun(offsets[entry.index], entry.shard.numel, entry.shard.start, self.type_of(name, entry))
            for entry in users
        ]
        return _slot(position if compact else full, compact, offsets, runs, self._dtype)

    def views(self, states: States, name: str, entries: Iterable[Entry]) -> RunViews:
        """Views of a state that some entries keep in no codes, see :class:`RunPlan`; allocated on first use."""
        if isinstance(entries, PlannedEntries):
            planned = entries.once(("state", name), partial(self._plan, name))
        else:
            planned = self._plan(name, entries)
        return planned.runs.cut(
            [
                self._flat(states, index, name)
                if kind is None
                else PackedLayout.as_type(self._packed(states, index, name), kind)
                for index, kind in planned.tensors
            ]
        )

    def _plan(self, name: str, entries: Iterable[Entry]) -> TensorRuns[tuple[int, torch.dtype | None]]:
        """Plan views of entries in a state; a packed one is viewed as another type for each type that it keeps."""

        def kind(entry: Entry) -> torch.dtype | None:
            packed = self._slots[entry.shard.tensor][name].packed is not None
            return self.type_of(name, entry) if packed else None

        return TensorRuns.of(
            ((entry.shard.tensor, kind(entry)), entry.shard.stored(self._first(entry, name))) for entry in entries
        )

    def type_of(self, name: str, entry: Entry) -> torch.dtype:
        """Type in which an entry's state is kept: that of the codes, where it is kept in codes."""
        return self._spec[entry.stored.index][name] or self._dtype

    def type_now(self, name: str, entry: Entry, state: Tensor) -> torch.dtype:
        """Type of a stored entry's part of a state at the moment: the state may be opened."""
        packed = self._slots[entry.shard.tensor][name].packed
        return self.type_of(name, entry) if packed is not None and packed.fits(state) else state.dtype

    def codes(self, states: States, name: str, plan: CodesPlan) -> tuple[RunViews, RunViews]:
        """Codes and exponents of parts of entries that keep a state in codes; allocated on first use."""
        kept = [self._packed(states, index, name) for index in plan.tensors]
        return plan.codes.cut(kept), plan.exponents.cut([state.view(torch.int8) for state in kept])

    def plan_codes(self, name: str, parts: Iterable[tuple[Entry, slice]]) -> CodesPlan:
        """Find the codes and exponents of parts of stored entries.

        Args:
            name: Name of the state.
            parts: Parts in the order of the tensors; each begins with a block, or where its entry does.
        """
        codes: list[tuple[int, Run]] = []
        exponents: list[tuple[int, Run]] = []
        for entry, part in parts:
            index, start = entry.shard.tensor, entry.shard.start
            slot = self._slots[index][name]
            assert slot.packed is not None
            offset, numel = slot.offsets[entry.index], part.stop - part.start
            block = slot.packed.exponents[offset] + (start + part.start) // BLOCK - start // BLOCK
            codes.append((index, Run(offset + part.start, numel)))
            exponents.append((index, Run(block, blocks_of(start + part.start, numel))))
        tensors, planned = TensorRuns.of(codes)
        return CodesPlan(tensors, planned, TensorRuns.of(exponents).runs)

    def allocate(self, states: States, index: int) -> None:
        """Make the states that one tensor does not have yet, in the form that steps change."""
        for name, slot in self._slots[index].items():
            if slot.packed is None:
                self._stored(states, index, name, slot)
            else:
                self._packed(states, index, name)

    def allocate_empty(self, states: States, tensor: Tensor) -> None:
        """Make the states of a sharded tensor of which this rank has an empty part."""
        for index in self._empty:
            if self._tensors[index] is tensor:
                self.allocate(states, index)

    def opened(self, index: int, name: str, state: Any) -> Any:
        """A copy of a state of one tensor in its opened form."""
        packed = self._layout_of(index, name, state)
        if packed is None:
            return state
        owner = self._tensors[index]
        return sharded_like(owner, packed.opened(state, self._local_shape(owner, self._slots[index][name])))

    def _layout_of(self, index: int, name: str, state: Any) -> PackedLayout | None:
        """The layout of a packed state of one tensor; None where it is not packed, or not any more."""
        slot = self._slots[index].get(name)
        packed = None if slot is None else slot.packed
        return packed if packed is not None and isinstance(state, Tensor) and packed.fits(state) else None

    def taken(self, index: int, name: str, state: Tensor, layout: PackedLayout) -> Tensor:
        """Convert a state that another optimizer has packed to the form in which this one keeps it.

        Args:
            index: Index of the tensor.
            name: Name of the state.
            state: The packed state, of as many elements; it stays as it is.
            layout: Layout of the packed state.
        """
        owner, slot = self._tensors[index], self._slots[index].get(name)
        if slot is None:
            return layout.opened(state, (layout.size,))
        if slot.packed is None:
            return layout.opened(state, self._local_shape(owner, slot), slot.dtype).to(owner.device)
        if slot.packed.is_like(layout):
            return state.to(owner.device, copy=True)
        return slot.packed.packed_again(state, layout, owner.device)

    def flat(self, states: States, index: int, name: str) -> Tensor | None:
        """A state of one tensor in one dimension, allocated on first use; None if the tensor keeps no such state."""
        return self._flat(states, index, name) if name in self._slots[index] else None

    def _flat(self, states: States, index: int, name: str) -> Tensor:
        stored = self._stored(states, index, name, self._slots[index][name])
        return stored if stored.dim() == 1 else stored.view(-1)

    def _first(self, entry: Entry, name: str) -> int:
        slot, stored = self._slots[entry.shard.tensor][name], entry.stored
        offset = slot.offsets[stored.index]
        first = offset if slot.packed is None else slot.packed.firsts[offset]
        return first + entry.shard.offset - stored.shard.offset

    def refuse_unfit(self, states: States, index: int, what: str, fix: str) -> None:
        """Refuse states that users have replaced by something that no step can use.

        Args:
            states: The optimizer's state.
            index: Index of a tensor of the unit.
            what: Subject of the message, with a placeholder for the state's name.
            fix: What else helps.

        Raises:
            RuntimeError: A state is no tensor, or has another shape.
        """
        owner, kept = self._tensors[index], states[self._tensors[index]]
        for name, slot in self._slots[index].items():
            if name in kept:
                self._refuse_unfit(kept[name], owner, slot, what.format(name), fix)

    @classmethod
    def _refuse_unfit(
        cls, state: Any, owner: Tensor, slot: _Slot, what: str, fix: str = "build a new optimizer"
    ) -> None:
        if not isinstance(state, Tensor):
            fault = "is no tensor"
        elif slot.packed is not None and slot.packed.fits(state):
            return
        else:
            local = local_view(state)
            # Codes of another layout cannot be read.
            if tuple(local.shape) in (cls._local_shape(owner, slot), (slot.numel,)) and not is_coded(local.dtype):
                return
            fault = f"has the shape {tuple(local.shape)}"
        raise RuntimeError(
            f"{what} {fault}, but must have {cls._shape(owner, slot)}: it was replaced since the optimizer was built; "
            f"put the state of that shape back, or, {fix}"
        )

    def lay_in_rows(self, states: States, index: int) -> None:
        """Make states contiguous, as :meth:`views` expects them; users may have put others there."""
        kept = states[self._tensors[index]]
        for name in self._slots[index]:
            state = kept.get(name)
            if state is not None and type(state) in PLAIN and not state.is_contiguous():
                kept[name] = state.contiguous()

    def _stored(self, states: States, index: int, name: str, slot: _Slot) -> Tensor:
        """This rank's part of a state, allocated on first use."""
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
            # A checkpoint may have left a part of rows.
            local = local.contiguous()
            state[name] = sharded_like(owner, local)
        return local

    def _as_planned(self, stored: Tensor, owner: Tensor, name: str, slot: _Slot) -> Tensor:
        """Convert a packed state from a checkpoint, or from before the model was brought to another type."""
        refuse_capture(owner.device, "the first step with states of another type")
        if slot.packed is not None and slot.packed.fits(stored):
            stored = slot.packed.opened(stored, self._local_shape(owner, slot))
        self._refuse_unfit(stored, owner, slot, f"the state {name!r} of a parameter")
        return stored.to(owner.device, slot.dtype)

    def _packed(self, states: States, index: int, name: str) -> Tensor:
        owner, slot = self._tensors[index], self._slots[index][name]
        layout, state = slot.packed, states[owner]
        assert layout is not None
        kept: Tensor | None = state.get(name)
        if kept is None or not layout.fits(kept) or kept.device != owner.device:
            refuse_capture(owner.device, "the first step of a parameter, or one with states of another type")
            if kept is None:
                kept = layout.fresh(owner.device)
            elif not layout.fits(kept):
                self._refuse_unfit(kept, owner, slot, f"the state {name!r} of a parameter")
                kept = layout.packed(local_view(kept).reshape(-1))
            kept = state[name] = kept.to(owner.device)
        return kept

    @classmethod
    def _local_shape(cls, owner: Tensor, slot: _Slot) -> tuple[int, ...]:
        return tuple(local_view(owner).shape) if is_sharded(owner) else cls._shape(owner, slot)

    @staticmethod
    def _shape(owner: Tensor, slot: _Slot) -> tuple[int, ...]:
        return (slot.numel,) if slot.is_compact else tuple(real_view(owner).shape)

    def shapes(self, index: int) -> dict[str, tuple[int, ...]]:
        """Shapes of all states of one tensor."""
        owner = self._tensors[index]
        return {name: self._shape(owner, slot) for name, slot in self._slots[index].items()}

    def offset(self, name: str, entry: Entry) -> int | None:
        """Offset of an entry's part of an opened state; None if its rule keeps no such state."""
        slot = self._slots[entry.shard.tensor].get(name)
        return None if slot is None else slot.offsets.get(entry.index)

    def _place(self, states: States, name: str, entry: Entry) -> Tensor | PackedValues:
        index, slot = entry.shard.tensor, self._slots[entry.shard.tensor][name]
        if slot.packed is None:
            return self._open_view(states, name, entry)
        kept = self._packed(states, index, name)
        return PackedValues(kept, slot.packed, slot.offsets[entry.index], entry.shard.numel)

    def of_entries(self, states: States, index: int, closed: bool = False) -> list[tuple[Entry, dict[str, Any]]]:
        """The entries in one tensor with views of their states, which are allocated if need be.

        Packed states are opened, or stay packed and :class:`PackedValues` stand for them, if ``closed``.
        """
        place = self._place if closed else self._open_view
        return [
            (entry, {name: place(states, name, entry) for name in self._spec[entry.index]})
            for entry in self._by_tensor[index]
        ]

    def _open_view(self, states: States, name: str, entry: Entry) -> Tensor:
        """A view of a stored entry's part of a state, which stays opened until the next step."""
        offset = self._slots[entry.shard.tensor][name].offsets[entry.index]
        return self._flat(states, entry.shard.tensor, name)[offset : offset + entry.shard.numel]

    def of_parameter(self, states: States, index: int, name: str, state: str) -> list[tuple[int, Tensor]]:
        """First element and view of the state, for each run of one parameter in one tensor."""
        runs = []
        for entry in self._by_tensor[index]:
            if entry.info.name == name:
                # A matrix of a stack counts from its own first element.
                before = 0 if entry.key == name else int(entry.key[len(name) + 1 : -1]) * prod(entry.shard.shape)
                runs.append((before + entry.shard.start, self._open_view(states, state, entry)))
        return runs

    def record(self, held: Mapping[str, Any], index: int) -> dict[str, Any]:
        """Describe what one tensor and its states store, in plain data.

        Returns:
            ``runs`` has key, shape, start, end and offset of each run; ``states`` the offsets of the runs' parts by
            name, see :meth:`offset`; ``packed`` the packed states, see :meth:`PackedLayout.record`.
        """
        entries, owner = self._by_tensor[index], self._tensors[index]
        shards = [entry.shard for entry in entries]
        packed = {}
        for name, state in held.items():
            layout = self._layout_of(index, name, state)
            if layout is not None:
                packed[name] = layout.record(self._local_shape(owner, self._slots[index][name]))
        return {
            "runs": [[part.key, list(part.shape), part.start, part.end, part.offset] for part in shards],
            "states": {name: [self.offset(name, entry) for entry in entries] for name in held},
            **({"packed": packed} if packed else {}),
        }
