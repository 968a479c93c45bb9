"""LDAdam's matrices of which several ranks own slices, and the messages between these ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rankwise.comm.message_format import Traffic
from rankwise.ldadam.basis import next_basis
from rankwise.ldadam.dispatch import moments_for
from rankwise.ldadam.formulas import basis_weights, kept_factor
from rankwise.ldadam.signature import LowRankSignature
from rankwise.ldadam.sliced_formulas import Holders, next_basis_of_slices, project_slices
from rankwise.ldadam.spec import SUBSPACE
from rankwise.states.matrix_states import MatrixState
from rankwise.updates.orthonormal import initial_basis

__all__ = ["holders_of", "step_slices"]

_AXES = dict(zip(SUBSPACE, ("short", "long", "long"), strict=True))


def holders_of(group: dist.ProcessGroup | None, traffic: Traffic) -> Holders:
    """The sums and gathers of the ranks that own slices of the same matrices.

    Args:
        group: Group of these ranks.
        traffic: Counts the messages.
    """

    def add(values: Tensor) -> Tensor:
        values = values.contiguous()
        traffic.count(values)
        dist.all_reduce(values, group=group)
        return values

    def gather(values: Tensor) -> Tensor:
        values = values.contiguous()
        traffic.count(values)
        result = values.new_empty(dist.get_world_size(group), *values.shape)
        dist.all_gather(list(result.unbind()), values, group=group)
        return result

    return Holders(dist.get_rank(group), add, gather)


def step_slices(
    keys: Sequence[str],
    stack: Tensor,
    states: Sequence[MatrixState],
    matrices: int,
    signature: LowRankSignature,
    group: Mapping[str, Any],
    holders: Holders,
    report: Callable[[Tensor], None],
    keep: Callable[..., None],
) -> Tensor:
    """Advance matrices of which this rank owns slices, as many of each, matrix by matrix.

    Args:
        keys: Keys of the slices; that of the matrix where they are alike in the moments, for their noise to be alike.
        stack: (slices, rows * columns), ``C``; read only.
        states: States of the slices, all at one count, changed in place.
        matrices: How many matrices they belong to.
        signature: Signature of the slices.
        group: Param group.
        holders: The ranks that own the other slices.
        report: Called with the rotations ``R`` (matrices, r, r), from the second step on.
        keep: Overwrites their states, see :meth:`rankwise.ldadam.subspaces.Subspaces.keep`.

    Returns:
        (slices, elements): the factors of each slice, as :func:`rankwise.ldadam.signature.split_factors` reads them.
    """
    count, written_beta1 = int(states[0]["step"]), float(states[0]["beta1"])
    step, beta1, feedback = count + 1, group["betas"][0], group["error_feedback"]
    cut = signature.cut
    assert cut is not None
    joined = _Joined(matrices, cut, stack.dtype)
    matrix = joined.matrix(stack, signature)
    U_prev, M_prev, V_prev = (joined.state(states, name) for name in _AXES)
    if step == 1:
        basis = _by_whole_matrices(
            joined, holders, lambda C, U, M: initial_basis(C, U.shape[-1]), matrix, U_prev, M_prev
        )
    else:
        weights = basis_weights(step, beta1, group["rho"], feedback, written_beta1)
        basis, failed = next_basis_of_slices(matrix, U_prev, M_prev, *weights, cut, holders)
        if bool(failed.any()):  # Alike on all ranks, as what it is judged by.
            basis = _by_whole_matrices(
                joined, holders, lambda C, U, M: next_basis(C, U, M, *weights), matrix, U_prev, M_prev
            )
    projected, rotation = project_slices(matrix, U_prev, basis, cut, holders)
    M, V, D = moments_for(stack.device, stack.dtype)(
        projected, rotation, M_prev, V_prev, step, group["betas"], group["eps"], feedback, written_beta1
    )
    if step > 1:
        report(rotation)
    new = zip(_AXES, (basis, M, V), strict=True)
    keep(keys, states, {name: joined.slices(name, value) for name, value in new}, step)
    for state in states:
        state["step"] += 1
        state["beta1"].fill_(beta1)
    factors = {"basis": basis, "direction": D}
    if feedback:
        factors["kept"] = M if step == 1 or beta1 == written_beta1 else kept_factor(projected, M, beta1)
    parts = [joined.slices(name, value) for name, value in factors.items()]
    return torch.stack([torch.cat([part.reshape(-1) for part in slices]) for slices in zip(*parts, strict=True)])


class _Joined:
    """A rank's slices of each matrix side by side, and back."""

    def __init__(self, matrices: int, cut: str, dtype: torch.dtype) -> None:
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
