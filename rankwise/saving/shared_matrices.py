"""Converts states of slices of matrices to states of the whole ones, or to ``DTensor``, and back.

A checkpoint finds them by name then, whoever owns them, on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rankwise.comm.owner_plan import MatrixTask
from rankwise.layout.agreement import gather_together
from rankwise.layout.dtensors import is_sharded, local_view
from rankwise.plan.checkpoint_mismatch import check_shape
from rankwise.plan.step_unit import StepUnit
from rankwise.states.declared_states import StatePart
from rankwise.states.matrix_states import MatrixState, kept_by

__all__ = ["cut_evenly", "hand_out", "homes", "on_mesh", "owned_parts", "present_slices", "whole_states"]


def _parts(unit: StepUnit, name: str, tasks: list[MatrixTask]) -> list[tuple[MatrixTask, StatePart]]:
    """The parts of a state that make up the whole, each with a task that has it."""
    parts = [(task, unit.state_part(task, name)) for task in tasks]
    return parts if parts[0][1].axis is not None else parts[:1]


def _tasks(unit: StepUnit) -> dict[str, list[MatrixTask]]:
    """All ranks' tasks by matrix, a task being the matrix or a slice of it; in the same order on all ranks."""
    tasks: dict[str, list[MatrixTask]] = {}
    for batch in unit.exchange.plan.batches if unit.exchange is not None else ():
        for task in batch.tasks:
            tasks.setdefault(task.whole or task.key, []).append(task)
    return tasks


def homes(unit: StepUnit) -> dict[str, int]:
    """The ranks that keep the whole states of matrices of which several own slices, in checkpoints."""
    slices = [key for key, tasks in _tasks(unit).items() if tasks[0].whole is not None]
    return {key: number % unit.layout.world_size for number, key in enumerate(slices)}


def present_slices(unit: StepUnit, present: Mapping[str, MatrixState]) -> dict[str, list[MatrixTask]]:
    """The slices of the matrices of which any rank has states; a collective."""
    slices = {key: tasks for key, tasks in _tasks(unit).items() if tasks[0].whole is not None}
    mine = [key for key, tasks in slices.items() if any(present.get(task.key) for task in tasks)]
    anywhere = set().union(*gather_together(lambda: mine, unit.layout.group))
    return {key: tasks for key, tasks in slices.items() if key in anywhere}


def whole_states(
    unit: StepUnit, present: Mapping[str, MatrixState], keys: Container[str] | None = None
) -> Iterator[tuple[str, str, Tensor]]:
    """Every state of every matrix of a unit, whole on every rank, one after the other; a collective.

    Args:
        unit: The unit.
        present: This rank's states.
        keys: The matrices; None: all.
    """
    owners = unit.exchange.plan.owners if unit.exchange is not None else {}
    elsewhere = _kept_elsewhere(unit, present)
    for key, tasks in _tasks(unit).items():
        for name, stored in unit.stored_states(tasks[0]).items() if keys is None or key in keys else ():
            parts = _parts(unit, name, tasks)
            shape = parts[0][1].whole_shape(stored.stored_shape)
            whole = torch.zeros(shape, dtype=stored.dtype or unit.dtype, device=unit.device)
            for task, part in parts:
                if elsewhere.get((task.key, name), owners[task.key]) == unit.layout.rank:
                    value = present.get(task.key, {}).get(name)
                    part.of(whole).copy_(stored.fresh(unit.dtype, unit.device) if value is None else value)
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
    size = -(-whole.shape[0] // mesh.size())
    first = min(mesh.get_local_rank() * size, whole.shape[0])
    return _rows_of(whole, whole[first : first + size].clone(), mesh)


def on_mesh(value: Tensor, mesh: Any) -> Tensor:
    """Bring a tensor of :func:`cut_evenly` that another process has sent to a mesh of this one, of equal ranks."""
    given: Any = value
    if not is_sharded(value) or given.device_mesh is mesh or given.device_mesh != mesh:
        return value
    return _rows_of(value, local_view(value), mesh)


def _rows_of(whole: Tensor, rows: Tensor, mesh: Any) -> Tensor:
    from torch.distributed.tensor import DTensor, Shard

    sharded: Tensor = DTensor.from_local(
        rows, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride()
    )
    return sharded


def owned_parts(owner: str, unit: StepUnit, saved: Mapping[str, MatrixState]) -> dict[str, MatrixState]:
    """Select what this rank owns of saved states; a collective.

    Raises:
        MisfitError: A state has another shape than its matrix asks for; alike on all ranks, before anything is sent.
    """
    for key, tasks in _tasks(unit).items():
        for name, stored in unit.stored_states(tasks[0]).items():
            if name in saved.get(key, {}):
                expected = unit.state_part(tasks[0], name).whole_shape(stored.stored_shape)
                check_shape(owner, key, name, saved[key][name].shape, [expected])
    owners = unit.exchange.plan.owners if unit.exchange is not None else {}
    owned: dict[str, MatrixState] = {}
    for key, tasks in _tasks(unit).items():
        for name, value in saved.get(key, {}).items():
            whole: Tensor = value.full_tensor() if is_sharded(value) else value  # type: ignore[attr-defined]
            for task in tasks:
                if owners[task.key] == unit.layout.rank:
                    known = name in unit.stored_states(task)
                    part = unit.state_part(task, name).of(whole) if known else whole
                    owned.setdefault(task.key, {})[name] = part.clone()
    return owned


def hand_out(owner: str, unit: StepUnit, loaded: dict[str, MatrixState]) -> None:
    """Give loaded states of whole matrices that lie with other ranks than their owners to these; a collective.

    Args:
        owner: Name of the optimizer, for messages.
        unit: The unit.
        loaded: This rank's loaded states, of which those of other ranks' matrices are taken, and its own added.

    Raises:
        MisfitError: A state has another shape than its matrix asks for; alike on all ranks, before anything is sent.
    """
    if unit.exchange is None:
        return
    plan, rank, tasks_of = unit.exchange.plan, unit.layout.rank, _tasks(unit)

    def misplaced() -> list[tuple[str, str]]:
        kept = set(kept_by(plan.keepers, rank, loaded))
        strays = [key for key in loaded if key in tasks_of and plan.owners.get(key) != rank]
        places = [(key, name) for key in strays for name in loaded[key] if (key, name) not in kept]
        for key, name in places:
            stored = unit.stored_states(tasks_of[key][0]).get(name)
            if stored is not None:
                expected = unit.state_part(tasks_of[key][0], name).whole_shape(stored.stored_shape)
                check_shape(owner, key, name, loaded[key][name].shape, [expected])
        return places

    senders = enumerate(gather_together(misplaced, unit.layout.group))
    sent = {place: sender for sender, places in senders for place in places}
    for (key, name), sender in sorted(sent.items()):
        stored = unit.stored_states(tasks_of[key][0]).get(name)
        if stored is None:
            continue
        tasks = tasks_of[key]
        shape = unit.state_part(tasks[0], name).whole_shape(stored.stored_shape)
        whole = torch.zeros(shape, dtype=stored.dtype or unit.dtype, device=unit.device)
        if sender == rank:
            whole.copy_(loaded[key].pop(name))
        # Summed as bytes, the zeros of all other ranks leave the sender's bits as they are.
        dist.all_reduce(whole.view(-1).view(torch.uint8), group=unit.layout.group)
        for task in tasks:
            if plan.owners[task.key] == rank:
                # What the owner has itself counts.
                loaded.setdefault(task.key, {}).setdefault(name, unit.state_part(task, name).of(whole).clone())
    for key in {key for key, _ in sent}:
        if not loaded.get(key, True):
            del loaded[key]
