"""Narrow states during one step: passes take them as they are stored, or opened, and they are stored again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from rankwise.intervals import Run
from rankwise.kernels.dispatch import quantization_for
from rankwise.kernels.low_precision_runs import BLOCK, LowPrecisionRuns, blocks_of, is_coded, is_narrow
from rankwise.kernels.passes import Field
from rankwise.kernels.quantization import key_of
from rankwise.layout.indices import DeviceIndices
from rankwise.states.element_states import CodesPlan, ElementStates, States
from rankwise.states.entries import Entry, PlannedEntries
from rankwise.states.optimizer_spec import OptimizerSpec
from rankwise.states.quantized_segments import Segment, Segments, part_in_stored, segments_of
from rankwise.states.shared_exponents import SharedExponents
from rankwise.updates.adamw import Step

__all__ = ["LowPrecisionStates", "NarrowPlan", "PassPart"]

# Sets of parameters that have gradients can differ at every step; the plans made for them are bounded.
_MOST_PLANS = 4096


class RuleBucket(Protocol):
    """What is asked of a :class:`rankwise.plan.step_unit.Bucket`."""

    entries: PlannedEntries
    grads: list[Tensor]

    @property
    def step(self) -> Step:
        """The number of this step, or (entries,) numbers on the device."""


@dataclass(frozen=True, slots=True)
class PassPart:
    """Parts of a bucket's entries whose states a pass gets in one form.

    Attributes:
        places: Indices of the entries in the bucket.
        parts: Elements of each of these entries; None: all of their elements.
        states: What the pass takes as its states, by name.
    """

    places: Sequence[int]
    parts: Sequence[slice] | None
    states: Mapping[str, Field]

    def cut(self, tensors: list[Tensor]) -> list[Tensor]:
        """Take these parts of a bucket's tensors; returns the list itself if that is all of them."""
        if self.parts is None and len(self.places) == len(tensors):
            return tensors
        chosen = [tensors[place] for place in self.places]
        return chosen if self.parts is None else [tensor[part] for tensor, part in zip(chosen, self.parts, strict=True)]


@dataclass(slots=True)
class _Opened:
    """Opened elements of a stored entry, in the type of the computation until they are stored again.

    Attributes:
        entry: The entry that stores the state.
        name: Name of the state.
        part: Range of the elements.
        values: Their present values.
        step: Number of the step.
    """

    entry: Entry
    name: str
    part: slice
    values: Tensor
    step: int | Tensor

    @property
    def first(self) -> int:
        return self.entry.shard.start + self.part.start


@dataclass(frozen=True)
class _PassPlan:
    """How the entries of a bucket are cut for a pass over some states."""

    # places of entries whose states have no codes, by the types of their states
    kept: dict[tuple[torch.dtype, ...], list[int]] = field(default_factory=dict)
    spread: list[int] = field(default_factory=list)  # places of entries that are opened as a whole
    whole: list[tuple[int, slice, slice]] = field(default_factory=list)  # place, its elements, the stored entry's
    loose: list[tuple[int, slice, int, slice]] = field(default_factory=list)  # place, its elements, run, the run's


@dataclass
class NarrowPlan:
    """What outlives the steps of a unit of its narrow states.

    Attributes:
        kept: Describes the stored states of every parameter.
        entries: Entries of the unit.
        shared: Agrees on the exponents of blocks that several runs share.
        indices: Puts indices on the device.
        dtype: Type of the computation.
        spec: Tells which states are rounded stochastically.
        rows: For a part of a state, its blocks that other ranks share, with their rows in the message.
        runs: Where parts of entries lie in a state.
        segments: How stored entries are cut, by their index.
    """

    kept: ElementStates
    entries: Sequence[Entry]
    shared: SharedExponents
    indices: DeviceIndices
    dtype: torch.dtype
    spec: OptimizerSpec
    rows: dict[tuple[int, str, int, int], dict[int, int]] = field(default_factory=dict)
    runs: dict[Any, tuple[Any, Any, Any]] = field(default_factory=dict)
    segments: dict[int, Segments] = field(default_factory=dict)

    @cached_property
    def made_of(self) -> dict[int, list[Entry]]:
        """Entries of the unit by the index of the stored entry that keeps their states."""
        made_of: dict[int, list[Entry]] = {}
        for entry in self.entries:
            made_of.setdefault(entry.stored.index, []).append(entry)
        return made_of

    def segments_of(self, stored: Entry) -> Segments:
        """How a stored entry is cut."""
        if stored.index not in self.segments:
            self.segments[stored.index] = segments_of(stored, self.made_of[stored.index])
        return self.segments[stored.index]


class LowPrecisionStates:
    """The narrow states of a unit, from the beginning of a step to its end.

    Args:
        plan: The unit's.
        states: The optimizer's state.
    """

    def __init__(self, plan: NarrowPlan, states: States) -> None:
        self._plan, self._states, self._kept, self._indices = plan, states, plan.kept, plan.indices
        self._stochastic = plan.spec.rounds_stochastically
        self._form = quantization_for(plan.indices.device, plan.dtype)
        if len(plan.rows) + len(plan.runs) > _MOST_PLANS:
            plan.rows.clear()
            plan.runs.clear()
        self._opened: dict[tuple[int, str, int | None], _Opened] = {}

    # --- what a step reads --------------------------------------------------------------------------------------

    def passes(
        self, bucket: RuleBucket, names: Sequence[str], opened: Mapping[str, list[Tensor]]
    ) -> Iterator[PassPart]:
        """Cut a bucket into parts that have their states in one form each; opened ones are taken as they are."""
        narrow = tuple(name for name in names if name not in opened)
        plan = bucket.entries.once(("narrow", narrow), lambda entries: self._cut(entries, narrow))
        wide = {name: opened[name] for name in names if name in opened}
        for places in plan.kept.values():
            yield self._part(places, None, {name: self._as_kept(bucket, name, places) for name in narrow}, wide)
        if plan.spread:
            spread = bucket.entries.only(plan.spread)
            yield self._part(plan.spread, None, {name: self._all_of(bucket, name, spread) for name in narrow}, wide)
        if plan.whole:
            places, own, kept = (list(column) for column in zip(*plan.whole, strict=True))
            parts = [(bucket.entries[place].stored, part) for place, part in zip(places, kept, strict=True)]
            whole = all(part == slice(0, bucket.entries[at].shard.numel) for at, part in zip(places, own, strict=True))
            fields = {name: self._whole(bucket, name, places, parts, own) for name in narrow}
            yield self._part(places, None if whole else own, fields, wide)
        if plan.loose:
            places = [place for place, *_ in plan.loose]
            fields = {name: self._loose(bucket, name, plan.loose) for name in narrow}
            yield self._part(places, [own for _, own, _, _ in plan.loose], fields, wide)

    @staticmethod
    def _part(
        places: Sequence[int], parts: Sequence[slice] | None, fields: dict[str, Field], wide: Mapping[str, list[Tensor]]
    ) -> PassPart:
        part = PassPart(places, parts, fields)
        for name, tensors in wide.items():
            fields[name] = part.cut(tensors)
        return part

    def whole_runs(self, bucket: RuleBucket, names: Sequence[str]) -> Iterator[PassPart]:
        """Cut a bucket into parts whose states have one type each, with every entry's state in one run.

        A pass must leave the new values of blocks that other runs share where :class:`LowPrecisionRuns` says; they are
        stored at the end of the step. The stored entries must have no gaps.
        """
        for places in bucket.entries.once(("types", *names), lambda entries: self._by_types(entries, names)):
            yield PassPart(places, None, {name: self._run(bucket, name, places) for name in names})

    def _by_types(self, entries: Sequence[Entry], names: Sequence[str]) -> list[tuple[int, ...]]:
        groups: dict[tuple[torch.dtype, ...], list[int]] = {}
        for place, entry in enumerate(entries):
            groups.setdefault(tuple(self._kept.type_of(name, entry) for name in names), []).append(place)
        return [tuple(places) for places in groups.values()]

    def _run(self, bucket: RuleBucket, name: str, places: tuple[int, ...]) -> Field:
        entries = bucket.entries
        if not is_coded(self._kept.type_of(name, entries[places[0]])):
            return self._as_kept(bucket, name, places)
        runs = self._narrow(name, [(entries[place], slice(0, entries[place].shard.numel)) for place in places])
        ends = entries.once(("ends", *places), lambda entries: [self._ends_of(entries[place]) for place in places])
        wanted = [(place, end) for place, pair in zip(places, ends, strict=True) for end in pair if end is not None]
        self._open(bucket, name, [(place, end.run) for place, end in wanted])

        def loose(place: int, end: Segment | None) -> Tensor | None:
            return None if end is None else self._opened[entries[place].index, name, end.run].values[end.within]

        memory = [(loose(place, head), loose(place, tail)) for place, (head, tail) in zip(places, ends, strict=True)]
        return replace(runs, step=self._step(bucket, name, places), loose=memory if wanted else ())

    def _ends_of(self, entry: Entry) -> tuple[Segment | None, Segment | None]:
        """The loose segments at the beginning and at the end of a stored entry."""
        loose = [piece for piece in self._plan.segments_of(entry).pieces[entry.index] if piece.run is not None]
        head = loose.pop(0) if loose and loose[0].own.start == 0 and entry.shard.start % BLOCK else None
        return head, loose.pop() if loose else None

    def opened(self, bucket: RuleBucket, name: str) -> list[Tensor]:
        """A state of a bucket's entries in the type of the computation; changes are stored at the end of the step.

        Tensors are 1-D, or (parts, elements) where an entry is stored with gaps.
        """
        if not self.is_narrow(bucket, name):
            return self._kept.views(self._states, name, bucket.entries)
        return self._all_of(bucket, name, bucket.entries)

    def peeked(self, bucket: RuleBucket, name: str, parts: Sequence[tuple[int, slice]]) -> list[Tensor]:
        """Read parts of a state, by entry index and elements, in the computation's type; for stored entries only."""
        if not self.is_narrow(bucket, name):
            views = self.kept(bucket, name)
            return [views[place][part] for place, part in parts]
        values: list[Tensor] = []
        opened: list[Tensor] = []
        runs: list[tuple[Entry, slice]] = []
        for place, part in parts:
            entry = bucket.entries[place]
            if not self._is_narrow(entry, name):
                (view,) = self._kept.views(self._states, name, bucket.entries.only([place]))
                values.append(view[part])
                continue
            assert entry.whole is None
            # States can only be opened from the beginning of a block.
            before = min(part.start, (entry.shard.start + part.start) % BLOCK)
            runs.append((entry, slice(part.start - before, part.stop)))
            opened.append(
                torch.empty(before + part.stop - part.start, dtype=self._plan.dtype, device=self._indices.device)
            )
            values.append(opened[-1][before:])
        if opened:
            self._form.decode_(opened, self._narrow(name, runs))
        return values

    def kept(self, bucket: RuleBucket, name: str) -> list[Tensor]:
        """A state of a bucket's entries as it is stored, which must not be in codes."""
        return self._kept.views(self._states, name, bucket.entries)

    def is_narrow(self, bucket: RuleBucket, name: str) -> bool:
        """Whether any entry of a bucket keeps a state narrow."""
        return bucket.entries.once(("narrow", name), lambda entries: any(self._is_narrow(e, name) for e in entries))

    def is_coded(self, bucket: RuleBucket, name: str) -> bool:
        """Whether any entry of a bucket stores a state in codes."""
        return bucket.entries.once(
            ("coded", name), lambda entries: any(is_coded(self._kept.type_of(name, e)) for e in entries)
        )

    def open_onto(self, bucket: RuleBucket, name: str, spends: Any) -> list[Tensor]:
        """Add a state to the gradients; the sums become the state at the end of the step.

        Args:
            bucket: All of its entries store the state in codes, and it has all entries of every stored one.
            name: Name of the state.
            spends: Tells, for a stored entry and its gradient, whether the gradient's memory may be overwritten.

        Returns:
            The sums by entry.
        """
        places: dict[int, list[int]] = {}
        for place, entry in enumerate(bucket.entries):
            places.setdefault(entry.stored.index, []).append(place)
        result = list(bucket.grads)
        grads, sums, parts = [], [], []
        for members in places.values():
            first = bucket.entries[members[0]]
            stored = first.stored
            grad = _around(first, stored, result[members[0]])
            total = grad if spends(stored, grad) else torch.empty_like(grad)
            for place in members:
                result[place] = _place(bucket.entries[place], stored).of(total)
            grads.append(grad)
            sums.append(total)
            parts.append((stored, slice(0, stored.shard.numel)))
            self._opened[(stored.index, name, None)] = _Opened(stored, name, parts[-1][1], total, _step_of(bucket, 0))
        self._form.add_decoded(grads, self._narrow(name, parts), sums)
        return result

    def chosen(self, values: Tensor, places: Sequence[int]) -> Tensor:
        """Select a bucket's values, of which it has one for each entry, by the indices of entries."""
        return values.index_select(0, self._indices.of(tuple(places)))

    # --- the end of a step --------------------------------------------------------------------------------------

    def close(self) -> None:
        """Store all opened states; a collective that all ranks enter where ranks have blocks in common."""
        self._keep(list(self._opened.values()), agree=True)
        self._opened.clear()

    def keep_apart(self) -> None:
        """Store what shares no block with other runs now, so that its memory is free."""
        apart = {key: run for key, run in self._opened.items() if not self._rows_of(run)}
        self._keep(list(apart.values()), agree=False)
        for key in apart:
            del self._opened[key]

    def _keep(self, runs: list[_Opened], agree: bool) -> None:
        agree = agree and bool(self._plan.shared)
        later: list[tuple[list[_Opened], LowPrecisionRuns, Tensor]] = []
        for opened, stored in self._by_state(runs):
            values = [run.values for run in opened]
            if agree and is_coded(stored.dtype):
                later.append((opened, stored, self._form.exponents_of(values, stored)))
            else:
                self._form.encode_(values, stored)
        for opened, stored, exponents in self._agreed(later) if agree else ():
            self._form.encode_([run.values for run in opened], stored, exponents)

    def _agreed(self, found: list[tuple[list[_Opened], LowPrecisionRuns, Tensor]]) -> Iterator[_Found]:
        positions: list[int] = []
        rows: list[int] = []
        start = 0
        for runs, stored, _ in found:
            for run, values in zip(runs, stored.exponents, strict=True):
                for block, row in self._rows_of(run).items():
                    positions.append(start + block)
                    rows.append(row)
                start += values.numel()
        nothing = torch.empty(0, dtype=torch.int8, device=self._indices.device)
        agreed = self._plan.shared.agree(torch.cat([nothing, *(values for *_, values in found)]), positions, rows)
        for (runs, stored, _), values in zip(found, agreed.split([len(values) for *_, values in found]), strict=True):
            yield runs, stored, values

    def _by_state(self, runs: list[_Opened]) -> Iterator[tuple[list[_Opened], LowPrecisionRuns]]:
        groups: dict[tuple[str, Any], list[_Opened]] = {}
        for run in runs:
            count = run.step if isinstance(run.step, int) else None
            groups.setdefault((run.name, count if self._stochastic(run.name) else 0), []).append(run)
        for (name, _), opened in groups.items():
            steps: Any = opened[0].step
            if not isinstance(steps, int):
                steps = torch.stack([run.step for run in opened])  # type: ignore[misc]
            stored = self._narrow(name, [(run.entry, run.part) for run in opened])
            yield opened, replace(stored, step=steps if self._stochastic(name) else None)

    def _rows_of(self, run: _Opened) -> dict[int, int]:
        """Rows in the message of a run's blocks that other runs share; only its first and last can be."""
        key = (run.entry.index, run.name, run.part.start, run.part.stop)
        if key not in self._plan.rows:
            last = blocks_of(run.first, run.part.stop - run.part.start) - 1
            rows = {block: self._plan.shared.row(run.entry.shard, run.name, run.first, block) for block in (0, last)}
            self._plan.rows[key] = {block: row for block, row in rows.items() if row is not None}
        return self._plan.rows[key]

    # --- where states are stored --------------------------------------------------------------------------------

    def _cut(self, entries: Sequence[Entry], names: Sequence[str]) -> _PassPlan:
        plan = _PassPlan()
        for place, entry in enumerate(entries):
            types = tuple(self._kept.type_of(name, entry) for name in names)
            if any(map(is_narrow, types)) and not self._plan.segments_of(entry.stored).pieces:
                plan.spread.append(place)
            elif any(map(is_coded, types)):
                for piece in self._plan.segments_of(entry.stored).pieces[entry.index]:
                    if piece.run is None:
                        plan.whole.append((place, piece.own, piece.within))
                    else:
                        plan.loose.append((place, piece.own, piece.run, piece.within))
            else:
                plan.kept.setdefault(types, []).append(place)
        return plan

    def _whole(
        self,
        bucket: RuleBucket,
        name: str,
        places: Sequence[int],
        parts: Sequence[tuple[Entry, slice]],
        own: list[slice],
    ) -> Field:
        if is_narrow(self._kept.type_of(name, parts[0][0])):
            return replace(self._narrow(name, parts), step=self._step(bucket, name, places))
        views = self._kept.views(self._states, name, bucket.entries.only(places))
        return [view[part] for view, part in zip(views, own, strict=True)]

    def _loose(self, bucket: RuleBucket, name: str, pieces: Sequence[tuple[int, slice, int, slice]]) -> Field:
        entries = bucket.entries
        places = [place for place, *_ in pieces]
        if not is_coded(self._kept.type_of(name, entries[places[0]])):
            parts = [
                (entries[place].stored, _shifted(part_in_stored(entries[place]), elements))
                for place, elements, *_ in pieces
            ]
            return self._whole(bucket, name, places, parts, [elements for _, elements, *_ in pieces])
        wanted = {(entries[place].stored.index, run): place for place, _, run, _ in pieces}
        self._open(bucket, name, [(place, run) for (_, run), place in wanted.items()])
        return [self._opened[entries[place].stored.index, name, run].values[within] for place, _, run, within in pieces]

    def _all_of(self, bucket: RuleBucket, name: str, entries: PlannedEntries) -> list[Tensor]:
        """The opened state of entries; of those that keep it wide, the stored state itself."""
        place_of = {entry.stored.index: place for place, entry in enumerate(bucket.entries)}
        narrow = [self._is_narrow(entry, name) for entry in entries]
        stored = {entry.stored.index for entry, opens in zip(entries, narrow, strict=True) if opens}
        self._open(bucket, name, [(place_of[index], None) for index in stored])
        wide = entries.only([place for place, opens in enumerate(narrow) if not opens])
        views = iter(self._kept.views(self._states, name, wide))
        return [
            _place(entry, entry.stored).of(self._opened[entry.stored.index, name, None].values)
            if opens
            else next(views)
            for entry, opens in zip(entries, narrow, strict=True)
        ]

    def _open(self, bucket: RuleBucket, name: str, wanted: Sequence[tuple[int, int | None]]) -> None:
        """Open runs of the stored entries of a bucket's places that are not open yet."""
        opened = []
        for place, run in wanted:
            stored = bucket.entries[place].stored
            if (stored.index, name, run) in self._opened:
                continue
            part = slice(0, stored.shard.numel)
            if run is not None:
                part = self._plan.segments_of(bucket.entries[place].stored).loose[run]
            values = torch.empty(part.stop - part.start, dtype=self._plan.dtype, device=self._indices.device)
            run_opened = _Opened(stored, name, part, values, _step_of(bucket, place))
            self._opened[stored.index, name, run] = run_opened
            opened.append(run_opened)
        if opened:
            kept = self._narrow(name, [(run.entry, run.part) for run in opened])
            self._form.decode_([run.values for run in opened], kept)

    def _narrow(self, name: str, parts: Sequence[tuple[Entry, slice]]) -> LowPrecisionRuns:
        """The stored runs of a state that parts of stored entries cover."""
        key = (name, tuple((entry.index, part.start, part.stop) for entry, part in parts))
        if key not in self._plan.runs:
            self._plan.runs[key] = self._planned(name, parts)
        plan, firsts, keys = self._plan.runs[key]
        if plan is not None:
            return LowPrecisionRuns(*self._kept.codes(self._states, name, plan), firsts, keys)
        views = self._kept.views(self._states, name, [entry for entry, _ in parts])
        return LowPrecisionRuns([view[part] for view, (_, part) in zip(views, parts, strict=True)], (), firsts, keys)

    def _planned(
        self, name: str, parts: Sequence[tuple[Entry, slice]]
    ) -> tuple[CodesPlan | None, list[int], list[int]]:
        plan = self._kept.plan_codes(name, parts) if is_coded(self._kept.type_of(name, parts[0][0])) else None
        firsts = [entry.shard.start + part.start for entry, part in parts]
        return plan, firsts, [key_of(entry.key, name) for entry, _ in parts]

    def _as_kept(self, bucket: RuleBucket, name: str, places: Sequence[int]) -> Field:
        """The state of entries whose state has no codes."""
        entries = bucket.entries if len(places) == len(bucket.entries) else bucket.entries.only(places)
        views = self._kept.views(self._states, name, entries)
        if not is_narrow(self._kept.type_of(name, entries[0])):
            return views
        firsts = [e.stored.shard.start + part_in_stored(e).start for e in entries]
        keys = [key_of(entry.stored.key, name) for entry in entries]
        return LowPrecisionRuns(views, (), firsts, keys, self._step(bucket, name, places))

    def _step(self, bucket: RuleBucket, name: str, places: Sequence[int]) -> Step | None:
        if not self._stochastic(name):
            return None
        step = bucket.step
        return self.chosen(step, places) if isinstance(step, Tensor) else step

    def _is_narrow(self, entry: Entry, name: str) -> bool:
        return is_narrow(self._kept.type_of(name, entry))


_Found = tuple[list[_Opened], LowPrecisionRuns, Tensor]


def _step_of(bucket: RuleBucket, place: int) -> int | Tensor:
    step = bucket.step
    return step[place] if isinstance(step, Tensor) else step


def _shifted(within: slice, own: slice) -> slice:
    return slice(within.start + own.start, within.start + own.stop)


def _place(entry: Entry, stored: Entry) -> Run:
    return entry.shard.stored(entry.shard.offset - stored.shard.offset)


def _around(entry: Entry, stored: Entry, grad: Tensor) -> Tensor:
    """Extend the gradient of an entry to all that is stored together with the entry."""
    first = grad.storage_offset() - _place(entry, stored).offset
    return grad.as_strided((stored.shard.numel,), (1,), first)
