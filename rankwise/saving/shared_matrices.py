"""Converts matrix states to ``DTensor`` of which all ranks that share parameters have a part, and back.

A checkpoint finds them by name then, whoever owns them, on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from rankwise.comm.owner_plan import MatrixTask
from rankwise.layout.agreement import gather_together
from rankwise.layout.dtensors import is_sharded
from rankwise.plan.checkpoint_mismatch import check_shape
from rankwise.plan.step_costs import StepCosts
from rankwise.plan.step_unit import StepUnit
from rankwise.states.matrix_states import MatrixState

__all__ = ["cut_evenly", "owned_parts", "whole_states"]


class _StatePart(NamedTuple):
    """The part that one task has of a state of its matrix.

    Attributes:
        task: The matrix, or a slice of it.
        axis: Dimension along which slices have parts of the state; None where each has all of it.
        number: Number of the slice.
        slices: Number of slices of the matrix.
    """

    task: MatrixTask
    axis: int | None
    number: int
    slices: int

    def of(self, whole: Tensor) -> Tensor:
        """View the part in the whole state."""
        return whole if self.axis is None else whole.chunk(self.slices, dim=self.axis)[self.number]

    def shape(self, own: torch.Size) -> list[int]:
        """Shape of the whole state, given that of the part."""
        return [size * self.slices if axis == self.axis else size for axis, size in enumerate(own)]


def _parts(unit: StepUnit, work: StepCosts, name: str, tasks: list[MatrixTask]) -> list[_StatePart]:
    if tasks[0].whole is None:
        return [_StatePart(tasks[0], None, 0, 1)]
    matrix = unit.slices[tasks[0].whole]
    parts = [
        _StatePart(task, work.cut_states(task).get(name), matrix.parts.index(task.key), matrix.count) for task in tasks
    ]
    return parts if parts[0].axis is not None else parts[:1]


def _tasks(unit: StepUnit) -> dict[str, list[MatrixTask]]:
    """All ranks' tasks by matrix, a task being the matrix or a slice of it; in the same order on all ranks."""
    tasks: dict[str, list[MatrixTask]] = {}
    for batch in unit.exchange.plan.batches if unit.exchange is not None else ():
        for task in batch.tasks:
            tasks.setdefault(task.whole or task.key, []).append(task)
    return tasks


def whole_states(
    unit: StepUnit, work: StepCosts, present: Mapping[str, MatrixState]
) -> Iterator[tuple[str, str, Tensor]]:
    """Every state of every matrix of a unit, whole on every rank, one after the other; a collective."""
    meta, owners = torch.device("meta"), unit.exchange.plan.owners if unit.exchange is not None else {}
    elsewhere = _kept_elsewhere(unit, present)
    for key, tasks in _tasks(unit).items():
        for name, expected in work.matrix_state(tasks[0], meta).items():
            parts = _parts(unit, work, name, tasks)
            whole = torch.zeros(parts[0].shape(expected.shape), dtype=expected.dtype, device=unit.device)
            for part in parts:
                if elsewhere.get((part.task.key, name), owners[part.task.key]) == unit.layout.rank:
                    value = present.get(part.task.key, {}).get(name)
                    part.of(whole).copy_(work.matrix_state(part.task, unit.device)[name] if value is None else value)
            # Summed as bytes, the zeros of all other ranks leave the owner's bits as they are.
            dist.all_reduce(whole.view(-1).view(torch.uint8), group=unit.layout.group)
            yield key, name, whole


def _kept_elsewhere(unit: StepUnit, present: Mapping[str, MatrixState]) -> Mapping[tuple[str, str], int]:
    """Ranks that have states in their owners' place, and not beside them; a collective if any may have."""
    if unit.exchange is None or not unit.exchange.plan.keepers:
        return {}
    plan, rank = unit.exchange.plan, unit.layout.rank
    held = [
        (key, name)
        for key, name in plan.keepers
        if plan.owners[key] == rank and (name in present.get(key, {}) or not present.get(key))
    ]
    with_owners = set().union(*gather_together(lambda: held, unit.layout.group))
    return {place: keeper for place, keeper in plan.keepers.items() if place not in with_owners}


def cut_evenly(whole: Tensor, mesh: Any) -> Tensor:
    """Cut a tensor that every rank has into rows of a ``DTensor`` on a 1-D mesh; a scalar stays whole."""
    if whole.dim() == 0:
        return whole
    from torch.distributed.tensor import DTensor, Shard

    size = -(-whole.shape[0] // mesh.size())
    first = min(mesh.get_local_rank() * size, whole.shape[0])
    rows = whole[first : first + size].clone()
    sharded: Tensor = DTensor.from_local(
        rows, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride()
    )
    return sharded


def owned_parts(
    owner: str, unit: StepUnit, work: StepCosts, saved: Mapping[str, MatrixState]
) -> dict[str, MatrixState]:
    """Select what this rank owns of saved states; a collective.

    Raises:
        MisfitError: A state has another shape than its matrix asks for; alike on all ranks, before anything is sent.
    """
    for key, tasks in _tasks(unit).items():
        initial = work.matrix_state(tasks[0], torch.device("meta")) if key in saved else {}
        for name in initial.keys() & saved.get(key, {}).keys():
            expected = _parts(unit, work, name, tasks)[0].shape(initial[name].shape)
            check_shape(owner, key, name, saved[key][name].shape, [tuple(expected)])
    owners = unit.exchange.plan.owners if unit.exchange is not None else {}
    owned: dict[str, MatrixState] = {}
    for key, tasks in _tasks(unit).items():
        for name, value in saved.get(key, {}).items():
            whole: Tensor = value.full_tensor() if is_sharded(value) else value  # type: ignore[attr-defined]
            for task in tasks:
                if owners[task.key] == unit.layout.rank:
                    part = next((part for part in _parts(unit, work, name, tasks) if part.task is task), None)
                    value_here = whole if part is None else part.of(whole)
                    owned.setdefault(task.key, {})[name] = value_here.clone()
    return owned
