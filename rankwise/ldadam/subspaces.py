"""LDAdam's matrices on their owner: a basis and two moments each, and how a step advances them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rankwise.comm.owner_plan import MatrixTask
from rankwise.kernels.dispatch import is_for_cpus, kernels_for
from rankwise.kernels.lists import copy_
from rankwise.kernels.quantization import key_of
from rankwise.ldadam.formulas import basis_weights, kept_factor, per_matrix, project, try_next_basis
from rankwise.ldadam.in_place import InPlace, LowRankStep, StepsInPlace
from rankwise.ldadam.rule import followed_basis, low_rank_moments
from rankwise.ldadam.signature import ELEMENTS_AT_ONCE, LowRankSignature
from rankwise.ldadam.spec import SUBSPACE, LDAdamSpec
from rankwise.states.matrix_states import MatrixState, MatrixStates, keep_narrow_
from rankwise.step.health import Health
from rankwise.updates.adamw import Scalar, Step

__all__ = [
    "Subspaces",
    "Triple",
]

Triple = tuple[Tensor, Tensor, Tensor]
"""Basis (..., m, r), first and second moment (..., r, n)."""

_Past = tuple[int, float] | None
"""Steps that a matrix has taken, and the ``beta1`` of the last; None: only the device knows, but not a first step."""


class Subspaces:
    """The states of the matrices that a rank owns, in one step.

    Args:
        states: States of the matrices by key.
        groups: Param groups by position.
        health: Receives rotations and numbers of bases that were kept.
        fresh: Makes a matrix's states before the first step.
        spec: Says in which types they are kept, and how they are rounded.
        followed: Shapes of matrices whose bases have been moved since the unit was planned; kept up to date.
        unstepped: Where only the device knows the counts: the matrices that are to take their first step, which is
            another one; kept up to date. None where the host knows.

    Attributes:
        on_device: Gives a matrix's states where they are computed with.
    """

    def __init__(
        self,
        states: MatrixStates,
        groups: Sequence[Mapping[str, Any]],
        health: Health,
        fresh: Callable[[MatrixTask], MatrixState],
        spec: LDAdamSpec,
        followed: set[tuple[int, ...]],
        unstepped: set[str] | None,
    ) -> None:
        self._states, self._groups, self._health = states, groups, health
        self._fresh, self._followed, self._unstepped, self._spec = fresh, followed, unstepped, spec
        self.on_device: Callable[[MatrixTask, MatrixState], MatrixState] = lambda task, state: state

    def obtain(self, task: MatrixTask) -> MatrixState:
        """A matrix's states."""
        known = task.key in self._states
        state = self._states.obtain(task.key, partial(self._fresh, task))
        if self._unstepped is not None and not known and int(state["step"]) == 0:
            self._unstepped.add(task.key)
        return self.on_device(task, state)

    def advance(self, tasks: Sequence[MatrixTask], stack: Tensor) -> Tensor:
        """Advance whole matrices of one shape and group.

        Args:
            tasks: The matrices.
            stack: (tasks, rows * columns), ``C``; read only.

        Returns:
            (tasks, elements): their factors, as :func:`rankwise.ldadam.working_shards.split_factors` reads them.
        """
        signature: LowRankSignature = tasks[0].signature
        group = self._groups[signature.group]
        states = [self.obtain(task) for task in tasks]
        matrices = stack.view(-1, signature.rows, signature.columns)
        matrices = matrices.mT if signature.right else matrices
        pasts = [self._past(task.key, state) for task, state in zip(tasks, states, strict=True)]
        if self._unstepped is not None:
            self._unstepped.difference_update(task.key for task in tasks)
        if len(set(pasts)) == 1:
            return self._step(tasks, matrices, states, pasts[0], group)
        factors_by_task: list[Tensor] = [stack] * len(tasks)
        # Matrices whose gradients were missing at different steps are at different counts.
        for past in dict.fromkeys(pasts):
            chosen = [place for place, other in enumerate(pasts) if other == past]
            chosen_tasks = [tasks[place] for place in chosen]
            factors = self._step(chosen_tasks, matrices[chosen], [states[place] for place in chosen], past, group)
            for place, own in zip(chosen, factors, strict=True):
                factors_by_task[place] = own
        return torch.stack(factors_by_task)

    def step_in_place(self, tasks: Sequence[MatrixTask], jobs: Sequence[LowRankStep], form: StepsInPlace) -> None:
        """Step matrices where they lie.

        Args:
            tasks: The matrices.
            jobs: What is to be done with them, each of which the form takes.
            form: What steps them.
        """
        opens = self._spec.has_narrow_subspaces
        rotation, kept = self._step_opened(tasks, jobs, form) if opens else form.step(jobs)
        torch._foreach_add_([job.state["step"] for job in jobs], 1)
        for job in jobs:
            # With error feedback only matrices are taken that have it already.
            if not job.group["error_feedback"]:
                job.state["beta1"].fill_(job.group["betas"][0])
        self._health.add("subspace_rotation", rotation, len(jobs))
        self._health.add("kept_bases", kept)

    def _step_opened(self, tasks: Sequence[MatrixTask], jobs: Sequence[LowRankStep], form: StepsInPlace) -> InPlace:
        """Step matrices with narrow states, which are opened for some of them at a time."""
        rotation: Tensor | float = 0.0
        kept: Tensor | float = 0.0
        for some in _at_once(jobs):
            narrow, keys = [job.state for job in jobs[some]], [task.key for task in tasks[some]]
            states = [{name: job.weight.new_empty(job.state[name].shape) for name in SUBSPACE} for job in jobs[some]]
            for name in SUBSPACE:
                copy_([state[name] for state in states], [state[name] for state in narrow])
            outcome = form.step([replace(job, state=state) for job, state in zip(jobs[some], states, strict=True)])
            steps = [job.step for job in jobs[some]]
            step: int | Tensor = steps[0]
            if len(set(steps)) > 1:
                step = torch.tensor(steps, dtype=torch.int64, device=jobs[0].weight.device)
            self.keep(keys, narrow, {name: [state[name] for state in states] for name in SUBSPACE}, step)
            rotation, kept = rotation + outcome.rotation, kept + outcome.kept
        return InPlace(rotation, kept)

    def keep(
        self,
        keys: Sequence[str],
        states: Sequence[Mapping[str, Tensor]],
        new: Mapping[str, Sequence[Tensor]],
        step: int | Tensor | None,
    ) -> None:
        """Overwrite the states of some matrices.

        What their holders get is not rounded: the momentum in the error buffer is exact then, and with it the next
        one, which is made of the buffer alone.

        Args:
            keys: Keys of the matrices.
            states: States of the matrices.
            new: What they are to be, by name.
            step: The number of the step, one for all or (matrices,) on the device; None: the states have it counted.
        """
        for name, values in new.items():
            own = [state[name] for state in states]
            if own[0].dtype == values[0].dtype:
                copy_(own, list(values))
                continue
            count = None
            if self._spec.rounds_stochastically(name):
                count = torch.stack([state["step"] for state in states]) if step is None else step
            keep_narrow_(own, values, [key_of(key, name) for key in keys], count)

    def report_rotation(self, rotation: Tensor) -> None:
        """Tell of ``R`` (..., r, r): how much of the old subspaces the new ones have left, from 0 to 1, orthogonal."""
        kept = rotation.square().sum((-2, -1)) / rotation.shape[-1]
        self._health.add("subspace_rotation", (1 - kept).sum(), kept.numel())

    def _past(self, key: str, state: MatrixState) -> _Past:
        if self._unstepped is not None:
            return (0, 0.0) if key in self._unstepped else None
        return int(state["step"]), float(state["beta1"])

    def _step(
        self,
        tasks: Sequence[MatrixTask],
        matrices: Tensor,
        states: list[MatrixState],
        past: _Past,
        group: Mapping[str, Any],
    ) -> Tensor:
        """Advance matrices (..., m, n) that have one past."""
        # A single matrix as such: products of stacks are slower on CPUs.
        alone = len(states) == 1
        matrices = matrices[0] if alone else matrices
        basis, exp_avg, exp_avg_sq = (_opened([state[name] for state in states], matrices.dtype) for name in SUBSPACE)
        outcome = self._advanced(matrices, (basis, exp_avg, exp_avg_sq), past, states, group)
        new = zip(SUBSPACE, outcome.states, strict=True)
        parts = {name: [value] if alone else value.unbind() for name, value in new}
        self.keep([task.key for task in tasks], states, parts, None if past is None else past[0] + 1)
        for state in states if past is not None else ():
            state["step"] += 1
            state["beta1"].fill_(group["betas"][0])
        return torch.cat([part.reshape(len(states), -1) for part in (outcome.states[0], *outcome.factors)], dim=1)

    def _advanced(
        self, matrices: Tensor, old: Triple, past: _Past, states: list[MatrixState], group: Mapping[str, Any]
    ) -> _SubspaceStep:
        """New states and factors, with what is to be told of them."""
        if past is None:
            self._followed.add(tuple(matrices.shape[-2:]))
            steps, written_betas = ([state[name] for state in states] for name in ("step", "beta1"))
            counts = (steps[0], written_betas[0]) if matrices.dim() == 2 else map(torch.stack, (steps, written_betas))
            step, written = counts
            outcome = _step_on_device(matrices, old, step + 1, written, group)
            torch._foreach_add_(steps, 1)
            torch._foreach_zero_(written_betas)
            torch._foreach_add_(written_betas, group["betas"][0])
        else:
            waits = past[0] == 0 or is_for_cpus(kernels_for(matrices.device, matrices.dtype))
            outcome = (_step_on_host if waits else _step_on_device)(matrices, old, past[0] + 1, past[1], group)
        if outcome.kept is not None:
            self._health.add("kept_bases", outcome.kept)
        if past is None or past[0]:
            self.report_rotation(outcome.rotation)
        return outcome


def _at_once(jobs: Sequence[LowRankStep]) -> Iterator[slice]:
    """Matrices whose states are opened at a time."""
    first = elements = 0
    for place, job in enumerate(jobs):
        own = sum(job.state[name].numel() for name in SUBSPACE)
        if place > first and elements + own > ELEMENTS_AT_ONCE:
            yield slice(first, place)
            first, elements = place, 0
        elements += own
    yield slice(first, len(jobs))


def _opened(states: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Stack a state of several matrices in the type of the computation; a single one is not stacked."""
    return (states[0] if len(states) == 1 else torch.stack(list(states))).to(dtype)


class _SubspaceStep(NamedTuple):
    """What a step gives.

    Attributes:
        states: New basis, first and second moment.
        factors: The direction, and with error feedback what the buffer loses.
        rotation: ``R`` (..., r, r).
        kept: How many matrices keep their basis, because no new one could be factored; 0-d. None: none can.
    """

    states: Triple
    factors: list[Tensor]
    rotation: Tensor
    kept: Tensor | None


def _step_on_device(
    matrices: Tensor, old: Triple, step: Step, written: Scalar, group: Mapping[str, Any]
) -> _SubspaceStep:
    """Advance matrices that have taken a step before; nothing is read on the host.

    A matrix whose power iteration fails (see :func:`rankwise.ldadam.formulas.try_next_basis`) keeps its basis for this
    step, which is orthonormal; on CPUs Householder reflections are tried instead.

    Args:
        matrices: ``C`` (..., m, n), of one matrix or a stack of them.
        old: States of the matrices before the step.
        step: Steps applied including this one: a number, or (...) numbers on the device.
        written: The ``beta1`` of the step before, a number or as ``step``.
        group: Param group of the matrices.
    """
    basis, M, _ = old
    beta1, feedback = group["betas"][0], group["error_feedback"]
    of_matrix, of_momentum = basis_weights(step, beta1, group["rho"], feedback, written)
    moved, failed = try_next_basis(matrices, basis, M, of_matrix, per_matrix(of_momentum, M))
    new_basis = torch.where(failed[..., None, None], basis, moved)
    return _in_new_basis(matrices, old, new_basis, step, written, group, failed.sum())


def _step_on_host(matrices: Tensor, old: Triple, step: int, written: float, group: Mapping[str, Any]) -> _SubspaceStep:
    """Step matrices that may take their first step, where the host may read how a factorization went."""
    options = group["betas"][0], group["rho"], group["error_feedback"], written
    return _in_new_basis(matrices, old, followed_basis(matrices, *old[:2], step, *options), step, written, group)


def _in_new_basis(
    matrices: Tensor,
    old: Triple,
    basis: Tensor,
    step: Step,
    written: Scalar,
    group: Mapping[str, Any],
    kept: Tensor | None = None,
) -> _SubspaceStep:
    """The moments carried into the new basis, and what the holders subtract."""
    old_basis, M, V = old
    beta1, feedback = group["betas"][0], group["error_feedback"]
    projected, rotation = project(matrices, old_basis, basis)
    options = group["betas"], group["eps"], feedback, written
    new_M, new_V, direction = low_rank_moments(projected, rotation, M, V, step, *options)
    factors = [direction]
    if feedback:
        if isinstance(written, Tensor):
            lost = kept_factor(projected, new_M, beta1)
            factors.append(torch.where((written == beta1)[..., None, None], new_M, lost))
        else:
            unchanged = step == 1 or written == beta1
            factors.append(new_M if unchanged else kept_factor(projected, new_M, beta1))
    return _SubspaceStep((basis, new_M, new_V), factors, rotation, kept)
