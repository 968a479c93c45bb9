"""LDAdam's matrices on their owner: a basis and two moments each, and how a step advances them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rankwise.comm.owner_plan import MatrixTask
from rankwise.kernels import graphs
from rankwise.kernels.dispatch import is_for_cpus, kernels_for
from rankwise.ldadam.basis import project, try_next_basis
from rankwise.ldadam.dispatch import moments_for
from rankwise.ldadam.formulas import basis_weights, kept_factor, per_matrix
from rankwise.ldadam.low_precision_subspaces import LowPrecisionSubspaces, opened
from rankwise.ldadam.rule import followed_basis
from rankwise.ldadam.signature import LowRankSignature
from rankwise.ldadam.spec import SUBSPACE
from rankwise.states.element_states import StateTypes
from rankwise.states.matrix_states import MatrixState, MatrixStates
from rankwise.step.health import Health
from rankwise.updates.adamw import Scalar, Step

__all__ = [
    "Subspaces",
    "Triple",
    "fresh_state",
]

_Past = tuple[int, float] | None
"""Steps that a matrix has taken, and the ``beta1`` of the last; None: only the device knows, but not a first step."""


def fresh_state(like: Tensor, signature: LowRankSignature, counts: torch.device, types: StateTypes) -> MatrixState:
    """A subspace and its moments before the first step.

    Args:
        like: Tensor of the computation's type, on the device of the states.
        signature: Signature of the matrix.
        counts: Device of the counts.
        types: Types of the states; None means that of the computation.
    """
    moment = signature.rank, signature.long
    shapes = dict(zip(SUBSPACE, ((signature.short, signature.rank), moment, moment), strict=True))
    return {
        **{name: like.new_zeros(shape, dtype=types[name]) for name, shape in shapes.items()},
        "step": torch.zeros((), dtype=torch.int64, device=counts),
        # That of the last step, with which the momentum in the error buffer is weighted. Where the count is.
        "beta1": torch.zeros((), dtype=torch.float64, device=counts),
    }


class Subspaces:
    """The states of the matrices that a rank owns, in one step.

    Args:
        states: States of the matrices by key.
        groups: Param groups by position.
        health: Receives rotations and numbers of bases that were kept.
        fresh: Makes a matrix's states before the first step.
        narrow: Opens and keeps them.
        followed: Shapes of matrices whose bases have been moved since the unit was planned; kept up to date.
        unstepped: Where only the device knows the counts: the matrices that are to take their first step, which is
            another one; kept up to date. None where the host knows.
    """

    def __init__(
        self,
        states: MatrixStates,
        groups: Sequence[Mapping[str, Any]],
        health: Health,
        fresh: Callable[[Tensor, LowRankSignature], MatrixState],
        narrow: LowPrecisionSubspaces,
        followed: set[tuple[int, ...]],
        unstepped: set[str] | None,
    ) -> None:
        self._states, self._groups, self._health = states, groups, health
        self._fresh, self._followed, self._unstepped, self.narrow = fresh, followed, unstepped, narrow

    def obtain(self, task: MatrixTask, like: Tensor) -> MatrixState:
        """A matrix's states; fresh ones are of the type of ``like`` and lie with it."""
        known = task.key in self._states
        if not known:
            graphs.refuse_capture(like.device, "the first step of a matrix")
        state = self._states.obtain(task.key, lambda: self._fresh(like, task.signature))
        if self._unstepped is not None and not known and int(state["step"]) == 0:
            self._unstepped.add(task.key)
        return state

    def advance(self, tasks: Sequence[MatrixTask], stack: Tensor) -> Tensor:
        """Advance whole matrices of one shape and group.

        Args:
            tasks: The matrices.
            stack: (tasks, rows * columns), ``C``; read only.

        Returns:
            (tasks, elements): their factors, as :func:`rankwise.ldadam.signature.split_factors` reads them.
        """
        signature: LowRankSignature = tasks[0].signature
        group = self._groups[signature.group]
        states = [self.obtain(task, stack) for task in tasks]
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
        basis, exp_avg, exp_avg_sq = (opened([state[name] for state in states], matrices.dtype) for name in SUBSPACE)
        outcome = self._advanced(matrices, (basis, exp_avg, exp_avg_sq), past, states, group)
        new = zip(SUBSPACE, outcome.states, strict=True)
        parts = {name: [value] if alone else value.unbind() for name, value in new}
        self.narrow.keep([task.key for task in tasks], states, parts, None if past is None else past[0] + 1)
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


Triple = tuple[Tensor, Tensor, Tensor]
"""Basis (..., m, r), first and second moment (..., r, n)."""


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

    A matrix whose power iteration fails (see :func:`rankwise.ldadam.basis.try_next_basis`) keeps its basis for this
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
    """The same of matrices that may take their first step, where the host may read how a factorization went."""
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
    moments = moments_for(matrices.device, matrices.dtype)
    new_M, new_V, direction = moments(projected, rotation, M, V, step, group["betas"], group["eps"], feedback, written)
    factors = [direction]
    if feedback:
        if isinstance(written, Tensor):
            lost = kept_factor(projected, new_M, beta1)
            factors.append(torch.where((written == beta1)[..., None, None], new_M, lost))
        else:
            unchanged = step == 1 or written == beta1
            factors.append(new_M if unchanged else kept_factor(projected, new_M, beta1))
    return _SubspaceStep((basis, new_M, new_V), factors, rotation, kept)
