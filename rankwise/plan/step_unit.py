"""The work of one ``step()`` call: the tensors that the framework handed over, cut into named shards."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from math import prod
from operator import attrgetter
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rankwise.comm.exchange import MatrixExchange
from rankwise.comm.halo import HaloExchange
from rankwise.comm.host_link import HostLink
from rankwise.comm.message_format import Traffic
from rankwise.comm.owner_plan import MatrixTask
from rankwise.comm.parameter_sums import ShardSums
from rankwise.kernels import lists
from rankwise.kernels.dispatch import kernels_for
from rankwise.kernels.graphs import refuse_capture
from rankwise.kernels.passes import FIELDS, Field, Pass, Scalars, only_some
from rankwise.kernels.passes import Rule as PassRule
from rankwise.kernels.run_views import are_runs, chosen_of
from rankwise.layout.dtensors import is_sharded, local_gradients, local_view
from rankwise.layout.equal_slices import SlicedMatrix
from rankwise.layout.indices import DeviceIndices
from rankwise.layout.layout import Layout
from rankwise.layout.layout_source import TensorContents, WorkPlace
from rankwise.plan.low_precision_states import LowPrecisionStates, NarrowPlan, PassPart
from rankwise.plan.notes import Note, Notes
from rankwise.routing.roles import ParameterInfo, Rule
from rankwise.states.declared_states import StatePart, StoredState
from rankwise.states.element_states import ElementStates, States, StateTypes
from rankwise.states.entries import Entry, PlannedEntries
from rankwise.states.matrix_states import MatrixState
from rankwise.states.optimizer_spec import OptimizerSpec
from rankwise.states.shared_exponents import SharedExponents
from rankwise.updates.adamw import Step

__all__ = [
    "AT_ONCE",
    "WHOLE",
    "Bucket",
    "Collectives",
    "PlannedParameter",
    "StepUnit",
    "UnitKey",
    "joined",
    "portion_sizes",
    "portions",
    "spans",
]

_INDEX = attrgetter("index")

WHOLE = slice(None)
"""All elements of an entry."""

AT_ONCE = 7 << 24
"""Elements that are given temporary memory at a time, unless one parameter has more: less than half a GiB."""

UnitKey = tuple[tuple[int, ...], ...]
"""Position of every group that has tensors, followed by their ``id``."""


@dataclass
class Bucket:
    """Entries that have a gradient and share a param group and a rule, with their tensors in the same order.

    Tensors are 1-D; blocks of a fused weight that are stored with gaps are (parts, elements).

    Attributes:
        count: The step count that all entries share; None where only the device knows the counts.
        narrow: The narrow states of the unit.
        found: States that have been asked for, in the type of the computation.
    """

    group: dict[str, Any]
    rule: Rule
    count: int | None
    entries: PlannedEntries
    weights: list[Tensor]
    grads: list[Tensor]
    narrow: LowPrecisionStates = field(repr=False)
    _counts: Callable[[Sequence[Entry]], Tensor] = field(repr=False)
    found: dict[str, list[Tensor]] = field(default_factory=dict, init=False, repr=False)

    @property
    def step(self) -> Step:
        """The number of this step, or (entries,) numbers on the device."""
        return self._counts(self.entries) if self.count is None else self.count

    def state(self, name: str) -> list[Tensor]:
        """An element state of the bucket's shards, opened if it is narrow; it is opened once a step."""
        if name not in self.found:
            self.found[name] = self.narrow.opened(self, name)
        return self.found[name]

    def parts(self, states: Sequence[str]) -> Iterator[PassPart]:
        """Cut the bucket into parts that have these states in one form each."""
        for name in states:
            if name not in self.found and not self.narrow.is_narrow(self, name):
                self.state(name)
        return self.narrow.passes(self, states, self.found)

    def passes(
        self,
        rule: PassRule,
        states: Sequence[str] | Mapping[str, str],
        scalars: Scalars,
        factors: Tensor | None = None,
        *,
        onto: Sequence[Tensor] | None = None,
    ) -> Iterator[Pass]:
        """Apply a rule to the whole bucket; states are opened and stored on the way.

        Args:
            rule: The update of an element.
            states: Names of the rule's states, and "reference" where gradients are compared with one; or a mapping from
                the rule's names to those of the states it is to take.
            scalars: The rule's numbers.
            factors: (entries,), see :class:`rankwise.kernels.passes.Pass`.
            onto: Tensors that the rule changes in the place of weights, by entry; None: the weights.
        """
        changed = self.weights if onto is None else list(onto)
        named = states if isinstance(states, Mapping) else {name: name for name in states}
        for part in self.parts(tuple(named.values())):
            fields = {"grad": part.cut(self.grads), **{name: part.states[state] for name, state in named.items()}}
            if "param" in FIELDS[rule]:
                fields["param"] = part.cut(changed)
            if part.parts is None and len(part.places) == len(self.entries):
                yield Pass(rule, fields, scalars, factors)
            else:
                chosen = partial(self.narrow.chosen, places=part.places)
                step = chosen(scalars.step) if isinstance(scalars.step, Tensor) else scalars.step
                yield Pass(rule, fields, replace(scalars, step=step), None if factors is None else chosen(factors))

    def only(self, places: Sequence[int]) -> Bucket:
        """A bucket of some of these entries, given by their indices."""
        return replace(
            self,
            entries=self.entries.only(places),
            weights=chosen_of(self.weights, places),
            grads=chosen_of(self.grads, places),
        )

    def pieces(self, found: Sequence[tuple[int, slice]], grads: list[Tensor], states: Sequence[str]) -> Bucket:
        """A bucket of parts of entries, given by index and elements, with other gradients and only these states."""
        whole = self.only([place for place, _ in found])
        parts = [part for _, part in found]
        if all(part == WHOLE for part in parts):
            return replace(whole, grads=grads)

        def cut(tensors: Sequence[Tensor]) -> list[Tensor]:
            return [tensor if part == WHOLE else tensor[part] for tensor, part in zip(tensors, parts, strict=True)]

        cut_out = replace(whole, weights=cut(whole.weights), grads=grads)
        cut_out.found.update((name, cut(whole.state(name))) for name in states)
        return cut_out


def joined(values: Sequence[Tensor]) -> Tensor:
    """Concatenate the 1-D tensors of all buckets; the tensor itself if there is one bucket."""
    return values[0] if len(values) == 1 else torch.cat(list(values))


def spans(buckets: Sequence[Bucket]) -> Iterator[tuple[Bucket, slice]]:
    """Where each bucket's part lies in a list that runs over the entries of all of them."""
    position = 0
    for bucket in buckets:
        yield bucket, slice(position, position + len(bucket.entries))
        position += len(bucket.entries)


def portions(buckets: Sequence[Bucket], size: Callable[[Entry, Tensor], int]) -> Iterator[list[Bucket]]:
    """Cut buckets into portions that need memory for :data:`AT_ONCE` elements at a time.

    Args:
        buckets: The buckets; if there are none, there is one empty portion.
        size: Elements that an entry with this gradient needs; one entry may need more than a portion has.
    """
    portion: list[Bucket] = []
    elements = 0
    for bucket in buckets:
        places: list[int] = []
        for place, entry_and_grad in enumerate(zip(bucket.entries, bucket.grads, strict=True)):
            needed = size(*entry_and_grad)
            if needed and elements and elements + needed > AT_ONCE:
                yield [*portion, bucket.only(places)] if places else portion
                portion, places, elements = [], [], 0
            places.append(place)
            elements += needed
        if places:
            portion.append(bucket if len(places) == len(bucket.entries) else bucket.only(places))
    if portion or not buckets:
        yield portion


def portion_sizes(everything: float, largest: float) -> tuple[float, float]:
    """Estimate the elements of the fullest portion of :func:`portions`, and of a portion on the average.

    Args:
        everything: Elements of all entries.
        largest: Elements of the largest entry.
    """
    # On the average, a portion ends half of a large entry below its limit.
    return min(everything, max(AT_ONCE, largest)), min(everything, max(AT_ONCE - largest / 2, largest))


@dataclass(frozen=True)
class PlannedParameter:
    """What all ranks know of a parameter, a matrix of a stack, or a block, whichever of them holds it.

    Attributes:
        info: Its description.
        rule: The rule that it takes.
        position: Position of its param group at the time of the step.
        group: The group as it was when the unit was planned.
        step_group: Where, among the views of the param groups, a step finds those values of the group that it reads.
        states: Types of its element states; a block's are those of its weight.
    """

    info: ParameterInfo
    rule: Rule
    position: int
    group: Mapping[str, Any]
    step_group: int
    states: StateTypes


@dataclass(frozen=True)
class Collectives:
    """What a rule exchanges in the steps of a unit, beside sums; planned once.

    Attributes:
        exchange: Carries matrices to their owners, and results back.
        slices: The matrices that the exchange has in slices.
        halo: Carries neighbours across cuts.
        place: The model's device, where a framework keeps weights and states on the host.
    """

    exchange: MatrixExchange | None = None
    slices: Mapping[str, SlicedMatrix] = field(default_factory=dict)
    halo: HaloExchange | None = None
    place: WorkPlace | None = None


_STORED: Note[dict[Any, Mapping[str, StoredState]]] = Note("how the states of matrices of a signature are kept")
_NARROW: Note[LowPrecisionStates] = Note("the narrow states, opened for the step under way")


@dataclass(frozen=True, eq=False)
class StepUnit:
    """What a step works on, planned once: tensors, layout, parameters and collectives."""

    tensors: list[Tensor]
    contents: Sequence[TensorContents]  # what the tensors store
    stored: Layout  # what is stored, by parameter or matrix of a stack
    layout: Layout  # the same, with the blocks of fused weights as parameters of their own
    stored_entries: list[Entry]
    entries: list[Entry]  # in ``layout``
    states: ElementStates
    parameters: Mapping[str, PlannedParameter]  # by the keys of both layouts
    device: torch.device
    dtype: torch.dtype
    spec: OptimizerSpec
    key_tensors: Mapping[str, int]  # where all ranks have a tensor of every parameter: its index, by key
    spends_gradients: bool = False  # whether nobody reads the gradients after the step
    apart: bool = False  # whether its ranks are only some of the optimizer's ranks
    collectives: Collectives = Collectives()  # of the rule; none while it plans them
    token: str = ""  # the same on the ranks that planned the unit together, and unique to it
    traffic: Traffic = field(default_factory=Traffic)  # of the collectives that an optimizer starts itself
    notes: Notes = field(default_factory=Notes)

    @cached_property
    def indices(self) -> DeviceIndices:
        """Indices on the unit's device."""
        return DeviceIndices(self.device)

    @cached_property
    def sharded(self) -> list[bool]:
        """Which of the tensors are torch's sharded ones."""
        return list(map(is_sharded, self.tensors))

    @cached_property
    def sums(self) -> ShardSums:
        """Sums over whole parameters."""
        return ShardSums(self.layout, self.device, set(self.summed))

    @cached_property
    def narrow_plan(self) -> NarrowPlan:
        """Where narrow states lie."""
        types = {key: self.parameters[key].states for key in self.stored.shapes}
        shared = SharedExponents(self.stored, types, self.indices, self.traffic)
        return NarrowPlan(self.states, self.entries, shared, self.indices, self.dtype, self.spec)

    @property
    def narrow(self) -> LowPrecisionStates:
        """The narrow states of the step under way."""
        return self.notes[_NARROW]

    @property
    def exchange(self) -> MatrixExchange | None:
        """See :class:`Collectives`."""
        return self.collectives.exchange

    @property
    def halo(self) -> HaloExchange | None:
        """See :class:`Collectives`."""
        return self.collectives.halo

    # --- states of matrices -------------------------------------------------------------------------------------

    def stored_states(self, task: MatrixTask) -> Mapping[str, StoredState]:
        """How the states of a matrix, or of a slice of one, are kept, by name; alike for tasks of one signature."""
        known = self.notes.obtain(_STORED, dict)
        if task.signature not in known:
            planned = self.parameters[task.whole or task.key]
            stored = self.spec.stored_states(self.spec.form_of(task, planned.info), planned.group)
            if task.whole is not None:
                matrix = self.collectives.slices[task.whole]
                stored = {name: state.of_slice(matrix.axis, matrix.count) for name, state in stored.items()}
            known[task.signature] = stored
        return known[task.signature]

    def fresh_states(self, task: MatrixTask) -> MatrixState:
        """States of a matrix, or of a slice of one, before the first step."""
        return {name: stored.fresh(self.dtype, self.device) for name, stored in self.stored_states(task).items()}

    def state_part(self, task: MatrixTask, name: str) -> StatePart:
        """The part of a state that a matrix, or a slice of one, has."""
        if task.whole is None:
            return StatePart(task.key)
        matrix = self.collectives.slices[task.whole]
        axis = self.stored_states(task)[name].axis(matrix.axis)
        return StatePart(task.whole, matrix.parts.index(task.key), matrix.count, axis)

    @property
    def link(self) -> HostLink | None:
        """What carries matrices to another device, where weights and states stay on the host."""
        return None if self.exchange is None else self.exchange.link

    @property
    def is_offloaded(self) -> bool:
        """Whether weights and states stay on the host, and another device multiplies the matrices."""
        return self.link is not None

    @property
    def work_device(self) -> torch.device:
        """The device that multiplies the matrices."""
        return self.device if self.exchange is None else self.exchange.device

    @property
    def planned_groups(self) -> dict[int, Mapping[str, Any]]:
        """The param groups of the parameters, as they were when the unit was planned, by position."""
        groups = {planned.position: planned.group for planned in self.parameters.values()}
        return {position: groups[position] for position in sorted(groups)}

    @property
    def summed(self) -> Collection[str]:
        """Keys of the parameters over which per-parameter sums are taken."""
        return self.layout.shapes if self.spec.sums_cover_fallback else self.keys("matrix")

    @property
    def cautious(self) -> bool:
        """Whether elements that step away from zero do not decay."""
        return self.spec.step_groups.cautious

    @property
    def missing_alike(self) -> bool:
        """Whether parameters without a gradient take no step, on any rank; else their gradients are zeros."""
        return bool(self.key_tensors) or self.layout.replicated or self.layout.world_size == 1

    def missing(self) -> frozenset[str]:
        """Keys whose parameter has no gradient, where ranks that store nothing of it must know."""
        absent = [tensor.grad is None for tensor in self.tensors]
        if not self.key_tensors or not any(absent):
            return frozenset()
        keys = {key for key, index in self.key_tensors.items() if absent[index]}
        slices = self.collectives.slices
        return frozenset(keys.union(part for key in keys.intersection(slices) for part in slices[key].parts))

    def local_tensors(self) -> list[Any]:
        """This rank's local parts of the tensors."""
        if not any(self.sharded):
            return self.tensors
        return [
            tensor._local_tensor if cut else tensor  # type: ignore[attr-defined]
            for tensor, cut in zip(self.tensors, self.sharded, strict=True)
        ]

    def local_gradients(self) -> list[Tensor | None]:
        """This rank's local parts of the gradients; a collective where some are cut otherwise than their tensors."""
        return local_gradients(self.tensors, self.sharded)

    def spends(self, entry: Entry, grad: Tensor) -> bool:
        """Whether a shard's gradient may be overwritten: nobody reads it after the step, or it is a copy."""
        given = self.tensors[entry.shard.tensor].grad
        if self.spends_gradients or given is None:
            return True
        given = local_view(given) if self.sharded[entry.shard.tensor] else given
        # Types do not tell a copy: a narrow parameter may have a gradient in the type of the step. Addresses do.
        return not 0 <= grad.data_ptr() - given.data_ptr() < given.nbytes

    @property
    def total_traffic(self) -> Traffic:
        """What this rank has sent for the unit since it was planned."""
        parts = [self.traffic, self.sums.traffic]
        parts += [exchange.traffic for exchange in (self.exchange, self.halo) if exchange is not None]
        return Traffic(sum(part.collectives for part in parts), sum(part.bytes for part in parts))

    def share(self, rule: Rule) -> float:
        """Fraction of all elements whose parameters take a rule, in [0, 1]."""
        sizes = {key: prod(shape) for key, shape in self.layout.shapes.items()}
        return sum(map(sizes.__getitem__, self.keys(rule))) / max(sum(sizes.values()), 1)

    def keys(self, rule: Rule) -> list[str]:
        """Keys of the whole layout that take ``rule``, sorted: the same list on every rank."""
        return [key for key in self.layout.shapes if self.parameters[key].rule == rule]

    @property
    def kernels(self) -> ModuleType:
        """The list forms of the element-wise updates for this unit's device and type."""
        return kernels_for(self.device, self.dtype)

    @contextmanager
    def stepping(self, states: States) -> Iterator[None]:
        """Hand out the narrow states in a context, and store them at its end, see :meth:`LowPrecisionStates.close`."""
        self.notes[_NARROW] = narrow = LowPrecisionStates(self.narrow_plan, states)
        try:
            yield
            narrow.close()
        finally:
            self.notes.drop(_NARROW)

    def run(self, update: Pass) -> Tensor | None:
        """Run a pass; tensors with gaps go to torch's list operations, which alone take them.

        Returns:
            (shards,) fp64, the squared norms of what the pass says; None where its form does not measure them.
        """
        update.scalars.cautious = self.cautious
        parts = self._by_form(update.grads)
        if len(parts) == 1:
            return parts[0][0].run(update)  # type: ignore[no-any-return]
        for form, places in parts:
            form.run(update.only(places))
        return None

    def squared_norms(self, tensors: list[Tensor], references: Field | None = None, k: float = 0.0) -> Tensor:
        """Squared norms as in :func:`rankwise.kernels.lists.squared_norms`, for tensors with and without gaps."""
        parts = self._by_form(tensors)
        if len(parts) == 1:
            return parts[0][0].squared_norms(tensors, references, k)  # type: ignore[no-any-return]
        norms = torch.empty(len(tensors), dtype=torch.float64, device=self.device)
        for form, places in parts:
            chosen = [tensors[place] for place in places]
            chosen_references = None if references is None else only_some(references, places)
            norms.index_copy_(0, self.indices.of(tuple(places)), form.squared_norms(chosen, chosen_references, k))
        return norms

    def _by_form(self, tensors: Sequence[Tensor]) -> list[tuple[ModuleType, Sequence[int]]]:
        """The list forms for the tensors, each with the places of those it takes."""
        if are_runs(tensors):
            return [(self.kernels, range(len(tensors)))]
        gaps = [place for place, tensor in enumerate(tensors) if tensor.dim() > 1]
        runs = [place for place, tensor in enumerate(tensors) if tensor.dim() < 2]
        return [(lists, gaps), (self.kernels, runs)] if runs else [(lists, gaps)]

    def sum_over_ranks(self, entries: Sequence[Entry], *quantities: Tensor) -> Tensor:
        """Per-parameter sums of per-shard partial sums, in one collective for all quantities.

        Args:
            entries: The shards the values belong to; shards not listed count zero.
            quantities: Each (entries,); or all of them, (quantities, entries).

        Returns:
            (quantities, entries): each entry's column holds its whole parameter's sums, in fp64.
        """
        positions = tuple(map(_INDEX, entries))
        if positions not in self.indices:
            refuse_capture(self.device, "a step with gradients for another set of parameters than before")
        index = self.indices.of(positions)
        rows = torch.stack(quantities) if len(quantities) > 1 else torch.atleast_2d(quantities[0])
        if self.sums.trivial:
            return rows.to(torch.float64)
        partial_sums = torch.zeros(len(rows), len(self.entries), dtype=torch.float64, device=self.device)
        if entries:
            partial_sums.index_copy_(1, index, rows.to(torch.float64))
        return self.sums(partial_sums).index_select(1, index)

    def common_step(self, states: States) -> int:
        """The step all ranks are at; a rank that holds no tensor has no count of its own."""
        # Where a checkpoint was asked for before the first step, there are states without a count.
        counts = [int(states[tensor].get("step", 0)) for tensor in self.tensors if tensor in states]
        step = max(counts, default=0)
        if self.layout.all_hold:
            return step
        agreed = torch.tensor(step, dtype=torch.int64, device=self.device)
        self.traffic.count(agreed)
        dist.all_reduce(agreed, dist.ReduceOp.MAX, group=self.layout.group)
        return int(agreed)

    def digest(self) -> str:
        """A hash of the rules and collectives that were planned, to be compared across ranks."""
        exchange = "" if self.exchange is None else self.exchange.plan.digest()
        routes = sorted((key, planned.rule, planned.position) for key, planned in self.parameters.items())
        return hashlib.sha256(repr((routes, str(self.dtype), exchange)).encode()).hexdigest()
