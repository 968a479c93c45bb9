"""STAND-IN: tokens of each expert, filled up with zeros to a number that 8-bit products can take."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

_ALIGNED = 16


def _filled(counts: Sequence[int]) -> list[int]:
    return [-(-int(count) // _ALIGNED) * _ALIGNED for count in counts]


class Fp8Padding(nn.Module):
    """Adds zeros below each expert's tokens."""

    def __init__(self, num_gemms: int, align_size: int | None = None) -> None:
        super().__init__()

    def forward(self, inp: Tensor, m_splits: Sequence[int]) -> tuple[Tensor, list[int]]:
        filled = _filled(m_splits)
        parts = [
            nn.functional.pad(part, (0, 0, 0, more - len(part)))
            for part, more in zip(inp.split(list(m_splits)), filled, strict=True)
        ]
        return torch.cat(parts), filled


class Fp8Unpadding(nn.Module):
    """Takes them away again."""

    def __init__(self, num_gemms: int, align_size: int | None = None) -> None:
        super().__init__()

    def forward(self, inp: Tensor, m_splits: Sequence[int]) -> Tensor:
        parts = inp.split(_filled(m_splits))
        return torch.cat([part[: int(count)] for part, count in zip(parts, m_splits, strict=True)])
