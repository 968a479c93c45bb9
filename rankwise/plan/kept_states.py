"""States that ranks keep for the owners of matrices, who have them during a step alone.

The keeper sends such a state to the owner before every step, and gets it back after the steps that changed it. An owner
that has the state itself (at a first step, or from a checkpoint of when it kept it) uses its own until that changes
and is given away.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from math import prod
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from rankwise.comm.owner_plan import MatrixTask
from rankwise.plan.notes import Note
from rankwise.plan.step_unit import StepUnit
from rankwise.states.declared_states import StoredState
from rankwise.states.matrix_states import MatrixState, MatrixStates

__all__ = ["fetch_kept_states", "initial_part", "refuse_stranded", "return_kept_states"]


class _KeptState(NamedTuple):
    """A state that another rank keeps for the owner."""

    task: MatrixTask
    state: str
    owner: int
    keeper: int
    stored: StoredState

    def of(self, states: MatrixStates) -> Tensor | None:
        """Return the state, or None if this rank does not have it."""
        return states.get(self.task.key, {}).get(self.state)


_LOANS: Note[list[_KeptState]] = Note("states that their owners do not keep, all ranks' in one order")
_BORROWED: Note[list[_KeptState]] = Note("those that are with their owners for the step under way")


def fetch_kept_states(unit: StepUnit, states: MatrixStates) -> None:
    """Complete the states of this rank's matrices for a step; a collective if any rank keeps a state for another."""
    loans, rank = _loans(unit), unit.layout.rank
    if not loans:
        return
    present = states.everything()
    for loan in loans:
        key = loan.task.key
        if rank == loan.owner or (rank == loan.keeper and key in present):
            states.take_up(key, partial(initial_part, unit, loan.task, present.get(key, {})))
    # A state that nobody keeps yet is with its owner, who ignores the initial value that it is sent.
    sent = [
        loan.stored.fresh(unit.dtype, unit.device) if (kept := loan.of(states)) is None else kept
        for loan in loans
        if loan.keeper == rank
    ]
    borrowed: list[_KeptState] = []
    unit.notes[_BORROWED] = borrowed
    for loan, value in _moved(unit, loans, sent, back=False):
        if loan.of(states) is None:
            states[loan.task.key][loan.state] = value
            borrowed.append(loan)


def refuse_stranded(unit: StepUnit, states: MatrixStates, mark: str) -> None:
    """Refuse a state that this rank kept for an owner when it was saved, and would not send to it now.

    Args:
        unit: Unit of a step that is about to begin.
        states: This rank's matrix states.
        mark: Name of a state that every owner has, and no keeper.

    Raises:
        RuntimeError: There is such a state: its owner would begin without it.
    """
    assert unit.exchange is not None
    plan, rank = unit.exchange.plan, unit.layout.rank
    for key, state in states.loaded.items():
        lost = [name for name in state if plan.keepers.get((key, name)) != rank]
        if key in plan.owners and mark not in state and lost:
            raise RuntimeError(
                f"this rank's part of the checkpoint has {lost[0]!r} of '{key}', but its owner would not get it now, "
                "because other ranks keep or own states than when it was saved; resume with the "
                "options and the version that saved it, or load it by name, as on another number of ranks"
            )


def return_kept_states(unit: StepUnit, states: MatrixStates, changed: Collection[str]) -> None:
    """Give back what :func:`fetch_kept_states` got; a collective if anything has ``changed``, alike on all ranks."""
    rank = unit.layout.rank
    leaving = [loan for loan in unit.notes.get(_LOANS) or () if loan.task.key in changed]
    if leaving:
        sent = [states[loan.task.key][loan.state] for loan in leaving if loan.owner == rank]
        for loan, value in _moved(unit, leaving, sent, back=True):
            states.setdefault(loan.task.key, {})[loan.state] = value
    for loan in (*(unit.notes.drop(_BORROWED) or ()), *leaving):
        if loan.owner == rank:
            states[loan.task.key].pop(loan.state, None)


def initial_part(unit: StepUnit, task: MatrixTask, present: MatrixState) -> MatrixState:
    """States of a matrix that a rank begins with: an owner's own, and those that it keeps for others."""
    assert unit.exchange is not None
    plan = unit.exchange.plan
    owned = plan.owners[task.key] == unit.layout.rank
    return {
        name: stored.fresh(unit.dtype, unit.device)
        for name, stored in unit.stored_states(task).items()
        if name in present or (owned and not (present and (task.key, name) in plan.keepers))
    }


def _loans(unit: StepUnit) -> Sequence[_KeptState]:
    """The states that any rank keeps for another, in the same order on all ranks; planned once."""
    if _LOANS not in unit.notes:
        assert unit.exchange is not None
        plan = unit.exchange.plan
        tasks = {task.key: task for batch in plan.batches for task in batch.tasks} if plan.keepers else {}
        unit.notes[_LOANS] = [
            _KeptState(tasks[key], name, plan.owners[key], keeper, unit.stored_states(tasks[key])[name])
            for (key, name), keeper in sorted(plan.keepers.items())
        ]
    return unit.notes[_LOANS]


def _moved(
    unit: StepUnit, loans: Sequence[_KeptState], sent: Sequence[Tensor], back: bool
) -> list[tuple[_KeptState, Tensor]]:
    """Exchange states in one all-to-all, ``back`` to their keepers or to their owners; returns those that arrive."""
    rank, first = unit.layout.rank, loans[0].stored
    empty = torch.empty(0, dtype=first.dtype or unit.dtype, device=unit.device)
    routes = [(loan.owner, loan.keeper)[:: 1 if back else -1] for loan in loans]
    values = iter(sent)
    outgoing = [(target, next(values).reshape(-1)) for source, target in routes if source == rank]
    incoming = [(source, loan) for loan, (source, target) in zip(loans, routes, strict=True) if target == rank]
    # A message is ordered by rank, and by loan for each rank.
    outgoing.sort(key=lambda entry: entry[0])
    incoming.sort(key=lambda entry: entry[0])
    counts_out, counts_in = [0] * unit.layout.world_size, [0] * unit.layout.world_size
    for target, value in outgoing:
        counts_out[target] += value.numel()
    for source, loan in incoming:
        counts_in[source] += prod(loan.stored.shape)
    message_out = outgoing[0][1] if len(outgoing) == 1 else torch.cat([empty, *(value for _, value in outgoing)])
    message_in = empty.new_empty(sum(counts_in))
    unit.traffic.count(message_out)
    dist.all_to_all_single(message_in, message_out, counts_in, counts_out, group=unit.layout.group)
    parts = message_in.split([prod(loan.stored.shape) for _, loan in incoming]) if incoming else ()
    # Kernels expect each state to begin at an aligned address, so every one gets memory of its own.
    return [
        (loan, (part if len(parts) == 1 else part.clone()).view(loan.stored.shape))
        for (_, loan), part in zip(incoming, parts, strict=True)
    ]
