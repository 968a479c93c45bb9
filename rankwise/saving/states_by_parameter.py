"""Everything an optimizer keeps under its parameters and param groups, where torch's checkpoint functions look for it.

``torch.distributed.checkpoint`` takes ``state`` and ``param_groups`` of a dictionary and nothing beside them. So the
states of a parameter's matrices stand among its own, as ``matrix.left`` or ``matrix.[3].basis`` (of the matrix in
brackets), and what belongs to no parameter is a text in its param group.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from rankwise.states.matrix_states import MatrixState

__all__ = [
    "COUNT",
    "MATRIX",
    "RECORD",
    "WITH_STATES",
    "asked_by_torch",
    "extras_of",
    "matrices_of",
    "record_texts",
    "steps_taken",
    "under_parameters",
    "without_matrices",
]

MATRIX = "matrix"
"""Begins the names of matrix states; alone, in a living optimizer's states, it says that there may be some."""
RECORD = "rankwise"
WITH_STATES = "matrices_with_states"
COUNT = "count"
_NAME = re.compile(rf"{MATRIX}\.((?:\[[^\]]*\])*)\.?(.+)")


def asked_by_torch() -> bool:
    """Whether one of torch's checkpoint functions has asked for what is made right now: nothing else tells them apart.

    They take states and groups alone, and what they write may be read by another optimizer of the same parameters.
    """
    frame = sys._getframe(1)
    while frame is not None:
        if str(frame.f_globals.get("__name__", "")).startswith("torch.distributed.checkpoint."):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def under_parameters(states: Mapping[str, MatrixState], names: Mapping[str, str]) -> dict[str, dict[str, Tensor]]:
    """States of matrices by parameter.

    Args:
        states: By matrix.
        names: The parameter of each matrix.
    """
    found: dict[str, dict[str, Tensor]] = {}
    for key, state in states.items():
        name = names[key]
        place = key[len(name) :]
        prefix = f"{MATRIX}.{place}." if place else f"{MATRIX}."
        found.setdefault(name, {}).update({f"{prefix}{kind}": value for kind, value in state.items()})
    return found


def matrices_of(name: str, state: Mapping[str, Any]) -> dict[str, MatrixState]:
    """The states of a parameter's matrices, by matrix, among all that a dictionary has of the parameter."""
    found: dict[str, MatrixState] = {}
    for path, value in _flat(state):
        place = _NAME.fullmatch(path)
        if place is not None:
            found.setdefault(f"{name}{place[1]}", {})[place[2]] = value
    return found


def without_matrices(state: Mapping[str, Any]) -> dict[str, Any]:
    """The other states of the parameter."""
    return {name: value for name, value in state.items() if name != MATRIX and not name.startswith(f"{MATRIX}.")}


def _flat(state: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Names with the dots of what torch has nested."""
    for name, value in state.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def record_texts(
    identity: str, matrices: int, count: int, extra: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]
) -> list[str]:
    """What is written into each param group: who has written it; into the first with parameters what else there is.

    Args:
        identity: The optimizer.
        matrices: How many have states.
        count: Steps of the parameter that has taken most.
        extra: What belongs to no parameter, in plain data.
        groups: The param groups.
    """
    first = next((place for place, group in enumerate(groups) if group["params"]), 0)
    common = {RECORD: identity, WITH_STATES: matrices, COUNT: count}
    return [json.dumps({**common, **(extra if place == first else {})}) for place in range(len(groups))]


def steps_taken(states: Mapping[Any, Mapping[str, Any]]) -> int:
    """Steps of the parameter that has taken most."""
    return max((int(state["step"]) for state in states.values() if "step" in state), default=0)


def extras_of(groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What :func:`record_texts` wrote; empty where nothing was written."""
    found: dict[str, Any] = {}
    for group in groups:
        text = group.get(RECORD)
        if isinstance(text, str) and text:
            found |= json.loads(text)
    return found
