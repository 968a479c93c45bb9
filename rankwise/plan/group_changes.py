"""What users change in a living optimizer: parameters moved between groups, options of groups, the model's own type."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from rankwise.layout.dtensors import cut_of, is_sharded, local_view
from rankwise.layout.front_ends import loaded_advice
from rankwise.layout.layout_source import real_view, refuse_strangers, refuse_unreadable
from rankwise.plan.planner import FORMS, Planner, form_of
from rankwise.plan.step_unit import StepUnit
from rankwise.states.element_states import States
from rankwise.states.parameter_table import Groups

__all__ = ["GroupChanges"]


class GroupChanges:
    """Notices what has changed since the steps were planned."""

    def __init__(self, planner: Planner) -> None:
        self._planner, self._spec, self._values, self._table = planner, planner.spec, planner.values, planner.table
        self._planned_structure: list[tuple[Any, ...]] = []

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy has nothing planned.
        return type(self), (self._planner,)

    def follow(self, unit: StepUnit | None, groups: Groups, states: States) -> bool:
        """Follow what may be changed and refuse what may not, before the step changes anything.

        Returns:
            Whether the plans were forgotten.

        Raises:
            OptionError: An option of a group has changed that may not change any more, or never.
            RuntimeError: A parameter is another tensor than before.
        """
        self._values.refuse_changes(groups)
        planner = self._planner
        plain = planner.is_plain
        if unit is not None and plain and list(map(form_of, unit.tensors)) != unit.notes[FORMS]:
            self._follow_forms(unit)
            return True
        if unit is None and plain:
            self._refuse_exchanged(groups)
            for tensor in (tensor for group in groups for tensor in group["params"]):
                # FSDP1 may have flattened the parameter since the optimizer was built.
                refuse_unreadable(self._spec.name, str(planner.name_of(tensor)), tensor)
        structure = self._spec.structures_of(groups)
        if unit is not None and structure == self._planned_structure:
            return False
        changed = self._follow_groups(groups, states)
        self._planned_structure = structure
        planned = {id(tensor) for planned_unit in planner.units.values() for tensor in planned_unit.tensors}
        present = (id(tensor) for group in groups for tensor in group["params"])
        # A plan of the same tensors in other groups is out of date.
        if changed or (unit is None and plain and not planned.isdisjoint(present)):
            planner.forget()
            return True
        return False

    def _refuse_exchanged(self, groups: Groups) -> None:
        """Refuse tensors that the optimizer was not built on."""
        known = self._table.names_by_group(len(groups))
        for position, group in enumerate(groups):
            for place, tensor in enumerate(group["params"]):
                if self._planner.name_of(tensor) is not None:
                    continue
                names = known[position]
                instead = f" in the place of '{names[place]}'" if place < len(names) else ""
                advice = loaded_advice()
                raise RuntimeError(
                    f"{self._spec.name}: param group {position} has a tensor of shape {tuple(tensor.shape)}{instead} "
                    "that the optimizer was not built on: parameters must stay the tensors they were; build a new "
                    "optimizer, or add further ones with add_param_group"
                    + (f"; under a framework, {advice}" if advice else "")
                )

    def replace_parameters(self, groups: Groups, states: States) -> None:
        """Use the sharded parameters that took the places of the optimizer's, as accelerate puts them there.

        Names, rules and groups stay.

        Raises:
            OptionError: The sharded model has one of them under another name.
            RuntimeError: There are states, which belong to the parameters before.
        """
        owner, sharded = self._spec.name, self._in_places(groups)
        if not sharded:
            return
        if states or self._planner.matrix_states.everything():
            raise RuntimeError(
                f"{owner}: the parameters were sharded after the optimizer had got states, which belong to those "
                "before; shard the model (accelerate: prepare) before the first step, and load states after it"
            )
        refuse_strangers(owner, sharded)
        self._table.replace_parameters(sharded)
        self._planner.forget()

    def _in_places(self, groups: Groups) -> dict[str, Tensor]:
        """Sharded parameters in the places of others, by name; none unless every place has one that fits."""
        table, name_of = self._table, self._planner.name_of
        present = [tensor for group in groups for tensor in group["params"]]
        if not self._planner.is_plain or all(name_of(tensor) for tensor in present):
            return {}
        places = Counter(index for _, index in table.catalog.values())
        if places != Counter({index: len(group["params"]) for index, group in enumerate(groups)}):
            return {}
        names = [name for group in table.names_by_group(len(groups)) for name in group]
        replaced = {name: new for name, new in zip(names, present, strict=True) if table.parameters[name] is not new}
        fit = all(is_sharded(new) and new.shape == table.parameters[name].shape for name, new in replaced.items())
        return replaced if fit else {}

    def _follow_forms(self, unit: StepUnit) -> None:
        """Plan anew for a model whose tensors were brought to another type or device, with their states."""
        owner, planner = self._spec.name, self._planner
        for tensor, planned in zip(unit.tensors, unit.notes[FORMS], strict=True):
            name = str(planner.name_of(tensor))
            refuse_unreadable(owner, name, tensor)
            if cut_of(tensor) != planned.cut:
                raise RuntimeError(
                    f"{owner}: '{name}' was cut over ranks in another way when the optimizer was built; build a new "
                    "optimizer after sharding a model, and load the states into it"
                )
            slices = planner.source.contents(tensor).slices
            numel, built = real_view(local_view(tensor)).numel(), sum(part.end - part.start for part in slices)
            if numel != built:
                raise RuntimeError(
                    f"{owner}: '{name}' has {numel} elements, but had {built} when the optimizer was "
                    "built; build a new optimizer after resizing a model"
                )
        planner.forget()
        planner.matrix_states.load(planner.matrix_states.everything())

    def _follow_groups(self, groups: Groups, states: States) -> bool:
        """Route by the groups that parameters are in now; return whether any route may have changed."""
        table, structure_of = self._table, self._spec.structure_of
        positions = {name: position for name, (_, position) in table.catalog.items()}
        if self._planner.is_plain:
            for position, group in enumerate(groups):
                self._values.refuse_incomplete(position, group)
                positions.update({str(self._planner.name_of(tensor)): position for tensor in group["params"]})
        places = {name: index for name, index in positions.items() if name in table.catalog and index < len(groups)}
        changed = [name for name, index in places.items() if structure_of(groups[index]) != table.structures[name]]
        for name in changed:
            self._refuse_other_states(name, places[name], groups, states)
        for name, position in places.items():
            table.move(name, position)
        for name in changed:
            table.route_by(groups, name)
        return bool(changed)

    def _refuse_other_states(self, name: str, position: int, groups: Groups, states: States) -> None:
        group = groups[position]
        old = dict(zip(self._spec.structural_options, self._table.structures[name], strict=True))
        if self._has_states(name, states) and self._keeps(name, {**group, **old}) != self._keeps(name, group):
            for option, value in old.items():
                self._values.refuse_edit(option, position, value, group.get(option), name)

    def _has_states(self, name: str, states: States) -> bool:
        if not self._planner.is_plain:
            return bool(states)
        # The user may have cleared the element states of a parameter and left its matrix states.
        return "step" in states.get(self._table.parameters[name], ())

    def _keeps(self, name: str, group: Mapping[str, Any]) -> Sequence[Any]:
        """A parameter's rule and the shapes of its states in a group."""
        spec = self._spec
        info, _ = self._table.catalog[name]
        rule = self._table.choose(info, group).rule
        matrices = spec.shapes_of_states(info, group) if rule == "matrix" and len(info.shape) > 1 else {}
        return rule, spec.element_states(info, rule, group), matrices
