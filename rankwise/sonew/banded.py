"""SONew (arXiv 2311.10085) computes sparse factors of a preconditioner whose inverse is given on a band only.

:mod:`rankwise.sonew.rule` says what chains and edges are.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["banded_factors"]


def banded_factors(
    diagonal: Tensor, covariances: Sequence[Tensor] | Tensor, tolerance: float = 0.0
) -> tuple[list[Tensor], Tensor]:
    r"""Factors of the preconditioner :math:`X = L D L^T` whose inverse matches ``H`` on the kept edges.

    Row ``j`` regresses coordinate ``j`` on the next ones: with :math:`I_j = \{j+1, .., j+b\}`,

    .. math::
        H_{I_j I_j} \psi_j = H_{I_j j}, \quad s_j = H_{jj} - H_{j I_j} \psi_j, \quad
        D_j = 1 / s_j, \quad L_{I_j j} = -\psi_j

    Source: arXiv 2311.10085, the closed form for banded graphs. The order recursion of linear prediction solves the
    ``b`` by ``b`` systems: the regressions on ``k`` neighbours, forward and backward, follow from the regressions on
    ``k - 1`` of two overlapping windows. It costs O(b^2) per element and yields every lower order on the way.

    An edge ``(j, j + k)`` is kept if the whole window ``j .. j + k`` is well conditioned: in no window inside it does
    the variance of an end given the rest fall to ``tolerance`` times its own variance or below. So a degenerate window
    loses its longest edge, and with it every edge that jumps over it. The kept edges form an interval graph and the
    factors are exact for it, hence ``X`` stays positive definite. For ``b = 1`` this is the published rule, with a
    relative tolerance. The decision needs the elements ``j .. j + b`` only, so that halos of ``b`` elements suffice;
    deleting all edges across a degenerate ``j``, as the paper proposes, would need ``2 b - 1`` on the right.

    Args:
        diagonal: Damped ``H_ii``, (..., n), not negative. A zero is an isolated coordinate.
        covariances: ``b`` tensors ``H_{i,i+k}``, (..., n), zero where a chain ends.
        tolerance: Smallest relative conditional variance, at least 0. A window with a NaN is degenerate.

    Returns:
        ``b`` coefficient tensors :math:`\psi^k_j` (the coefficient of ``j + k``; 0 on dropped edges and past the end),
        and the conditional variances ``s``, all (..., n).
    """
    edges = list(covariances)
    n = diagonal.shape[-1]
    coefficients = [torch.zeros_like(diagonal) for _ in edges]
    schur = diagonal.clone()
    floor = tolerance * diagonal

    # Entry j of every tensor of order k describes the window j .. j + k; there are n - k windows.
    after: list[Tensor] = []  # coefficients of j + 1 .. j + k in the regression of j
    before: list[Tensor] = []  # coefficients of j .. j + k - 1 in the regression of j + k
    var_first, var_last = diagonal, diagonal  # conditional variances of j and of j + k
    sound = torch.ones_like(diagonal, dtype=torch.bool)
    for k in range(1, min(len(edges), n - 1) + 1):
        count = n - k
        after, before = [c[..., :-1] for c in after], [c[..., 1:] for c in before]
        var_first, var_last = var_first[..., :-1], var_last[..., 1:]
        partial = edges[k - 1][..., :count]
        for i, coefficient in enumerate(after, start=1):
            partial = partial - coefficient * edges[k - i - 1][..., i : i + count]
        # A zero variance gives an infinity or a NaN here, and both fail the comparisons below.
        on_last, on_first = partial / var_last, partial / var_first
        after, before = (
            [*(a - on_last * c for a, c in zip(after, before, strict=True)), on_last],
            [on_first, *(c - on_first * a for a, c in zip(after, before, strict=True))],
        )
        var_first, var_last = var_first - on_last * partial, var_last - on_first * partial
        sound = sound[..., :-1] & sound[..., 1:] & (var_first > floor[..., :count])
        if k > 1:  # the two ends of a single edge have the same relative conditional variance
            sound = sound & (var_last > floor[..., k:])
        schur[..., :count] = torch.where(sound, var_first, schur[..., :count])
        for kept, coefficient in zip(coefficients, after, strict=False):
            kept[..., :count] = torch.where(sound, coefficient, kept[..., :count])
    return coefficients, schur
