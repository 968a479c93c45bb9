"""Runs for the kernel tests: uneven, empty, unaligned views into flat buffers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# Around a tile of 64, empty, a single element, several tiles.
LENGTHS = (130, 0, 1, 64, 63, 65, 7, 200)
TILE = 64


def runs(lengths: Sequence[int], generator: torch.Generator, offset: int = 0, scale: float = 1.0) -> list[Tensor]:
    """Random fp32 views, one behind the other in a flat buffer that begins ``offset`` elements late."""
    flat = torch.randn(offset + sum(lengths), generator=generator) * scale
    return list(flat[offset:].split(list(lengths)))


def copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """In double precision."""
    return [tensor.double() for tensor in tensors]


def assert_runs_close(found: Sequence[Tensor], wanted: Sequence[Tensor], tolerance: float = 3e-6) -> None:
    """Every run, relative to its largest element."""
    assert len(found) == len(wanted)
    for index, (mine, other) in enumerate(zip(found, wanted, strict=True)):
        assert mine.shape == other.shape
        if mine.numel():
            error = (mine.double() - other.double()).abs().max()
            assert error <= tolerance * other.double().abs().max().clamp(min=1e-30), f"run {index}: off by {error:.3g}"
