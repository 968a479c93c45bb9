"""An optimizer's states by parameter name and position, for frameworks whose checkpoints take them piece by piece."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rankwise.sharding import Fragment
from rankwise.step.matrix_states import MatrixState
from rankwise.step.optimizer import ShardedOptimizer

__all__ = [
    "SlicePlace",
    "StoredFragment",
    "common_step",
    "owned_states",
    "resume",
    "slice_places",
    "stored_fragments",
]


class StoredFragment(NamedTuple):
    """A run of a parameter on this rank.

    Attributes:
        fragment: Where it lies in the parameter.
        copy: Which of the copies that ranks hold alike it is a part of; 0 is the one to be written.
        weight: 1-D view of the optimizer's weight.
        states: 1-D views of its element states, by name.
    """

    fragment: Fragment
    copy: int
    weight: Tensor
    states: dict[str, Tensor]


@dataclass(frozen=True)
class SlicePlace:
    """One of the equal slices of a matrix.

    Attributes:
        whole: The matrix.
        index: Of the slice.
        count: Number of slices.
        axes: The dimension along which a state is cut, by its name; all slices have the other states alike.
    """

    whole: str
    index: int
    count: int
    axes: Mapping[str, int]


def stored_fragments(optimizer: ShardedOptimizer) -> Iterator[StoredFragment]:
    """This rank's planned fragments, with their states allocated if they were not.

    Args:
        optimizer: Planned, see :meth:`rankwise.step.optimizer.ShardedOptimizer.plan_ahead`.
    """
    for unit in optimizer.planned_units:
        for index, tensor in enumerate(unit.tensors):
            flat = tensor.detach().view(-1)
            for entry, states in unit.states.of_entries(optimizer.state, index):
                part = entry.fragment
                copy = list(unit.layout.copies[part.key]).index(part.copy)
                weight = flat[part.offset : part.offset + part.numel]
                yield StoredFragment(part, copy, weight, states)


def owned_states(optimizer: ShardedOptimizer) -> dict[str, MatrixState]:
    """The states of all matrices this rank owns; those of a matrix that was not stepped yet are the initial ones."""
    found: dict[str, MatrixState] = {}
    present = optimizer.matrix_states.everything()
    for unit in optimizer.planned_units:
        if unit.exchange is not None:
            initial = optimizer.work(unit).matrix_state
            for task in unit.exchange.owned():
                fresh = dict(initial(task, unit.device))
                if fresh:
                    found[task.key] = {**fresh, **present.get(task.key, {})}
    return found


def slice_places(optimizer: ShardedOptimizer) -> dict[str, SlicePlace]:
    """Of every slice this rank owns, by its key in :func:`owned_states`: where its states lie in the matrix's."""
    found: dict[str, SlicePlace] = {}
    for unit in optimizer.planned_units:
        if unit.exchange is None:
            continue
        cut_states = optimizer.work(unit).cut_states
        for task in unit.exchange.owned():
            if task.whole is not None:
                matrix = unit.slices[task.whole]
                found[task.key] = SlicePlace(task.whole, matrix.parts.index(task.key), matrix.count, cut_states(task))
    return found


def common_step(optimizer: ShardedOptimizer) -> int:
    """The number of steps taken; a collective, as a rank without any tensor has no count of its own."""
    optimizer.settle()
    return max((unit.common_step(optimizer.state) for unit in optimizer.planned_units), default=0)


def resume(
    optimizer: ShardedOptimizer, matrix_states: Mapping[str, MatrixState], step: int, extra: Mapping[str, Any]
) -> None:
    """Take over matrix states and counts; weights and element states are written through their views.

    Args:
        optimizer: Planned.
        matrix_states: As :func:`owned_states` gave them.
        step: As :func:`common_step` gave it; 0 leaves the optimizer as if it had not been stepped.
        extra: As :meth:`rankwise.step.optimizer.ShardedOptimizer.extra_state` gave it.
    """
    steps = {index: torch.tensor(float(step)) for index in range(len(optimizer.param_groups))} if step else {}
    optimizer.adopt(matrix_states if step else {}, steps)
    optimizer.load_extra_state(extra)
