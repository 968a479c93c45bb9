"""LDAdam's step as published: full matrices with an error of their own, no algebra, no conditioning."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Step", "published"]


class Step(NamedTuple):
    """What one step leaves behind, side-normalised."""

    W: Tensor
    E: Tensor
    U: Tensor
    M: Tensor
    V: Tensor


def published(
    gs: Sequence[Tensor],
    rank: int,
    W: Tensor,
    betas: Sequence[tuple[float, float]],
    lr: float,
    rho: float,
    eps: float,
    wd: float = 0.0,
    feedback: bool = True,
) -> list[Step]:
    """All steps of a wide (m, n) matrix.

    Args:
        betas: Of each step. The momentum that a new basis drops enters the error with the weight of the step that made
            it.
    """
    m, n = W.shape
    U, M, V, E, made = W.new_zeros(m, rank), W.new_zeros(rank, n), W.new_zeros(rank, n), W * 0, 0.0
    history = []
    for t, (G, (b1, b2)) in enumerate(zip(gs, betas, strict=True), start=1):
        d1, d2, c1, c2 = 1 - b1 ** (t - 1), 1 - b2 ** (t - 1), 1 - b1**t, 1 - b2**t
        A = G + E
        if t == 1:
            U_new = torch.linalg.svd(A, full_matrices=False).U[:, :rank]
        else:
            B = rho * U @ (M / d1) + (1 - rho) * A
            U_new = torch.linalg.qr(B @ (B.T @ U)).Q
        a, R = U_new.T @ A, U_new.T @ U
        M_turned, V_turned = R @ M, torch.zeros_like(V)
        if feedback:
            E = A - U_new @ a + made / (1 - made) * (U @ M - U_new @ M_turned)
        if t > 1:
            bracket = R**2 @ (V / d2 - (M / d1) ** 2) + (M_turned / d1) ** 2
            V_turned = d2 * bracket.abs()
        M, V, U, made = b1 * M_turned + (1 - b1) * a, b2 * V_turned + (1 - b2) * a**2, U_new, b1
        W = (1 - lr * wd) * W - lr * U @ ((M / c1) / ((V / c2).sqrt() + eps))
        history.append(Step(W, E, U, M, V))
    return history
