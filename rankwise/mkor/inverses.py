"""MKOR's factor inverses: rank-1 updates, the stabilizer and the guard; see :mod:`rankwise.mkor.formulas`."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

__all__ = [
    "FACTOR_NORMS",
    "RULES",
    "FactorNorm",
    "Rule",
    "check_choice",
    "compute_dtype",
    "factor_norm",
    "guarded",
    "rank1_apply",
    "rank1_direction",
    "rank1_inverse_update",
    "stabilize",
    "update_factor",
]

Rule = Literal["official", "ema", "paper_literal"]
FactorNorm = Literal["row_sum", "max_entry"]

RULES: tuple[str, ...] = ("official", "ema", "paper_literal")
FACTOR_NORMS: tuple[str, ...] = ("row_sum", "max_entry")


def rank1_inverse_update(inverse: Tensor, vector: Tensor, decay: float, rule: Rule = "official") -> Tensor:
    r"""Move a factor inverse by one statistics vector, without inverting anything.

    With ``J`` the inverse, ``v`` the vector and :math:`\gamma` the decay:

    .. math::
        \text{official:}\quad & H = \gamma J + (1-\gamma) I, \quad J' = H - \frac{H v v^T H}{1 + v^T H v}
            = \bigl(H^{-1} + v v^T\bigr)^{-1} \\
        \text{ema:}\quad & J' = \frac1\gamma \Bigl(J - \frac{(1-\gamma)\, J v v^T J}{\gamma + (1-\gamma) v^T J v}\Bigr)
            = \bigl(\gamma J^{-1} + (1-\gamma) v v^T\bigr)^{-1} \\
        \text{paper\_literal:}\quad & J' = \gamma J
            + \frac{1-\gamma}{\gamma^2 (1 + \gamma (1-\gamma) v^T J v)} J v v^T J

    ``official`` is what the authors' code computes: it keeps :math:`0 < J' \le I`. ``ema`` is the exact inverse of the
    moving average of :math:`v v^T`. ``paper_literal`` is algorithm 1, lines 7 and 8, as printed. It is the inverse of
    nothing, grows without bound along a repeated direction, and exists for comparison only.

    The arithmetic is float32 (float64 if either argument is) whatever the storage type, and a symmetric ``inverse``
    gives an exactly symmetric result. One so damaged that the denominator is not positive gives NaN: see `guarded`.

    Args:
        inverse: factor inverse, symmetric positive definite, ``(..., d, d)``.
        vector: mean input or virtual-bias gradient, ``(..., d)``.
        decay: :math:`\gamma`, in (0, 1).
        rule: one of `RULES`.

    Returns:
        A new tensor ``(..., d, d)`` in the type of ``inverse``.

    Raises:
        ValueError: if ``rule`` or ``decay`` is out of range.
    """
    direction = rank1_direction(inverse, vector, decay, rule)
    curvature = (direction * vector.to(direction.dtype)).sum(-1)
    return rank1_apply(inverse, direction, direction, curvature, decay, rule)


def rank1_direction(
    inverse: Tensor, vector: Tensor, decay: float, rule: Rule = "official", row_start: int = 0
) -> Tensor:
    r"""First half of `rank1_inverse_update`: the product the rank-1 term is made of, for a block of rows.

    :math:`u = H v` for ``official``, :math:`u = J v` for the others.

    Args:
        inverse: rows ``row_start`` to ``row_start + r`` of the factor inverse, ``(..., r, d)``; by default all of it.
        vector: the whole statistics vector, ``(..., d)``.
        decay: :math:`\gamma`, in (0, 1).
        rule: one of `RULES`.
        row_start: index of the first of these rows in the whole matrix.

    Returns:
        These rows of ``u``, ``(..., r)``, in float32 or float64.

    Raises:
        ValueError: if ``rule`` or ``decay`` is out of range.
    """
    check_choice("rule", rule, RULES)
    _check_open_unit("decay", decay)
    dtype = compute_dtype(inverse, vector)
    vector = vector.to(dtype)
    product = (inverse.to(dtype) @ vector.unsqueeze(-1)).squeeze(-1)
    if rule != "official":
        return product
    return decay * product + (1.0 - decay) * vector.narrow(-1, row_start, inverse.shape[-2])


def rank1_apply(
    inverse: Tensor,
    row_direction: Tensor,
    direction: Tensor,
    curvature: Tensor,
    decay: float,
    rule: Rule = "official",
    row_start: int = 0,
) -> Tensor:
    r"""Second half of `rank1_inverse_update`: add the rank-1 term to a block of rows.

    Args:
        inverse: rows of the factor inverse, ``(..., r, d)``.
        row_direction: the same rows of ``u`` from `rank1_direction`, ``(..., r)``.
        direction: the whole ``u``, ``(..., d)``.
        curvature: :math:`v^T u` over the whole vector, ``(...)``.
        decay: :math:`\gamma`, in (0, 1).
        rule: one of `RULES`.
        row_start: index of the first of these rows in the whole matrix.

    Returns:
        The new rows, ``(..., r, d)``, in the type of ``inverse``.

    Raises:
        ValueError: if ``rule`` or ``decay`` is out of range.
    """
    check_choice("rule", rule, RULES)
    _check_open_unit("decay", decay)
    if rule == "official":
        keep, sign, weight = decay, -1.0, 1.0 / (1.0 + curvature)
    elif rule == "ema":
        keep, sign, weight = 1.0 / decay, -1.0, (1.0 - decay) / (decay * (decay + (1.0 - decay) * curvature))
    else:
        keep, sign = decay, 1.0
        weight = (1.0 - decay) / (decay**2 * (1.0 + decay * (1.0 - decay) * curvature))
    # The root of the weight goes into both vectors: (w u_i) u_j would round differently from (w u_j) u_i.
    root = weight.sqrt().unsqueeze(-1)
    rows, columns = (row_direction * root).unsqueeze(-1), (direction * root).unsqueeze(-2)
    updated = torch.addcmul(keep * inverse.to(rows.dtype), rows, columns, value=sign)
    if rule == "official":
        updated.diagonal(row_start, -2, -1).add_(1.0 - decay)
    return updated.to(inverse.dtype)


def factor_norm(inverse: Tensor, norm: FactorNorm = "row_sum") -> Tensor:
    r"""Size of a factor inverse, as the stabilizer measures it.

    ``row_sum`` is the induced infinity norm :math:`\max_i \sum_j |J_{ij}|`, which bounds the largest eigenvalue.
    ``max_entry`` is :math:`\max_{ij} |J_{ij}|`, the test of the authors' code, which can miss it by a factor ``d``.
    For a factor cut by rows, the maximum over the blocks is the norm of the whole.

    Args:
        inverse: factor inverse, or a block of its rows, ``(..., r, d)``.
        norm: one of `FACTOR_NORMS`.

    Returns:
        ``(...)``, in float32 or float64; not finite if an entry is not.

    Raises:
        ValueError: if ``norm`` is unknown.
    """
    check_choice("norm", norm, FACTOR_NORMS)
    magnitude = inverse.to(compute_dtype(inverse)).abs()
    return magnitude.sum(-1).amax(-1) if norm == "row_sum" else magnitude.amax((-2, -1))


def stabilize(
    inverse: Tensor,
    threshold: float,
    retention: float,
    norm: FactorNorm = "row_sum",
    *,
    size: Tensor | None = None,
    row_start: int = 0,
) -> Tensor:
    r"""Pull factor inverses that have grown too large towards the identity (algorithm 1's norm-based stabilizer).

    .. math::
        J \leftarrow \zeta J + (1 - \zeta) I \quad\text{where}\quad \|J\| > \epsilon

    A matrix with a non-finite entry becomes the identity: its comparison with the threshold would be false for ever.

    Args:
        inverse: factor inverse, or a block of its rows, ``(..., r, d)``.
        threshold: :math:`\epsilon`, not negative.
        retention: :math:`\zeta`, in [0, 1].
        norm: one of `FACTOR_NORMS`.
        size: `factor_norm` of the whole matrix, ``(...)``, when ``inverse`` is only a block of its rows.
        row_start: index of the first of these rows in the whole matrix.

    Returns:
        A new tensor ``(..., r, d)`` in the type of ``inverse``.

    Raises:
        ValueError: if ``threshold``, ``retention`` or ``norm`` is out of range.
    """
    if not threshold >= 0.0:
        raise ValueError(f"threshold={threshold} must be at least 0; use 2.0, the value of the authors' code")
    if not 0.0 <= retention <= 1.0:
        raise ValueError(f"retention={retention} must lie in [0, 1]; use 0.9, the value of the authors' code")
    if size is None:
        size = factor_norm(inverse, norm)
    dtype = compute_dtype(inverse)
    identity = torch.zeros(inverse.shape[-2:], dtype=dtype, device=inverse.device)
    identity.diagonal(row_start).fill_(1.0)
    blended = retention * inverse.to(dtype) + (1.0 - retention) * identity
    size = size[..., None, None]
    stable = torch.where(size > threshold, blended, inverse.to(dtype))
    return torch.where(size.isfinite(), stable, identity).to(inverse.dtype)


def guarded(new: Tensor, old: Tensor) -> tuple[Tensor, Tensor]:
    """Keep the old matrix wherever the new one has an entry that is not finite.

    Args:
        new: candidates, ``(..., m, n)``.
        old: the values they are to replace, ``(..., m, n)``.

    Returns:
        The committed matrices ``(..., m, n)``, and the mask ``(...)`` of those whose candidate was taken.
    """
    ok = new.isfinite().flatten(-2).all(-1)
    return torch.where(ok[..., None, None], new, old), ok


def update_factor(
    inverse: Tensor,
    vector: Tensor,
    decay: float,
    rule: Rule = "official",
    threshold: float = 2.0,
    retention: float = 0.9,
    norm: FactorNorm = "row_sum",
) -> tuple[Tensor, Tensor]:
    """One factor step: stabilize the old inverse, move it by the vector, keep it where the result is not finite.

    The order is that of algorithm 1. A non-finite vector leaves the stabilized inverse in place; a non-finite inverse
    is first reset to the identity. The other matrices of the batch are not touched by either.

    Args:
        inverse: factor inverse, ``(..., d, d)``.
        vector: statistics vector, ``(..., d)``.
        decay: factor momentum, in (0, 1).
        rule: one of `RULES`.
        threshold: norm above which the stabilizer acts, not negative.
        retention: what the stabilizer keeps of such an inverse, in [0, 1].
        norm: one of `FACTOR_NORMS`.

    Returns:
        The new inverse ``(..., d, d)`` in the type of ``inverse``, and the mask ``(...)`` of those updated.

    Raises:
        ValueError: if an option is out of range.
    """
    stable = stabilize(inverse, threshold, retention, norm)
    return guarded(rank1_inverse_update(stable, vector, decay, rule), stable)


def compute_dtype(*tensors: Tensor) -> torch.dtype:
    """Float64 if one of the tensors is, else float32: the type of all arithmetic outside the products."""
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32


def check_choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    """Refuse an option outside its choices with a message that lists them."""
    if value not in allowed:
        raise ValueError(f"{name}={value!r} is not one of {', '.join(map(repr, allowed))}; choose one of these")


def _check_open_unit(name: str, value: float) -> None:
    if not 0.0 < value < 1.0:
        raise ValueError(f"{name}={value} must lie strictly between 0 and 1; use 0.95, the published value")
