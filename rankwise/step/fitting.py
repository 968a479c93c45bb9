"""Whether saved states are those of an optimizer's parameters: compared before any of them is taken over."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rankwise.sharding import MatrixTask
from rankwise.step.unit import StepUnit

__all__ = ["InitialStates", "MisfitError", "check_shape", "in_order_of", "refuse_strange", "saved_groups_fit"]

Shape = tuple[int, ...]
Names = Sequence[Sequence[str | None]]
"""Of the parameters of each param group, in order; None where it is not known."""

_FIX = "load it into the model that it was saved with, or load the weights alone and start the optimizer afresh"


class MisfitError(ValueError):
    """A checkpoint's states are not those of this optimizer's parameters."""


def check_shape(owner: str, key: str, state: str, found: Sequence[int], allowed: Collection[Shape]) -> None:
    """Refuse a state of another shape than its parameter's.

    Args:
        owner: Of the message: the optimizer.
        key: The parameter.
        state: Name of the state.
        found: Its shape.
        allowed: What it may be.

    Raises:
        MisfitError: It is none of these.
    """
    if tuple(found) not in allowed:
        rule = " or ".join(str(tuple(shape)) for shape in allowed)
        raise MisfitError(
            f"{owner}: the state {state!r} of '{key}' has the shape {tuple(found)}, which is invalid: it must be "
            f"{rule}, as the parameter and the options of its group say; {_FIX}"
        )


def saved_groups_fit(state_dict: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> bool:
    """Whether there are as many groups of as many parameters; torch itself refuses anything else."""
    return [len(group["params"]) for group in state_dict["param_groups"]] == [len(group["params"]) for group in groups]


def in_order_of(owner: str, state_dict: Mapping[str, Any], ours: Names) -> dict[str, Any]:
    """A state dictionary with the parameters of each group in another order.

    torch matches element states by position alone, which is right only if both sides list their parameters alike.

    Args:
        owner: Of the message: the optimizer.
        state_dict: With as many groups of as many parameters as ``ours``.
        ours: The names to put them in the order of.

    Returns:
        The dictionary with its own order where names are not known, or are other ones altogether: as in torch the place
        counts then, for the states of matrices too, which are kept by name.

    Raises:
        MisfitError: The names show that the parameters are not the same ones.
    """
    result = dict(state_dict)
    theirs = _saved_names(state_dict)
    known = [name for names in (*ours, *theirs) for name in names]
    if None in known or [list(names) for names in ours] == theirs:
        return result
    place = {name: (group, index) for group, names in enumerate(theirs) for index, name in enumerate(names)}
    mine = {name: (group, index) for group, names in enumerate(ours) for index, name in enumerate(names)}
    if any(set(names) != set(saved) for names, saved in zip(ours, theirs, strict=True)):
        moved = next((name for name in mine if name in place and place[name] != mine[name]), None)
        if moved is not None:
            raise MisfitError(
                f"{owner}: the checkpoint's parameters are invalid: they must be this optimizer's, in its groups, but "
                f"{moved!r} is number {place[moved][1]} of group {place[moved][0]} there and number {mine[moved][1]} "
                f"of group {mine[moved][0]} here; build the optimizer from the same named parameters in the same groups"
            )
        names_here = {name: ours[group][index] for name, (group, index) in place.items()}
        result["matrix_states"] = _renamed(state_dict.get("matrix_states", {}), names_here)
        return result
    result["param_groups"] = [
        _reordered(group, [place[name][1] for name in names])
        for group, names in zip(state_dict["param_groups"], ours, strict=True)
    ]
    return result


def _renamed(states: Mapping[str, Any], names: Mapping[Any, Any]) -> dict[str, Any]:
    """States by other names; those of one matrix of a stack have its place in brackets behind the name."""
    found = {}
    for key, state in states.items():
        name = key
        while name and name not in names:
            name = name.rpartition("[")[0]
        found[names[name] + key[len(name) :] if name else key] = state
    return found


def _reordered(group: Mapping[str, Any], order: Sequence[int]) -> dict[str, Any]:
    lists = {name: group[name] for name in ("params", "param_names") if len(group.get(name) or ()) == len(order)}
    return {**group, **{name: [values[index] for index in order] for name, values in lists.items()}}


def _saved_names(state_dict: Mapping[str, Any]) -> list[list[str | None]]:
    found: list[list[str | None]] = []
    records: Iterator[Mapping[str, Any]] = iter(state_dict.get("layout", ()))
    for group in state_dict["param_groups"]:
        count = len(group["params"])
        recorded = [next(records, {}).get("name") for _ in range(count)]
        listed = list(group.get("param_names") or ())
        # Of checkpoints that were written before the layout had names.
        found.append(listed if None in recorded and len(listed) == count else recorded)
    return found


InitialStates = Callable[[MatrixTask, torch.device], Mapping[str, Tensor]]
"""The states of a matrix before its first step; see :class:`rankwise.step.work.StepWork`."""


def refuse_strange(
    owner: str, unit: StepUnit, states: Mapping[str, Mapping[str, Tensor]], initial: InitialStates
) -> None:
    """Compare the states of matrices that this rank owns with what a planned unit expects of them.

    Args:
        owner: Of the message: the optimizer.
        unit: The unit.
        states: By matrix.
        initial: Those that it would begin with.

    Raises:
        MisfitError: One has another shape.
    """
    for task in unit.exchange.owned() if unit.exchange is not None else ():
        found = states.get(task.key)
        if found:
            for name, expected in initial(task, torch.device("meta")).items():
                if name in found:
                    check_shape(owner, task.key, name, found[name].shape, [tuple(expected.shape)])
