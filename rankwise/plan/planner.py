"""Plans the units of a step, the owners of their matrices and the ranks' loads, once until something changes."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from rankwise.comm.exchange import MatrixExchange
from rankwise.comm.host_link import HostLink
from rankwise.comm.owner_plan import MatrixTask, plan_matrices
from rankwise.comm.quantized_messages import wire_of
from rankwise.comm.slice_holders import Holders, holders_of
from rankwise.kernels import graphs
from rankwise.kernels.native.building import SWITCH
from rankwise.layout.agreement import gather_together, refuse_difference
from rankwise.layout.dtensors import PLAIN, Cut, cut_of
from rankwise.layout.equal_slices import SlicedMatrix, in_slices
from rankwise.layout.even_cuts import EvenCuts
from rankwise.layout.layout import LayoutError
from rankwise.layout.layout_source import LayoutSource, TensorContents, TensorParallel, WholeParameters, WorkPlace
from rankwise.plan.checkpoint_mismatch import refuse_strange
from rankwise.plan.notes import Note
from rankwise.plan.state_memory import keepers_in
from rankwise.plan.step_unit import Collectives, StepUnit, UnitKey
from rankwise.plan.unit_builder import UnitBuilder, device_and_dtype
from rankwise.plan.work_device import computes_on_device, is_left_to_us
from rankwise.states.element_states import ElementStates
from rankwise.states.entries import cut_into_entries
from rankwise.states.group_values import GroupValues
from rankwise.states.matrix_states import MatrixStates
from rankwise.states.optimizer_spec import OptimizerSpec
from rankwise.states.parameter_table import Groups, ParameterTable
from rankwise.version import __version__

__all__ = ["FORMS", "Planned", "Planner", "TensorForm", "form_of"]


class TensorForm(NamedTuple):
    """The properties of a tensor that a plan relies on."""

    kind: type
    dtype: torch.dtype
    device: torch.device
    shape: tuple[int, ...]
    cut: Cut | None


FORMS: Note[list[TensorForm]] = Note("properties of the tensors when the unit was planned")


def form_of(tensor: Tensor) -> TensorForm:
    """Return the present properties of a tensor."""
    cut = None if type(tensor) in PLAIN else cut_of(tensor)
    return TensorForm(type(tensor), tensor.dtype, tensor.device, tensor.shape, cut)


class Planned(Protocol):
    """An optimizer, as its planner sees it while it plans."""

    def plan(self, unit: StepUnit) -> Collectives:
        """Plan the collectives of a unit that has none yet; those of matrices by :meth:`Planner.choose_owners`."""


class Planner:
    """Plans a unit for every ``step()`` call of a round, and remembers owners.

    Args:
        settle: Called before plans are forgotten: the last steps may have to be undone by them.

    Attributes:
        spec: What follows from the optimizer's options.
        table: The parameters and their rules.
        values: Checks and describes the values of param groups.
        matrix_states: The optimizer's matrix states.
        units: Units planned so far.
        loads: What each rank has to compute, by rank; empty for nothing.
        owner_of: Owners by matrix, and keepers by (matrix, state). It outlives the plans, because nobody else has the
            states that an owner or keeper has.
    """

    def __init__(
        self,
        spec: OptimizerSpec,
        table: ParameterTable,
        values: GroupValues,
        matrix_states: MatrixStates,
        settle: Callable[[], None],
    ) -> None:
        self.spec, self.table, self.values, self.matrix_states = spec, table, values, matrix_states
        self._settle = settle
        self._builder = UnitBuilder(spec, table, values)
        self._attached: LayoutSource | None = None
        self.units: dict[UnitKey, StepUnit] = {}
        self.loads: list[float] = []
        self.owner_of: dict[Any, int] = {}
        self._imagined_place: WorkPlace | None = None
        self._imagined_together: TensorParallel | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy belongs to no framework and has nothing planned.
        return type(self), (self.spec, self.table, self.values, self.matrix_states, self._settle)

    # --- the layout ---------------------------------------------------------------------------------------------

    @property
    def source(self) -> LayoutSource:
        """The framework's description of the param groups' tensors; that of plain parameters if there is none."""
        return self.table.plain if self._attached is None else self._attached

    def attach(self, source: LayoutSource) -> None:
        """Plan by another description of the tensors from now on.

        Raises:
            RuntimeError: It is of other ranks, and the present ranks keep states for one another.
        """
        if source.group is not self.source.group:
            if self.matrix_states and any(isinstance(place, tuple) for place in self.owner_of):
                raise RuntimeError(
                    f"{self.spec.name}: the ranks hold states of each other's matrices, so the group of ranks cannot "
                    "change now; save the optimizer, and load it into a new one that is built on the new ranks"
                )
            self.owner_of.clear()
        self._attached = source
        self.forget()

    @property
    def together(self) -> TensorParallel | None:
        """The ranks that may compute a matrix together, slice by slice."""
        return self._imagined_together or self.source.tensor_parallel

    @property
    def rank(self) -> int:
        """This process's position among the data-parallel ranks."""
        group = self.source.group
        return 0 if group is None else dist.get_rank(group)

    @property
    def is_plain(self) -> bool:
        """Whether the tensors are the parameters themselves."""
        return isinstance(self.source, WholeParameters)

    def name_of(self, tensor: Tensor) -> str | None:
        """Name of the parameter that a tensor is; None where tensors are not parameters."""
        return self.source.name_of(tensor)

    # --- units --------------------------------------------------------------------------------------------------

    def forget(self) -> None:
        """Forget all plans, but not the owners."""
        self._settle()
        self.units.clear()
        self.loads = []

    def take_owners(self, owner_of: Mapping[Any, int]) -> None:
        """Plan by the owners of another replica, with whose states this one goes on."""
        if owner_of != self.owner_of:
            self.owner_of = dict(owner_of)
            self.forget()

    def route_again(self, groups: Groups) -> None:
        """Choose rules and owners afresh, for states that were saved with other groups."""
        # The saved states lie with the owners that a fresh plan would choose.
        self.owner_of.clear()
        self.table.route_again(groups)
        self.forget()

    def find(self, groups: Groups) -> StepUnit | None:
        """Return the unit planned for the present tensors of the groups."""
        key = tuple((position, *map(id, group["params"])) for position, group in enumerate(groups) if group["params"])
        return self.units.get(key)

    def places(self) -> dict[int, tuple[StepUnit, int]]:
        """The unit that each planned tensor is in, and its index there, by the tensor's identity."""
        return {id(tensor): (unit, at) for unit in self.units.values() for at, tensor in enumerate(unit.tensors)}

    def kept_in(
        self, groups: Groups, tensor: Tensor, group: Mapping[str, Any], dtype: torch.dtype
    ) -> tuple[TensorContents, ElementStates]:
        """What one tensor stores, and the states, under index 0, that it keeps in a group, planned or not."""
        content, table = self.source.contents(tensor), self.table
        infos = {part.key: table.catalog[part.key][0] for part in content.slices}
        routes = {part.key: table.choose_in(groups, part.key, group) for part in content.slices}
        entries = cut_into_entries([content], infos, routes)
        kept = [table.element_states(entry.info, entry.route.rule, group) for entry in entries]
        name = self.source.name_of(tensor)
        known = {} if name is None else {name: 0}
        of_empty = self._builder.states_of_empty([tensor], entries, known, {0: group}, [0])
        return content, ElementStates([tensor], entries, kept, dtype, of_empty)

    def plan_present(self, optimizer: Planned, groups: Groups) -> StepUnit:
        """Plan the unit of the present tensors of the groups."""
        tensors = [tensor for group in groups for tensor in group["params"]]
        positions = [position for position, group in enumerate(groups) for _ in group["params"]]
        return self.new_unit(optimizer, groups, tensors, positions, dict(enumerate(groups)))

    def plan_ahead(self, optimizer: Planned, groups: Groups, units: Sequence[Sequence[tuple[Tensor, int]]]) -> None:
        """Plan units that are not planned yet.

        Args:
            optimizer: Plans its own collectives.
            groups: The optimizer's param groups.
            units: For each ``step()`` call, the tensors it will find in the groups and the positions of their groups.
        """
        for members in units:
            tensors = [tensor for tensor, _ in members]
            positions = [position for _, position in members]
            if _key_of(tensors, positions) not in self.units:
                self.new_unit(optimizer, groups, tensors, positions)

    def new_unit(
        self,
        optimizer: Planned,
        groups: Groups,
        tensors: list[Tensor],
        positions: list[int],
        planned_groups: Mapping[int, Mapping[str, Any]] | None = None,
    ) -> StepUnit:
        """Plan a unit; a collective of its ranks.

        Args:
            optimizer: Plans its own collectives.
            groups: The optimizer's param groups.
            tensors: Tensors of the step.
            positions: Positions of their groups at the time of the step.
            planned_groups: Those groups by position; None: the groups that the tensors' contents name.

        Raises:
            RuntimeError: The ranks planned differently.
            Exception: Planning failed on some rank; raised on every rank, and nothing is planned then.
        """
        device = device_and_dtype(tensors or list(self.table.parameters.values()))[0]
        graphs.refuse_capture(device, "the first step")
        key, loads, owner_of = _key_of(tensors, positions), self.loads, dict(self.owner_of)
        bare = self._builder.build(self.source, groups, tensors, positions, planned_groups)
        bare.notes[FORMS] = list(map(form_of, tensors))
        if key in self.units:
            self._settle()
            self.loads = _without(self.units[key], loads)
        planned = []

        def plan() -> tuple[str, dict[str, str], str]:
            self._refuse_other_shapes(bare)
            unit = replace(bare, collectives=optimizer.plan(bare))
            planned.append(unit)
            self.table.warn_of_nameless()
            refuse_strange(self.spec.identity, unit, self.matrix_states.everything())
            return unit.digest(), self._settings(unit), uuid.uuid4().hex

        try:
            # All ranks must enter the same collectives, so they compare their plans before anything is sent.
            everyone = gather_together(plan, bare.layout.group)
            refuse_difference([(digest, settings) for digest, settings, _ in everyone])
        except BaseException:
            self.units.pop(key, None)
            self.loads, self.owner_of = loads, owner_of
            raise
        self.units[key] = replace(planned[0], token=everyone[0][2])
        return self.units[key]

    def imagine(
        self,
        groups: Groups,
        units: Sequence[Sequence[Sequence[TensorContents]] | EvenCuts],
        replicated: bool,
        plan: Callable[[StepUnit], Collectives],
        spends_gradients: bool | None = None,
        offloaded: bool = False,
        together: TensorParallel | None = None,
    ) -> list[StepUnit]:
        """Plan for ranks that need not exist; nothing of the plans in use changes.

        Args:
            groups: The optimizer's param groups.
            units: For each ``step()`` call, for each rank, what its tensors store; or how parameters are cut evenly.
            replicated: See :class:`rankwise.layout.layout.Layout`.
            plan: Plans the collectives of a unit.
            spends_gradients: Whether nobody reads gradients after steps; None: as it is here.
            offloaded: Whether weights and states are on the host, beside another device; gradients are then read.
            together: Ranks that may compute a matrix together; None: those of the present source.

        Returns:
            The units as rank 0 would plan them.
        """
        present = self.loads, self.owner_of
        spends = self.source.spends_gradients if spends_gradients is None else spends_gradients
        spends = spends and not offloaded
        self.loads, self.owner_of = [], {}
        self._imagined_place = WorkPlace(torch.device("meta"), None) if offloaded else None
        self._imagined_together = together
        imagined = []
        try:
            for ranks in units:
                unit = replace(self._builder.imagine(groups, ranks, replicated), spends_gradients=spends)
                imagined.append(replace(unit, collectives=plan(unit)))
        finally:
            self.loads, self.owner_of = present
            self._imagined_together = None
        return imagined

    def choose_owners(
        self,
        unit: StepUnit,
        tasks: Sequence[MatrixTask],
        slices: Mapping[str, SlicedMatrix] | None = None,
        alone: bool = False,
    ) -> Collectives:
        """Spread a unit's tasks over the ranks, considering the units planned before.

        Args:
            unit: The unit.
            tasks: Tasks of its matrices; some may be slices.
            slices: The matrices of which ``tasks`` has the slices.
            alone: Whether the rule takes whole matrices where they lie on every device; else it does so only on devices
                where stacks are no faster.

        Returns:
            The exchange of the matrices; none without tasks.
        """
        if not tasks:
            return Collectives()
        slices = slices or {}
        layout = in_slices(unit.layout, slices)
        # Only some ranks plan such a unit, so its loads must not count where all ranks have to agree.
        loads = [] if unit.apart else self.loads
        plan, loads = plan_matrices(
            layout, tasks, loads or [0.0] * layout.world_size, kept=self.owner_of, slices=slices
        )
        if unit.layout.world_size > 1 and any(state.lendable for state in self.spec.matrix_states):
            plan = replace(plan, keepers=keepers_in(unit, tasks, plan.owners, self.owner_of))
        wire = wire_of(getattr(self.spec.options, "comm_dtype", None), unit.dtype)
        place = self._imagined_place if layout.imagined else self.source.work_place(unit.layout.group)
        if place is not None and place.device.type == "cpu" and is_left_to_us(self.spec):
            place = None  # the model is on the host itself, and nothing travels
        if place is not None and computes_on_device(self.spec, place.device, unit, tasks):
            how: tuple[Any, ...] = (place.device, unit.dtype, wire, None, HostLink(place.device), place.group)
        else:
            how = (unit.device, unit.dtype, wire, alone or None, None, None)
        if not unit.apart:
            self.loads = loads
        self.owner_of |= plan.owners
        self.owner_of |= plan.keepers
        return Collectives(MatrixExchange(layout, plan, *how), slices, place=place)

    def holders(self, unit: StepUnit) -> Holders:
        """Ranks that compute slices of a unit's matrices together, with the group of the device that multiplies."""
        together, place = self.together, unit.collectives.place
        assert together is not None
        far = place is not None and unit.is_offloaded
        return holders_of(place.partners if far else together.group, unit.traffic)  # type: ignore[union-attr]

    def owners(self) -> dict[str, int]:
        """Owner ranks of all planned matrices."""
        return {
            key: owner
            for unit in self.units.values()
            if unit.exchange is not None
            for key, owner in unit.exchange.plan.owners.items()
        }

    # --- what ranks compare -------------------------------------------------------------------------------------

    def _refuse_other_shapes(self, unit: StepUnit) -> None:
        """Compare this rank's model with what others report of parameters that it may hold nothing of."""
        for key, shape in unit.stored.shapes.items():
            name = self.table.base_name(key)
            info, _ = self.table.catalog[name]
            own = info.shape if name == key else info.matrix_shape
            if tuple(own) != tuple(shape):
                raise LayoutError(
                    f"'{key}' has shape {tuple(own)} in the model of rank {self.rank} and {tuple(shape)} in that of a "
                    "rank that stores it; all data-parallel ranks must hold the same model."
                )

    def _settings(self, unit: StepUnit) -> dict[str, str]:
        """What must be equal on all ranks: the options, and those of the unit's groups, which schedulers may change."""
        spec, texts = self.spec, self.values.in_words(unit.planned_groups)
        if unit.device.type == "cpu":
            # Copies of a weight on ranks that round differently would drift apart.
            texts[f"the form of the CPU kernels (environment variable {SWITCH}=0 makes them alike)"] = (
                unit.kernels.__name__
            )
        texts["the device that multiplies offloaded matrices"] = unit.work_device.type
        product, option = spec.product_type(unit.work_device, unit.dtype), spec.product_option
        if product is not None and getattr(spec.options, option) == "auto":
            name = f"the type of the products (set {option} to 'float32' or 'bfloat16' on all ranks)"
            texts[name] = str(product).removeprefix("torch.")
        # Another version may send something else at the same point.
        return {"the version of rankwise": __version__, "the optimizer": spec.name, **texts}


def _without(unit: StepUnit, loads: Sequence[float]) -> list[float]:
    """The ranks' loads without those of a unit that is planned anew."""
    rest = list(loads)
    if unit.exchange is not None and not unit.apart:
        for task in (task for batch in unit.exchange.plan.batches for task in batch.tasks):
            rest[unit.exchange.plan.owners[task.key]] -= task.cost
    return rest


def _key_of(tensors: Sequence[Tensor], positions: Sequence[int]) -> UnitKey:
    members: dict[int, list[int]] = {}
    for tensor, position in zip(tensors, positions, strict=True):
        members.setdefault(position, [position]).append(id(tensor))
    return tuple(tuple(members[position]) for position in sorted(members))
