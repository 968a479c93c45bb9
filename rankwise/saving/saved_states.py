"""Saves and restores an optimizer, and takes over states that were saved in another layout."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from rankwise.layout.agreement import gather_together
from rankwise.layout.dtensors import cut_as, is_sharded
from rankwise.plan.planner import Planner
from rankwise.plan.step_unit import StepUnit
from rankwise.plan.unit_builder import dtype_of
from rankwise.saving.adamw_states import AdamWStates
from rankwise.saving.changed_blocks import ChangedBlocks
from rankwise.saving.checkpoint_fit import WRITTEN_BY, CheckpointFit, this_rank
from rankwise.saving.shared_matrices import (
    cut_evenly,
    hand_out,
    homes,
    on_mesh,
    owned_parts,
    present_slices,
    whole_states,
)
from rankwise.saving.states_by_parameter import (
    MATRIX,
    RECORD,
    REPLICA,
    asked_by_torch,
    asked_by_torchft,
    owners_in,
    record_texts,
    steps_taken,
    under_parameters,
    without_matrices,
)
from rankwise.states.element_states import ElementStates, States
from rankwise.states.matrix_states import MatrixState, kept_by
from rankwise.states.packed_states import may_be_packed, packed_in
from rankwise.states.param_remainders import NARROW, REMAINDER, fit_to_travel
from rankwise.states.parameter_table import Groups

__all__ = ["SavedStates"]

logger = logging.getLogger(__name__)


class SavedStates:
    """The part of an optimizer that is saved in checkpoints.

    Attributes:
        fit: Checks dictionaries before anything of them is taken over.
        succession: Converts the states of other optimizers.
        carrier: Tells which states still fit where weights are divided differently.
    """

    def __init__(self, planner: Planner) -> None:
        self._planner, self._spec, self._table = planner, planner.spec, planner.table
        self._matrix_states = planner.matrix_states
        self._consolidated: dict[str, MatrixState] | None = None
        self._waiting: dict[str, MatrixState] = {}
        self._whole: dict[str, MatrixState] | None = None
        self._handed_out: set[str] | None = None  # units that have what was loaded; None: nothing was
        self._told_of_lost_bits = False
        self.carrier = ChangedBlocks(self._spec, self._table)
        self.fit = CheckpointFit(planner)
        self.succession = AdamWStates(planner)

    # --- dictionaries -------------------------------------------------------------------------------------------

    def refuse_apart(self, groups: Groups, states: States) -> None:
        """Refuse to save states of tensors that no param group has, for which torch knows no number.

        Raises:
            RuntimeError: Names the way to save.
        """
        held = {id(tensor) for group in groups for tensor in group["params"]}
        apart = sum(isinstance(tensor, Tensor) and id(tensor) not in held for tensor in states)
        if apart:
            raise RuntimeError(
                f"{self._spec.name}: state_dict() is invalid now: {apart} of {len(states)} tensors with states are in "
                "no param group; a framework that puts them there for its own steps alone saves them by its own "
                "function, as engine.save_checkpoint"
            )

    def beside_torch(self, result: Mapping[str, Any], groups: Groups) -> dict[str, Any]:
        """Entries of a state dictionary besides torch's own; a collective where ranks hold the parameters alike."""
        if self._whole is not None:
            matrices: Mapping[str, MatrixState] = self._whole
        else:
            matrices = self._collected() if self._consolidated is None else self._consolidated
        # Where ranks miss gradients alike, each has parts of parameters, which only it can load again.
        parts = {WRITTEN_BY: this_rank()} if self._planner.source.missing_alike else {}
        return {
            "matrix_states": {key: dict(state) for key, state in matrices.items()},
            "rankwise": self._spec.identity,
            "layout": self._layout_records(result, groups),
            **parts,
        }

    def under_parameters(
        self, result: Mapping[str, Any], groups: Groups, matrices: Mapping[str, MatrixState], extra: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Put matrix states, and what belongs to no parameter, into torch's dictionary."""
        by_parameter = under_parameters(matrices, {key: self._table.base_name(key) for key in matrices})
        state = {key: without_matrices(states_here) for key, states_here in result["state"].items()}
        keys = (key for group in result["param_groups"] for key in group["params"])
        for group in groups:
            for tensor in group["params"]:
                key, states_here = next(keys), by_parameter.get(str(self._planner.name_of(tensor)))
                if states_here and key in state:
                    state[key] |= states_here
        # Some rules keep no state of a matrix.
        with_states = sum(map(bool, matrices.values()))
        texts = record_texts(self._spec.identity, with_states, steps_taken(state), extra, groups)
        saved = [{**group, RECORD: text} for group, text in zip(result["param_groups"], texts, strict=True)]
        return {**result, "state": state, "param_groups": saved}

    def for_replica(self, result: Mapping[str, Any], groups: Groups, extra: Mapping[str, Any]) -> dict[str, Any]:
        """Put what this rank itself has into torch's dictionary, for the same rank of another replica; no collective.

        Element and matrix states are the living tensors. Owners go along, because a replica that has begun otherwise
        may have chosen others. All is under parameters and groups, since torchtitan drops the rest.
        """
        matrices = self._waiting or self._matrix_states.everything()
        owners = [[place, rank] for place, rank in self._planner.owner_of.items()]
        replica = {REPLICA: {"owners": owners, "waiting": len(self._waiting) > 0}, WRITTEN_BY: this_rank()}
        saved = self.under_parameters(result, groups, matrices, {**extra, **replica})
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()  # torchft copies states on a stream of its own
        return saved

    def mark(self, groups: Sequence[dict[str, Any]], states: States, states_too: bool = True) -> None:
        """Mark living groups and states where a checkpoint has more: torch asks for no other names.

        Args:
            groups: The optimizer's param groups.
            states: The optimizer's element states.
            states_too: Whether to mark states: once torch's functions have been used, or where ranks have parts of
                parameters, which nothing else saves.
        """
        if not self._planner.is_plain:
            return
        for group in groups:
            group[RECORD] = ""
            for tensor in group["params"] if states_too and self._spec.matrix_states else ():
                if tensor in states:
                    states[tensor].setdefault(MATRIX, {})

    @property
    def is_cut(self) -> bool:
        """Whether ranks have parts of parameters as torch's sharded tensors, and share the matrix states."""
        source = self._planner.source
        return source.mesh() is not None and len(self._spec.matrix_states) > 0

    def shared_matrices(self) -> dict[str, MatrixState]:
        """Matrix states of all ranks, cut evenly so that each rank has a part; a collective."""
        if self._waiting:
            return self._waiting
        present, mesh = self._matrix_states.everything(), self._planner.source.mesh()
        parts: dict[str, MatrixState] = {}
        for unit in self._planner.units.values():
            for key, name, whole in whole_states(unit, present):
                parts.setdefault(key, {})[name] = cut_evenly(whole, mesh)
        return parts

    @contextmanager
    def of_whole_matrices(self) -> Iterator[None]:
        """Let dictionaries have whole matrices, one rank each, where far ranks own slices; a collective."""
        if self._is_far:
            self._whole = self._with_whole_matrices()
        try:
            yield
        finally:
            self._whole = None

    def _with_whole_matrices(self) -> dict[str, MatrixState]:
        units = list(self._planner.units.values())
        for unit in units:
            self.deliver(unit)
        present = self._matrix_states.everything()
        states = dict(present)
        for unit in units:
            slices = present_slices(unit, present)
            home_of = {key: home for key, home in homes(unit).items() if key in slices}
            for task in (task for tasks in slices.values() for task in tasks):
                states.pop(task.key, None)
            for key, name, whole in whole_states(unit, present, home_of):
                if home_of[key] == unit.layout.rank:
                    states.setdefault(key, {})[name] = whole
        return states

    @property
    def _is_far(self) -> bool:
        """Whether far ranks may own slices of matrices, and each saves and loads a part of the states."""
        together = self._planner.together
        return together is not None and not (together.near or self._planner.source.missing_alike)

    def deliver(self, unit: StepUnit) -> None:
        """Give the loaded states to the owners of a unit's matrices, which are known by now; a collective."""
        if self._handed_out is not None and unit.token not in self._handed_out and self._is_far:
            hand_out(self._spec.identity, unit, self._matrix_states.loaded)
            self._handed_out.add(unit.token)
        if not self._waiting:
            return
        owned: dict[str, MatrixState] = {}
        mesh = self._planner.source.mesh()
        parts = {key: {name: on_mesh(v, mesh) for name, v in state.items()} for key, state in self._waiting.items()}
        for unit in self._planner.units.values():
            owned |= owned_parts(self._spec.identity, unit, parts)
        self._matrix_states.load(owned)
        self._waiting = {}

    def as_saved(self, result: Mapping[str, Any], groups: Groups, states: States) -> dict[str, Any]:
        """The states for a dictionary of torch; packed ones stay packed, and the layout's records explain them.

        They are opened where nobody reads these records: in torch's sharded tensors, whose parts any mesh may ask for,
        and for torch's checkpoint functions, which take states and groups alone. What torch may send gets a type that
        can be sent.
        """
        saved = dict(result["state"])
        everywhere = self._planner.is_plain and (asked_by_torch() or asked_by_torchft())
        opened = self._opener(groups)
        keys = (key for group in result["param_groups"] for key in group["params"])
        for group in groups:
            for tensor in group["params"]:
                key, state = next(keys), states.get(tensor, {})
                if (everywhere or is_sharded(tensor)) and key in saved:
                    saved[key] = saved[key] | opened(tensor, group, state)
                if REMAINDER in state and self._planner.is_plain:
                    saved[key] = {**saved[key], REMAINDER: fit_to_travel(state[REMAINDER])}
        return saved

    def opened(self, groups: Groups, states: States) -> dict[Tensor, dict[str, Any]]:
        """All states, with new ones in the place of packed ones."""
        opened = self._opener(groups)
        members = ((tensor, group, states.get(tensor, {})) for group in groups for tensor in group["params"])
        return {tensor: {**state, **opened(tensor, group, state)} for tensor, group, state in members}

    def _opener(self, groups: Groups) -> Callable[[Tensor, Mapping[str, Any], Mapping[str, Any]], dict[str, Any]]:
        """Make a function that opens the packed states of a tensor."""
        found = self._finder(groups)

        def opened(tensor: Tensor, group: Mapping[str, Any], state: Mapping[str, Any]) -> dict[str, Any]:
            packed = {name: value for name, value in state.items() if may_be_packed(value)}
            if not packed:
                return packed
            _, kept, index = found(tensor, group)
            return {name: kept.opened(index, name, value) for name, value in packed.items()}

        return opened

    def _finder(self, groups: Groups) -> Callable[[Tensor, Mapping[str, Any]], tuple[int, ElementStates, int]]:
        """Make a function that finds a tensor's param group, the layout of its states, and its index there."""
        planned, computed = self._planner.places(), _computed(groups)

        def found(tensor: Tensor, group: Mapping[str, Any]) -> tuple[int, ElementStates, int]:
            if id(tensor) in planned:
                unit, index = planned[id(tensor)]
                return unit.contents[index].group, unit.states, index
            # States were loaded, and no step has planned since.
            content, kept = self._planner.kept_in(groups, tensor, group, computed)
            return content.group, kept, 0

        return found

    @property
    def is_shared(self) -> bool:
        """Whether other ranks have states of parameters that this one has, and they are not consolidated."""
        source = self._planner.source
        shared = source.saved_by_some and source.group is not None and source.group.size() > 1
        return shared and self._consolidated is None

    @property
    def is_consolidated(self) -> bool:
        """Whether one rank alone may ask for the states of all."""
        return self._consolidated is not None

    def consolidate(self) -> None:
        """Keep the matrix states of all ranks, until the next step; a collective."""
        self._consolidated = self._collected()

    def forget_consolidated(self) -> None:
        """Drop the consolidated states, which are out of date."""
        self._consolidated = None

    def _collected(self) -> dict[str, MatrixState]:
        """Matrix states of all ranks; where several have states of a matrix, its owner's count, else the first's."""
        states, planner = self._waiting or self._matrix_states.everything(), self._planner
        if not planner.source.saved_by_some or planner.source.group is None:
            return dict(states)
        owned = {key: state for key, state in states.items() if planner.owner_of.get(key, planner.rank) == planner.rank}
        kept = {place: states[place[0]][place[1]] for place in kept_by(planner.owner_of, planner.rank, states)}
        parts = gather_together(lambda: (owned, kept), planner.source.group)
        collected = {key: dict(state) for rank_states, _ in reversed(parts) for key, state in rank_states.items()}
        for _, rank_states in parts:
            for (key, name), value in rank_states.items():
                # The owner's own value counts.
                collected.setdefault(key, {}).setdefault(name, value)
        return collected

    def _layout_records(self, result: Mapping[str, Any], groups: Groups) -> list[dict[str, Any]]:
        """Describe what every tensor stores, in plain data, so that a checkpoint can be read on another layout."""
        found, planned = self._finder(groups), self._planner.places()
        records = []
        keys = (key for group in result["param_groups"] for key in group["params"])
        for group in groups:
            for tensor in group["params"]:
                state, name = result["state"].get(next(keys)), self._planner.name_of(tensor)
                record: dict[str, Any] = {"group": 0, "runs": [], "states": {}}
                if state is not None or id(tensor) in planned:
                    position, kept, index = found(tensor, group)
                    held = {key: value for key, value in (state or {}).items() if key not in ("step", MATRIX)}
                    record = {"group": position, **kept.record(held, index)}
                records.append(record if name is None else {**record, "name": name})
        return records

    # --- loading ------------------------------------------------------------------------------------------------

    def restore(self, state_dict: Mapping[str, Any], groups: Groups, states: States) -> None:
        """Restore the states, after torch has restored the groups.

        Args:
            state_dict: Dictionary that :meth:`CheckpointFit.fitted` returned.
            groups: The param groups, as loaded.
            states: The optimizer's state; it is empty, because torch would cast all states to the parameters' types.
        """
        computed = _computed(groups)
        saved_ids = (key for group in state_dict["param_groups"] for key in group["params"])
        members = ((tensor, group) for group in groups for tensor in group["params"])
        for key, (tensor, group) in zip(saved_ids, members, strict=True):
            saved = state_dict["state"].get(key)
            if saved is not None:
                record = state_dict["layout"][key] if "layout" in state_dict else None
                self._restore(tensor, saved, record, states, groups, group, computed)

    def _restore(
        self,
        tensor: Tensor,
        saved: Mapping[str, Any],
        record: Mapping[str, Any] | None,
        states: States,
        groups: Groups,
        group: Mapping[str, Any],
        computed: torch.dtype,
    ) -> None:
        """Copy a tensor's states; the step count is copied too, because it is advanced in place."""
        kept: ElementStates | None = None
        for name, value in saved.items():
            if name == "step" and not isinstance(value, Tensor):
                value = torch.tensor(float(value), dtype=torch.float32, device="cpu")
            packed = None if record is None else packed_in(record, name)
            if name == REMAINDER and not self._keeps_remainder(tensor):
                self._tell_of_lost_bits()
            elif packed is not None:
                try:
                    kept = kept or self._planner.kept_in(groups, tensor, group, computed)[1]
                except (LookupError, RuntimeError):
                    # The framework's weights are not those of its copies yet, but its layout is the one that was saved.
                    alike = self._spec.asked_type(name) == "int8"
                    restored = value if alike else packed[0].opened(value, packed[1])
                    states[tensor][name] = restored.to(device=tensor.device, copy=alike)
                else:
                    states[tensor][name] = kept.taken(0, name, value, packed[0])
            elif isinstance(value, Tensor):
                device = self._spec.count_device(tensor) if name == "step" else tensor.device
                value = value if name == "step" else cut_as(value, tensor)
                states[tensor][name] = value.to(device=device, copy=True)
            else:
                states[tensor][name] = value

    def _keeps_remainder(self, tensor: Tensor) -> bool:
        return self._spec.options.store_param_remainders and tensor.dtype is NARROW

    def _tell_of_lost_bits(self) -> None:
        if not self._told_of_lost_bits and self._planner.rank == 0:
            logger.warning(
                "%s: the checkpoint has the 16 bits that its weights in bfloat16 lack, which this optimizer does not "
                "keep: weights go on rounded. store_param_remainders=True and a model in bfloat16 keep them.",
                self._spec.name,
            )
        self._told_of_lost_bits = True

    def restore_matrices(self, state_dict: Mapping[str, Any]) -> None:
        """Load the matrix states of a dictionary."""
        self.forget_consolidated()
        saved = self.carrier.carried(state_dict.get("matrix_states", {}))
        copies = {key: {name: value.clone() for name, value in state.items()} for key, state in saved.items()}
        replica = state_dict.get(REPLICA)
        if replica is not None:
            self._planner.take_owners(owners_in(replica))
        # Only owners, which are not known yet, can make slices of whole matrices from the parts.
        waits = self._planner.source.missing_alike if replica is None else replica["waiting"]
        self._waiting = copies if waits else {}
        self._matrix_states.load({} if self._waiting else copies)
        # What another replica's rank has sent is this rank's own.
        self._handed_out = set() if replica is None else None

    def adopt_groups(self, groups: Sequence[dict[str, Any]], saved: Groups) -> None:
        """Take over hyper-parameters from another layout's checkpoint; before planning, which depends on some."""
        before = self._spec.structures_of(groups)
        for group, saved_group in zip(groups, saved, strict=True):
            group.update({name: value for name, value in saved_group.items() if name != "params"})
        if self._spec.structures_of(groups) != before:
            self._planner.route_again(groups)

    def forget(self, states: dict[Tensor, Any]) -> None:
        """Drop all states but the remainders of weights: the next step is a first one."""
        self.forget_consolidated()
        self._waiting = {}
        for unit in self._planner.units.values():
            for tensor in unit.tensors:
                dropped = states.pop(tensor, {})
                if REMAINDER in dropped:
                    states[tensor] = {REMAINDER: dropped[REMAINDER]}
        self._matrix_states.forget()

    def adopt(
        self,
        states: States,
        matrix_states: Mapping[str, MatrixState],
        steps: Mapping[int, Tensor],
    ) -> None:
        """Take over matrix states and step counts by group from another layout's checkpoint.

        Raises:
            MisfitError: A state is not of the shape of its matrix; nothing has changed then.
        """
        self.forget_consolidated()
        units = list(self._planner.units.values())
        matrix_states = self.carrier.carried(matrix_states)
        self.fit.refuse_misfits(matrix_states)
        device = next((unit.device for unit in units), torch.device("cpu"))
        self._matrix_states.load(
            {key: {name: value.to(device) for name, value in state.items()} for key, state in matrix_states.items()}
        )
        self._handed_out = set()
        for unit in units:
            for tensor, content in zip(unit.tensors, unit.contents, strict=True):
                step = steps.get(content.group)
                if step is not None:
                    states[tensor]["step"] = step.to(device=self._spec.count_device(tensor), copy=True)

    # --- where states are stored --------------------------------------------------------------------------------

    def stored_states(
        self, groups: Groups, states: States, tensor: Tensor, name: str, state: str
    ) -> list[tuple[int, Tensor]]:
        """Find an element state of one parameter in a tensor that was stepped or loaded before.

        Returns:
            The runs of the flattened parameter that ``tensor`` stores: first element, and a 1-D view of the state.
        """
        position = self._planner.source.contents(tensor).group
        _, kept, index = self._finder(groups)(tensor, groups[position])
        return kept.of_parameter(states, index, name, state)


def _computed(groups: Groups) -> torch.dtype:
    """Type in which steps compute."""
    return dtype_of(tensor for group in groups for tensor in group["params"])
