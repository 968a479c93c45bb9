"""LDAdam's matrices of which several ranks own slices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rankwise.comm.owner_plan import Batch, MatrixTask
from rankwise.comm.slice_holders import Holders
from rankwise.ldadam.formulas import basis_weights, kept_factor, next_basis
from rankwise.ldadam.rule import low_rank_moments
from rankwise.ldadam.signature import LowRankSignature
from rankwise.ldadam.sliced_formulas import Cut, next_basis_of_slices, project_slices
from rankwise.ldadam.spec import SUBSPACE
from rankwise.ldadam.subspaces import Subspaces
from rankwise.states.matrix_states import MatrixState
from rankwise.updates.orthonormal import initial_basis

__all__ = ["step_slices"]

_AXES = dict(zip(SUBSPACE, ("short", "long", "long"), strict=True))


def step_slices(
    batch: Batch,
    tasks: Sequence[MatrixTask],
    stack: Tensor,
    subspaces: Subspaces,
    group: Mapping[str, Any],
    holders: Holders,
    reports: bool,
) -> Tensor:
    """Advance slices that this rank owns, as many of each matrix, together with the owners of the others.

    Args:
        batch: To which they belong.
        tasks: The slices, matrix by matrix.
        stack: (slices, rows * columns), ``C``; read only.
        subspaces: States of the slices, changed in place.
        group: Param group.
        holders: The ranks that own the other slices.
        reports: Whether this rank tells of the rotations, one for all holders.

    Returns:
        (slices, elements): the factors of each slice, see :func:`rankwise.ldadam.working_shards.split_factors`.
    """
    states = [subspaces.obtain(task) for task in tasks]
    slices = len(tasks) // len({task.whole for task in tasks})
    # Matrices whose gradients were missing at different steps are at different counts, alike for all partners.
    by_past: dict[tuple[int, float], list[int]] = {}
    for first in range(0, len(tasks), slices):
        past = int(states[first]["step"]), float(states[first]["beta1"])
        by_past.setdefault(past, []).extend(range(first, first + slices))

    def stepped(past: tuple[int, float], places: Sequence[int], own: Tensor) -> Tensor:
        joined = _Joined(len(places) // slices, batch.signature.cut, stack.dtype)
        chosen = [states[place] for place in places]
        new, factors, rotation = _step(joined, joined.matrix(own, batch.signature), chosen, past, group, holders)
        if reports and past[0]:
            subspaces.report_rotation(rotation)
        # Slices that are alike in the moments have the matrix's key for these, for their noise to be alike.
        whole = batch.signature.cut == "short"
        keys = [str(tasks[place].whole) if whole else tasks[place].key for place in places]
        parts = {name: joined.slices(name, value) for name, value in new.items()}
        subspaces.keep(keys, chosen, parts, past[0] + 1)
        for state in chosen:
            state["step"] += 1
            state["beta1"].fill_(group["betas"][0])
        rows = zip(*(joined.slices(name, value) for name, value in factors.items()), strict=True)
        return torch.stack([torch.cat([part.reshape(-1) for part in row]) for row in rows])

    if len(by_past) == 1:
        ((past, places),) = by_past.items()
        return stepped(past, places, stack)
    places_in_order = [place for places in by_past.values() for place in places]
    order = torch.tensor(places_in_order, dtype=torch.int64, device=stack.device)
    return torch.cat([stepped(past, places, stack[places]) for past, places in by_past.items()])[order.argsort()]


def _step(
    joined: _Joined,
    matrix: Tensor,
    states: Sequence[MatrixState],
    past: tuple[int, float],
    group: Mapping[str, Any],
    holders: Holders,
) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor]:
    """New states, factors and rotations ``R`` (matrices, r, r) of matrices that have one past."""
    (count, written_beta1), cut = past, joined.cut
    step, beta1, feedback = count + 1, group["betas"][0], group["error_feedback"]
    U_prev, M_prev, V_prev = (joined.state(states, name) for name in _AXES)
    if step == 1:
        basis = _by_whole_matrices(
            joined, holders, lambda C, U, M: initial_basis(C, U.shape[-1]), matrix, U_prev, M_prev
        )
    else:
        weights = basis_weights(step, beta1, group["rho"], feedback, written_beta1)
        basis, failed = next_basis_of_slices(matrix, U_prev, M_prev, *weights, cut, holders)
        if bool(failed.any()):  # All ranks decide alike: what is judged is equal on all.
            basis = _by_whole_matrices(
                joined, holders, lambda C, U, M: next_basis(C, U, M, *weights), matrix, U_prev, M_prev
            )
    projected, rotation = project_slices(matrix, U_prev, basis, cut, holders)
    M, V, D = low_rank_moments(
        projected, rotation, M_prev, V_prev, step, group["betas"], group["eps"], feedback, written_beta1
    )
    factors = {"basis": basis, "direction": D}
    if feedback:
        factors["kept"] = M if step == 1 or beta1 == written_beta1 else kept_factor(projected, M, beta1)
    return dict(zip(_AXES, (basis, M, V), strict=True)), factors, rotation


class _Joined:
    """A rank's slices of each matrix side by side, and back."""

    def __init__(self, matrices: int, cut: Cut, dtype: torch.dtype) -> None:
        self._matrices, self.cut, self._dtype = matrices, cut, dtype

    def matrix(self, stack: Tensor, signature: LowRankSignature) -> Tensor:
        """(matrices, m, n) of (slices, rows * columns), m and n of what this rank has."""
        parts = stack.view(self._matrices, -1, signature.rows, signature.columns)
        return self._join(parts.mT if signature.right else parts, -1 if self.cut == "long" else -2)

    def state(self, states: Sequence[MatrixState], name: str) -> Tensor:
        """A state of all matrices."""
        stack = torch.stack([state[name] for state in states]).to(self._dtype).unflatten(0, (self._matrices, -1))
        return self._join(stack, self._axis(name)) if self._is_cut(name) else stack[:, 0]

    def slices(self, name: str, value: Tensor) -> list[Tensor]:
        """What :meth:`state` has joined, slice by slice; what is not cut belongs to each."""
        per_matrix = self._per_matrix
        if not self._is_cut(name):
            return [part for part in value for _ in range(per_matrix)]
        return [part for whole in value for part in whole.chunk(per_matrix, dim=self._axis(name))]

    def _join(self, parts: Tensor, axis: int) -> Tensor:
        self._per_matrix = parts.shape[1]
        return parts[:, 0] if self._per_matrix == 1 else torch.cat(parts.unbind(1), dim=axis)

    def _axis(self, name: str) -> int:
        return -2 if name == "basis" else -1

    def _is_cut(self, name: str) -> bool:
        return _AXES.get(name, "long") == self.cut


def _by_whole_matrices(
    joined: _Joined,
    holders: Holders,
    compute: Callable[[Tensor, Tensor, Tensor], Tensor],
    matrix: Tensor,
    U: Tensor,
    M: Tensor,
) -> Tensor:
    """A basis that needs the whole matrices, computed by every holder: at the first step, and where others fail."""
    if joined.cut == "long":
        return compute(_side_by_side(holders.gather(matrix), -1), U, _side_by_side(holders.gather(M), -1))
    basis = compute(_side_by_side(holders.gather(matrix), -2), _side_by_side(holders.gather(U), -2), M)
    return basis.split(U.shape[-2], dim=-2)[holders.rank]


def _side_by_side(parts: Tensor, axis: int) -> Tensor:
    return torch.cat(parts.unbind(0), dim=axis)
