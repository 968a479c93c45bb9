"""Orthonormal bases: same Q as exact arithmetic, orthonormal at any condition number, failures flagged."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rankwise.updates import orthonormal
from rankwise.updates.orthonormal import cholesky_qr, cholesky_qr2, householder_qr, initial_basis, triangular_factor

EXAMPLES = settings(deadline=None, max_examples=25, derandomize=True)
ORTHONORMAL = {torch.float32: 2e-6, torch.float64: 1e-14}
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def defect(basis: Tensor) -> float:
    return (basis.mT @ basis - torch.eye(basis.shape[-1], dtype=basis.dtype)).abs().max().item()


def with_spectrum(values: Tensor, n: int, seed: int = 0) -> Tensor:
    """(m, n) matrix in double precision with the given singular values."""
    m = values.numel()
    left, right = householder_qr(randn(m, m, seed=seed)), householder_qr(randn(n, m, seed=seed + 1))
    return (left * values) @ right.mT


@DTYPES
@given(b=st.integers(1, 3), n=st.integers(1, 20), r=st.integers(1, 20), seed=st.integers(0, 1000))
@EXAMPLES
def test_cholesky_equals_householder(dtype: torch.dtype, b: int, n: int, r: int, seed: int) -> None:
    n, r = max(n, r) + 1, min(n, r)
    matrix = randn(b, n, r, seed=seed, dtype=dtype)
    basis, failed = cholesky_qr2(matrix)
    assert not failed.any()
    assert defect(basis) <= ORTHONORMAL[dtype]
    condition = torch.linalg.cond(matrix.double()).max().item()
    assert (basis - householder_qr(matrix)).abs().max() <= 30 * condition * torch.finfo(dtype).eps
    upper = basis.mT @ matrix
    assert torch.all(upper.diagonal(dim1=-2, dim2=-1) > 0), "positive diagonal"


@DTYPES
def test_one_pass_is_an_upper_triangular_change_of_columns(dtype: torch.dtype) -> None:
    matrix = randn(2, 12, 5, dtype=dtype)
    basis, _ = cholesky_qr(matrix)
    change = torch.linalg.lstsq(matrix, basis).solution
    assert change.tril(-1).abs().max() <= 100 * torch.finfo(dtype).eps
    assert defect(basis) <= 100 * torch.finfo(dtype).eps


@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1.0, 1e20, 1e30])
def test_column_scaling_survives_extreme_units(scale: float) -> None:
    """Squares of these entries leave the range of fp32; the basis must not notice."""
    graded = torch.logspace(0, -6, 4)
    matrix = randn(16, 4, dtype=torch.float32)
    basis, failed = cholesky_qr2(matrix * graded * scale)
    assert not failed
    torch.testing.assert_close(basis, cholesky_qr2(matrix)[0], atol=2e-6, rtol=0)


@DTYPES
@pytest.mark.parametrize("kind", ["zero", "zero column", "equal columns", "nan", "inf"])
def test_unusable_matrices_are_flagged_and_their_neighbours_are_not(dtype: torch.dtype, kind: str) -> None:
    matrix = randn(3, 10, 3, dtype=dtype)
    clean = cholesky_qr2(matrix)[0]
    if kind == "zero":
        matrix[1] = 0
    elif kind == "zero column":
        matrix[1, :, 2] = 0
    elif kind == "equal columns":
        matrix[1, :, 2] = matrix[1, :, 0]
    else:
        matrix[1, 4, 1] = float(kind)
    basis, failed = cholesky_qr2(matrix)
    assert failed.tolist() == [False, True, False]
    assert torch.equal(basis[[0, 2]], clean[[0, 2]])
    if kind not in ("nan", "inf"):
        assert defect(householder_qr(matrix)) <= ORTHONORMAL[dtype]


def test_unflagged_results_are_orthonormal_up_to_the_breakdown() -> None:
    """Numerically rank-deficient columns can pass both factorisations; the second diagonal gives them away."""
    slipped = worst = 0.0
    for seed in range(60):
        values = torch.zeros(24, dtype=torch.float64)
        values[:6] = torch.logspace(0, -2 - seed % 3, 6)
        matrix = with_spectrum(values, 60, seed=2 * seed).float()
        image = matrix @ cholesky_qr(matrix.mT @ randn(24, 8, seed=seed, dtype=torch.float32))[0]
        basis, failed = cholesky_qr2(image)
        worst = max(worst, 0.0 if failed else defect(basis))
        first, first_failed = cholesky_qr(image)
        factor, second_failed = triangular_factor(first.mT @ first)
        if not (first_failed | second_failed):
            slipped = max(slipped, defect(torch.linalg.solve_triangular(factor.mT, first, upper=True, left=False)))
    assert worst <= 2e-6
    assert slipped > 2e-6, "the guard on the second diagonal has nothing to catch here; choose other seeds"


def test_triangular_factor_reports_without_raising() -> None:
    grams = [
        [[1.0, 0.0], [0.0, 1.0]],
        [[1.0, 2.0], [2.0, 1.0]],  # indefinite
        [[1.0, 1.0], [1.0, 1.0 + 1e-13]],  # columns at an angle of 3e-7
        [[1.0, 0.0], [0.0, 1e-14]],  # a short column, at a right angle
        [[0.0, 0.0], [0.0, 1.0]],
    ]
    factor, failed = triangular_factor(torch.tensor(grams, dtype=torch.float64))
    assert failed.tolist() == [False, True, True, False, True]
    assert torch.equal(factor[0], torch.eye(2, dtype=torch.float64))


@DTYPES
@given(m=st.integers(1, 12), extra=st.integers(0, 12), data=st.data())
@EXAMPLES
def test_initial_basis_is_the_leading_singular_vectors(
    dtype: torch.dtype, m: int, extra: int, data: st.DataObject
) -> None:
    rank = data.draw(st.integers(1, m))
    values = torch.logspace(0, -3, m, dtype=torch.float64)
    matrix = torch.stack([with_spectrum(values, m + extra, seed) for seed in range(2)])
    basis = initial_basis(matrix.to(dtype), rank)
    assert basis.shape == (2, m, rank)
    assert basis.dtype == dtype
    expected = torch.linalg.svd(matrix, full_matrices=False).U[..., :rank]
    overlap = (basis.double() * expected).sum(dim=-2).abs()
    # An error e in a vector costs e**2 in its overlap; rounding fp32 input moves the smallest by eps * 1e3.
    assert (1 - overlap).max() <= (1e-6 if dtype == torch.float32 else 1e-13)
    assert defect(basis) <= ORTHONORMAL[dtype]


def test_initial_basis_resolves_what_a_single_precision_gram_cannot() -> None:
    values = torch.logspace(0, -5, 8, dtype=torch.float64)
    matrix = with_spectrum(values, 20)
    expected = torch.linalg.svd(matrix, full_matrices=False).U[:, :6]
    angles = 1 - (initial_basis(matrix.float(), 6).double() * expected).sum(dim=0).abs()
    assert angles.max() <= 1e-4


def test_initial_basis_sums_blocks_of_the_long_side(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = randn(2, 6, 23)
    whole = initial_basis(matrix, 3)
    monkeypatch.setattr(orthonormal, "_GRAM_BLOCK", 5)
    blocks = initial_basis(matrix, 3)
    signs = (whole * blocks).sum(dim=-2, keepdim=True).sign()
    torch.testing.assert_close(blocks * signs, whole, atol=1e-12, rtol=0)


@DTYPES
@pytest.mark.parametrize("numerical_rank", [0, 1, 3])
def test_initial_basis_completes_deficient_matrices(dtype: torch.dtype, numerical_rank: int) -> None:
    matrix = (randn(2, 8, numerical_rank) @ randn(2, numerical_rank, 15, seed=1)).to(dtype)
    basis = initial_basis(matrix, 5)
    assert basis.isfinite().all()
    assert defect(basis) <= ORTHONORMAL[dtype]
    residual = matrix - basis @ (basis.mT @ matrix)
    assert residual.abs().max() <= 50 * torch.finfo(dtype).eps


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_initial_basis_isolates_a_matrix_that_is_not_finite(bad: float) -> None:
    matrix = randn(3, 5, 9)
    clean = initial_basis(matrix, 2)
    matrix[1, 0, 0] = bad
    basis = initial_basis(matrix, 2)
    assert torch.equal(basis[[0, 2]], clean[[0, 2]])
    assert defect(basis) <= 1e-14


@pytest.mark.parametrize("rank", [0, -1, 6])
def test_initial_basis_refuses_impossible_ranks(rank: int) -> None:
    with pytest.raises(ValueError, match=rf"rank must lie in 1\.\.5 .* got {rank}"):
        initial_basis(torch.zeros(5, 9), rank)
