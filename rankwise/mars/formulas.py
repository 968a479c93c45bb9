"""MARS's numbers for orthogonal factors: what they are scaled by, and what is added to the norm they start from.

Sources and notation as in :mod:`rankwise.mars.rule`.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

__all__ = [
    "MatrixVariant",
    "Scale",
    "norm_offset",
    "shape_factor",
]

MatrixVariant = Literal["shampoo", "muon"]
"""``"shampoo"``: MARS-Shampoo of the first paper. ``"muon"``: MARS-M of the second. Both use Newton-Schulz."""

Scale = Literal["published", "rms", "spectral", "unit_rms_norm", "shape_scaling"]
"""``"published"``: as the variant's paper has it. ``"rms"``: as large as AdamW's updates. The others: by the
usual names of Muon's scale modes."""

_SHAMPOO_EPS = 1e-8
_MUON_EPS = 1e-7


def shape_factor(variant: MatrixVariant, rows: int, cols: int, scale: Scale = "published") -> float:
    r"""What the orthogonal factor of a (rows, cols) matrix is multiplied by.

    ``"shampoo"``: :math:`\sqrt{\max(1, rows / cols)}`, as in the authors' code (the paper has none). ``"muon"``, and
    either with the scale ``"rms"``: :math:`0.2 \sqrt{\max(rows, cols)}` (arXiv 2502.16982, section 2.2). The entries of
    an orthogonal factor have the root mean square :math:`1 / \sqrt{\max(rows, cols)}`: it becomes 0.2, about that of
    AdamW's updates. ``"spectral"`` makes it 1, by :math:`\sqrt{\max(rows, cols)}`; ``"unit_rms_norm"``,
    :math:`\sqrt{rows / cols}`, lets inputs and outputs of any width change alike (the operator norm between root mean
    squares is 1), which learning rates that are carried to other widths rest on; ``"shape_scaling"`` is
    :math:`\sqrt{\max(1, rows / cols)}`.

    Args:
        variant: Which of the two rules.
        rows: Rows of the logical matrix: before any sharding, and before any transposition for the computation.
        cols: Columns of the logical matrix.
        scale: A value of the option "scale", see :class:`rankwise.mars.options.MARSOptions`.

    Raises:
        ValueError: If ``variant`` or ``scale`` is none of those known, or a side is below 1.
    """
    if rows < 1 or cols < 1:
        raise ValueError(
            f"rows and cols must be at least 1, got ({rows}, {cols}); pass the logical shape of one matrix"
        )
    if variant not in get_args(MatrixVariant):
        raise ValueError(
            f"variant must be 'shampoo' or 'muon', got {variant!r}; 'adamw' and 'lion' are not matrix rules"
        )
    if scale not in get_args(Scale):
        known = ", ".join(map(repr, get_args(Scale)))
        raise ValueError(f"scale must be one of {known}, got {scale!r}; 'published' is the default")
    if scale == "published":
        scale = "shape_scaling" if variant == "shampoo" else "rms"
    if scale == "shape_scaling":
        return math.sqrt(max(1.0, rows / cols))
    if scale == "unit_rms_norm":
        return math.sqrt(rows / cols)
    return (0.2 if scale == "rms" else 1.0) * math.sqrt(max(rows, cols))


def norm_offset(variant: MatrixVariant, beta1: float, eps: float | None = None) -> float:
    """What is added to the Frobenius norm of the momentum before its orthogonalisation.

    Args:
        variant: Which of the two rules.
        beta1: Decay rate of the momentum. ``"shampoo"`` orthogonalises ``m / (1 - beta1)``, which is the same as ``m``
            with an ``eps`` smaller by that factor.
        eps: The rule's own; ``None``: as published, 1e-8 for ``"shampoo"`` and 1e-7 for ``"muon"``.
    """
    if variant == "shampoo":
        return (_SHAMPOO_EPS if eps is None else eps) * (1.0 - beta1)
    return _MUON_EPS if eps is None else eps
