"""Values of the param groups' options: checked when a group is added, and when somebody has changed one."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping, MutableMapping, Sequence
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor

from rankwise.options.checks import plain_number
from rankwise.options.fields import Options
from rankwise.options.hints import ADVICE, LEFT_OVER, OPTION_WORDS, hint_for, nearest, shown
from rankwise.options.validation import OptionError, called
from rankwise.routing.step_groups import peak_of
from rankwise.states.optimizer_spec import OptimizerSpec

__all__ = ["GroupValues"]

logger = logging.getLogger(__name__)
_SMALLEST = torch.finfo(torch.float32).tiny
_RECORD = "rankwise"  # The key at which :mod:`rankwise.saving.states_by_parameter` keeps its record.
# Schedulers' and frameworks' own keys of a param group that are spelt much like options.
_KEYS_OF_OTHERS = frozenset(
    {"max_momentum", "base_momentum", "min_lr", "max_lr", "initial_lr", "swa_lr", "name", "lr_mult", "wd_mult"}
)
# Schedules that change more than rates, such as OneCycleLR, make new values at every step.
_MOST_ACCEPTED = 64


class GroupValues:
    """Checks the options that param groups set."""

    def __init__(self, spec: OptimizerSpec, defaults: Mapping[str, Any]) -> None:
        self._spec = spec
        self._defaults = defaults
        # Values of groups without their rates.
        self._accepted: set[tuple[Any, ...]] = set()

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy accepts nothing yet: some values are compared by their address in memory.
        return type(self), (self._spec, self._defaults)

    def accept(self, group: Mapping[str, Any]) -> None:
        """Accept the present values of a group as valid."""
        self._accepted.add(self._values_of(group))

    def validate(self, group: MutableMapping[str, Any], rate_too: bool = True) -> None:
        """Check a group as the constructor checks its options, and convert its values as the constructor does.

        Args:
            group: The group.
            rate_too: Whether to check the rate; a schedule may have made it a tensor, which would have to be read.

        Raises:
            OptionError: A value is outside its range, nothing reads a key, or it must be alike in all groups.
        """
        spec, options = self._spec, self._spec.options
        self._refuse_unread(group)
        if not isinstance(group.get("fallback"), bool | None):
            raise OptionError(
                f"{spec.name}: fallback={shown(group['fallback'])} in a param group is invalid: it must be true (the "
                "first-order rule), false (the matrix rule) or absent; write it without quotes"
            )
        values = {name: getattr(options, name) for name in options.names()}
        # The options refuse what a backend does not read, with the reason.
        variable = [name for name in options.per_group() if name in group and (rate_too or name != "lr")]
        values.update({name: group[name] for name in variable})
        if not rate_too:
            values["lr"] = 0.0
        with called(spec.name):
            judged = type(options)(**values)
        group.update({name: getattr(judged, name) for name in variable})
        for name in options.names():
            if name in group and name not in options.per_group() and group[name] != getattr(options, name):
                raise OptionError(
                    f"{spec.name}: {name}={group[name]!r} in a param group is invalid: it must be the same "
                    f"for all groups; pass it to the constructor (groups may set {', '.join(spec.group_options)})"
                )

    def refuse_without_peak(self, group: Mapping[str, Any]) -> None:
        """Refuse a rate of 0 where decay is a share of the first rate.

        Raises:
            OptionError: The group's rate is 0, and decay does not follow the schedule.
        """
        if self._spec.step_groups.independent and not peak_of(group):
            raise OptionError(
                f"{self._spec.name}: lr={group['lr']!r} is invalid with weight_decay_method='independent': it must "
                "be above 0, because decay is a share of it; pass the peak lr and let the scheduler start from 0"
            )

    def warn_of_tiny(self) -> None:
        """Warn of an option that is 0 in the type of the computation."""
        for key in ("eps", "graft_eps"):
            value = getattr(self._spec.options, key, 1.0)
            if value < _SMALLEST:
                logger.warning(
                    "%s: with %s=%g, nothing in float32, a weight whose gradients were all zero becomes 0 / 0.",
                    self._spec.name,
                    key,
                    value,
                )

    def _refuse_unread(self, group: Mapping[str, Any]) -> None:
        """Refuse a key that nobody reads but that is, or looks like, an option; programs add keys of their own."""
        spec = self._spec
        valid = {*spec.group_options, "params", "param_names", "fallback", _RECORD}
        elsewhere = Options.of_all().union(LEFT_OVER, ADVICE, OPTION_WORDS, _options_of_torch())
        known = valid.union(self._defaults, _KEYS_OF_OTHERS, spec.options.names())
        for key in group:
            if key in known or (key == "differentiable" and not group[key]):  # which torch adds by itself
                continue
            near = nearest(key, valid, OPTION_WORDS, cutoff=0.8)
            hint = f"did you mean '{near}'?" if near else "remove it"
            if key in elsewhere and near is None:
                advised = key in LEFT_OVER or any(option in valid for option, _ in ADVICE.get(key, ()))
                hint = hint_for(key, valid) if advised else f"remove it; groups may set {', '.join(spec.group_options)}"
            if near is not None or key in elsewhere:
                raise OptionError(
                    f"{spec.name}: {key}={shown(group[key])} in a param group is invalid: nothing reads it; {hint}"
                )

    def refuse_changes(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Check what was written into living groups, before a step changes anything.

        The range of rates is not checked, because schedules set them, as in torch.

        Raises:
            OptionError: A value is outside its range, or may not change any more.
        """
        self._refuse_constants(groups)
        for position, group in enumerate(groups):
            if type(group.get("lr")) is not float:
                self._refuse_no_rate(position, group)
            if self._values_of(group) in self._accepted:
                continue
            self.refuse_incomplete(position, group)
            self.validate(cast("MutableMapping[str, Any]", group), rate_too=False)
            if len(self._accepted) >= _MOST_ACCEPTED:
                self._accepted.clear()
            self._accepted.add(self._values_of(group))

    def _refuse_no_rate(self, position: int, group: Mapping[str, Any]) -> None:
        """Refuse a rate that is no single number, without reading a tensor."""
        self.refuse_incomplete(position, group)
        lr = plain_number(group.get("lr", 0.0))
        if isinstance(lr, bool) or not (lr.numel() == 1 if isinstance(lr, Tensor) else isinstance(lr, int | float)):
            raise OptionError(
                f"{self._spec.name}: lr={shown(lr)} in param group {position} is invalid: it must be a number, or a "
                "tensor of one element; write e.g. 1e-3"
            )

    def _refuse_constants(self, groups: Sequence[Mapping[str, Any]]) -> None:
        constant = self._spec.constant_options
        for position, group in enumerate(groups):
            if constant.isdisjoint(group):
                continue
            for name in sorted(constant.intersection(group)):
                self.refuse_edit(name, position, getattr(self._spec.options, name), group[name], "")

    def refuse_edit(self, name: str, position: int, old: Any, new: Any, key: str) -> None:
        """Refuse another value of an option that states depend on.

        Args:
            name: Name of the option.
            position: Position of the group that sets it.
            old: Value of the option before.
            new: Present value of the option.
            key: Parameter that has been stepped with the old value; empty if the optimizer was built with it.
        """
        if old != new:
            what = (
                f" for {key!r}, which has been stepped with {name}={old!r}" if key else f" (it was built with {old!r})"
            )
            fix = "move the parameter back, or set the option back" if key else f"set it to {old!r}, or remove it"
            raise OptionError(
                f"{self._spec.name}: {name}={new!r} in param group {position} is invalid{what}: it must stay as it "
                f"was, because the states depend on it; {fix}, or build a new optimizer"
            )

    def refuse_incomplete(self, position: int, group: Mapping[str, Any]) -> None:
        """Refuse a group that was appended without the defaults."""
        missing = [name for name in self._spec.group_options if name not in group]
        if missing and group["params"]:
            raise OptionError(
                f"{self._spec.name}: param group {position} is invalid: it must have {missing[0]!r}; add groups "
                "with add_param_group, which fills in the defaults"
            )

    def completed(
        self, groups: Sequence[Mapping[str, Any]], saved: Sequence[Mapping[str, Any]]
    ) -> list[dict[str, Any]]:
        """Saved groups, completed by the present values of options that their version did not have."""
        return [
            {**theirs, **{name: group[name] for name in self._defaults if name in group and name not in theirs}}
            for group, theirs in zip(groups, saved, strict=True)
        ]

    def in_words(self, groups: Mapping[int, Mapping[str, Any]]) -> dict[str, str]:
        """Describe the options, and those of param groups by their position."""
        options = self._spec.options
        shared = set(options.names()).difference(self._spec.group_options, ("lr",))
        values = {name: getattr(options, name) for name in sorted(shared)}
        for position, group in groups.items():
            names = [name for name in (*self._defaults, "fallback") if name in group]
            values.update({f"param group {position}: {name}": group[name] for name in names})
        # The text of a tensor names its device, and would have to be waited for.
        return {name: repr(value) for name, value in values.items() if not isinstance(value, Tensor)}

    def _values_of(self, group: Mapping[str, Any]) -> tuple[Any, ...]:
        """Keys of a group and all its values but the rate; a new key may be one that nothing reads."""
        names = (*self._spec.group_options, "fallback")
        # The first step adds the record by itself.
        keys = tuple(key for key in group if key != _RECORD)
        return keys, *(_comparable(group.get(name)) for name in names if name != "lr")


@cache
def _options_of_torch() -> frozenset[str]:
    """The keywords of torch.optim's classes."""
    classes = [member for member in vars(torch.optim).values() if isinstance(member, type)]
    optimizers = [member for member in classes if issubclass(member, torch.optim.Optimizer)]
    return frozenset(key for member in optimizers for key in inspect.signature(member).parameters)


def _comparable(value: Any) -> Any:
    """Make a value of an option comparable, without reading tensors on a device."""
    if isinstance(value, list | tuple):
        return tuple(map(_comparable, value))
    return value if isinstance(value, bool | int | float | str | None) else id(value)
