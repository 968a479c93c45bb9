"""fp32 weights in halves: every value comes back bit for bit, and no pair of finite halves becomes a NaN by itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from rankwise.updates.remainders import join, split

LOWS = (0, 1, 0x0042, 0x7FFF, 0x8000, 0x8001, 0xBEEF, 0xFFFF)
"""Low halves around the middle between two bf16 values, and others."""


def _values(low: int) -> Tensor:
    """All 65536 fp32 values with these low bits: zeros, denormals, infinities and NaN among them."""
    bits = (np.arange(1 << 16, dtype=np.uint32) << 16) | np.uint32(low)
    return torch.from_numpy(bits.view(np.float32))


def _halves(values: Tensor) -> tuple[Tensor, Tensor]:
    rounded, remainder = torch.empty_like(values, dtype=torch.bfloat16), torch.empty_like(values, dtype=torch.int16)
    split(values, rounded, remainder)
    return rounded, remainder


def _bits(values: Tensor) -> np.ndarray:
    return values.numpy().view(np.uint32)


def _check_comes_back(values: Tensor) -> None:
    rounded, remainder = _halves(values)
    found, number = join(rounded, remainder), ~np.isnan(values.numpy())
    np.testing.assert_array_equal(_bits(found)[number], _bits(values)[number])
    assert found[torch.from_numpy(~number)].isnan().all()


def _check_is_nearest(values: Tensor) -> None:
    """By fp64 arithmetic: to the nearer neighbour, in the middle to the one of larger magnitude."""
    rounded, _ = _halves(values)
    finite = values.isfinite()
    exact, found = values[finite].double(), rounded[finite].double()
    cast = values[finite].bfloat16().double()
    tie = (values[finite].view(torch.int32) & 0xFFFF) == 0x8000
    assert torch.equal(found[~tie], cast[~tie])
    assert bool((found[tie].abs() > exact[tie].abs()).all())


@pytest.mark.parametrize("low", LOWS)
def test_every_value_comes_back_bit_for_bit(low: int) -> None:
    _check_comes_back(_values(low))
    _check_is_nearest(_values(low))


def test_edges_are_rounded_as_said() -> None:
    tie, largest = float.fromhex("0x1.01p0"), torch.finfo(torch.float32).max
    rounded, remainder = _halves(torch.tensor([0.0, -0.0, 1e-45, -1e-45, tie, largest, torch.inf, torch.nan]))
    assert rounded.float().tolist()[:7] == [0.0, -0.0, 0.0, -0.0, float.fromhex("0x1.02p0"), torch.inf, torch.inf]
    assert remainder.tolist() == [0, 0, 1, 1, -0x8000, -1, 0, 0]
    assert rounded.view(torch.int16).tolist()[1::2] == [-0x8000, -0x8000, 0x7F80, 0x7FC0]


def _check_pairs(remainder: int) -> None:
    """A bf16 weight changed by others, with the remainder of before, for all 65536 bf16 values."""
    rounded = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    found = join(rounded, torch.full(rounded.shape, remainder, dtype=torch.int16))
    assert found[rounded.isnan()].isnan().all()
    number = ~rounded.isnan() & ~rounded.isinf()
    assert not found[number].isnan().any()
    # Within half a unit in the last place: it rounds to itself, or in the middle to a neighbour.
    away = found[number].view(torch.int32) - (rounded[number].view(torch.int16).int() << 16)
    assert int(away.abs().max()) <= 0x8000
    assert torch.equal(found[number].signbit(), rounded[number].signbit())
    again, rest = _halves(found[number])
    assert torch.equal(join(again, rest).view(torch.int32), found[number].view(torch.int32))
    assert torch.equal(again.view(torch.int16), rounded[number].view(torch.int16))


@pytest.mark.parametrize("remainder", [-0x8000, -0x7FFF, -1, 0, 1, 0x7FFF])
def test_no_pair_becomes_a_nan_or_another_weight(remainder: int) -> None:
    _check_pairs(remainder)


def test_tensors_keep_their_shape() -> None:
    values = torch.randn(3, 5)
    rounded, remainder = _halves(values)
    assert torch.equal(join(rounded, remainder), values)
    assert remainder.shape == (3, 5)


@pytest.mark.exhaustive
def test_all_values_and_pairs() -> None:
    for low in range(1 << 16):
        _check_comes_back(_values(low))
        _check_pairs(low - 0x8000)
