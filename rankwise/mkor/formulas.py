"""MKOR: Kronecker factor inverses kept up to date by rank-1 updates, and the gradient they precondition.

A linear layer with weight of shape ``(o, i)`` has a left factor inverse ``(o, o)`` that follows its output gradients
and a right one ``(i, i)`` that follows its inputs (``i + 1`` when the bias gradient rides along as a last column). The
functions work on either side, on batches of matrices, and on a block of consecutive rows of a factor, so that a factor
cut over tensor-parallel ranks takes the same path: the caller only completes the vectors, dot products and norms.

Reference: Mozaffari et al., MKOR: Momentum-Enabled Kronecker-Factor-Based Optimizer Using Rank-1 Updates,
arXiv:2306.01685.
"""

from __future__ import annotations

from rankwise.mkor.inverses import (
    FACTOR_NORMS,
    RULES,
    FactorNorm,
    Rule,
    factor_norm,
    guarded,
    rank1_apply,
    rank1_direction,
    rank1_inverse_update,
    stabilize,
    update_factor,
)
from rankwise.mkor.preconditioning import (
    RESCALES,
    Rescale,
    apply_inverses,
    gradient_norm,
    precondition,
    product_dtype,
    rescale_to_norm,
)

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
    "rank1_apply",
    "rank1_direction",
    "rank1_inverse_update",
    "rescale_to_norm",
    "stabilize",
    "update_factor",
]
