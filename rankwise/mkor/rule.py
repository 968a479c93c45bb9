r"""MKOR and MKOR-H, line by line: "MKOR: Momentum-Enabled Kronecker-Factor-Based Optimizer Using Rank-1 Updates",
arXiv 2306.01685, Algorithm 1. Start with :func:`mkor_step`.

=========================  ===========================================================================================
paper                      here
=========================  ===========================================================================================
gradient of a layer        ``D`` (o, i); with a bias, whose gradient is the last column, (o, i + 1)
a_t                        ``a`` (i,), the mean input over all tokens of the step; with a bias a 1 at the end
g_t                        ``g`` (o,), the gradient that a bias has, or would have: a mean over samples, as the paper's
L^{-1}, R^{-1}             ``L`` (o, o), ``R`` (i, i): **the inverses**, never the factors; ``J`` is either of them. The
                           identity before the first step; None for a side too long for a factor
gamma, epsilon, zeta       ``gamma``; ``threshold`` and ``retention`` of the stabilizer, whose norm is "row_sum"
Delta W                    ``V``, which AdamW, LAMB or SGD (:mod:`rankwise.updates`) takes in the gradient's place
"sketch" (ours)            random sums of D's rows and columns in the place of ``a`` and ``g``, scaled to the identity
MKOR-H's switch            :func:`watched_loss`; the paper has no criterion, and this one is ours
=========================  ===========================================================================================

What differs from the paper and from the published code is listed in ``docs/deviations.md``.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

__all__ = ["Knee", "Rule", "factor_step", "mkor_step", "preconditioned_gradient", "watched_loss"]

Rule = Literal["official", "ema", "paper_literal"]
FactorNorm = Literal["row_sum", "max_entry"]


def mkor_step(
    D: Tensor,
    a: Tensor,
    g: Tensor,
    L: Tensor | None,
    R: Tensor | None,
    step: int,
    *,
    update_interval: int = 10,
    gamma: float = 0.95,
    rule: Rule = "official",
    stabilizer: tuple[float, float] | None = (2.0, 0.9),
    rescale: bool = True,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """``V``, ``L`` and ``R`` of a step, counted from 1. Factors move at the first of ``update_interval`` steps."""
    if (step - 1) % update_interval == 0:
        L = None if L is None else factor_step(L, g, gamma, rule, stabilizer)
        R = None if R is None else factor_step(R, a, gamma, rule, stabilizer)
    return preconditioned_gradient(D, L, R, rescale), L, R


def factor_step(J: Tensor, v: Tensor, gamma: float, rule: Rule, stabilizer: tuple[float, float] | None) -> Tensor:
    """The stabilized inverse (..., d, d), moved by a vector (..., d), if the result is finite."""
    stable = J if stabilizer is None else stabilize(J, *stabilizer)
    return guarded(rank1_inverse_update(stable, v, gamma, rule), stable)[0]


def stabilize(J: Tensor, threshold: float, retention: float, norm: FactorNorm = "row_sum") -> Tensor:
    """``J <- zeta J + (1 - zeta) I`` where its norm is above the threshold; the identity where it is not finite."""
    identity = torch.eye(J.shape[-1], dtype=J.dtype, device=J.device)
    size = factor_norm(J, norm)[..., None, None]
    stable = torch.where(size > threshold, retention * J + (1.0 - retention) * identity, J)
    return torch.where(size.isfinite(), stable, identity)


def factor_norm(J: Tensor, norm: FactorNorm = "row_sum") -> Tensor:
    """The largest row sum, which bounds all eigenvalues; or the published code's largest entry, which bounds none."""
    return J.abs().sum(-1).amax(-1) if norm == "row_sum" else J.abs().amax((-2, -1))


def rank1_inverse_update(J: Tensor, v: Tensor, gamma: float, rule: Rule = "official") -> Tensor:
    r"""The factor inverse moved by one vector, without inverting anything.

    official (the authors' code): ``H - H v v^T H / (1 + v^T H v)`` with ``H = gamma J + (1 - gamma) I``, the inverse of
    ``H^-1 + v v^T``; ``u`` is H v. ema (the paper's derivation): the inverse of ``gamma J^-1 + (1 - gamma) v v^T``;
    paper_literal: lines 7 and 8 as printed, ``gamma J + (1 - gamma) / (gamma^2 (1 + gamma (1 - gamma) v^T J v)) J v v^T
    J``; in both ``u`` is J v.
    """
    u = (J @ v.unsqueeze(-1)).squeeze(-1)
    if rule == "official":
        u = gamma * u + (1.0 - gamma) * v
    curvature = (u * v).sum(-1)
    if rule == "official":
        keep, sign, weight = gamma, -1.0, 1.0 / (1.0 + curvature)
    elif rule == "ema":
        keep, sign, weight = 1.0 / gamma, -1.0, (1.0 - gamma) / (gamma * (gamma + (1.0 - gamma) * curvature))
    else:
        keep, sign, weight = gamma, 1.0, (1.0 - gamma) / (gamma**2 * (1.0 + gamma * (1.0 - gamma) * curvature))
    # The root of the weight goes into both vectors: (w u_i) u_j would round differently from (w u_j) u_i.
    root = u * weight.sqrt().unsqueeze(-1)
    moved = torch.addcmul(keep * J, root.unsqueeze(-1), root.unsqueeze(-2), value=sign)
    if rule == "official":
        moved.diagonal(0, -2, -1).add_(1.0 - gamma)
    return moved


def guarded(new: Tensor, old: Tensor) -> tuple[Tensor, Tensor]:
    """``new`` (..., m, n), but ``old`` for a matrix with an entry that is not finite; and which are new."""
    ok = new.isfinite().flatten(-2).all(-1)
    return torch.where(ok[..., None, None], new, old), ok


def preconditioned_gradient(D: Tensor, L: Tensor | None, R: Tensor | None, rescale: bool = True) -> Tensor:
    """``V = U ||D|| / ||U||`` with ``U = L D R``."""
    U = D if L is None else L @ D
    U = U if R is None else U @ R
    return rescale_to_norm(U, D, torch.linalg.matrix_norm(U), torch.linalg.matrix_norm(D)) if rescale else U


def rescale_to_norm(U: Tensor, D: Tensor, U_norm: Tensor, D_norm: Tensor) -> Tensor:
    """``U``, or any part of it, at the norm of ``D``; where its own is 0 or not finite, ``D`` itself."""
    usable = (U_norm > 0) & U_norm.isfinite()
    ratio = D_norm / torch.where(usable, U_norm, 1.0)
    return torch.where(usable[..., None, None], U * ratio[..., None, None], D.to(U.dtype))


class Knee(NamedTuple):
    """What MKOR-H knows of the losses."""

    step: int = 0
    loss_average: float = 0.0
    decrease_average: float = 0.0
    first: float = 0.0
    previous: float = 0.0
    slow_steps: int = 0
    switched: bool = False


def watched_loss(knee: Knee, loss: float, *, beta: float, patience: int, min_steps: int, ema: float) -> Knee:
    """Switched for good when, ``patience`` steps running, the averaged decrease is below beta times the mean one."""
    if knee.switched or not math.isfinite(loss):
        return knee
    step, previous = knee.step + 1, knee.previous
    loss_average = ema * knee.loss_average + (1.0 - ema) * loss
    smooth = loss_average / (1.0 - ema**step)
    decrease = 0.0 if step == 1 else ema * knee.decrease_average + (1.0 - ema) * (previous - smooth)
    first = smooth if step == 1 else knee.first
    slow_steps = 0
    if step >= min_steps:
        recent, overall = decrease / (1.0 - ema ** (step - 1)), (first - smooth) / (step - 1)
        slow_steps = knee.slow_steps + 1 if recent < beta * overall else 0
    switched = step >= min_steps and slow_steps >= patience
    return Knee(step, loss_average, decrease, first, smooth, slow_steps, switched)
