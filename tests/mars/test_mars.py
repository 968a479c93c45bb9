"""MARS's rule: clip, scale, shapes; step/test_golden.py has the recorded trajectories, test_rivals.py Lion's."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rankwise.mars import rule as mars
from rankwise.mars.formulas import shape_factor
from rankwise.updates.newton_schulz import newton_schulz

F64 = torch.float64


def noise(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


def test_shampoo_orthogonalises_the_momentum_over_one_minus_beta():
    """Which shows only against eps."""
    m = noise(4, 7, scale=1e-3)
    direct = newton_schulz(m / (1 - 0.9), eps=0.02)
    torch.testing.assert_close(mars.orthogonal_direction(m, "shampoo", 0.9, 0.02), direct, rtol=1e-12, atol=0)
    assert (direct - newton_schulz(m, eps=0.02)).abs().max() > 0.05
    torch.testing.assert_close(
        mars.orthogonal_direction(m, "muon", 0.9, 0.02),
        newton_schulz(m, eps=0.02) * 0.2 * 7**0.5,
        rtol=1e-12,
        atol=0,
    )


# --- sizes, bounds, variance -----------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=25)
@given(
    scale=st.sampled_from([1e-9, 0.3, 1.0, 1e4]),
    clip=st.sampled_from([0.5, 1.0, 10.0]),
    seed=st.integers(0, 2**16),
)
def test_clip_by_norm(scale, clip, seed):
    """Per matrix in a stack: at most the threshold after it, untouched below it."""
    c = noise(3, 4, 5, seed=seed) * torch.tensor([1.0, scale, 0.0], dtype=F64).reshape(3, 1, 1)
    coefficient = mars.clip_coefficient(c.square().sum((-2, -1), keepdim=True), clip)
    result = c * coefficient
    assert coefficient.shape == (3, 1, 1)
    for before, after in zip(c, result, strict=True):
        norm = before.norm()
        assert after.norm() <= clip * (1 + 1e-14)
        if norm <= clip:
            assert torch.equal(after, before)
        else:
            torch.testing.assert_close(after, before * clip / norm, rtol=1e-14, atol=0)


def test_clip_coefficient_of_zero_and_nan():
    coefficient = mars.clip_coefficient(torch.tensor([0.0, float("nan"), 4.0]), 1.0)
    assert coefficient[0] == 1.0 and coefficient[1].isnan() and coefficient[2] == 0.5


@pytest.mark.parametrize("variant", ["shampoo", "muon"])
@pytest.mark.parametrize("shape", [(18, 6), (6, 18), (3, 10, 4)])
def test_scale_of_singular_values_of_the_update(shape, variant):
    direction = mars.orthogonal_direction(noise(*shape), variant, 0.95)
    assert direction.dtype == F64 and direction.shape == shape
    factors = {"coarse": newton_schulz(noise(*shape), dtype=torch.bfloat16)}
    factors["exact"] = direction / shape_factor(variant, *shape[-2:])
    for kind, slack in (("exact", 0.0), ("coarse", 0.05)):
        singular = torch.linalg.svdvals(factors[kind])
        assert singular.min() >= 0.68 - slack
        assert singular.max() <= 1.21 + slack


def test_shape_factors_take_the_logical_shape():
    assert shape_factor("shampoo", 50304, 768) == pytest.approx(8.093, abs=1e-3)
    assert shape_factor("shampoo", 768, 50304) == 1.0
    assert shape_factor("muon", 16, 100) == shape_factor("muon", 100, 16) == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: shape_factor("adamw", 2, 2), "variant must be 'shampoo' or 'muon', got 'adamw'"),
        (lambda: shape_factor("muon", 0, 2), r"rows and cols must be at least 1, got \(0, 2\)"),
    ],
)
def test_bad_arguments(call, words):
    with pytest.raises(ValueError, match=words):
        call()
