"""Saving, restoring and copying an optimizer, and taking over states that another layout has saved."""

from __future__ import annotations

from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from rankwise.routing.roles import ParameterInfo, Rule
from rankwise.sharding.sources import LayoutSource, TensorContents, WholeParameters
from rankwise.step.element_states import ElementStates, StateTypes, StoredRun
from rankwise.step.entries import cut_into_entries
from rankwise.step.fitting import MisfitError, check_shape, in_order_of, saved_groups_fit
from rankwise.step.matrix_states import MatrixState
from rankwise.step.table import RoutedOptimizer, UnitKey
from rankwise.step.undo import Unsettled
from rankwise.step.unit import StepUnit

__all__ = ["Checkpoints"]


class Checkpoints(RoutedOptimizer):
    """The part of :class:`rankwise.step.optimizer.ShardedOptimizer` that outlives the process."""

    matrix_state_names: ClassVar[tuple[str, ...]] = ()
    """Names of the states that an owner keeps of a matrix."""
    counted_states: ClassVar[tuple[str, ...]] = ()
    """Those among them that the host works with; they lie in its memory, unless the optimizer is capturable."""

    optional_states: ClassVar[tuple[str, ...]] = ()
    """Element states that a parameter may have been stepped without."""

    copied_attributes: ClassVar[tuple[str, ...]] = (
        "options",
        "group_options",
        "structural_options",
        "matrix_states",
        "_catalog",
        "_routes",
        "_structures",
        "parameters_by_name",
    )
    """What ``copy.deepcopy`` and ``pickle`` take along besides torch's own."""

    @property
    def capturable(self) -> bool:
        """Whether steps can be captured in a CUDA graph; their counts then lie on the device of the weights."""
        return bool(getattr(self.options, "capturable", False))

    def _count_device(self, tensor: Tensor) -> torch.device:
        return tensor.device if self.capturable else torch.device("cpu")

    def _detach(self) -> None:
        super()._detach()
        self._unsettled: dict[UnitKey, Unsettled] = {}

    def _forget_plans(self) -> None:
        self.settle()
        super()._forget_plans()

    def settle(self, keys: Iterable[UnitKey] | None = None) -> None:
        """Take back the counts of steps that were undone; of all units, or some."""
        for key in list(self._unsettled) if keys is None else keys:
            unsettled = self._unsettled.pop(key, None)
            if unsettled is not None:
                unsettled.settle()

    # --- dictionaries -------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """As :meth:`torch.optim.Optimizer.state_dict`, plus this rank's matrix states by parameter name.

        Where a framework saves only one rank's dictionary (parameters replicated), the owners' states are collected
        first; every rank must then call this.
        """
        self.settle()
        result = super().state_dict()
        states = self.matrix_states.everything()
        if self._source.replicated and self._source.group is not None:
            states = self._collected(states, self._source.group)
        result["matrix_states"] = {key: dict(state) for key, state in states.items()}
        result["rankwise"] = self.identity
        result["layout"] = self._layout_records()
        return result

    def _collected(self, states: Mapping[str, MatrixState], group: dist.ProcessGroup) -> dict[str, MatrixState]:
        """The states of all ranks; where several have some of one matrix, its owner's count, else the first rank's."""
        mine = {key: state for key, state in states.items() if self._owner_of.get(key, self.rank) == self.rank}
        everyone: list[dict[str, MatrixState]] = [{} for _ in range(dist.get_world_size(group))]
        dist.all_gather_object(everyone, mine, group=group)
        return {key: state for rank_states in reversed(everyone) for key, state in rank_states.items()}

    @property
    def identity(self) -> str:
        """What a checkpoint must have been written by for its states to be ours: class and structural choices."""
        return type(self).__name__

    def _layout_records(self) -> list[dict[str, Any]]:
        """What every tensor stores, in plain data, so that a checkpoint can be read on another layout."""
        planned = {id(tensor): (unit, at) for unit in self._units.values() for at, tensor in enumerate(unit.tensors)}
        infos = self._infos()
        return [
            self._layout_record(tensor, group, planned.get(id(tensor)), infos)
            for group in self.param_groups
            for tensor in group["params"]
        ]

    def _layout_record(
        self,
        tensor: Tensor,
        group: Mapping[str, Any],
        place: tuple[StepUnit, int] | None,
        infos: Mapping[str, ParameterInfo],
    ) -> dict[str, Any]:
        names = [name for name in self.state.get(tensor, {}) if name != "step"]
        name = self._name_of(tensor)
        own = {} if name is None else {"name": name}
        if place is not None:
            unit, index = place
            return {"group": unit.tensor_groups[index], **unit.states.record(names, index), **own}
        if tensor not in self.state:
            return {"group": 0, "runs": [], "states": {}, **own}
        # States were loaded and no step has planned since.
        content = self._source.contents(tensor)
        return {"group": content.group, **self._kept_in(tensor, content, group, infos).record(names, 0), **own}

    def _name_of(self, tensor: Tensor) -> str | None:
        """The parameter that a tensor is, where the tensors are parameters."""
        return self._source.name_of(tensor) if isinstance(self._source, WholeParameters) else None

    def _infos(self) -> dict[str, ParameterInfo]:
        return {name: info for name, (info, _) in self._catalog.items()}

    def _kept_in(
        self, tensor: Tensor, content: TensorContents, group: Mapping[str, Any], infos: Mapping[str, ParameterInfo]
    ) -> ElementStates:
        """The states that one tensor keeps in a group, whether or not a step was planned; its index is 0."""
        routes = {part.name: self._choose_in(part.name, group) for part in content.slices}
        entries = cut_into_entries([content], infos, routes)
        declared = [self.element_states(entry.info, entry.route.rule, group) for entry in entries]
        return ElementStates([tensor], entries, declared, tensor.dtype)

    def stored_states(self, tensor: Tensor, name: str, state: str) -> list[tuple[int, Tensor]]:
        """Where an element state of one parameter lies.

        Args:
            tensor: A tensor of the param groups, stepped or loaded before.
            name: A parameter.
            state: One of its :meth:`kept_states`.

        Returns:
            The runs of the flattened parameter that ``tensor`` stores: first element, and a 1-D view of the state.
        """
        for unit in self._units.values():
            for index, candidate in enumerate(unit.tensors):
                if candidate is tensor:
                    return unit.states.of_parameter(self.state, index, name, state)
        # States were loaded and no step has planned since.
        content = self._source.contents(tensor)
        kept = self._kept_in(tensor, content, self.param_groups[content.group], self._infos())
        return kept.of_parameter(self.state, 0, name, state)

    def kept_states(self, name: str) -> StateTypes:
        """The element states that a parameter's rule keeps, the same on every rank.

        Args:
            name: The parameter's.

        Raises:
            KeyError: The optimizer has no such parameter.
        """
        info, index = self._catalog[name]
        return self.element_states(info, self._routes[name].rule, self.param_groups[index])

    @abstractmethod
    def element_states(self, info: ParameterInfo, rule: Rule, group: Mapping[str, Any]) -> StateTypes:
        """Names of a parameter's per-element states, and their type (None: that of the computation)."""

    def matrix_state_shapes(
        self, info: ParameterInfo, group: Mapping[str, Any]
    ) -> Mapping[str, Collection[tuple[int, ...]]]:
        """The shapes that the states of one matrix may have, by name; those not named are not compared."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore; matrix states go to whoever owns them now.

        Parameters that were saved in another order are found by their names where both sides have them. States keep
        the type they were saved with until the next step, which brings them to its own.

        Raises:
            ValueError: Another optimizer has written it, or for other parameters; nothing has changed then.
        """
        hooks = self._optimizer_load_state_dict_pre_hooks
        state_dict = dict(state_dict)
        for hook in hooks.values():
            state_dict = hook(self, state_dict) or state_dict
        self._refuse_foreign(state_dict)
        if saved_groups_fit(state_dict, self.param_groups):
            names = [[self._name_of(tensor) for tensor in group["params"]] for group in self.param_groups]
            state_dict = in_order_of(self.identity, state_dict, names)
            self._refuse_unknown_matrices(state_dict)
            self._refuse_misfits(state_dict)
            state_dict["param_groups"] = self._completed(state_dict["param_groups"])
        before = self._structure()
        # They have been called: what is compared must be what is loaded.
        self._optimizer_load_state_dict_pre_hooks = OrderedDict()
        try:
            super().load_state_dict(state_dict)
        finally:
            self._optimizer_load_state_dict_pre_hooks = hooks
        self._restore_types(state_dict)
        if self._structure() != before:
            # The saved states lie with the owners of a fresh plan.
            self._owner_of.clear()
            self._route_again()
        saved: Mapping[str, MatrixState] = state_dict.get("matrix_states", {})
        self.matrix_states.load(
            {key: {name: value.clone() for name, value in state.items()} for key, state in saved.items()}
        )

    def refuse_foreign(self, state_dict: Mapping[str, Any]) -> None:
        """Refuse a dictionary that is not one of this optimizer's.

        Args:
            state_dict: As :meth:`state_dict` returned it, somewhere.

        Raises:
            ValueError: Another optimizer has written it, or it has states or parameters that this one has not.
        """
        self._refuse_foreign(state_dict)
        self._refuse_unknown_matrices(state_dict)

    def _refuse_foreign(self, state_dict: Mapping[str, Any]) -> None:
        ours = self.identity
        theirs = state_dict.get("rankwise")
        # A dictionary that was put together by others holds no matrix states; some optimizers have none.
        if theirs != ours and (theirs is not None or (self.matrix_state_names and state_dict["state"])):
            if theirs is None:
                raise ValueError(self._refusal_of_anonymous(state_dict))
            raise ValueError(
                f"{ours}: the checkpoint's rankwise={theirs!r} is invalid: it names the optimizer that wrote it, "
                f"which must be {ours!r}; load it into that one, or load the weights alone"
            )

    def _refuse_unknown_matrices(self, state_dict: Mapping[str, Any]) -> None:
        ours = self.identity
        for key, state in state_dict.get("matrix_states", {}).items():
            if self._base_name(key) not in self._catalog:
                raise ValueError(
                    f"{ours}: the checkpoint's matrix_states has {key!r}, which is invalid: it must be the name of one "
                    f"of this optimizer's parameters ({', '.join(list(self._catalog)[:3])}, ...); build the optimizer "
                    "from the same named parameters"
                )
            unknown = sorted(set(state).difference(self.matrix_state_names))
            if unknown:
                raise ValueError(
                    f"{ours}: the checkpoint's matrix_states[{key!r}] has {unknown[0]!r}, which is invalid: it must be "
                    f"one of {', '.join(self.matrix_state_names) or 'none'}; load it with the version that wrote it"
                )

    def _completed(self, saved: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Groups of a dictionary, with this optimizer's values of what their version did not have."""
        return [
            {**theirs, **{name: group[name] for name in self.defaults if name in group and name not in theirs}}
            for group, theirs in zip(self.param_groups, saved, strict=True)
        ]

    def _refuse_misfits(self, state_dict: Mapping[str, Any]) -> None:
        """Compare the states with the parameters of this optimizer, in the groups that the dictionary brings."""
        infos = self._infos()
        groups = []
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            groups.append({**group, **{key: value for key, value in saved.items() if key != "params"}})
            for tensor, key in zip(group["params"], saved["params"], strict=True):
                states = state_dict["state"].get(key)
                if states:
                    self._refuse_misfit(tensor, states, groups[-1], infos)
        for key, states in state_dict.get("matrix_states", {}).items():
            name = self._base_name(key)
            info, position = self._catalog[name]
            # Slices of a matrix are compared with what their owner expects.
            if (key == name) == (len(info.shape) < 3) and position < len(groups):
                allowed = self.matrix_state_shapes(info, groups[position])
                for state, shapes in allowed.items():
                    if state in states:
                        check_shape(self.identity, key, state, states[state].shape, shapes)
        if self._structures_of(groups) == self._structure():
            for unit in self._units.values():
                self._refuse_strange(unit, state_dict.get("matrix_states", {}))

    def _refuse_misfit(
        self,
        tensor: Tensor,
        states: Mapping[str, Any],
        group: Mapping[str, Any],
        infos: Mapping[str, ParameterInfo],
    ) -> None:
        try:
            content = self._source.contents(tensor)
        except (LookupError, RuntimeError):
            return  # the step will say what is wrong
        kept = self._kept_in(tensor, content, group, infos)
        whole = self._name_of(tensor)
        key = whole or ", ".join(part.name for part in content.slices[:3])
        expected = kept.shapes(0)
        for name, shape in expected.items():
            if name in states:
                check_shape(self.identity, key, name, states[name].shape, [shape])
            elif whole is not None and "step" in states and name not in self.optional_states:
                raise MisfitError(
                    f"{self.identity}: the checkpoint's states of {key!r} are invalid: they must include {name!r}, as "
                    f"this optimizer's options say, but are {', '.join(map(repr, states))}; build it with the options "
                    "that the checkpoint was saved with, or load the weights alone"
                )

    @abstractmethod
    def _refuse_strange(self, unit: StepUnit, states: Mapping[str, MatrixState]) -> None:
        """Compare the states of matrices that this rank owns with what a planned unit expects of them."""

    def _refusal_of_anonymous(self, state_dict: Mapping[str, Any]) -> str:
        """Of a dictionary that says nothing of who wrote it: another optimizer's, or ours, taken apart."""
        groups = state_dict["param_groups"]
        if groups and all(set(self.group_options) <= set(group) for group in groups):
            return (
                f"{self.identity}: the state dictionary has lost its matrix states "
                f"({', '.join(self.matrix_state_names)}), as happens in torch.distributed.checkpoint's "
                "get_optimizer_state_dict, which keeps states by parameter alone; save "
                "optimizer.state_dict() itself, for example under a key of its own, and load that"
            )
        return (
            f"{self.identity}: the state dictionary was written by another optimizer than rankwise's, "
            "torch.optim.AdamW for example, whose states mean something else; "
            "load it into that one, or load the weights alone and start "
            "the states afresh"
        )

    def extra_state(self) -> dict[str, Any]:
        """What is neither weight, element state nor matrix state, in plain data."""
        return {}

    def load_extra_state(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what is neither weight, element state nor matrix state."""

    def _restore_types(self, state_dict: Mapping[str, Any]) -> None:
        # torch casts floating-point states to the parameter's type, which would round fp32 states of bf16 weights.
        saved_ids: Iterable[Any] = (key for group in state_dict["param_groups"] for key in group["params"])
        for key, tensor in zip(saved_ids, self._tensors(), strict=True):
            for name, value in state_dict["state"].get(key, {}).items():
                if name == "step" and not isinstance(value, Tensor):
                    value = torch.tensor(float(value), dtype=torch.float32)
                if isinstance(value, Tensor):
                    # Copies, the count included: it is advanced in place.
                    device = self._count_device(tensor) if name == "step" else tensor.device
                    self.state[tensor][name] = value.to(device=device, copy=True)

    def _structure(self) -> list[tuple[Any, ...]]:
        return self._structures_of(self.param_groups)

    def _structures_of(self, groups: Sequence[Mapping[str, Any]]) -> list[tuple[Any, ...]]:
        return [self._structure_of(group) for group in groups]

    # --- moving to another layout -------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """This process's position among the data-parallel ranks."""
        group = self._source.group
        return 0 if group is None else dist.get_rank(group)

    @property
    def layout_source(self) -> LayoutSource:
        """The framework's description of the param groups' tensors."""
        return self._source

    def storage(self) -> Iterator[tuple[Tensor, list[StoredRun]]]:
        """Every planned tensor with its runs and views of its element states, allocated if they were not."""
        for unit in self._units.values():
            for index, tensor in enumerate(unit.tensors):
                yield tensor, unit.states.runs(self.state, index)

    @property
    def planned_units(self) -> Sequence[StepUnit]:
        """The units planned so far, one for each ``step()`` call of a round."""
        return list(self._units.values())

    def logical_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of everything planned, whichever rank holds it, by parameter or matrix of a stack."""
        return {key: tuple(shape) for unit in self._units.values() for key, shape in unit.layout.shapes.items()}

    def adopt_groups(self, param_groups: Sequence[Mapping[str, Any]]) -> None:
        """Take over hyper-parameters from another layout's checkpoint; before planning, which depends on some."""
        before = self._structure()
        for group, saved in zip(self.param_groups, param_groups, strict=True):
            group.update({name: value for name, value in saved.items() if name != "params"})
        if self._structure() != before:
            self._owner_of.clear()
            self._route_again()

    def forget_states(self) -> None:
        """Drop all states: the next step is a first one."""
        self.settle()
        for unit in self._units.values():
            for tensor in unit.tensors:
                self.state.pop(tensor, None)
        self.matrix_states.forget()

    def adopt(self, matrix_states: Mapping[str, MatrixState], steps: Mapping[int, Tensor]) -> None:
        """Take over matrix states and step counts by group from another layout's checkpoint.

        Raises:
            MisfitError: A state is not of the shape of its matrix; nothing has changed then.
        """
        self.settle()
        for unit in self._units.values():
            self._refuse_strange(unit, matrix_states)
        device = next((unit.device for unit in self._units.values()), torch.device("cpu"))
        self.matrix_states.load(
            {key: {name: value.to(device) for name, value in state.items()} for key, state in matrix_states.items()}
        )
        for unit in self._units.values():
            for tensor, group_index in zip(unit.tensors, unit.tensor_groups, strict=True):
                step = steps.get(group_index)
                if step is not None:
                    self.state[tensor]["step"] = step.to(device=self._count_device(tensor), copy=True)

    # --- copies -------------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        self.settle()
        return {**super().__getstate__(), **{name: getattr(self, name) for name in self.copied_attributes}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # torch's load_state_dict comes here too, with states and groups alone.
        if "options" in state:
            self._detach()
        super().__setstate__(state)
        for name, parameter in state.get("parameters_by_name", {}).items():
            self._plain.register(parameter, name, self._catalog[name][1])
