"""States that other ranks keep for the owners of matrices: owners have them during a step alone.

What a rank keeps, it sends to the owner before every step, and gets back after those that changed it. An owner that has
such a state itself, as at a first step or from a checkpoint of a time when it kept it, goes on with its own, until that
changes and is given away.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from rankwise.comm.owner_plan import MatrixTask
from rankwise.plan.checkpoint_mismatch import InitialStates
from rankwise.plan.notes import Note
from rankwise.plan.step_unit import StepUnit
from rankwise.states.matrix_states import MatrixState, MatrixStates

__all__ = ["fetch_kept_states", "initial_part", "refuse_stranded", "return_kept_states"]


class _KeptState(NamedTuple):
    """A state that its owner does not keep; ``like`` it, on the meta device."""

    task: MatrixTask
    state: str
    owner: int
    keeper: int
    like: Tensor

    def of(self, states: MatrixStates) -> Tensor | None:
        """The state, if this rank has it."""
        return states.get(self.task.key, {}).get(self.state)


_LOANS: Note[list[_KeptState]] = Note("states that their owners do not keep, all ranks' in one order")
_BORROWED: Note[list[_KeptState]] = Note("those that are with their owners for the step under way")


def fetch_kept_states(unit: StepUnit, states: MatrixStates, initial: InitialStates) -> None:
    """Complete the states of this rank's matrices for a step; a collective where other ranks keep any.

    Args:
        unit: Unit of the step.
        states: This rank's.
        initial: What matrices begin with.
    """
    loans, rank = _loans(unit, initial), unit.layout.rank
    if not loans:
        return
    present = states.everything()
    for loan in loans:
        key = loan.task.key
        if rank == loan.owner or (rank == loan.keeper and key in present):
            states.take_up(key, partial(initial_part, unit, loan.task, present.get(key, {}), initial))
    # Where nothing is kept yet, the owner has it itself, and takes no notice of what arrives.
    sent = [
        initial(loan.task, unit.device)[loan.state] if (kept := loan.of(states)) is None else kept
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
    """Refuse what this rank kept for an owner when it was saved, and does not keep now: the owner begins without it.

    Args:
        unit: Unit of a step that is about to begin.
        states: This rank's.
        mark: A state that owners alone have, always.

    Raises:
        RuntimeError: There is such a state.
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
    """Leave with their keepers what :func:`fetch_kept_states` got; a collective where any of it changed.

    Args:
        unit: As it was borrowed for.
        states: This rank's.
        changed: Matrices whose states may have, alike on all ranks.
    """
    rank = unit.layout.rank
    leaving = [loan for loan in unit.notes.get(_LOANS) or () if loan.task.key in changed]
    if leaving:
        sent = [states[loan.task.key][loan.state] for loan in leaving if loan.owner == rank]
        for loan, value in _moved(unit, leaving, sent, back=True):
            states.setdefault(loan.task.key, {})[loan.state] = value
    for loan in (*(unit.notes.drop(_BORROWED) or ()), *leaving):
        if loan.owner == rank:
            states[loan.task.key].pop(loan.state, None)


def initial_part(unit: StepUnit, task: MatrixTask, present: MatrixState, initial: InitialStates) -> MatrixState:
    """What a rank begins with of a matrix's states: all of an owner's but what has gone to others, else what it keeps.

    Args:
        unit: Unit of the matrix.
        task: The matrix.
        present: Its states that this rank has.
        initial: All states that it begins with.
    """
    assert unit.exchange is not None
    plan = unit.exchange.plan
    owned = plan.owners[task.key] == unit.layout.rank
    return {
        name: value
        for name, value in initial(task, unit.device).items()
        if name in present or (owned and not (present and (task.key, name) in plan.keepers))
    }


def _loans(unit: StepUnit, initial: InitialStates) -> Sequence[_KeptState]:
    """All ranks', in one order; planned once."""
    if _LOANS not in unit.notes:
        assert unit.exchange is not None
        plan, meta = unit.exchange.plan, torch.device("meta")
        tasks = {task.key: task for batch in plan.batches for task in batch.tasks} if plan.keepers else {}
        unit.notes[_LOANS] = [
            _KeptState(tasks[key], name, plan.owners[key], keeper, initial(tasks[key], meta)[name])
            for (key, name), keeper in sorted(plan.keepers.items())
        ]
    return unit.notes[_LOANS]


def _moved(
    unit: StepUnit, loans: Sequence[_KeptState], sent: Sequence[Tensor], back: bool
) -> list[tuple[_KeptState, Tensor]]:
    """What others have sent to this rank, in one all-to-all.

    Args:
        unit: Unit of the ranks.
        loans: What travels.
        sent: What this rank has of it, in the same order.
        back: Whether it goes to the keepers, else to the owners.
    """
    rank, empty = unit.layout.rank, loans[0].like.new_empty(0, device=unit.device)
    ways = [(loan.owner, loan.keeper)[:: 1 if back else -1] for loan in loans]
    values = iter(sent)
    out = [(target, next(values).reshape(-1)) for source, target in ways if source == rank]
    come = [(source, loan) for loan, (source, target) in zip(loans, ways, strict=True) if target == rank]
    # A message has what it brings to each rank, or of each, in the order of the loans.
    out.sort(key=lambda way: way[0])
    come.sort(key=lambda way: way[0])
    counts_out, counts_in = [0] * unit.layout.world_size, [0] * unit.layout.world_size
    for target, value in out:
        counts_out[target] += value.numel()
    for source, loan in come:
        counts_in[source] += loan.like.numel()
    leaving = out[0][1] if len(out) == 1 else torch.cat([empty, *(value for _, value in out)])
    arriving = empty.new_empty(sum(counts_in))
    unit.traffic.count(leaving)
    dist.all_to_all_single(arriving, leaving, counts_in, counts_out, group=unit.layout.group)
    parts = arriving.split([loan.like.numel() for _, loan in come]) if come else ()
    # Each in memory of its own, as other states are: it begins where kernels expect it.
    return [
        (loan, (part if len(parts) == 1 else part.clone()).view(loan.like.shape))
        for (_, loan), part in zip(come, parts, strict=True)
    ]
