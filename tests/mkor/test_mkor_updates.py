"""MKOR's algebra against dense float64 linear algebra."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_mkor import Dense
from torch import Tensor

from rankwise.mkor.formulas import (
    gradient_norm,
    precondition,
    product_dtype,
    rank1_inverse_update,
    stabilize,
    update_factor,
)
from rankwise.mkor.rule import factor_norm, guarded, mkor_step, rescale_to_norm

GAMMA = 0.95
quick = settings(max_examples=20, deadline=None)
batches = st.sampled_from([(), (1,), (3,), (2, 2)])
dims = st.integers(1, 9)
seeds = st.integers(0, 2**20)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def positive_definite(*shape: int, seed: int = 0) -> Tensor:
    root = randn(*shape, shape[-1], seed=seed)
    matrix = root @ root.mT / shape[-1] + 0.1 * torch.eye(shape[-1], dtype=torch.float64)
    return (matrix + matrix.mT) / 2


def eye(dim: int) -> Tensor:
    return torch.eye(dim, dtype=torch.float64)


def outer(vector: Tensor) -> Tensor:
    return vector.unsqueeze(-1) * vector.unsqueeze(-2)


def damped(inverse: Tensor, decay: float = GAMMA) -> Tensor:
    return decay * inverse + (1 - decay) * eye(inverse.shape[-1])


def assert_close(actual: Tensor, expected: Tensor, rtol: float = 1e-12) -> None:
    assert actual.shape == expected.shape
    assert float((actual - expected).abs().max()) <= rtol * max(1.0, float(expected.abs().max()))


# Rank-1 updates


@quick
@given(batches, dims, seeds)
def test_rules_are_inverses_of_their_statistics(batch: tuple[int, ...], dim: int, seed: int) -> None:
    inverse, vector = positive_definite(*batch, dim, seed=seed), randn(*batch, dim, seed=seed + 1)
    ema = rank1_inverse_update(inverse, vector, GAMMA, "ema")
    assert_close(ema, torch.linalg.inv(GAMMA * torch.linalg.inv(inverse) + (1 - GAMMA) * outer(vector)))
    official = rank1_inverse_update(inverse, vector, GAMMA, "official")
    assert_close(official, torch.linalg.inv(torch.linalg.inv(damped(inverse)) + outer(vector)))
    u, s = (inverse @ vector[..., None])[..., 0], torch.einsum("...i,...ij,...j->...", vector, inverse, vector)
    weight = (1 - GAMMA) / (GAMMA**2 * (1 + GAMMA * (1 - GAMMA) * s))
    literal = rank1_inverse_update(inverse, vector, GAMMA, "paper_literal")
    assert_close(literal, GAMMA * inverse + weight[..., None, None] * outer(u))
    assert float((literal - ema).abs().max()) > 1e-4


@quick
@given(batches, dims, seeds)
def test_zero_vector(batch: tuple[int, ...], dim: int, seed: int) -> None:
    inverse, zero = positive_definite(*batch, dim, seed=seed), torch.zeros(*batch, dim, dtype=torch.float64)
    assert_close(rank1_inverse_update(inverse, zero, GAMMA, "ema"), inverse / GAMMA, 1e-15)
    assert_close(rank1_inverse_update(inverse, zero, GAMMA, "official"), damped(inverse), 1e-15)
    assert_close(rank1_inverse_update(inverse, zero, GAMMA, "paper_literal"), GAMMA * inverse, 1e-15)


@pytest.mark.parametrize("rule", ["official", "ema", "paper_literal"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_storage_type_rounds_once(rule: str, dtype: torch.dtype) -> None:
    """Arithmetic is float32 for every storage type, so a low-precision result is the float32 one, rounded."""
    inverse, vector = positive_definite(2, 33, seed=1).to(dtype), randn(2, 33, seed=2).float()
    reference = rank1_inverse_update(inverse.float(), vector, GAMMA, rule)
    result = rank1_inverse_update(inverse, vector, GAMMA, rule)
    assert result.dtype == dtype
    assert torch.equal(result, reference.to(dtype))
    assert torch.equal(result, result.mT)
    exact = rank1_inverse_update(inverse.double(), vector.double(), GAMMA, rule)
    assert exact.dtype == torch.float64
    assert_close(reference.double(), exact, 2e-6)


@pytest.mark.parametrize(("rule", "bound"), [("official", 5e-3), ("ema", 3e-2)])
def test_half_precision_storage_does_not_drift(rule: str, bound: float) -> None:
    exact, stored = eye(64), torch.eye(64, dtype=torch.float16)
    for step in range(300):
        vector = 0.3 * randn(64, seed=step)
        exact, _ = update_factor(exact, vector, GAMMA, rule)
        stored, ok = update_factor(stored, vector.float(), GAMMA, rule)
        assert bool(ok)
    assert float((stored.double() - exact).abs().max()) <= bound
    assert torch.equal(stored, stored.mT)


@pytest.mark.parametrize("stabilizer", [(2.0, 0.9), (1.0, 0.5), None])
@pytest.mark.parametrize("rule", ["official", "ema"])
def test_the_rule_is_dense_linear_algebra(rule: Any, stabilizer: tuple[float, float] | None) -> None:
    """Explicit inverses that move at the first of three steps; the stabilizer acts, where there is one."""
    dense, L, R = Dense(rule, 0.7, stabilizer), eye(6), eye(5)
    for step in range(1, 9):
        D, a, g = randn(6, 5, seed=step), randn(5, seed=100 + step), randn(6, seed=200 + step)
        if step % 3 == 1:
            dense.move("left", g)
            dense.move("right", a)
        options: dict[str, Any] = {"update_interval": 3, "gamma": 0.7, "rule": rule, "stabilizer": stabilizer}
        V, L, R = mkor_step(D, a, g, L, R, step, **options)
        for found, wanted in ((V, dense.apply(D, True)), (L, dense.inverse["left"]), (R, dense.inverse["right"])):
            assert_close(found, wanted, 1e-10)


# Stabilizer and guard


def test_stabilizer_blends_only_what_exceeds_the_threshold() -> None:
    inverse = torch.stack([eye(3), 2.0 * eye(3), 2.1 * eye(3)])
    expected = torch.stack([eye(3), 2.0 * eye(3), (0.9 * 2.1 + 0.1) * eye(3)])
    assert_close(stabilize(inverse, 2.0, 0.9), expected)
    assert torch.equal(stabilize(inverse, 2.0, 0.9)[:2], inverse[:2])


def test_norms_differ_on_dense_matrices() -> None:
    """Entries of 1 in a 5 x 5 matrix: largest entry 1, eigenvalue and row sum 5."""
    ones = torch.ones(5, 5, dtype=torch.float64)
    assert float(factor_norm(ones, "max_entry")) == 1.0
    assert float(factor_norm(ones, "row_sum")) == 5.0
    assert torch.equal(stabilize(ones, 2.0, 0.9, "max_entry"), ones)
    assert_close(stabilize(ones, 2.0, 0.9, "row_sum"), 0.9 * ones + 0.1 * eye(5))


@pytest.mark.parametrize("norm", ["row_sum", "max_entry"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_stabilizer_resets_damaged_matrices_only(norm: str, bad: float, dtype: torch.dtype) -> None:
    inverse = torch.stack([0.5 * eye(4), 0.5 * eye(4)]).to(dtype)
    inverse[0, 1, 2] = bad
    result = stabilize(inverse, 2.0, 0.9, norm)
    assert torch.equal(result[0], torch.eye(4, dtype=dtype))
    assert torch.equal(result[1], inverse[1])


def test_half_precision_row_sums_do_not_overflow() -> None:
    inverse = torch.full((300, 300), 300.0, dtype=torch.float16)
    assert float(factor_norm(inverse.float())) == 90000.0
    assert torch.equal(stabilize(inverse, 2.0, 0.5), 0.5 * inverse + 0.5 * torch.eye(300, dtype=torch.float16))


@quick
@given(st.sampled_from([(1,), (3,), (2, 2)]), dims, seeds)
def test_guard_keeps_old_matrices_one_by_one(batch: tuple[int, ...], dim: int, seed: int) -> None:
    new, old = randn(*batch, dim, dim + 1, seed=seed), randn(*batch, dim, dim + 1, seed=seed + 1)
    damaged = randn(*batch, seed=seed + 2) > 0
    new[..., 0, -1] = torch.where(damaged, torch.nan, new[..., 0, -1])
    committed, ok = guarded(new, old)
    assert torch.equal(ok, ~damaged)
    assert torch.equal(committed[ok], new[ok])
    assert torch.equal(committed[~ok], old[~ok])


@pytest.mark.parametrize("rule", ["official", "ema", "paper_literal"])
def test_damage_stays_in_its_layer(rule: str) -> None:
    inverse, vector = 0.3 * positive_definite(4, 5, seed=1), randn(4, 5, seed=2)
    clean, _ = update_factor(inverse, vector, GAMMA, rule)
    inverse[1, 2, 3], vector[2, 0] = math.nan, math.inf
    result, ok = update_factor(inverse, vector, GAMMA, rule)
    assert ok.tolist() == [True, True, False, True]
    assert torch.equal(result[[0, 3]], clean[[0, 3]])
    assert torch.equal(result[1], rank1_inverse_update(eye(5), vector[1], GAMMA, rule))
    assert torch.equal(result[2], inverse[2])


def test_indefinite_inverse_is_refused() -> None:
    inverse, vector = torch.stack([-eye(3), eye(3)]), 10 * torch.ones(2, 3, dtype=torch.float64)
    result, ok = update_factor(inverse, vector, GAMMA, "ema")
    assert ok.tolist() == [False, True]
    assert torch.equal(result[0], inverse[0])


def test_overflow_of_the_storage_type_is_refused() -> None:
    inverse = torch.full((1, 1), 60000.0, dtype=torch.float16)
    assert bool(rank1_inverse_update(inverse, torch.zeros(1), 0.5, "ema").isinf())
    result, ok = update_factor(inverse, torch.zeros(1), 0.5, "ema", threshold=1e9)
    assert not bool(ok)
    assert torch.equal(result, inverse)


# Preconditioning


@quick
@given(batches, dims, dims, seeds)
def test_precondition_keeps_norm_and_descends(batch: tuple[int, ...], rows: int, columns: int, seed: int) -> None:
    grad = randn(*batch, rows, columns, seed=seed)
    left, right = positive_definite(*batch, rows, seed=seed + 1), positive_definite(*batch, columns, seed=seed + 2)
    update = precondition(grad, left, right)
    product = left @ grad @ right
    ratio = grad.flatten(-2).norm(dim=-1) / product.flatten(-2).norm(dim=-1)
    assert_close(update, ratio[..., None, None] * product)
    assert_close(update.flatten(-2).norm(dim=-1), grad.flatten(-2).norm(dim=-1))
    assert math.isclose(float(update.norm()), float(grad.norm()), rel_tol=1e-12)
    assert bool(((update * grad).flatten(-2).sum(-1) > 0).all())
    assert_close(precondition(grad, left, right, rescale=None), product)
    for scale in (1e-3, 7.0):
        assert_close(precondition(scale * grad, left, right), scale * update)
    assert_close(precondition(grad, left, None, rescale=None), left @ grad)
    assert_close(precondition(grad, None, right, rescale=None), grad @ right)


@quick
@given(batches, dims, dims, seeds, st.sampled_from([torch.float64, torch.float32, torch.bfloat16]))
def test_identity_factors_return_the_gradient(
    batch: tuple[int, ...], rows: int, columns: int, seed: int, dtype: torch.dtype
) -> None:
    grad = randn(*batch, rows, columns, seed=seed).to(dtype)
    identities = [torch.eye(n).expand(*batch, n, n) for n in (rows, columns)]
    for left, right in ([None, None], [identities[0], None], [None, identities[1]], identities):
        for rescale in ("joint", "sum_of_norms", None):
            update = precondition(grad, left, right, rescale, has_bias=columns > 1)
            assert torch.equal(update, grad)
            assert update.dtype == dtype
            assert update.data_ptr() != grad.data_ptr()


def test_sum_of_norms_treats_the_bias_apart() -> None:
    grad, right = randn(4, 6, seed=1), positive_definite(6, seed=2)
    product = grad @ right
    ratio = (grad[:, :-1].norm() + grad[:, -1].norm()) / (product[:, :-1].norm() + product[:, -1].norm())
    assert_close(precondition(grad, None, right, "sum_of_norms", has_bias=True), ratio * product)
    assert_close(precondition(grad, None, right, "sum_of_norms"), precondition(grad, None, right, "joint"))


def test_sharded_rescaling_equals_the_whole() -> None:
    grad, left, right = randn(6, 5, seed=1), positive_definite(6, seed=2), positive_definite(5, seed=3)
    product = left @ grad @ right
    norms = [torch.stack([gradient_norm(m[:2]), gradient_norm(m[2:])]).norm() for m in (product, grad)]
    shards = [rescale_to_norm(product[rows], grad[rows], *norms) for rows in (slice(0, 2), slice(2, 6))]
    assert_close(torch.cat(shards), precondition(grad, left, right))


@pytest.mark.parametrize("grad_dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_products_of_bfloat16_factors_are_bfloat16(dtype: torch.dtype, grad_dtype: torch.dtype) -> None:
    """One rounding of the gradient and one of each product, against exact products of the same numbers."""
    grad, left, right = (1e-7 * randn(6, 5, seed=1)).to(grad_dtype), positive_definite(6, seed=2), positive_definite(5)
    left, right = left.to(dtype), right.to(dtype)
    exact = left.double() @ grad.double() @ right.double()
    product = precondition(grad, left, right, rescale=None)
    rounded = dtype == torch.bfloat16 and grad_dtype != torch.float64
    assert product_dtype(grad, left, right) == (
        torch.bfloat16 if rounded else torch.float64 if grad_dtype == torch.float64 else torch.float32
    )
    unit = torch.finfo(torch.bfloat16 if rounded or grad_dtype == torch.bfloat16 else torch.float32).eps / 2
    growth = float(torch.linalg.cond(left.double()) * torch.linalg.cond(right.double()))
    assert float((product.double() - exact).norm() / exact.norm()) <= 3 * growth * unit
    assert product.dtype == grad_dtype
    if rounded and grad_dtype == torch.float32:
        half = (left @ grad.to(dtype)) @ right
        assert torch.equal(product, half.float())
    assert product_dtype(grad, left.float(), right) != torch.bfloat16 and product_dtype(grad) == product_dtype(
        grad, left.float()
    )


def test_degenerate_products_fall_back_to_the_gradient() -> None:
    grad = torch.ones(5, 2, 3)
    grad[0] = 0.0
    bad = [torch.full((2, 2), value) for value in (0.0, math.nan, math.inf)]
    left = torch.stack([torch.eye(2), *bad, 3 * torch.eye(2)])
    update = precondition(grad, left, None)
    assert torch.equal(update[:4], grad[:4])
    assert torch.allclose(update[4], grad[4])


def test_functions_leave_their_arguments_alone() -> None:
    inverse, vector, grad = 3 * positive_definite(2, 4, seed=1), randn(2, 4, seed=2), randn(2, 4, 4, seed=3)
    copies = [t.clone() for t in (inverse, vector, grad)]
    update_factor(inverse, vector, GAMMA)
    precondition(grad, inverse, inverse)
    assert all(torch.equal(a, b) for a, b in zip(copies, (inverse, vector, grad), strict=True))
    assert stabilize(inverse, 100.0, 0.9).data_ptr() != inverse.data_ptr()
