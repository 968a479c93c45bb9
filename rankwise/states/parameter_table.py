"""What an optimizer knows of its parameters before its first step: names, roles, param groups, rules."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from rankwise.layout.fused_blocks import Block
from rankwise.layout.layout_source import WholeParameters, layout_with, real_view, refuse_unreadable
from rankwise.layout.logical_matrices import block_info, blocks_of
from rankwise.options.validation import OptionError
from rankwise.routing.patterns import are_checked_later, refuse_unmatched, unmatched
from rankwise.routing.roles import ParameterInfo, Role, Route, Rule, describe, info_of, recall, route
from rankwise.routing.stored_shapes import parts_by_name, transposed_by_name
from rankwise.states.element_states import StateTypes
from rankwise.states.matrix_states import base_name
from rankwise.states.optimizer_spec import OptimizerSpec
from rankwise.states.param_remainders import NARROW, REMAINDER, refuse_other_types

__all__ = ["Groups", "ParameterTable", "idle_allowed"]

Groups = Sequence[Mapping[str, Any]]
"""``Optimizer.param_groups``: handed in at every call, because loading a checkpoint replaces them."""

logger = logging.getLogger(__name__)
_is_idle_allowed: ContextVar[bool] = ContextVar("is_idle_allowed", default=False)
_NAMELESS = re.compile(r"group\d+\.param\d+(@.*)?")


def _is_named(info: ParameterInfo) -> bool:
    return _NAMELESS.fullmatch(info.name) is None


@contextmanager
def idle_allowed() -> Iterator[None]:
    """Accept optimizers with nothing for their own rule, where they are given only one stage of a model.

    The caller must call :meth:`ParameterTable.refuse_if_idle` where no other stage has anything either.
    """
    token = _is_idle_allowed.set(True)
    try:
        yield
    finally:
        _is_idle_allowed.reset(token)


_BRACKETS = re.compile(r"\[([^\[\]]*)\]")


class ParameterTable:
    """Names an optimizer's parameters and picks their rules.

    Args:
        spec: Tells which parameters take the optimizer's own rule.

    Attributes:
        catalog: Description and param group of every parameter, by name.
        parameters: The parameters the optimizer was built on, by name.
        routes: Rules of the parameters, by name.
        blocks: Logical matrices of the fused parameters that take the optimizer's own rule, by name.
        structures: Values of the structural options that parameters were routed by, by name.
        plain: Layout of plain PyTorch: every parameter by its name.
        exchanged: Parameters that replaced others, by the identity of the old ones, until somebody has followed.
    """

    def __init__(self, spec: OptimizerSpec) -> None:
        self._spec = spec
        self.catalog: dict[str, tuple[ParameterInfo, int]] = {}
        self.parameters: dict[str, Tensor] = {}
        self.routes: dict[str, Route] = {}
        self.blocks: dict[str, tuple[Block, ...]] = {}
        self.structures: dict[str, tuple[Any, ...]] = {}
        self.plain = WholeParameters()
        self.exchanged: dict[int, Tensor] = {}
        self._warned_of_nameless = False
        self._sees_modules = not spec.learns_from_modules

    def __getstate__(self) -> dict[str, Any]:
        # The plain layout knows the parameters by their addresses.
        return {name: value for name, value in vars(self).items() if name != "plain"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._warned_of_nameless = False
        self.replace_parameters({})

    # --- parameters ---------------------------------------------------------------------------------------------

    def refuse_unreadable(self, group: Mapping[str, Any]) -> None:
        """Refuse parameters of a group that no rule can read.

        Raises:
            OptionError: A parameter has its values elsewhere, or is complex and was asked to take a matrix rule.
        """
        owner = self._spec.name
        names: Sequence[str] = group.get("param_names") or [f"number {place}" for place in range(len(group["params"]))]
        for name, parameter in zip(names, group["params"], strict=True):
            refuse_unreadable(owner, name, parameter)
            if parameter.is_complex() and group.get("fallback") is False:
                raise OptionError(
                    f"{owner}: fallback=False in the param group of '{name}' is invalid: it must not be "
                    "false for a complex parameter, because no matrix rule supports one; remove it"
                )
        if self._spec.options.store_param_remainders:
            refuse_other_types(owner, names, group["params"])

    def element_states(self, info: ParameterInfo, rule: Rule, group: Mapping[str, Any]) -> StateTypes:
        """Element states of a parameter or block: those of its rule, and the remainder of a narrow weight."""
        kept = self._spec.element_states(info, rule, group)
        if not self._spec.options.store_param_remainders:
            return kept
        narrow = self.parameters[self.base_name(info.name)].dtype is NARROW
        return {**kept, REMAINDER: torch.int16} if narrow else kept

    def add_group(self, groups: Groups, index: int) -> None:
        """Name the parameters of a group and route them."""
        group = groups[index]
        names: Sequence[str | None] = group.get("param_names") or [None] * len(group["params"])
        recalled = recall(group["params"])
        for position, (parameter, name) in enumerate(zip(group["params"], names, strict=True)):
            info = info_of(parameter, name, f"group{index}.param{position}", recalled)
            if parameter.is_complex():
                info = replace(info, shape=tuple(real_view(parameter).shape))
            if info.name in self.catalog:
                info = info.told_apart(index, position)
            self.catalog[info.name] = (info, index)
            self.parameters[info.name] = parameter
            self.route_by(groups, info.name)
            self._register(parameter, info.name, index)
        self._know_by_name(groups)

    def name_again(self, groups: Groups) -> None:
        """Name and route all parameters by what is known of them now."""
        self.catalog.clear()
        self.routes.clear()
        self.blocks.clear()
        self.structures.clear()
        self.parameters.clear()
        for index in range(len(groups)):
            self.add_group(groups, index)

    def replace_parameters(self, found: Mapping[str, Tensor]) -> None:
        """Use other tensors as the same parameters, by name."""
        self.exchanged = {id(self.parameters[name]): new for name, new in found.items()}
        self.plain = WholeParameters()
        self.parameters |= found
        for name, parameter in self.parameters.items():
            self._register(parameter, name, self.catalog[name][1])

    def move(self, name: str, position: int) -> None:
        """Move a parameter to another param group."""
        info, before = self.catalog[name]
        if position != before:
            self.catalog[name] = (info, position)
            self._register(self.parameters[name], name, position)

    def _register(self, parameter: Tensor, name: str, position: int) -> None:
        self.plain = layout_with(self.plain, parameter)
        self.plain.register(parameter, name, position)

    def leave_out_empty_groups(self) -> None:
        """Number param groups as a framework does that removed those without parameters."""
        new_index = {index: rank for rank, index in enumerate(sorted({index for _, index in self.catalog.values()}))}
        self.catalog = {name: (info, new_index[index]) for name, (info, index) in self.catalog.items()}

    def names_by_group(self, count: int) -> list[list[str]]:
        """Names of the parameters each group was made of, also where a framework has replaced them by parts."""
        names: list[list[str]] = [[] for _ in range(count)]
        for name, (_, index) in self.catalog.items():
            if index < count:  # a user may have deleted groups
                names[index].append(name)
        return names

    @property
    def infos(self) -> dict[str, ParameterInfo]:
        """Descriptions of all parameters, by name."""
        return {name: info for name, (info, _) in self.catalog.items()}

    def base_name(self, key: str) -> str:
        """Name of the parameter that a key, or the slice or matrix of it, belongs to; empty if there is none."""
        return base_name(key, self.catalog)

    def matrix_info(self, key: str) -> ParameterInfo | None:
        """Description of the matrix that has states under a key; None for slices, and for unknown keys."""
        name = self.base_name(key)
        info, _ = self.catalog[name]
        place, *marks = _BRACKETS.findall(key[len(name) :]) or [""]
        blocks = {block.name: block for block in self.blocks.get(name, ())} if self._spec.owns_blocks else {}
        if len(info.shape) > 2:
            if not place.isdecimal():
                return None
        elif place:
            marks = [place, *marks]
        if not blocks:
            return None if marks else info
        return block_info(info, blocks[marks[0]]) if len(marks) == 1 and marks[0] in blocks else None

    def _know_by_name(self, groups: Groups) -> None:
        """Recognise GPT-2's ``Conv1D`` weights, and fused weights, by name where nobody has shown the modules."""
        turned = transposed_by_name(info for info, _ in self.catalog.values() if not info.transposed)
        for name in turned:
            info, position = self.catalog[name]
            self.catalog[name] = (replace(info, transposed=True), position)
        for name, (info, position) in self.catalog.items():
            parts = parts_by_name(info)
            if parts is not None:
                self.catalog[name] = (replace(info, fused=parts), position)
                self.route_by(groups, name)
        if turned:
            logger.info(
                "%s: by their names and shapes, %s and %d more are taken for (inputs, outputs), as GPT-2's Conv1D "
                "stores them; call rankwise.annotate(model) before the optimizer is built to make certain.",
                self._spec.name,
                turned[0],
                len(turned) - 1,
            )

    # --- rules --------------------------------------------------------------------------------------------------

    def route_by(self, groups: Groups, name: str) -> None:
        """Pick a parameter's rule by the options of its group."""
        info, index = self.catalog[name]
        self.routes[name] = self.choose(info, groups[index])
        blocks, _ = self._divided(info, groups[index])
        if blocks:
            self.blocks[name] = blocks
        else:
            self.blocks.pop(name, None)
        self.structures[name] = self._spec.structure_of(groups[index])

    def route_again(self, groups: Groups) -> None:
        """Pick all rules by the present options of the groups."""
        for name in self.catalog:
            self.route_by(groups, name)

    def send_to_fallback(self, names: Iterable[str], reason: str) -> None:
        """Overrule the options, for a reason that only running the model shows."""
        for name in names:
            self.routes[name] = Route("fallback", reason)

    def choose(self, info: ParameterInfo, group: Mapping[str, Any]) -> Route:
        """Choose the rule that a parameter would take in a group."""
        if self.parameters[info.name].is_complex():
            return Route("fallback", "complex")
        blocks, obstacle = self._divided(info, group)
        # Each block takes the rule by its own shape; that of the whole weight does not matter.
        chosen = self._route(block_info(info, blocks[0]) if blocks else info, group)
        kept = "heads together" if blocks else "undivided"
        return replace(chosen, reason=f"{chosen.reason}, {kept}: {obstacle}") if obstacle else chosen

    def _route(self, info: ParameterInfo, group: Mapping[str, Any]) -> Route:
        spec = self._spec
        return spec.adjust_route(info, group, route(info, spec.policy, group.get("fallback")))

    def _divided(self, info: ParameterInfo, group: Mapping[str, Any]) -> tuple[tuple[Block, ...], str]:
        """Logical matrices of a weight, if each of them takes the rule in a group; else the weight stays whole.

        Heads that are too small for the rule are taken together.

        Returns:
            The blocks, and what kept a fused weight from being divided as asked.
        """
        options, spec = self._spec.options, self._spec
        if not spec.splits(info) or self.parameters[info.name].is_complex():
            return (), ""
        layouts, split_heads = getattr(options, "blocks", None), getattr(options, "split_heads", False)
        first = ""
        for together in (False, True):
            blocks = blocks_of(spec.name, info, layouts, split_heads, together)
            if together and not blocks:
                break  # there is nothing to take together: the heads are all of the weight
            routes = ((block, self._route(block_info(info, block), group)) for block in blocks)
            obstacles = (f"{block.name}: {chosen.reason}" for block, chosen in routes if chosen.rule != "matrix")
            obstacle = next(obstacles, "")
            if not obstacle:
                return blocks, first
            first = first or obstacle
        return (), obstacle

    def choose_in(self, groups: Groups, name: str, group: Mapping[str, Any]) -> Route:
        """Choose a parameter's rule as if its group had these values."""
        info, index = self.catalog[name]
        structure_of = self._spec.structure_of
        return self.routes[name] if structure_of(group) == structure_of(groups[index]) else self.choose(info, group)

    def learn_roles(self, model: nn.Module, groups: Groups) -> None:
        """Route by module types what the constructor knew by name or shape alone."""
        self._sees_modules = True
        described = {id(parameter): info for parameter, info in describe(model).items()}
        for name, (info, index) in self.catalog.items():
            shown = described.get(id(self.parameters[name]))
            if shown is not None and info.role is Role.UNKNOWN and shown.shape == info.shape:
                known = replace(info, role=shown.role, transposed=shown.transposed, fused=shown.fused)
                self.catalog[name] = (known, index)
        self.route_again(groups)

    # --- judgements ---------------------------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """Whether no parameter takes the optimizer's own rule, or none has the heads that ``split_heads`` asks for."""
        return self._lacks_matrices or self._lacks_heads

    @property
    def _lacks_matrices(self) -> bool:
        return all(chosen.rule != "matrix" for chosen in self.routes.values())

    @property
    def _lacks_heads(self) -> bool:
        asked = self._sees_modules and getattr(self._spec.options, "split_heads", False)
        # To element-wise variants heads make no difference.
        matters = asked and any(self._spec.splits(info) for info, _ in self.catalog.values())
        return matters and not any(map(self.heads_of, self.blocks))

    def heads_of(self, name: str) -> list[Block]:
        """The blocks of a parameter that are single heads."""
        chosen = self.routes[name].rule == "matrix"
        return [block for block in self.blocks.get(name, ()) if chosen and block.name.rpartition(".")[2].isdecimal()]

    def refuse_if_idle(self, unless_allowed: bool = False) -> None:
        """Refuse an optimizer that would do no more than AdamW; ``unless_allowed``: not inside :func:`idle_allowed`.

        Raises:
            OptionError: No parameter takes the optimizer's own rule, or ``split_heads`` divides none.
        """
        if not self.is_idle or (unless_allowed and _is_idle_allowed.get()):
            return
        spec = self._spec
        if not self._lacks_matrices:
            known = [name for name, (info, _) in self.catalog.items() if info.fused is not None and info.fused.heads]
            why = f"those of '{known[0]}' do not ({self.routes[known[0]].reason})" if known else "no weight's are"
            raise OptionError(
                f"{spec.name}: split_heads=True is invalid: the attention heads of a weight must be known and fit the "
                f"rule, and {why}; call rankwise.annotate(model) before the optimizer is built, or write the heads: "
                'blocks={"*q_proj*": {"q": 4096, "heads": 32}}'
            )
        if not self.routes:
            raise OptionError(
                f"{spec.name}: params is invalid: it must have at least one parameter, and every param group is "
                "empty; pass model.named_parameters()"
            )
        reasons = ", ".join(sorted({chosen.reason for chosen in self.routes.values()}))
        further = "".join(f" {advice}," for reason, advice in spec.idle_advice.items() if reason in reasons)
        raise OptionError(
            f"{spec.name} would update none of the {len(self.routes)} parameters with its own rule (all are "
            f"on the first-order fallback: {reasons}). Pass parameters with matrices, loosen 'exclude',{further} "
            "or use AdamW."
        )

    def refuse_unmatched(self) -> None:
        """Refuse patterns of options without effect, where all parameters are known by their names.

        Raises:
            OptionError: A pattern matches no name.
        """
        if not are_checked_later():
            for key, patterns in self._spec.options.patterns.items():
                if patterns:
                    self._refuse_unmatched(key, patterns)

    def _refuse_unmatched(self, key: str, patterns: Collection[str]) -> None:
        spec, names = self._spec, list(self.catalog)
        if all(_is_named(info) for info, _ in self.catalog.values()):
            refuse_unmatched(spec.name, patterns, names, key)
        elif unmatched(patterns, names):
            # A framework may name the parameters later.
            logger.warning(
                "%s: %s=%s has no effect on parameters without names; pass model.named_parameters().",
                spec.name,
                key,
                unmatched(patterns, names),
            )

    def warn_of_nameless(self) -> None:
        """Warn once, before the first step, that embeddings and heads cannot be told from other matrices."""
        judged = [info for info, _ in self.catalog.values() if info.role is Role.UNKNOWN and not _is_named(info)]
        blind = [info for info in judged if self.routes[info.name].rule == "matrix" and len(info.shape) > 1]
        if blind and not self._spec.policy.embeddings and not self._warned_of_nameless:
            self._warned_of_nameless = True
            logger.warning(
                "%s: the matrix rule is used because of the shape alone, even for an embedding or output head, where "
                "parameters have no names (%d of them); pass model.named_parameters(), or call "
                "rankwise.annotate(model) first.",
                self._spec.name,
                len(blind),
            )
