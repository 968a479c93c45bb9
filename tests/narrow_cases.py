"""Values and runs of codes that tests of narrow states share."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rankwise.kernels.low_precision_runs import BLOCK, ROOT, LowPrecisionRuns, blocks_of, is_coded

LENGTHS = (0, 1, 5, 63, 64, 65, 200, 1000, 5000, 4096 + 7, 3)
FIRSTS = (7, 3, 62, 1, 64, 0, 130, 2**32 - 100, 2**33 + 5, 2**32 - 4096, 2**32 - 1)
BEGINNINGS = tuple(first - first % BLOCK for first in FIRSTS)
"""The same, of runs that begin with a block."""


def values_of(numel: int, dtype: torch.dtype, seed: int, is_finite: bool = False) -> Tensor:
    """Of all magnitudes, block by block and within blocks, with both zeros, denormals and the largest float32."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(-150, 128, (numel // BLOCK + 1,), generator=generator).float().repeat_interleave(BLOCK)
    found = torch.ldexp(torch.randn(numel, generator=generator), sizes[:numel]).clamp(-3.4e38, 3.4e38)
    found *= torch.ldexp(torch.ones(()), torch.randint(-14, 1, (numel,), generator=generator).float())
    chance = torch.rand(numel, generator=generator)
    found[chance < 0.1], found[chance > 0.95] = 0.0, -0.0
    if numel > 300:
        found[280] = torch.finfo(torch.float32).max
        if not is_finite:
            found[100], found[200] = torch.nan, -torch.inf
    return found.abs() if dtype == ROOT else found


def runs_of(
    lengths: Sequence[int], firsts: Sequence[int], dtype: torch.dtype, step: int | Tensor | None = None
) -> LowPrecisionRuns:
    """Of codes that nothing was kept in yet."""
    places = list(zip(lengths, firsts, strict=True))
    exponents = [torch.full((blocks_of(first, numel),), 3, dtype=torch.int8) for numel, first in places]
    codes = [torch.zeros(numel, dtype=dtype) for numel in lengths]
    keys = [5 + at for at in range(len(lengths))]
    return LowPrecisionRuns(codes, exponents if is_coded(dtype) else [], list(firsts), keys, step)


def copy_of(runs: LowPrecisionRuns) -> LowPrecisionRuns:
    """The same codes elsewhere."""
    codes, exponents = ([tensor.clone() for tensor in tensors] for tensors in (runs.codes, runs.exponents))
    return LowPrecisionRuns(codes, exponents, runs.firsts, runs.keys, runs.step)


def assert_same(found: Sequence[Tensor] | LowPrecisionRuns, expected: Sequence[Tensor] | LowPrecisionRuns) -> None:
    """To the bit, but for those of NaNs."""
    if isinstance(found, LowPrecisionRuns) and isinstance(expected, LowPrecisionRuns):
        assert_same([*found.codes, *found.exponents], [*expected.codes, *expected.exponents])
        return
    torch.testing.assert_close(list(found), list(expected), rtol=0, atol=0, equal_nan=True)
