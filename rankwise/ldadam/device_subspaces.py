"""LDAdam's matrices on a device for which the host does not wait: a step that a graph can repeat."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rankwise.ldadam import formulas as updates
from rankwise.ldadam.dispatch import moments_for
from rankwise.updates.adamw import Scalar, Step

__all__ = ["SubspaceStep", "Triple", "step_on_device"]

Triple = tuple[Tensor, Tensor, Tensor]
"""Basis (..., m, r), first and second moment (..., r, n)."""


class SubspaceStep(NamedTuple):
    """What a step gives.

    Attributes:
        states: New basis, first and second moment.
        factors: The direction, and with error feedback what the buffer loses.
        rotation: ``R`` (..., r, r).
        kept: How many matrices keep their basis, because no new one could be factored; 0-d.
    """

    states: Triple
    factors: list[Tensor]
    rotation: Tensor
    kept: Tensor


def step_on_device(
    matrices: Tensor, old: Triple, step: Step, written: Scalar, group: Mapping[str, Any]
) -> SubspaceStep:
    """Advance matrices that have taken a step before; nothing is read on the host.

    A matrix whose power iteration fails (see :func:`rankwise.ldadam.formulas.try_next_basis`) keeps its basis for this
    step, which is orthonormal; on CPUs Householder reflections are tried instead.

    Args:
        matrices: ``C`` (..., m, n), of one matrix or a stack of them.
        old: Their states.
        step: Steps applied including this one: a number, or (...) numbers on the device.
        written: The ``beta1`` of the step before, alike.
        group: Param group.
    """
    basis, M, V = old
    beta1, feedback = group["betas"][0], group["error_feedback"]
    of_matrix, of_momentum = updates.basis_weights(step, beta1, group["rho"], feedback, written)
    found, failed = updates.try_next_basis(matrices, basis, M, of_matrix, updates.per_matrix(of_momentum, M))
    new_basis = torch.where(failed[..., None, None], basis, found)
    projected, rotation = updates.project(matrices, basis, new_basis)
    moments = moments_for(matrices.device, matrices.dtype)
    new_M, new_V, direction = moments(projected, rotation, M, V, step, group["betas"], group["eps"], feedback, written)
    factors = [direction]
    if feedback:
        # What kept_factor() says, of the product that is there already.
        share = beta1 / (1 - beta1)
        if isinstance(written, Tensor):
            factors.append(torch.where((written == beta1)[..., None, None], new_M, projected - share * new_M))
        else:
            factors.append(new_M if written == beta1 else projected - share * new_M)
    return SubspaceStep((new_basis, new_M, new_V), factors, rotation, failed.sum())
