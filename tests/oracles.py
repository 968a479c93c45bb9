r"""Formulas that only tests call: what the passes, lists and kernels are compared with, one tensor at a time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def one_sided_l1_damping(
    eps: float, diagonal_hat: Tensor, covariances_hat: Sequence[Tensor] | Tensor, floor: float = 1e-16
) -> Tensor:
    r"""Damping relative to the size of the tridiagonal ``H``, as the authors' JAX code measures it.

    .. math::
        \max(\epsilon r, \text{floor}), \quad
        r = \max\bigl(H_{00} + |H_{01}|, \max_{i \ge 1} H_{ii} + |H_{i,i-1}|\bigr)

    The row sums are one-sided: the code means the norm but counts one neighbour only, kept here for parity with its
    trajectories. The maximum runs over the whole chain, so shards have to combine theirs before the floor is applied.

    Args:
        eps: relative damping.
        diagonal_hat: undamped bias-corrected diagonal, (..., n), n at least 1.
        covariances_hat: edge tensors; only the first, (..., n), is used.
        floor: smallest damping.

    Returns:
        (..., 1), to be passed as ``eps`` to :func:`direction`.
    """
    edges = list(covariances_hat)
    sums = diagonal_hat
    if edges:
        size = edges[0].abs()
        sums = diagonal_hat + torch.cat((size[..., :1], size[..., :-1]), dim=-1)
    return (eps * sums.amax(dim=-1, keepdim=True)).clamp_min(floor)


def codes_by_search(values: np.ndarray, is_root: bool = False) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Block-wise quantization by search: of all numbers that codes stand for, the nearest, of two the even one.

    Args:
        values: 1-D, fp64, finite; from the first element of a parameter on.
        is_root: Whether codes are of roots, with an exponent of their own.

    Returns:
        The codes, their exponents, one for each 64 values, and what the codes stand for.
    """
    if is_root:
        # 3 bits of an exponent, 5 digits behind it; the lowest exponent's without the digit before the point.
        units = np.array([c if c < 64 else (32 + c % 32) * 2 ** (c // 32 - 1) for c in range(256)], dtype=np.float64)
        grid, exponents = units, range(-63, 53)
    else:
        grid, exponents = np.arange(-127.0, 128.0), range(-126, 122)
    roots = np.sqrt(values) if is_root else values
    codes, scales = np.zeros(len(values)), np.zeros(-(-len(values) // 64))
    for block, first in enumerate(range(0, len(values), 64)):
        own = roots[first : first + 64]
        fits = (e for e in exponents if np.abs(own).max() <= grid[-1] * 2.0**e)
        scales[block] = next(fits, exponents[-1])
        distances = np.abs(own[:, None] / 2.0 ** scales[block] - grid)
        nearest = distances == distances.min(axis=1, keepdims=True)
        even = nearest & (grid_codes(is_root) % 2 == 0)
        chosen = np.where(even.any(axis=1), even.argmax(axis=1), nearest.argmax(axis=1))
        codes[first : first + 64] = grid_codes(is_root)[chosen]
        if is_root:
            # What is not zero is never kept as zero.
            codes[first : first + 64] = np.where(own > 0, np.maximum(codes[first : first + 64], 1), 0)
    found = codes if not is_root else units[codes.astype(int)]
    opened = found * 2.0 ** np.repeat(scales, 64)[: len(values)]
    return codes, scales, opened**2 if is_root else opened


def grid_codes(is_root: bool) -> np.ndarray:
    """The codes of a kind, in the order of what they stand for."""
    return np.arange(256) if is_root else np.arange(-127, 128)
