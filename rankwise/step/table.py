"""What an optimizer knows before its first step: options, param groups, names, routes, the framework's layout."""

from __future__ import annotations

import logging
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rankwise.options.fields import Options
from rankwise.options.hints import OPTION_WORDS, nearest, shown
from rankwise.options.validation import OptionError
from rankwise.routing.patterns import are_checked_later, refuse_unmatched, unmatched
from rankwise.routing.roles import ParameterInfo, Role, Route, RoutingPolicy, describe, info_of, route
from rankwise.routing.stored_shapes import transposed_by_name
from rankwise.sharding.sources import LayoutSource, WholeParameters, real_view, refuse_unreadable
from rankwise.step.matrix_states import MatrixStates
from rankwise.step.unit import StepUnit

__all__ = ["RoutedOptimizer", "UnitKey", "idle_allowed"]

UnitKey = tuple[tuple[int, ...], ...]
"""Position and tensors of every group that has any, by ``id``."""

logger = logging.getLogger(__name__)
_allowances = 0
# Schedulers' and frameworks' own keys of a param group that are spelt much like ours.
_KEYS_OF_OTHERS = frozenset({"max_momentum", "base_momentum", "min_lr", "max_lr", "initial_lr", "swa_lr", "name"})
_SMALLEST = torch.finfo(torch.float32).tiny
_NAMELESS = re.compile(r"group\d+\.param\d+(@.*)?")


def _is_named(info: ParameterInfo) -> bool:
    return _NAMELESS.fullmatch(info.name) is None


@contextmanager
def idle_allowed() -> Iterator[None]:
    """Accept optimizers with nothing for their own rule, where they are given only one stage of a model.

    Whoever uses this calls :meth:`RoutedOptimizer.refuse_if_idle` where no other stage has anything either.
    """
    global _allowances
    _allowances += 1
    try:
        yield
    finally:
        _allowances -= 1


class RoutedOptimizer(Optimizer, ABC):
    """The part of :class:`rankwise.step.optimizer.ShardedOptimizer` that names parameters and picks their rules."""

    options_type: ClassVar[type[Options]]
    group_options: tuple[str, ...]
    """Options that may differ between param groups."""
    structural_options: tuple[str, ...]
    """Keys of a param group on which routes and shapes of states depend."""
    idle_advice: ClassVar[Mapping[str, str]] = {}
    """What else helps where nothing takes the optimizer's own rule, by a part of the reason for it."""

    @property
    @abstractmethod
    def policy(self) -> RoutingPolicy:
        """Which parameters take the matrix rule."""

    def _adjust_route(self, info: ParameterInfo, group: Mapping[str, Any], chosen: Route) -> Route:
        """Last word on a parameter's route."""
        return chosen

    def __init__(self, params: Any, options: Options, extra_defaults: Mapping[str, Any] | None = None) -> None:
        self.options = options
        # Asked for at every step.
        self.group_options, self.structural_options = options.varying, ("fallback", *options.structural())
        self.matrix_states = MatrixStates()
        self.parameters_by_name: dict[str, Tensor] = {}
        self._catalog: dict[str, tuple[ParameterInfo, int]] = {}
        self._routes: dict[str, Route] = {}
        # Values of the structural options that parameters were routed by.
        self._structures: dict[str, tuple[Any, ...]] = {}
        self._detach()
        defaults = {name: getattr(options, name) for name in self.group_options}
        super().__init__(params, {**defaults, **(extra_defaults or {})})
        self._refuse_if_idle()
        self._refuse_unmatched()
        for key in ("eps", "graft_eps"):
            value = getattr(options, key, 1.0)
            if value < _SMALLEST:
                logger.warning(
                    "%s: with %s=%g, nothing in float32, a weight whose gradients were all zero becomes 0 / 0.",
                    type(self).__name__,
                    key,
                    value,
                )

    def _detach(self) -> None:
        """Belong to no framework and have nothing planned, as a new optimizer and a copy do."""
        self._plain = WholeParameters()
        self._source: LayoutSource = self._plain
        self._units: dict[UnitKey, StepUnit] = {}
        self._planned_structure: list[tuple[Any, ...]] = []
        self._loads: list[float] = []
        # Outlives the plans: an owner keeps its matrices, whose states nobody else has.
        self._owner_of: dict[str, int] = {}
        self._warned_of_nameless = False

    # --- param groups -------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group and route its parameters; see :class:`torch.optim.Optimizer`.

        Raises:
            OptionError: A value of the group is outside its range.
        """
        if isinstance(param_group, dict):
            self._validate_group(param_group)
        super().add_param_group(param_group)
        try:
            self._refuse_unreadable(self.param_groups[-1])
        except OptionError:
            self.param_groups.pop()
            raise
        self._route_group(len(self.param_groups) - 1)
        self._forget_plans()

    def _refuse_unreadable(self, group: Mapping[str, Any]) -> None:
        names: Sequence[str] = group.get("param_names") or [f"number {place}" for place in range(len(group["params"]))]
        for name, parameter in zip(names, group["params"], strict=True):
            refuse_unreadable(type(self).__name__, name, parameter)
            if parameter.is_complex() and group.get("fallback") is False:
                raise OptionError(
                    f"{type(self).__name__}: fallback=False in the param group of '{name}' is invalid: it must not be "
                    "false for a complex parameter, which no matrix rule is made for; remove it"
                )

    def reroute(self) -> None:
        """Route again by what is known of the parameters by now; see :func:`rankwise.routing.roles.annotate`.

        Names become those of the annotation. Does nothing once there is state, which is kept by name.

        Raises:
            OptionError: No parameter takes this optimizer's own rule any more.
        """
        if self.state or self.matrix_states.everything():
            return
        self._catalog.clear()
        self._routes.clear()
        self._structures.clear()
        self._owner_of.clear()
        self.parameters_by_name.clear()
        for index in range(len(self.param_groups)):
            self._route_group(index)
        self._forget_plans()
        self._refuse_if_idle()
        self._refuse_unmatched()

    def names_by_group(self) -> list[list[str]]:
        """Names of the parameters each group was made of, also where a framework has put parts in their place."""
        found: list[list[str]] = [[] for _ in self.param_groups]
        for name, (_, index) in self._catalog.items():
            found[index].append(name)
        return found

    def _route_group(self, index: int) -> None:
        group = self.param_groups[index]
        names: Sequence[str | None] = group.get("param_names") or [None] * len(group["params"])
        for position, (parameter, name) in enumerate(zip(group["params"], names, strict=True)):
            info = info_of(parameter, name, f"group{index}.param{position}")
            if parameter.is_complex():
                info = replace(info, shape=tuple(real_view(parameter).shape))
            if info.name in self._catalog:
                info = info.told_apart(index, position)
            self._catalog[info.name] = (info, index)
            self.parameters_by_name[info.name] = parameter
            self._route_one(info.name)
            self._plain.register(parameter, info.name, index)
        self._turn_by_name()

    def _turn_by_name(self) -> None:
        """Take GPT-2's ``Conv1D`` weights for what they are where nobody has shown the modules."""
        turned = transposed_by_name(info for info, _ in self._catalog.values() if not info.transposed)
        for name in turned:
            info, position = self._catalog[name]
            self._catalog[name] = (replace(info, transposed=True), position)
        if turned:
            logger.info(
                "%s: %s and %d more are taken for (inputs, outputs), as GPT-2's Conv1D stores them, by their names and "
                "shapes; rankwise.annotate(model) before the optimizer is built says it for certain.",
                type(self).__name__,
                turned[0],
                len(turned) - 1,
            )

    def _warn_of_nameless(self) -> None:
        """Say once that embeddings and heads cannot be told from other matrices; before the first step."""
        judged = [info for info, _ in self._catalog.values() if info.role is Role.UNKNOWN and not _is_named(info)]
        blind = [info for info in judged if self._routes[info.name].rule == "matrix" and len(info.shape) > 1]
        if blind and not self.policy.embeddings and not self._warned_of_nameless:
            self._warned_of_nameless = True
            logger.warning(
                "%s: %d parameters without names take its matrix rule by their shapes alone, an embedding or output "
                "head among them, too; pass model.named_parameters(), or call rankwise.annotate(model) first.",
                type(self).__name__,
                len(blind),
            )

    def _route_again(self) -> None:
        for name in self._catalog:
            self._route_one(name)
        self._forget_plans()

    def _route_one(self, name: str) -> None:
        info, index = self._catalog[name]
        group = self.param_groups[index]
        self._routes[name] = self._choose_rule(info, group)
        self._structures[name] = self._structure_of(group)

    def _learn_roles(self, model: nn.Module) -> None:
        """Route by module type what the constructor knew by name or shape alone."""
        found = {id(parameter): info for parameter, info in describe(model).items()}
        for name, (info, index) in self._catalog.items():
            learnt = found.get(id(self.parameters_by_name[name]))
            if learnt is not None and info.role is Role.UNKNOWN:
                self._catalog[name] = (replace(info, role=learnt.role, transposed=learnt.transposed), index)
        self._route_again()

    def _choose_rule(self, info: ParameterInfo, group: Mapping[str, Any]) -> Route:
        if self.parameters_by_name[info.name].is_complex():
            return Route("fallback", "complex")
        return self._adjust_route(info, group, route(info, self.policy, group.get("fallback")))

    def _choose_in(self, name: str, group: Mapping[str, Any]) -> Route:
        """A parameter's route if its group had these values."""
        info, index = self._catalog[name]
        if self._structure_of(group) == self._structure_of(self.param_groups[index]):
            return self._routes[name]
        return self._choose_rule(info, group)

    @property
    def _constant_options(self) -> frozenset[str]:
        """Those that no group may set otherwise than the constructor."""
        return frozenset(self.options.names()).difference(self.group_options, self.structural_options)

    def _structure_of(self, group: Mapping[str, Any]) -> tuple[Any, ...]:
        return tuple(group.get(name) for name in self.structural_options)

    def _tensors(self) -> list[Tensor]:
        return [tensor for group in self.param_groups for tensor in group["params"]]

    def _forget_plans(self) -> None:
        self._units.clear()
        self._loads = []

    def _validate_group(self, group: Mapping[str, Any]) -> None:
        self._refuse_misspelt(group)
        values = {name: getattr(self.options, name) for name in self.options.names()}
        # Those of the class: what a backend does not read is for the options to refuse, with the reason.
        variable = self.options.per_group()
        values.update({name: group[name] for name in variable if name in group})
        type(self.options)(**values)
        for name in self.options.names():
            if name in group and name not in variable and group[name] != getattr(self.options, name):
                raise OptionError(
                    f"{type(self).__name__}: {name}={group[name]!r} in a param group is invalid: it must be the same "
                    f"for all groups; pass it to the constructor (groups may set {', '.join(self.group_options)})"
                )

    def _refuse_misspelt(self, group: Mapping[str, Any]) -> None:
        """Refuse a key that nobody reads but that looks like one of ours; other programs add keys of their own."""
        valid = {*self.group_options, "params", "param_names", "fallback"}
        for key in group:
            if key in valid or key in self.defaults or key in _KEYS_OF_OTHERS or key in self.options.names():
                continue
            near = nearest(key, valid, OPTION_WORDS, cutoff=0.8)
            if near is not None:
                raise OptionError(
                    f"{type(self).__name__}: {shown(key)} in a param group is invalid: nothing reads it; "
                    f"did you mean '{near}'?"
                )

    def _refuse_unmatched(self) -> None:
        """Refuse patterns of ``exclude`` without effect, where all parameters are known by their names."""
        patterns: Sequence[str] = getattr(self.options, "exclude", ())
        if are_checked_later() or not patterns:
            return
        names = list(self._catalog)
        if all(_is_named(info) for info, _ in self._catalog.values()):
            refuse_unmatched(type(self).__name__, patterns, names)
        elif unmatched(patterns, names):
            # A framework may name them yet.
            logger.warning(
                "%s: exclude=%s has no effect on parameters without names; pass model.named_parameters().",
                type(self).__name__,
                unmatched(patterns, names),
            )

    @property
    def is_idle(self) -> bool:
        """Whether no parameter takes this optimizer's own rule."""
        return all(chosen.rule != "matrix" for chosen in self._routes.values())

    def _refuse_if_idle(self) -> None:
        if not _allowances:
            self.refuse_if_idle()

    def refuse_if_idle(self) -> None:
        """Refuse to be what AdamW would do as well.

        Raises:
            OptionError: No parameter takes this optimizer's own rule.
        """
        if not self.is_idle:
            return
        reasons = ", ".join(sorted({chosen.reason for chosen in self._routes.values()}))
        further = "".join(f" {advice}," for reason, advice in self.idle_advice.items() if reason in reasons)
        raise OptionError(
            f"{type(self).__name__} would update none of the {len(self._routes)} parameters with its own rule (all are "
            f"on the first-order fallback: {reasons}). Pass parameters with matrices, loosen 'exclude',{further} "
            "or use AdamW."
        )

    def _base_name(self, key: str) -> str:
        """The parameter a key belongs to: itself, or what it is a slice or a matrix of; empty if there is none."""
        while key and key not in self._catalog:
            key = key.rpartition("[")[0]
        return key

    def leave_out_empty_groups(self) -> None:
        """Count param groups as a framework does that removed those without parameters."""
        place = {index: new for new, index in enumerate(sorted({index for _, index in self._catalog.values()}))}
        self._catalog = {name: (info, place[index]) for name, (info, index) in self._catalog.items()}

    # --- frameworks ---------------------------------------------------------------------------------------------

    def attach(self, source: LayoutSource) -> None:
        """Tell the optimizer how a framework stores the parameters it was constructed with.

        Args:
            source: Names the parameters in each tensor that ``step()`` will meet.
        """
        if source.group is not self._source.group:
            self._owner_of.clear()
        self._source = source
        self._forget_plans()
