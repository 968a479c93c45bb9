"""Newton-Schulz against the scalar map of its singular values, matrix by matrix, and its published rounding."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from rankwise.updates.newton_schulz import newton_schulz

F64 = torch.float64


def quintic(sigma: Tensor, steps: int) -> Tensor:
    for _ in range(steps):
        sigma = 3.4445 * sigma - 4.7750 * sigma**3 + 2.0315 * sigma**5
    return sigma


def by_svd(matrix: Tensor, steps: int = 5, eps: float = 1e-7) -> Tensor:
    """What the iteration computes in exact arithmetic, for one matrix."""
    u, sigma, vh = torch.linalg.svd(matrix, full_matrices=False)
    return u @ torch.diag(quintic(sigma / (sigma.square().sum().sqrt() + eps), steps)) @ vh


def with_spectrum(rows: int, cols: int, sigma: Tensor, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    u, _, vh = torch.linalg.svd(torch.randn(rows, cols, dtype=F64, generator=generator), full_matrices=False)
    return u @ torch.diag(sigma) @ vh


def random_matrix(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


@settings(deadline=None, max_examples=25)
@given(
    rows=st.integers(1, 14),
    cols=st.integers(1, 14),
    batch=st.sampled_from([(), (1,), (3,), (2, 2)]),
    steps=st.integers(1, 7),
    eps=st.sampled_from([0.0, 1e-7, 0.3]),
    seed=st.integers(0, 2**16),
)
def test_equals_the_polynomial_of_the_singular_values(rows, cols, batch, steps, eps, seed):
    matrix = random_matrix(*batch, rows, cols, seed=seed)
    before = matrix.clone()
    result = newton_schulz(matrix, steps, eps=eps)
    assert result.shape == matrix.shape and result.dtype == F64
    assert torch.equal(matrix, before)
    for got, single in zip(result.reshape(-1, rows, cols), matrix.reshape(-1, rows, cols), strict=True):
        # More steps than five leave the interval in which the map is tame, so rounding grows a little.
        torch.testing.assert_close(got, by_svd(single, steps, eps), rtol=0, atol=2e-11)


def test_scale_of_singular_values():
    sigma = torch.logspace(-2.69, 0, 12, dtype=F64)
    sigma = sigma * (1 - 1e-12) / sigma.square().sum().sqrt()
    sigma = sigma[sigma >= 0.002]
    for rows, cols in [(12, 30), (30, 12), (12, 12)]:
        matrix = with_spectrum(rows, cols, torch.cat([sigma, sigma[:1].expand(12 - len(sigma))]), seed=rows + cols)
        for dtype, slack in [(None, 0.0), (torch.float32, 1e-4), (torch.bfloat16, 0.05)]:
            singular = torch.linalg.svdvals(newton_schulz(matrix, dtype=dtype))
            assert singular.min() >= 0.68 - slack
            assert singular.max() <= 1.21 + slack


def test_tiny_singular_values_grow_by_the_slope_at_zero():
    sigma = torch.tensor([1.0, 1e-9], dtype=F64)
    singular = torch.linalg.svdvals(newton_schulz(with_spectrum(6, 9, torch.cat([sigma, sigma[1:].expand(4)]), 3)))
    torch.testing.assert_close(singular[1:] / 1e-9, torch.full((5,), 3.4445**5, dtype=F64), rtol=1e-5, atol=0)


def test_points_along_the_polar_factor():
    matrix = random_matrix(40, 40)
    u, _, vh = torch.linalg.svd(matrix)
    result = newton_schulz(matrix)
    cosine = (result * (u @ vh)).sum() / (result.norm() * (u @ vh).norm())
    assert 0.96 < cosine < 1.0


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_zero_matrix_gives_zero_and_leaves_its_stack_alone(dtype):
    stack = random_matrix(3, 5, 8).float()
    stack[1] = 0
    result = newton_schulz(stack, dtype=dtype)
    assert torch.equal(result[1], torch.zeros(5, 8))
    torch.testing.assert_close(result[[0, 2]], newton_schulz(stack[[0, 2]], dtype=dtype))


def test_each_matrix_of_a_stack_has_its_own_norm():
    stack = random_matrix(3, 6, 4)
    scaled = stack * torch.tensor([1.0, 1e3, 1e-3], dtype=F64).reshape(3, 1, 1)
    torch.testing.assert_close(newton_schulz(scaled, eps=0.0), newton_schulz(stack, eps=0.0), rtol=0, atol=1e-12)


def test_split_qkv_equals_the_blocks_done_separately():
    fused = random_matrix(36, 12)
    stacked = newton_schulz(fused.reshape(3, 12, 12)).reshape(36, 12)
    separate = torch.cat([newton_schulz(block) for block in fused.split(12)])
    torch.testing.assert_close(stacked, separate, rtol=0, atol=1e-13)
    assert (stacked - newton_schulz(fused)).abs().max() > 1e-2  # the fused matrix is another question


def test_transposed_and_strided_inputs():
    matrix = random_matrix(2, 9, 20)
    torch.testing.assert_close(newton_schulz(matrix.mT), newton_schulz(matrix).mT, rtol=0, atol=1e-13)
    torch.testing.assert_close(
        newton_schulz(matrix[:, :, ::2]), newton_schulz(matrix[:, :, ::2].contiguous()), rtol=0, atol=1e-13
    )


@pytest.mark.parametrize("shape", [(8, 20), (20, 8), (32, 32), (256, 256)])
def test_rounding_of_lower_precisions(shape):
    matrix = random_matrix(*shape)
    exact = newton_schulz(matrix)

    def error(other: Tensor) -> float:
        return float((other.double() - exact).norm() / exact.norm())

    single, half = newton_schulz(matrix.float()), newton_schulz(matrix.float(), dtype=torch.bfloat16)
    assert single.dtype == half.dtype == torch.float32
    assert error(single) < 2e-5
    assert 1e-3 < error(half) < 0.03
    assert newton_schulz(matrix.bfloat16()).dtype == torch.bfloat16
    assert error(newton_schulz(matrix.bfloat16())) < 0.05


def test_bfloat16_input_is_normalised_in_float32():
    matrix = random_matrix(24, 40).bfloat16()
    as_single = newton_schulz(matrix.float())
    assert torch.equal(newton_schulz(matrix, dtype=torch.float32), as_single.bfloat16())


@pytest.mark.parametrize("shape", [(6, 50), (50, 6), (3, 50, 6)])
def test_cost_follows_the_smaller_side(shape):
    with FlopCounterMode(display=False) as counter:
        newton_schulz(random_matrix(*shape))
    count = 3 if len(shape) == 3 else 1
    assert counter.get_total_flops() == count * 5 * (4 * 6**2 * 50 + 2 * 6**3)


@pytest.mark.parametrize("shape", [(0, 4, 5), (3, 0, 5), (3, 4, 0), (0, 5)])
def test_empty_matrices(shape):
    assert newton_schulz(torch.empty(shape)).shape == shape


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: newton_schulz(torch.ones(4)), "logical shape"),
        (lambda: newton_schulz(torch.ones(2, 2), steps=0), "steps must be at least 1, got 0"),
        (lambda: newton_schulz(torch.ones(2, 2, dtype=torch.int32)), "floating-point"),
        (lambda: newton_schulz(torch.ones(2, 2), dtype=torch.int8), "floating-point"),
    ],
)
def test_bad_arguments(call, words):
    with pytest.raises(ValueError, match=words):
        call()
