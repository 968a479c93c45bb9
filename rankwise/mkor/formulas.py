"""MKOR's formulas: factor inverses moved by rank-1 updates, the stabilizer, the guard, and preconditioned gradients.

A linear layer with weight of shape ``(o, i)`` has a left factor inverse ``(o, o)`` that follows its output gradients
and a right one ``(i, i)`` that follows its inputs (``i + 1`` when the bias gradient rides along as a last column). The
functions work on either side and on batches of matrices.

Reference: Mozaffari et al., MKOR: Momentum-Enabled Kronecker-Factor-Based Optimizer Using Rank-1 Updates,
arXiv:2306.01685.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

__all__ = [
    "FACTOR_NORMS",
    "RESCALES",
    "RULES",
    "FactorNorm",
    "Rescale",
    "Rule",
    "apply_inverses",
    "factor_norm",
    "gradient_norm",
    "guarded",
    "precondition",
    "product_dtype",
    "rank1_inverse_update",
    "rescale_to_norm",
    "stabilize",
    "update_factor",
]

Rule = Literal["official", "ema", "paper_literal"]
FactorNorm = Literal["row_sum", "max_entry"]

Rescale = Literal["joint", "sum_of_norms"]

RULES: tuple[str, ...] = ("official", "ema", "paper_literal")
FACTOR_NORMS: tuple[str, ...] = ("row_sum", "max_entry")
RESCALES: tuple[str, ...] = ("joint", "sum_of_norms")


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
        decay: :math:`\gamma`, in (0, 1].
        rule: one of `RULES`.

    Returns:
        A new tensor ``(..., d, d)`` in the type of ``inverse``.

    Raises:
        ValueError: if ``rule`` or ``decay`` is out of range.
    """
    _check_choice("rule", rule, RULES)
    _check_decay(decay)
    dtype = _compute_dtype(inverse, vector)
    vector = vector.to(dtype)
    direction = (inverse.to(dtype) @ vector.unsqueeze(-1)).squeeze(-1)
    if rule == "official":
        direction = decay * direction + (1.0 - decay) * vector
    curvature = (direction * vector).sum(-1)
    if rule == "official":
        keep, sign, weight = decay, -1.0, 1.0 / (1.0 + curvature)
    elif rule == "ema":
        keep, sign, weight = 1.0 / decay, -1.0, (1.0 - decay) / (decay * (decay + (1.0 - decay) * curvature))
    else:
        keep, sign = decay, 1.0
        weight = (1.0 - decay) / (decay**2 * (1.0 + decay * (1.0 - decay) * curvature))
    # The root of the weight goes into both vectors: (w u_i) u_j would round differently from (w u_j) u_i.
    root = direction * weight.sqrt().unsqueeze(-1)
    updated = torch.addcmul(keep * inverse.to(dtype), root.unsqueeze(-1), root.unsqueeze(-2), value=sign)
    if rule == "official":
        updated.diagonal(0, -2, -1).add_(1.0 - decay)
    return updated.to(inverse.dtype)


def factor_norm(inverse: Tensor, norm: FactorNorm = "row_sum") -> Tensor:
    r"""Size of a factor inverse, as the stabilizer measures it.

    ``row_sum`` is the induced infinity norm :math:`\max_i \sum_j |J_{ij}|`, which bounds the largest eigenvalue.
    ``max_entry`` is :math:`\max_{ij} |J_{ij}|`, the test of the authors' code, which can miss it by a factor ``d``.

    Args:
        inverse: factor inverse, ``(..., d, d)``.
        norm: one of `FACTOR_NORMS`.

    Returns:
        ``(...)``, in float32 or float64; not finite if an entry is not.

    Raises:
        ValueError: if ``norm`` is unknown.
    """
    _check_choice("norm", norm, FACTOR_NORMS)
    magnitude = inverse.to(_compute_dtype(inverse)).abs()
    return magnitude.sum(-1).amax(-1) if norm == "row_sum" else magnitude.amax((-2, -1))


def stabilize(inverse: Tensor, threshold: float, retention: float, norm: FactorNorm = "row_sum") -> Tensor:
    r"""Pull factor inverses that have grown too large towards the identity (algorithm 1's norm-based stabilizer).

    .. math::
        J \leftarrow \zeta J + (1 - \zeta) I \quad\text{where}\quad \|J\| > \epsilon

    A matrix with a non-finite entry becomes the identity: its comparison with the threshold would be false for ever.
    It is written out once more, in place, for CPUs (``_stabilized`` in :mod:`rankwise.mkor.cpu`) and for devices
    (``_decide_kernel`` in :mod:`rankwise.mkor.cuda.factor_updates`).

    Args:
        inverse: factor inverse, ``(..., d, d)``.
        threshold: :math:`\epsilon`, not negative.
        retention: :math:`\zeta`, in [0, 1].
        norm: one of `FACTOR_NORMS`.

    Returns:
        A new tensor ``(..., d, d)`` in the type of ``inverse``.

    Raises:
        ValueError: if ``threshold``, ``retention`` or ``norm`` is out of range.
    """
    if not threshold >= 0.0:
        raise ValueError(f"threshold={threshold} must be at least 0; use 2.0, the value of the authors' code")
    if not 0.0 <= retention <= 1.0:
        raise ValueError(f"retention={retention} must lie in [0, 1]; use 0.9, the value of the authors' code")
    dtype = _compute_dtype(inverse)
    identity = torch.eye(inverse.shape[-1], dtype=dtype, device=inverse.device)
    blended = retention * inverse.to(dtype) + (1.0 - retention) * identity
    size = factor_norm(inverse, norm)[..., None, None]
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
        decay: factor momentum, in (0, 1].
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


# --- gradients -------------------------------------------------------------------------------------------------------


def precondition(
    grad: Tensor,
    left_inverse: Tensor | None,
    right_inverse: Tensor | None,
    rescale: Rescale | None = "joint",
    has_bias: bool = False,
) -> Tensor:
    r"""Multiply a gradient by its factor inverses and give the product the gradient's norm back.

    .. math::
        U = J_L D J_R, \qquad V = \frac{\|D\|}{\|U\|} U

    With ``joint``, :math:`\|\cdot\|` is the Frobenius norm of the whole matrix, so that the global gradient norm does
    not change. ``sum_of_norms`` adds the norms of the weight part and of the bias column, as the authors' code does.
    With two identity factors the gradient comes back bit for bit, unless they are bfloat16 (see `product_dtype`) and it
    is not. Where ``U`` has a norm of zero or one that is not finite, the gradient itself is returned.

    Args:
        grad: gradient ``D``, ``(..., o, i)``; with ``has_bias`` its last column is the bias gradient.
        left_inverse: ``(..., o, o)``, or None for the identity.
        right_inverse: ``(..., i, i)``, or None for the identity.
        rescale: one of `RESCALES`, or None to return ``U``.
        has_bias: whether the last column is the bias gradient; matters to ``sum_of_norms`` only.

    Returns:
        A new tensor ``(..., o, i)`` in the type of ``grad``.

    Raises:
        ValueError: if ``rescale`` is unknown.
    """
    if rescale is not None:
        _check_choice("rescale", rescale, RESCALES)
    update = apply_inverses(grad, left_inverse, right_inverse)
    if rescale is not None:
        split = has_bias and rescale == "sum_of_norms"
        norms = gradient_norm(update, split), gradient_norm(grad.to(update.dtype), split)
        update = rescale_to_norm(update, grad, *norms)
    return update.to(grad.dtype)


def product_dtype(grad: Tensor, *inverses: Tensor) -> torch.dtype:
    """Type of the operands of a preconditioning product; the sums are at least float32.

    Args:
        grad: the gradient.
        inverses: the factor inverses it is multiplied by.

    Returns:
        float64 for a gradient of that type; bfloat16 if all inverses are stored in it; otherwise float32. Never
        float16, in which gradients vanish.
    """
    if grad.dtype != torch.float64 and inverses and all(inverse.dtype == torch.bfloat16 for inverse in inverses):
        return torch.bfloat16
    return _compute_dtype(grad)


def apply_inverses(
    grad: Tensor, left_inverse: Tensor | None, right_inverse: Tensor | None, dtype: torch.dtype | None = None
) -> Tensor:
    """Product of the left factor inverse, the gradient and the right factor inverse; None stands for the identity.

    Args:
        grad: ``(..., o, i)``; rounded to ``dtype``, as are the two products.
        left_inverse: ``(..., o, o)`` or None.
        right_inverse: ``(..., i, i)`` or None.
        dtype: of the products; None for `product_dtype`.

    Returns:
        A new tensor ``(..., o, i)`` in float32, or in float64 if ``grad`` is.
    """
    inverses = [inverse for inverse in (left_inverse, right_inverse) if inverse is not None]
    dtype = dtype or product_dtype(grad, *inverses)
    update = grad.to(dtype)
    if left_inverse is not None:
        update = left_inverse.to(dtype) @ update
    if right_inverse is not None:
        update = update @ right_inverse.to(dtype)
    return update.to(_compute_dtype(grad)) if inverses else update.clone()


def gradient_norm(grad: Tensor, split_bias: bool = False) -> Tensor:
    """Frobenius norm of a gradient, or the sum of those of its weight part and of its bias column.

    Args:
        grad: ``(..., o, i)``.
        split_bias: take the last column for itself.

    Returns:
        ``(...)``.
    """
    if not split_bias:
        return torch.linalg.matrix_norm(grad)
    return torch.linalg.matrix_norm(grad[..., :-1]) + torch.linalg.matrix_norm(grad[..., -1:])


def rescale_to_norm(update: Tensor, grad: Tensor, update_norm: Tensor, grad_norm: Tensor) -> Tensor:
    """Scale a preconditioned gradient to a norm, falling back to the gradient where its own norm is 0 or not finite.

    Args:
        update: preconditioned gradient or a shard of it, ``(..., o, i)``.
        grad: the gradient or the same shard of it, ``(..., o, i)``.
        update_norm: norm of the whole preconditioned gradient, ``(...)``.
        grad_norm: norm of the whole gradient, ``(...)``.

    Returns:
        A new tensor ``(..., o, i)`` in the type of ``update``.
    """
    usable = (update_norm > 0) & update_norm.isfinite()
    ratio = grad_norm / torch.where(usable, update_norm, 1.0)
    return torch.where(usable[..., None, None], update * ratio[..., None, None], grad.to(update.dtype))


# --- types and ranges ------------------------------------------------------------------------------------------------


def _compute_dtype(*tensors: Tensor) -> torch.dtype:
    """Float64 if one of the tensors is, else float32: the type of all arithmetic outside the products."""
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32


def _check_choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    """Refuse an option outside its choices with a message that lists them."""
    if value not in allowed:
        raise ValueError(f"{name}={value!r} is not one of {', '.join(map(repr, allowed))}; choose one of these")


def _check_decay(value: float) -> None:
    if not 0.0 < value <= 1.0:
        raise ValueError(f"decay={value} must lie in (0, 1]; use 0.95, the published value")
