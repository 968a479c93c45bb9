"""Saving and restoring an optimizer, and taking over states that another layout has saved."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rankwise.routing.roles import ParameterInfo
from rankwise.sharding.sources import TensorContents
from rankwise.step.declared import Declared
from rankwise.step.element_states import ElementStates, States, StateTypes, StoredRun
from rankwise.step.entries import cut_into_entries
from rankwise.step.fitting import MisfitError, check_shape, in_order_of, refuse_strange, saved_groups_fit
from rankwise.step.matrix_states import MatrixState, MatrixStates
from rankwise.step.planner import Planned, Planner
from rankwise.step.table import Groups, ParameterTable
from rankwise.step.unit import StepUnit
from rankwise.step.values import GroupValues

__all__ = ["SavedStates"]


class SavedStates:
    """The part of an optimizer that outlives the process.

    Args:
        declared: The states that rules keep.
        values: The options of groups.
        table: The parameters and their rules.
        planner: The units, in whose layout states are stored.
        matrix_states: The optimizer's.
    """

    def __init__(
        self,
        declared: Declared,
        values: GroupValues,
        table: ParameterTable,
        planner: Planner,
        matrix_states: MatrixStates,
    ) -> None:
        self._declared, self._values, self._table = declared, values, table
        self._planner, self._matrix_states = planner, matrix_states

    # --- dictionaries -------------------------------------------------------------------------------------------

    def beside_torch(self, groups: Groups, states: States) -> dict[str, Any]:
        """What a state dictionary holds besides torch's own; a collective where ranks hold the parameters alike."""
        matrices, source = self._matrix_states.everything(), self._planner.source
        if source.replicated and source.group is not None:
            matrices = self._collected(matrices, source.group)
        return {
            "matrix_states": {key: dict(state) for key, state in matrices.items()},
            "rankwise": self._declared.identity,
            "layout": self._layout_records(groups, states),
        }

    def _collected(self, states: Mapping[str, MatrixState], group: dist.ProcessGroup) -> dict[str, MatrixState]:
        """The states of all ranks; where several have some of one matrix, its owner's count, else the first rank's."""
        planner = self._planner
        mine = {key: state for key, state in states.items() if planner.owner_of.get(key, planner.rank) == planner.rank}
        everyone: list[dict[str, MatrixState]] = [{} for _ in range(dist.get_world_size(group))]
        dist.all_gather_object(everyone, mine, group=group)
        return {key: state for rank_states in reversed(everyone) for key, state in rank_states.items()}

    def _layout_records(self, groups: Groups, states: States) -> list[dict[str, Any]]:
        """What every tensor stores, in plain data, so that a checkpoint can be read on another layout."""
        units = self._planner.units.values()
        planned = {id(tensor): (unit, at) for unit in units for at, tensor in enumerate(unit.tensors)}
        infos = self._table.infos
        return [
            self._layout_record(groups, tensor, group, states, planned.get(id(tensor)), infos)
            for group in groups
            for tensor in group["params"]
        ]

    def _layout_record(
        self,
        groups: Groups,
        tensor: Tensor,
        group: Mapping[str, Any],
        states: States,
        place: tuple[StepUnit, int] | None,
        infos: Mapping[str, ParameterInfo],
    ) -> dict[str, Any]:
        names = [name for name in states.get(tensor, {}) if name != "step"]
        name = self._planner.name_of(tensor)
        own = {} if name is None else {"name": name}
        if place is not None:
            unit, index = place
            return {"group": unit.tensor_groups[index], **unit.states.record(names, index), **own}
        if tensor not in states:
            return {"group": 0, "runs": [], "states": {}, **own}
        # States were loaded and no step has planned since.
        content = self._planner.source.contents(tensor)
        kept = self._kept_in(groups, tensor, content, group, infos)
        return {"group": content.group, **kept.record(names, 0), **own}

    def _kept_in(
        self,
        groups: Groups,
        tensor: Tensor,
        content: TensorContents,
        group: Mapping[str, Any],
        infos: Mapping[str, ParameterInfo],
    ) -> ElementStates:
        """The states that one tensor keeps in a group, whether or not a step was planned; its index is 0."""
        routes = {part.name: self._table.choose_in(groups, part.name, group) for part in content.slices}
        entries = cut_into_entries([content], infos, routes)
        declared = [self._declared.element_states(entry.info, entry.route.rule, group) for entry in entries]
        return ElementStates([tensor], entries, declared, tensor.dtype)

    # --- judging a dictionary -----------------------------------------------------------------------------------

    def fitted(self, optimizer: Planned, state_dict: dict[str, Any], groups: Groups) -> dict[str, Any]:
        """A dictionary as this optimizer would have written it.

        Args:
            optimizer: Knows what its matrices begin with.
            state_dict: Of any optimizer.
            groups: This one's.

        Raises:
            ValueError: Another optimizer has written it, or for other parameters.
        """
        self._refuse_foreign(state_dict)
        if saved_groups_fit(state_dict, groups):
            names = [[self._planner.name_of(tensor) for tensor in group["params"]] for group in groups]
            state_dict = in_order_of(self._declared.identity, state_dict, names)
            self._refuse_unknown_matrices(state_dict)
            self._refuse_misfits(optimizer, state_dict, groups)
            state_dict["param_groups"] = self._values.completed(groups, state_dict["param_groups"])
        return state_dict

    def refuse_foreign(self, state_dict: Mapping[str, Any]) -> None:
        """Refuse a dictionary that is not one of this optimizer's.

        Args:
            state_dict: As ``optimizer.state_dict()`` returned it, somewhere.

        Raises:
            ValueError: Another optimizer has written it, or it has states or parameters that this one has not.
        """
        self._refuse_foreign(state_dict)
        self._refuse_unknown_matrices(state_dict)

    def _refuse_foreign(self, state_dict: Mapping[str, Any]) -> None:
        ours = self._declared.identity
        theirs = state_dict.get("rankwise")
        # A dictionary that was put together by others holds no matrix states; some optimizers have none.
        if theirs != ours and (theirs is not None or (self._declared.matrix_state_names and state_dict["state"])):
            if theirs is None:
                raise ValueError(self._refusal_of_anonymous(state_dict))
            raise ValueError(
                f"{ours}: the checkpoint's rankwise={theirs!r} is invalid: it names the optimizer that wrote it, "
                f"which must be {ours!r}; load it into that one, or load the weights alone"
            )

    def _refusal_of_anonymous(self, state_dict: Mapping[str, Any]) -> str:
        """Of a dictionary that says nothing of who wrote it: another optimizer's, or ours, taken apart."""
        declared, groups = self._declared, state_dict["param_groups"]
        if groups and all(set(declared.group_options) <= set(group) for group in groups):
            return (
                f"{declared.identity}: the state dictionary has lost its matrix states "
                f"({', '.join(declared.matrix_state_names)}), as happens in torch.distributed.checkpoint's "
                "get_optimizer_state_dict, which keeps states by parameter alone; save "
                "optimizer.state_dict() itself, for example under a key of its own, and load that"
            )
        return (
            f"{declared.identity}: the state dictionary was written by another optimizer than rankwise's, "
            "torch.optim.AdamW for example, whose states mean something else; "
            "load it into that one, or load the weights alone and start "
            "the states afresh"
        )

    def _refuse_unknown_matrices(self, state_dict: Mapping[str, Any]) -> None:
        ours, names = self._declared.identity, self._declared.matrix_state_names
        for key, state in state_dict.get("matrix_states", {}).items():
            if self._table.base_name(key) not in self._table.catalog:
                raise ValueError(
                    f"{ours}: the checkpoint's matrix_states has {key!r}, which is invalid: it must be the name of one "
                    f"of this optimizer's parameters ({', '.join(list(self._table.catalog)[:3])}, ...); build the "
                    "optimizer from the same named parameters"
                )
            unknown = sorted(set(state).difference(names))
            if unknown:
                raise ValueError(
                    f"{ours}: the checkpoint's matrix_states[{key!r}] has {unknown[0]!r}, which is invalid: it must be "
                    f"one of {', '.join(names) or 'none'}; load it with the version that wrote it"
                )

    def _refuse_misfits(self, optimizer: Planned, state_dict: Mapping[str, Any], present: Groups) -> None:
        """Compare the states with the parameters of this optimizer, in the groups that the dictionary brings."""
        declared, infos = self._declared, self._table.infos
        matrices: Mapping[str, MatrixState] = state_dict.get("matrix_states", {})
        groups = []
        for group, saved in zip(present, state_dict["param_groups"], strict=True):
            groups.append({**group, **{key: value for key, value in saved.items() if key != "params"}})
            for tensor, key in zip(group["params"], saved["params"], strict=True):
                states = state_dict["state"].get(key)
                if states:
                    self._refuse_misfit(present, tensor, states, groups[-1], infos)
        for key, states in matrices.items():
            name = self._table.base_name(key)
            info, position = self._table.catalog[name]
            # Slices of a matrix are compared with what their owner expects.
            if (key == name) == (len(info.shape) < 3) and position < len(groups):
                for state, shapes in declared.matrix_state_shapes(info, groups[position]).items():
                    if state in states:
                        check_shape(declared.identity, key, state, states[state].shape, shapes)
        if self.structure(groups) == self.structure(present):
            for unit in self._planner.units.values():
                refuse_strange(declared.identity, unit, matrices, optimizer.work(unit).matrix_state)

    def _refuse_misfit(
        self,
        groups: Groups,
        tensor: Tensor,
        states: Mapping[str, Any],
        group: Mapping[str, Any],
        infos: Mapping[str, ParameterInfo],
    ) -> None:
        try:
            content = self._planner.source.contents(tensor)
        except (LookupError, RuntimeError):
            return  # the step will say what is wrong
        owner = self._declared.identity
        kept = self._kept_in(groups, tensor, content, group, infos)
        whole = self._planner.name_of(tensor)
        key = whole or ", ".join(part.name for part in content.slices[:3])
        for name, shape in kept.shapes(0).items():
            if name in states:
                check_shape(owner, key, name, states[name].shape, [shape])
            elif whole is not None and "step" in states and name not in self._declared.optional_states:
                raise MisfitError(
                    f"{owner}: the checkpoint's states of {key!r} are invalid: they must include {name!r}, as "
                    f"this optimizer's options say, but are {', '.join(map(repr, states))}; build it with the options "
                    "that the checkpoint was saved with, or load the weights alone"
                )

    # --- taking over --------------------------------------------------------------------------------------------

    def structure(self, groups: Groups) -> list[tuple[Any, ...]]:
        """The values of all groups on which shapes of states depend."""
        return [self._declared.structure_of(group) for group in groups]

    def restore(self, state_dict: Mapping[str, Any], groups: Groups, states: States) -> None:
        """Finish what torch has begun: the types of states, and those of matrices.

        Args:
            state_dict: See :meth:`fitted`.
            groups: Loaded.
            states: Loaded.
        """
        # torch casts floating-point states to the parameter's type, which would round fp32 states of bf16 weights.
        saved_ids = (key for group in state_dict["param_groups"] for key in group["params"])
        tensors = (tensor for group in groups for tensor in group["params"])
        for key, tensor in zip(saved_ids, tensors, strict=True):
            for name, value in state_dict["state"].get(key, {}).items():
                if name == "step" and not isinstance(value, Tensor):
                    value = torch.tensor(float(value), dtype=torch.float32)
                if isinstance(value, Tensor):
                    # Copies, the count included: it is advanced in place.
                    device = self._declared.count_device(tensor) if name == "step" else tensor.device
                    states[tensor][name] = value.to(device=device, copy=True)

    def restore_matrices(self, state_dict: Mapping[str, Any]) -> None:
        """Take the matrix states of a dictionary."""
        saved: Mapping[str, MatrixState] = state_dict.get("matrix_states", {})
        self._matrix_states.load(
            {key: {name: value.clone() for name, value in state.items()} for key, state in saved.items()}
        )

    def adopt_groups(self, groups: Sequence[dict[str, Any]], saved: Groups) -> None:
        """Take over hyper-parameters from another layout's checkpoint; before planning, which depends on some.

        Args:
            groups: The optimizer's, changed in place.
            saved: The checkpoint's.
        """
        before = self.structure(groups)
        for group, theirs in zip(groups, saved, strict=True):
            group.update({name: value for name, value in theirs.items() if name != "params"})
        if self.structure(groups) != before:
            self._planner.route_again(groups)

    def forget(self, states: dict[Tensor, Any]) -> None:
        """Drop all states: the next step is a first one."""
        for unit in self._planner.units.values():
            for tensor in unit.tensors:
                states.pop(tensor, None)
        self._matrix_states.forget()

    def adopt(
        self,
        optimizer: Planned,
        states: States,
        matrix_states: Mapping[str, MatrixState],
        steps: Mapping[int, Tensor],
    ) -> None:
        """Take over matrix states and step counts by group from another layout's checkpoint.

        Args:
            optimizer: Knows what its matrices begin with.
            states: Its element states.
            matrix_states: By matrix.
            steps: By the position of a group.

        Raises:
            MisfitError: A state is not of the shape of its matrix; nothing has changed then.
        """
        units = list(self._planner.units.values())
        for unit in units:
            refuse_strange(self._declared.identity, unit, matrix_states, optimizer.work(unit).matrix_state)
        device = next((unit.device for unit in units), torch.device("cpu"))
        self._matrix_states.load(
            {key: {name: value.to(device) for name, value in state.items()} for key, state in matrix_states.items()}
        )
        for unit in units:
            for tensor, group_index in zip(unit.tensors, unit.tensor_groups, strict=True):
                step = steps.get(group_index)
                if step is not None:
                    states[tensor]["step"] = step.to(device=self._declared.count_device(tensor), copy=True)

    # --- where states lie ---------------------------------------------------------------------------------------

    def kept_states(self, groups: Groups, name: str) -> StateTypes:
        """The element states that a parameter's rule keeps, the same on every rank.

        Raises:
            KeyError: The optimizer has no such parameter.
        """
        info, index = self._table.catalog[name]
        return self._declared.element_states(info, self._table.routes[name].rule, groups[index])

    def stored_states(
        self, groups: Groups, states: States, tensor: Tensor, name: str, state: str
    ) -> list[tuple[int, Tensor]]:
        """Where an element state of one parameter lies.

        Args:
            groups: The optimizer's.
            states: Its element states.
            tensor: A tensor of the param groups, stepped or loaded before.
            name: A parameter.
            state: One of its :meth:`kept_states`.

        Returns:
            The runs of the flattened parameter that ``tensor`` stores: first element, and a 1-D view of the state.
        """
        place = self._planner.place_of(tensor)
        if place is not None:
            unit, index = place
            return unit.states.of_parameter(states, index, name, state)
        # States were loaded and no step has planned since.
        content = self._planner.source.contents(tensor)
        kept = self._kept_in(groups, tensor, content, groups[content.group], self._table.infos)
        return kept.of_parameter(states, 0, name, state)

    def storage(self, states: States) -> Iterator[tuple[Tensor, list[StoredRun]]]:
        """Every planned tensor with its runs and views of its element states, allocated if they were not."""
        for unit in self._planner.units.values():
            for index, tensor in enumerate(unit.tensors):
                yield tensor, unit.states.runs(states, index)
