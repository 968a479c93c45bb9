"""A checkpoint by the names of its parameters, which is the same under every framework."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from rankwise.states.matrix_states import MatrixState, base_name

__all__ = ["ConversionError", "NamedCheckpoint", "NamedGroup", "NamedParameter", "of_another", "renaming"]

_SHOWN = 3


class ConversionError(ValueError):
    """A checkpoint cannot be converted to one of another framework."""


@dataclass
class NamedParameter:
    """A trained parameter.

    Attributes:
        weight: Weight in its logical shape, in full precision where there is any.
        states: Element states by name, in the weight's shape.
        step: Number of steps that the parameter has taken.
    """

    weight: Tensor
    states: dict[str, Tensor] = field(default_factory=dict)
    step: float = 0.0


@dataclass
class NamedGroup:
    """A param group.

    Attributes:
        settings: Options and rates of the group, without what belongs to one framework.
        members: Names of its parameters, in order.
    """

    settings: dict[str, Any]
    members: list[str]


@dataclass
class NamedCheckpoint:
    """The content of an optimizer of ours and its model, whichever framework wrote it.

    Attributes:
        identity: Identity of the optimizer.
        parameters: Trained parameters by name.
        matrices: States of matrices by key: the name of the parameter, with the matrix in brackets where it is one of
            several.
        groups: The param groups, in order.
        extra: What belongs to no parameter, in plain data.
        module: Everything else of the model: buffers, frozen weights, further names of tied ones.
        left: Descriptions of what is known not to be converted.
    """

    identity: str
    parameters: dict[str, NamedParameter]
    matrices: dict[str, MatrixState]
    groups: list[NamedGroup]
    extra: dict[str, Any]
    module: dict[str, Any] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)

    @property
    def step(self) -> int:
        """Number of steps taken by the parameter that has taken most."""
        return int(max((parameter.step for parameter in self.parameters.values()), default=0))

    def owner(self, key: str) -> str:
        """Name of the parameter that a matrix is, or is part of.

        Raises:
            ConversionError: There is no such parameter.
        """
        name = base_name(key, self.parameters)
        if not name:
            raise ConversionError(
                f"the checkpoint has states of the matrix {key!r}, which is not one of its parameters"
            )
        return name

    def check(self, source: Any) -> None:
        """Refuse a checkpoint that is not complete.

        Raises:
            ConversionError: A parameter is in no group or in two, has no states, or some of another shape.
        """
        members = [name for group in self.groups for name in group.members]
        _refuse(f"{source}: parameters in no param group", set(self.parameters) - set(members))
        _refuse(f"{source}: parameters of a param group without a weight", set(members) - set(self.parameters))
        _refuse(f"{source}: parameters in two param groups", _repeated(members))
        with_matrices = {self.owner(key) for key in self.matrices}
        bare = {
            name for name, parameter in self.parameters.items() if not parameter.states and name not in with_matrices
        }
        _refuse(
            f"{source}: without optimizer states (never trained, or saved before the first step or without the "
            "optimizer: freeze what is not trained, and leave it out of the optimizer)",
            bare,
        )
        # Formats make names of files of them.
        _refuse(f"{source}: names that are no names of modules", {n for n in self.parameters if not _is_name(n)})
        wrong = {
            f"{state} of {name}"
            for name, parameter in self.parameters.items()
            for state, value in parameter.states.items()
            if value.shape != parameter.weight.shape
        }
        _refuse(f"{source}: states whose shape is not that of their weight", wrong)

    def one_step(self, names: Mapping[str, Any], what: str) -> float:
        """Step count that parameters have in common, for a format whose unit ``what`` has one for them.

        Raises:
            ConversionError: The parameters have several counts.
        """
        steps = {self.parameters[name].step for name in names}
        if len(steps) > 1:
            few = min(names, key=lambda name: self.parameters[name].step)
            raise ConversionError(
                f"{few!r} has taken {self.parameters[few].step:g} steps and others {max(steps):g}: {what} has one "
                "count for all. Give each parameter a gradient at every step, or give it a param group of its own"
            )
        return steps.pop() if steps else 0.0

    def renamed(self, rename: Callable[[str], str]) -> NamedCheckpoint:
        """Rename the parameters.

        Args:
            rename: Returns the new name of a parameter; no two may get the same.

        Raises:
            ConversionError: Two parameters would have one name.
        """
        names = {name: rename(name) for name in self.parameters}
        module = {rename(name): value for name, value in self.module.items()}
        taken = [*names.values(), *module]
        _refuse("several parameters would be called", _repeated(taken))

        def key(old: str) -> str:
            name = base_name(old, names)
            return names[name] + old[len(name) :] if name else old

        def anywhere(value: Any) -> Any:
            if isinstance(value, str):
                return key(value)
            if isinstance(value, Mapping):
                return {anywhere(name): anywhere(own) for name, own in value.items()}
            return type(value)(map(anywhere, value)) if isinstance(value, list | tuple) else value

        groups = [replace(group, members=[names[name] for name in group.members]) for group in self.groups]
        return replace(
            self,
            parameters={names[name]: own for name, own in self.parameters.items()},
            matrices={key(old): state for old, state in self.matrices.items()},
            groups=groups,
            extra=anywhere(self.extra),
            module=module,
        )


def _is_name(name: str) -> bool:
    return name != "" and not set(name) & set("/\\") and name not in (".", "..")


def of_another(source: Any) -> ConversionError:
    """Error for a checkpoint that none of our optimizers wrote."""
    return ConversionError(
        f"{source} was written by another optimizer than rankwise's, whose states are not converted: continue from it "
        "in its own framework (docs/checkpoints.md says how for AdamW and Muon), and convert the next checkpoint"
    )


def renaming(patterns: Mapping[str, str], names: Mapping[str, Any]) -> Callable[[str], str]:
    """Make a function that renames by patterns; each ``*`` stands for what matches, up to the end of the name.

    Args:
        patterns: New names by the pattern that a whole name must match. The first pattern that matches counts.
        names: All names that will be renamed.

    Raises:
        ConversionError: A pattern matches nothing, or the two sides have different numbers of ``*``.
    """
    rules: list[tuple[re.Pattern[str], str]] = []
    for old, new in patterns.items():
        if not _is_name(new) or "[" in new:
            raise ConversionError(f"{old!r}: {new!r} is invalid: it must be a parameter's name, without '/' and '['")
        if old.count("*") != new.count("*"):
            raise ConversionError(f"{old!r}: {new!r} is invalid: both must have as many '*'")
        rules.append((re.compile("(.+?)".join(map(re.escape, old.split("*")))), new))

    def rename(name: str) -> str:
        for pattern, new in rules:
            if match := pattern.fullmatch(name):
                first, *others = new.split("*")
                return first + "".join(map("".join, zip(match.groups(), others, strict=True)))
        return name

    unused = (text for text, (rule, _) in zip(patterns, rules, strict=True) if not any(map(rule.fullmatch, names)))
    _refuse("names that no parameter of the checkpoint matches", set(unused))
    return rename


def _repeated(names: list[str]) -> set[str]:
    return {name for name, times in Counter(names).items() if times > 1}


def _refuse(problem: str, names: set[str]) -> None:
    if names:
        raise ConversionError(f"{problem}: {', '.join(_shown(names))}")


def _shown(names: set[str]) -> Iterator[str]:
    yield from sorted(names)[:_SHOWN]
    if len(names) > _SHOWN:
        yield f"and {len(names) - _SHOWN} more"
