"""What users change in a living optimizer: parameters moved between groups, options of groups, the model's own type."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rankwise.options.validation import OptionError
from rankwise.sharding.sources import WholeParameters, real_view, refuse_unreadable
from rankwise.step.saved import Checkpoints
from rankwise.step.unit import StepUnit

__all__ = ["Form", "LiveGroups", "form_of"]


# Of schedules that change more than rates, such as OneCycleLR.
_MOST_ACCEPTED = 64


class Form(NamedTuple):
    """What a plan takes for granted of a tensor."""

    kind: type
    dtype: torch.dtype
    device: torch.device
    shape: tuple[int, ...]


def _comparable(value: Any) -> Any:
    """To tell one value of an option from another, without reading a device's."""
    if isinstance(value, list | tuple):
        return tuple(map(_comparable, value))
    return value if isinstance(value, bool | int | float | str | None) else id(value)


def form_of(tensor: Tensor) -> Form:
    """The present one."""
    return Form(type(tensor), tensor.dtype, tensor.device, tensor.shape)


class LiveGroups(Checkpoints):
    """The part of :class:`rankwise.step.optimizer.ShardedOptimizer` that notices what changed since it planned."""

    def _detach(self) -> None:
        super()._detach()
        # Values of groups, without their rates, that were found to be valid.
        self._accepted_values: set[tuple[Any, ...]] = set()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """See the base class, which validates the group."""
        super().add_param_group(param_group)
        self._accepted_values.add(self._values_of(self.param_groups[-1]))

    def _values_of(self, group: Mapping[str, Any]) -> tuple[Any, ...]:
        """What a group sets besides its rate."""
        return tuple(_comparable(group.get(name)) for name in self.group_options if name != "lr")

    def _follow_changes(self, unit: StepUnit | None) -> bool:
        """Follow what may be changed and refuse what may not, before the step changes anything.

        Args:
            unit: The plan for the present groups; None if there is none.

        Returns:
            Whether the plans were forgotten.

        Raises:
            OptionError: An option of a group may not change any more, or never.
            RuntimeError: A parameter has become another one.
        """
        self._refuse_constant_options()
        self._refuse_bad_values()
        plain = isinstance(self._source, WholeParameters)
        if unit is not None and plain and list(map(form_of, unit.tensors)) != unit.forms:
            self._follow_forms(unit)
            return True
        if unit is not None and self._structure() == self._planned_structure:
            return False
        changed = self._follow_groups(plain)
        self._planned_structure = self._structure()
        planned = {id(tensor) for other in self._units.values() for tensor in other.tensors}
        # A plan of the same tensors in other groups is out of date.
        if changed or (unit is None and plain and not planned.isdisjoint(map(id, self._tensors()))):
            self._forget_plans()
            return True
        return False

    def _refuse_constant_options(self) -> None:
        for position, group in enumerate(self.param_groups):
            if self._constant_options.isdisjoint(group):
                continue
            for name in sorted(self._constant_options.intersection(group)):
                self._refuse_edit(name, position, getattr(self.options, name), group[name], "")

    def _refuse_bad_values(self) -> None:
        """Judge what was written into a group as its constructor would: half a step may be done before it is met.

        The rate alone is left to schedules, as in torch.
        """
        for position, group in enumerate(self.param_groups):
            values = self._values_of(group)
            if values in self._accepted_values and "lr" in group:
                continue
            self._refuse_incomplete(position, group)
            # Not the rate itself, a tensor perhaps, which would be read.
            self._validate_group({**group, "lr": 0.0})
            if len(self._accepted_values) >= _MOST_ACCEPTED:
                self._accepted_values.clear()
            self._accepted_values.add(values)

    def _refuse_edit(self, name: str, position: int, old: Any, new: Any, key: str) -> None:
        if old != new:
            what = (
                f" for {key!r}, which has been stepped with {name}={old!r}" if key else f" (it was built with {old!r})"
            )
            fix = "move the parameter back, or set the option back" if key else f"set it to {old!r}, or remove it"
            raise OptionError(
                f"{type(self).__name__}: {name}={new!r} in param group {position} is invalid{what}: it must stay as it "
                f"was, because the states depend on it; {fix}, or build a new optimizer"
            )

    def _follow_forms(self, unit: StepUnit) -> None:
        """Plan anew for a model that was brought to another type or device, states with it."""
        for tensor in unit.tensors:
            name = str(self._name_of(tensor))
            refuse_unreadable(type(self).__name__, name, tensor)
            numel, built = real_view(tensor).numel(), sum(part.end for part in self._source.contents(tensor).slices)
            if numel != built:
                raise RuntimeError(
                    f"{type(self).__name__}: '{name}' has {numel} elements, but had {built} when the optimizer was "
                    "built; build a new optimizer after resizing a model"
                )
        self._forget_plans()
        self.matrix_states.load(self.matrix_states.everything())

    def _follow_groups(self, plain: bool) -> bool:
        """Route by the groups that parameters are in now; whether any route may be another one."""
        here = {name: position for name, (_, position) in self._catalog.items()}
        if plain:
            for position, group in enumerate(self.param_groups):
                self._refuse_incomplete(position, group)
                here.update({str(self._name_of(tensor)): position for tensor in group["params"]})
        places = {name: at for name, at in here.items() if name in self._catalog and at < len(self.param_groups)}
        changed = [
            name
            for name, position in places.items()
            if self._structure_of(self.param_groups[position]) != self._structures[name]
        ]
        for name in changed:
            self._refuse_other_states(name, places[name])
        for name, position in places.items():
            info, before = self._catalog[name]
            if position != before:
                self._catalog[name] = (info, position)
                self._plain.register(self.parameters_by_name[name], name, position)
        for name in changed:
            self._route_one(name)
        return bool(changed)

    def _refuse_incomplete(self, position: int, group: Mapping[str, Any]) -> None:
        missing = [name for name in self.group_options if name not in group]
        if missing and group["params"]:
            raise OptionError(
                f"{type(self).__name__}: param group {position} is invalid: it must have {missing[0]!r}; add groups "
                "with add_param_group, which fills in the defaults"
            )

    def _refuse_other_states(self, name: str, position: int) -> None:
        group = self.param_groups[position]
        old = dict(zip(self.structural_options, self._structures[name], strict=True))
        if self._has_states(name) and self._keeps(name, {**group, **old}) != self._keeps(name, group):
            for option, value in old.items():
                self._refuse_edit(option, position, value, group.get(option), name)

    def _has_states(self, name: str) -> bool:
        if not isinstance(self._source, WholeParameters):
            return bool(self.state)
        held = any(self._base_name(key) == name for key in self.matrix_states.everything())
        return held or bool(self.state.get(self.parameters_by_name[name]))

    def _keeps(self, name: str, group: Mapping[str, Any]) -> Sequence[Any]:
        """A parameter's rule and the shapes of its states in a group."""
        info, _ = self._catalog[name]
        rule = self._choose_rule(info, group).rule
        matrices = self.matrix_state_shapes(info, group) if rule == "matrix" and len(info.shape) > 1 else {}
        return rule, self.element_states(info, rule, group), matrices
