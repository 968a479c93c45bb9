"""STAND-IN: norms."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import Parameter


def normalized(rows: Tensor, gain: Tensor, shift: Tensor | None, eps: float, zero_centered: bool) -> Tensor:
    """In fp32, rounded once; without a shift the root mean square is divided by."""
    wide = torch.promote_types(rows.dtype, torch.float32)
    factor = gain.to(wide) + 1.0 if zero_centered else gain.to(wide)
    if shift is None:
        return F.rms_norm(rows.to(wide), factor.shape, factor, eps).to(rows.dtype)
    return F.layer_norm(rows.to(wide), factor.shape, factor, shift.to(wide), eps).to(rows.dtype)


class _Norm(nn.Module):
    """An operation of its own, which has an (empty) extra state as all of them."""

    def __init__(
        self,
        normalized_shape: int | None = None,
        eps: float = 1e-5,
        sequence_parallel: bool | None = None,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        hidden_size: int | None = None,
        device: Any = None,
    ) -> None:
        super().__init__()
        size = hidden_size if normalized_shape is None else normalized_shape
        assert size is not None
        self.eps, self.sequence_parallel, self.zero_centered_gamma = eps, sequence_parallel, zero_centered_gamma
        dtype = params_dtype or torch.get_default_dtype()
        self.weight = Parameter(torch.full((size,), float(not zero_centered_gamma), dtype=dtype, device=device))
        self.bias: Parameter | None = self._shift(size, dtype, device)
        if sequence_parallel is not None:
            for parameter in self.parameters():
                parameter.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]

    def _shift(self, size: int, dtype: torch.dtype, device: Any) -> Parameter | None:
        return Parameter(torch.zeros(size, dtype=dtype, device=device))

    def get_extra_state(self) -> Tensor:
        """None."""
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None:
        """None."""

    def forward(self, inp: Tensor) -> Tensor:
        """Of (..., features)."""
        return normalized(inp, self.weight, self.bias, self.eps, self.zero_centered_gamma)


class LayerNorm(_Norm):
    """With a shift."""


class RMSNorm(_Norm):
    """Without one."""

    def _shift(self, size: int, dtype: torch.dtype, device: Any) -> Parameter | None:
        return None
