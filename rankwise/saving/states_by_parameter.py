"""Stores all of an optimizer's state under its parameters and param groups.

``torch.distributed.checkpoint`` takes ``state`` and ``param_groups`` of a dictionary and nothing else. So the states of
a parameter's matrices stand among its own, as ``matrix.left`` or ``matrix.[3].basis`` (of the matrix in brackets), and
what belongs to no parameter is a text in its param group.
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
    "REPLICA",
    "WITH_STATES",
    "asked_by_torch",
    "asked_by_torchft",
    "extras_of",
    "matrices_of",
    "owners_in",
    "record_texts",
    "steps_taken",
    "under_parameters",
    "without_matrices",
]

MATRIX = "matrix"
"""Prefix of the names of matrix states; alone, in a living optimizer's states, it says that there may be some."""
RECORD = "rankwise"
WITH_STATES = "matrices_with_states"
COUNT = "count"
REPLICA = "replica"
"""Key of a dictionary for the same rank of another replica, which has what its rank has: the owners of matrices."""
_NAME = re.compile(rf"{MATRIX}\.((?:\[[^\]]*\])*)\.?(.+)")


def asked_by_torch() -> bool:
    """Whether one of torch's checkpoint functions is on the call stack: nothing else tells that it asks.

    They take states and groups alone, and what they write may be read by another optimizer of the same parameters.
    """
    return _asked_by("torch.distributed.checkpoint.")


def asked_by_torchft() -> bool:
    """Whether torchft's manager is on the call stack: it sends states to a replica that joins, rank by rank.

    It asks on a thread of its own, beside the forward pass, where no collective may run.
    """
    return _asked_by("torchft.manager")


def _asked_by(module: str) -> bool:
    frame = sys._getframe(2)
    while frame is not None:
        if str(frame.f_globals.get("__name__", "")).startswith(module):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def under_parameters(states: Mapping[str, MatrixState], names: Mapping[str, str]) -> dict[str, dict[str, Tensor]]:
    """Sort states of matrices by parameter."""
    by_parameter: dict[str, dict[str, Tensor]] = {}
    for key, state in states.items():
        name = names[key]
        place = key[len(name) :]
        prefix = f"{MATRIX}.{place}." if place else f"{MATRIX}."
        by_parameter.setdefault(name, {}).update({f"{prefix}{kind}": value for kind, value in state.items()})
    return by_parameter


def matrices_of(name: str, state: Mapping[str, Any]) -> dict[str, MatrixState]:
    """Select the states of a parameter's matrices, by matrix, from all that a dictionary has of the parameter."""
    matrices: dict[str, MatrixState] = {}
    for path, value in _flat(state):
        place = _NAME.fullmatch(path)
        if place is not None:
            matrices.setdefault(f"{name}{place[1]}", {})[place[2]] = value
    return matrices


def without_matrices(state: Mapping[str, Any]) -> dict[str, Any]:
    """Select the parameter's states that are no matrix states."""
    return {name: value for name, value in state.items() if name != MATRIX and not name.startswith(f"{MATRIX}.")}


def _flat(state: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Flatten what torch has nested; dots join the names."""
    for name, value in state.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def record_texts(
    identity: str, matrices: int, count: int, extra: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]
) -> list[str]:
    """Texts for the param groups: all name their writer, and the first with parameters has the rest.

    Args:
        identity: Identity of the optimizer.
        matrices: Number of matrices that have states.
        count: Steps of the parameter that has taken most.
        extra: What belongs to no parameter, in plain data.
        groups: The param groups.
    """
    first = next((place for place, group in enumerate(groups) if group["params"]), 0)
    common = {RECORD: identity, WITH_STATES: matrices, COUNT: count}
    return [json.dumps({**common, **(extra if place == first else {})}) for place in range(len(groups))]


def steps_taken(states: Mapping[Any, Mapping[str, Any]]) -> int:
    """Number of steps of the parameter that has taken most."""
    return max((int(state["step"]) for state in states.values() if "step" in state), default=0)


def owners_in(replica: Mapping[str, Any]) -> dict[Any, int]:
    """Read the owners of matrices, and keepers by (matrix, state), that stand under :data:`REPLICA` in plain data."""
    return {tuple(place) if isinstance(place, list) else place: rank for place, rank in replica["owners"]}


def extras_of(groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Read what :func:`record_texts` wrote; empty where nothing was written."""
    extras: dict[str, Any] = {}
    for group in groups:
        text = group.get(RECORD)
        if isinstance(text, str) and text:
            extras |= json.loads(text)
    return extras
