"""Values of the param groups' options: judged when a group is added, and when somebody has written into one."""

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
from rankwise.states.optimizer_spec import OptimizerSpec
from rankwise.states.step_groups import peak_of

__all__ = ["GroupValues"]

logger = logging.getLogger(__name__)
_SMALLEST = torch.finfo(torch.float32).tiny
_RECORD = "rankwise"  # What :mod:`rankwise.saving.states_by_parameter` keeps there.
# Schedulers' and frameworks' own keys of a param group that are spelt much like options.
_KEYS_OF_OTHERS = frozenset(
    {"max_momentum", "base_momentum", "min_lr", "max_lr", "initial_lr", "swa_lr", "name", "lr_mult", "wd_mult"}
)
# Of schedules that change more than rates, such as OneCycleLR.
_MOST_ACCEPTED = 64


class GroupValues:
    """Judges what param groups set.

    Args:
        spec: The optimizer's options, and which of them groups may set.
        defaults: The optimizer's, by name, for groups that do not say otherwise.
    """

    def __init__(self, spec: OptimizerSpec, defaults: Mapping[str, Any]) -> None:
        self._spec = spec
        self._defaults = defaults
        # Without their rates.
        self._accepted: set[tuple[Any, ...]] = set()

    def __reduce__(self) -> tuple[Any, ...]:
        # Values that cannot be compared are known by their place in memory.
        return type(self), (self._spec, self._defaults)

    def accept(self, group: Mapping[str, Any]) -> None:
        """Take the present values of a group for valid."""
        self._accepted.add(self._values_of(group))

    def validate(self, group: MutableMapping[str, Any], rate_too: bool = True) -> None:
        """Judge a group as the constructor judges its options, and keep its values as the constructor keeps them.

        Args:
            group: The group.
            rate_too: Whether its rate is an option, not what a schedule says: a tensor perhaps, which would be read.

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
        # Those of the class: what a backend does not read is for the options to refuse, with the reason.
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
        """Refuse a group whose decay would be a share of nothing.

        Raises:
            OptionError: Its rate is 0, and decay does not follow the schedule.
        """
        if self._spec.step_groups.independent and not peak_of(group):
            raise OptionError(
                f"{self._spec.name}: lr={group['lr']!r} is invalid with weight_decay_method='independent': it must "
                "be above 0, because decay is a share of it; pass the peak lr and let the scheduler start from 0"
            )

    def warn_of_tiny(self) -> None:
        """Say so where an option is nothing in the type of the computation."""
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
                own = key in LEFT_OVER or any(option in valid for option, _ in ADVICE.get(key, ()))
                hint = hint_for(key, valid) if own else f"remove it; groups may set {', '.join(spec.group_options)}"
            if near is not None or key in elsewhere:
                raise OptionError(
                    f"{spec.name}: {key}={shown(group[key])} in a param group is invalid: nothing reads it; {hint}"
                )

    def refuse_changes(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Judge what was written into living groups: half a step may be done before it is met.

        The rate alone is left to schedules, as in torch.

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
        """Refuse what is no single number, without reading a tensor."""
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
            name: The option.
            position: Position of the group that sets it.
            old: What it was.
            new: What it is.
            key: The parameter that has been stepped with it; empty if it is the optimizer.
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
        """Groups of a dictionary, with the present values of what their version did not have."""
        return [
            {**theirs, **{name: group[name] for name in self._defaults if name in group and name not in theirs}}
            for group, theirs in zip(groups, saved, strict=True)
        ]

    def in_words(self, groups: Mapping[int, Mapping[str, Any]]) -> dict[str, str]:
        """The options, and those of param groups by their position."""
        options = self._spec.options
        shared = set(options.names()).difference(self._spec.group_options, ("lr",))
        found = {name: getattr(options, name) for name in sorted(shared)}
        for position, group in groups.items():
            names = [name for name in (*self._defaults, "fallback") if name in group]
            found.update({f"param group {position}: {name}": group[name] for name in names})
        # A tensor's text names its device, and would have to be waited for.
        return {name: repr(value) for name, value in found.items() if not isinstance(value, Tensor)}

    def _values_of(self, group: Mapping[str, Any]) -> tuple[Any, ...]:
        """What a group sets besides its rate, and its keys: nothing may read one of them."""
        names = (*self._spec.group_options, "fallback")
        # The record alone comes by itself, with the first step.
        keys = tuple(key for key in group if key != _RECORD)
        return keys, *(_comparable(group.get(name)) for name in names if name != "lr")


@cache
def _options_of_torch() -> frozenset[str]:
    """The keywords of torch.optim's classes."""
    classes = [found for found in vars(torch.optim).values() if isinstance(found, type)]
    ours = [found for found in classes if issubclass(found, torch.optim.Optimizer)]
    return frozenset(key for found in ours for key in inspect.signature(found).parameters)


def _comparable(value: Any) -> Any:
    """To tell one value of an option from another, without reading a device's."""
    if isinstance(value, list | tuple):
        return tuple(map(_comparable, value))
    return value if isinstance(value, bool | int | float | str | None) else id(value)
