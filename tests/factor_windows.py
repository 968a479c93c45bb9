"""Factor inverses of MKOR's states, whatever their form, as dense matrices in float64."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from rankwise.mkor.windows import Factor, Window, factor_of


def dense(factor: Factor | None) -> Tensor:
    """J itself."""
    assert factor is not None
    if isinstance(factor, Tensor):
        return factor.double()
    vectors, weights = factor.vectors.double(), factor.weights.double()
    return torch.eye(vectors.shape[-1]).double() - (vectors * weights[..., None]).mT @ vectors


def inverse(state: Mapping[str, Tensor], side: str) -> Tensor:
    """The inverse of one side of a matrix."""
    return dense(factor_of(state, side))


def fresh(count: int, length: int, side: int, dtype: torch.dtype = torch.float32) -> list[Window]:
    """Windows of identities."""
    wide = torch.promote_types(dtype, torch.float32)
    return [Window(torch.zeros(length, side, dtype=dtype), torch.zeros(length, dtype=wide)) for _ in range(count)]
