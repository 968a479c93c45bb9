"""LDAdam's rule against the published recursion, written out literally, and against its invariances."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from published_ldadam import Step, published
from torch import Tensor

from rankwise.ldadam import formulas as low_rank_formulas
from rankwise.ldadam.formulas import (
    basis_weights,
    effective_rank,
    moment_scales,
    next_basis,
    projects_right,
    side_normalized,
    try_next_basis,
    worth_projecting,
)
from rankwise.ldadam.low_rank_products import low_rank_rows
from rankwise.ldadam.rule import Subspace, ldadam_step, low_rank_moments, subspace_step
from rankwise.updates.orthonormal import householder_qr, initial_basis

BETAS, RHO, EPS, LR = (0.908, 0.99), 0.908, 1e-8, 1e-2
K = BETAS[0] / (1 - BETAS[0])
EXAMPLES = settings(deadline=None, max_examples=12, derandomize=True)
SHAPES = {"m": st.integers(1, 12), "extra": st.integers(0, 12), "r": st.integers(1, 12), "seed": st.integers(0, 99)}


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def gradients(m: int, n: int, steps: int = 8, seed: int = 0) -> list[Tensor]:
    """A slowly turning signal of low rank, with noise."""
    left, right = randn(m, 3, seed=seed), randn(3, n, seed=seed + 1000)
    scale = torch.tensor([3.0, 2.0, 1.0], dtype=torch.float64)
    drift = [0.1 * randn(m, 3, seed=seed + 2000 + t) for t in range(steps)]
    noise = [0.3 * randn(m, n, seed=seed + 3000 + t) for t in range(steps)]
    return [((left + sum(drift[:t])) * scale) @ right / 3 + noise[t] for t in range(steps)]


def run(
    gs: list[Tensor],
    rank: int,
    W: Tensor | None = None,
    feedback: bool = True,
    betas: tuple[float, float] = BETAS,
    rho: float = RHO,
    eps: float = EPS,
    wd: float = 0.0,
) -> list[Step]:
    """The rule, on (..., m, n) matrices."""
    W = torch.zeros_like(gs[0]) if W is None else W
    *lead, m, n = W.shape
    F = torch.zeros_like(W)
    state = Subspace(*(W.new_zeros(*lead, *shape) for shape in ((m, rank), (rank, n), (rank, n))))
    numbers = {"lr": LR, "betas": betas, "rho": rho, "eps": eps, "weight_decay": wd, "error_feedback": feedback}
    history = []
    for step, G in enumerate(gs, start=1):
        W, F, state = ldadam_step(W, G, F, state, step, **numbers)
        E = F - betas[0] / (1 - betas[0]) * (state.U @ state.M) if feedback else F
        history.append(Step(W, E, *state))
    return history


def distance(ours: list[Step], theirs: list[Step]) -> float:
    """Largest difference of the parameters, relative to the largest parameter change."""
    motion = max((s.W - theirs[0].W).abs().max().item() for s in theirs) + LR
    return max((a.W - b.W).abs().max().item() for a, b in zip(ours, theirs, strict=True)) / motion


def defect(basis: Tensor) -> float:
    return (basis.mT @ basis - torch.eye(basis.shape[-1], dtype=basis.dtype)).abs().max().item()


def dims(m: int, extra: int, r: int) -> tuple[int, int, int]:
    return m, m + extra, min(m, r)


# --- sides, ranks, weights ------------------------------------------------------------------------------------------


def test_side_rule() -> None:
    assert projects_right(5, 4)
    assert not projects_right(4, 5)
    assert not projects_right(4, 4), "square goes left"
    tall = randn(2, 5, 4)
    assert side_normalized(tall).data_ptr() == tall.data_ptr()
    assert torch.equal(side_normalized(tall), tall.mT)
    square = randn(4, 4)
    assert side_normalized(square) is square


def test_effective_rank() -> None:
    assert [effective_rank(8, 5, 9), effective_rank(8, 9, 5), effective_rank(2, 9, 5)] == [5, 5, 2]
    with pytest.raises(ValueError, match="rank must be a positive integer, got 0"):
        effective_rank(0, 4, 4)


@given(
    rows=st.integers(1, 60),
    cols=st.integers(1, 60),
    rank=st.integers(1, 60),
    feedback=st.booleans(),
    cost=st.sampled_from([0.5, 1.0]),
)
@EXAMPLES
def test_worth_projecting_counts_states(rows: int, cols: int, rank: int, feedback: bool, cost: float) -> None:
    W = side_normalized(torch.zeros(rows, cols))
    r = effective_rank(rank, rows, cols)
    U, M = initial_basis(W, r), torch.zeros(r, W.shape[1])
    states = U.numel() + 2 * M.numel() + (cost * W.numel() if feedback else 0)
    assert worth_projecting(rank, rows, cols, feedback, cost) == (states < 2 * W.numel())


def test_worth_projecting_square_boundary() -> None:
    """With full-precision error feedback a square matrix pays off below a third of its side, without below two."""
    assert worth_projecting(29, 90, 90, error_feedback=True)
    assert not worth_projecting(30, 90, 90, error_feedback=True)
    assert worth_projecting(59, 90, 90, error_feedback=False)
    assert not worth_projecting(60, 90, 90, error_feedback=False)
    assert worth_projecting(44, 90, 90, error_feedback=True, error_cost=0.5)


@pytest.mark.parametrize("feedback", [True, False])
@pytest.mark.parametrize("step", [2, 3, 50])
def test_basis_weights_reproduce_the_tracked_matrix(feedback: bool, step: int) -> None:
    A, S = randn(4, 6), randn(4, 6, seed=1)
    B = 0.7 * S / (1 - 0.9 ** (step - 1)) + 0.3 * A
    matrix = A + 0.9 / (1 - 0.9) * S if feedback else A
    weight_matrix, weight_momentum = basis_weights(step, 0.9, 0.7, feedback)
    torch.testing.assert_close(weight_matrix * matrix + weight_momentum * S, B, atol=1e-13, rtol=0)


# --- the oracles ----------------------------------------------------------------------------------------------------


@given(**SHAPES)
@EXAMPLES
def test_o1_basis_is_orthonormal_in_single_precision(m: int, extra: int, r: int, seed: int) -> None:
    m, n, r = dims(m, extra, r)
    for step in run([g.float() for g in gradients(m, n, seed=seed)], r):
        assert defect(step.U) < 2e-6


@pytest.mark.parametrize("scale", [1e-6, 3.0, 1e6])
def test_o11_gradient_scale_does_not_matter(scale: float) -> None:
    gs = gradients(8, 14)
    base, scaled = run(gs, 3, eps=0.0), run([scale * g for g in gs], 3, eps=0.0)
    assert distance(scaled, base) < 1e-10
    torch.testing.assert_close(scaled[-1].E / scale, base[-1].E, atol=1e-10, rtol=0)


@pytest.mark.parametrize("feedback", [True, False])
@given(**SHAPES, rho=st.sampled_from([0.1, 0.5, 0.908]), beta1=st.sampled_from([0.0, 0.75, 0.908]))
@EXAMPLES
def test_o16_single_buffer_equals_published_recursion(
    feedback: bool, m: int, extra: int, r: int, seed: int, rho: float, beta1: float
) -> None:
    m, n, r = dims(m, extra, r)
    gs, W, betas = gradients(m, n, seed=seed), randn(m, n, seed=seed + 7), (beta1, 0.99)
    ours = run(gs, r, W, feedback, betas, rho, 1e-6, 0.1)
    theirs = published(gs, r, W, [betas] * len(gs), LR, rho, 1e-6, 0.1, feedback)
    assert distance(ours, theirs) < 1e-9
    assert max((a.E - b.E).abs().max().item() for a, b in zip(ours, theirs, strict=True)) < 1e-8


def test_o19_negative_variances_take_the_absolute_value() -> None:
    M = torch.tensor([[1.0], [3.0]], dtype=torch.float64)
    V = torch.tensor([[0.1], [0.2]], dtype=torch.float64)
    R = torch.tensor([[0.8, -0.6], [0.6, 0.8]], dtype=torch.float64)
    bias1, bias2 = 1 - BETAS[0], 1 - BETAS[1]
    bracket = R**2 @ (V / bias2 - (M / bias1) ** 2) + (R @ M / bias1) ** 2
    assert bracket.min() < 0 < bracket.max()
    _, V_new, _ = low_rank_moments(torch.zeros_like(M), R, M, V, 2, BETAS, EPS, error_feedback=False)
    torch.testing.assert_close(V_new, BETAS[1] * bias2 * bracket.abs())


# --- numerics -------------------------------------------------------------------------------------------------------


def graded(condition: float, m: int = 32, n: int = 80, seed: int = 0) -> Tensor:
    values = torch.logspace(0, -torch.tensor(condition).log10().item(), m, dtype=torch.float64)
    return (householder_qr(randn(m, m, seed=seed)) * values) @ householder_qr(randn(n, m, seed=seed + 1)).mT


@pytest.mark.parametrize("rank", [1, 8, 32])
@pytest.mark.parametrize("start", ["cold", "warm"])
def test_graded_spectra_in_single_precision(start: str, rank: int) -> None:
    """Condition 4e7, which one-pass Cholesky QR of B B^T U cannot survive from a cold basis."""
    C = graded(4e7)
    cold = householder_qr(randn(32, rank, seed=3))
    U = cold if start == "cold" else initial_basis(C + 1e-3 * graded(4e7, seed=9), rank)
    M = torch.zeros(rank, 80, dtype=torch.float64)
    basis = next_basis(C.float(), U.float(), M.float(), 1.0, 0.0)
    assert defect(basis) < 2e-6
    X = householder_qr(C.mT @ U)
    exact = householder_qr(C @ X)
    # Singular values below 1e-6 of the first are rounding of the fp32 input: compare the directions above.
    known = min(rank, 8)
    assert ((basis[:, :known].double() - exact[:, :known]).abs().max()) < 2e-5


def test_conditioning_the_coordinates_first_matters() -> None:
    """The same iteration without the intermediate orthonormalisation loses the basis in single precision."""
    C, U, M = graded(4e7, 8).float(), householder_qr(randn(8, 6, seed=3)).float(), torch.zeros(6, 80)
    C64, U64 = C.double(), U.double()
    exact = householder_qr(C64 @ householder_qr(C64.mT @ U64))
    with_orth = (next_basis(C, U, M, 1.0, 0.0).double() - exact).abs().max()
    without = (householder_qr(C @ (C.mT @ U)).double() - exact).abs().max()
    assert with_orth < 2e-3
    assert without > 10 * with_orth


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rank", [1, 4, 9])
@pytest.mark.parametrize("numerical_rank", [0, 1, 2])
@pytest.mark.parametrize("feedback", [True, False])
def test_deficient_gradients_stay_finite_and_orthonormal(
    dtype: torch.dtype, rank: int, numerical_rank: int, feedback: bool
) -> None:
    gs = [(randn(9, numerical_rank, seed=t) @ randn(numerical_rank, 14, seed=50 + t)).to(dtype) for t in range(6)]
    for step in run(gs, rank, feedback=feedback):
        assert all(x.isfinite().all() for x in step)
        assert defect(step.U) < (2e-6 if dtype == torch.float32 else 1e-13)
        if numerical_rank == 0:
            assert not step.W.any()
            assert not step.E.any()


def test_gradient_that_dies_and_comes_back() -> None:
    gs = [g.float() for g in gradients(6, 11, 9)]
    for dead in (0, 4, 5):
        gs[dead] = torch.zeros(6, 11)
    for feedback in (True, False):
        for step in run(gs, 6, feedback=feedback):
            assert all(x.isfinite().all() for x in step)
            assert defect(step.U) < 2e-6


def test_failure_of_the_coordinates_alone_is_noticed() -> None:
    """Here the image of unusable coordinates is well conditioned: an orthonormal basis, but a wrong one."""
    worst = 0.0
    for seed in range(4, 12):
        C, U = graded(1e5, 8, 20, seed), householder_qr(randn(8, 8, seed=seed + 1))
        exact = householder_qr(C @ householder_qr(C.mT @ U))
        basis = next_basis(C.float(), U.float(), torch.zeros(8, 20), 1.0, 0.0)
        worst = max(worst, (basis.double() - exact).abs().max().item())
    assert worst < 2e-2


def batch_with_one_dead_matrix() -> tuple[Tensor, Tensor, Tensor]:
    C, U, M = randn(3, 6, 11), householder_qr(randn(3, 6, 3, seed=1)), randn(3, 3, 11, seed=2)
    C[1], M[1] = 0, 0
    return C, U, M


def test_fallback_touches_only_the_failed_matrix() -> None:
    C, U, M = batch_with_one_dead_matrix()
    basis, (tried, failed) = next_basis(C, U, M, 0.3, 0.4), try_next_basis(C, U, M, 0.3, 0.4)
    assert failed.tolist() == [False, True, False]
    assert torch.equal(basis[[0, 2]], tried[[0, 2]])
    assert defect(basis) < 1e-14
    bad = tried[1]
    assert not bad.isfinite().all() or defect(bad) > 1e-3, "the case must need the fallback"


def test_fallback_without_batch_dimension() -> None:
    C, U, M = (x[1] for x in batch_with_one_dead_matrix())
    assert defect(next_basis(C, U, M, 0.3, 0.4)) < 1e-14


def test_householder_runs_only_when_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(low_rank_formulas, "householder_qr", lambda y: calls.append(1) or householder_qr(y))
    next_basis(randn(2, 6, 11), householder_qr(randn(2, 6, 3)), randn(2, 3, 11), 0.3, 0.4)
    assert not calls
    next_basis(*batch_with_one_dead_matrix(), 0.3, 0.4)
    assert len(calls) == 2


def test_batched_equals_one_by_one() -> None:
    runs = [gradients(6, 11, seed=s) for s in range(4)]
    batch = run([torch.stack(gs).view(2, 2, 6, 11) for gs in zip(*runs, strict=True)], 3)[-1]
    for k, gs in enumerate(runs):
        torch.testing.assert_close(batch.W[k // 2, k % 2], run(gs, 3)[-1].W, atol=1e-12, rtol=0)


def test_nan_stays_in_its_own_matrix() -> None:
    gs = [torch.stack([g, g.flip(0)]) for g in gradients(6, 11, 4)]
    clean = run(gs, 3)[-1]
    for poisoned_step in (0, 2):
        bad = [g.clone() for g in gs]
        bad[poisoned_step][0, 2, 3] = float("nan")
        step = run(bad, 3)[-1]
        assert step.W[0].isnan().any()
        torch.testing.assert_close(step.W[1], clean.W[1], atol=1e-13, rtol=0)


@pytest.mark.parametrize("step", [1, 4])
def test_inputs_are_left_alone(step: int) -> None:
    inputs = [randn(2, 6, 11), householder_qr(randn(2, 6, 3)), randn(2, 3, 11), randn(2, 3, 11).square()]
    copies = [x.clone() for x in inputs]
    subspace_step(*inputs, step, BETAS, RHO, EPS, True)
    assert all(torch.equal(a, b) for a, b in zip(inputs, copies, strict=True))


# --- shards ------------------------------------------------------------------------------------------------------


@given(rows=st.integers(1, 9), cols=st.integers(1, 9), r=st.integers(1, 3), data=st.data())
@settings(deadline=None, max_examples=60, derandomize=True)
def test_low_rank_rows_is_a_slice_of_the_product(rows: int, cols: int, r: int, data: st.DataObject) -> None:
    right, numel = projects_right(rows, cols), rows * cols
    start = data.draw(st.integers(0, numel))
    end = data.draw(st.integers(start, numel))
    m, n = sorted((rows, cols))
    U, X = randn(m, r), randn(2, r, n, seed=1)
    full = side_normalized(torch.zeros(2, rows, cols)).shape
    product = U @ X
    assert product.shape == full
    expected = (product.mT if right else product).reshape(2, numel)[:, start:end]
    piece = low_rank_rows(U, X, start, end, rows, cols, right)
    assert piece.shape == (2, end - start)
    torch.testing.assert_close(piece, expected, atol=1e-14, rtol=0)
    torch.testing.assert_close(low_rank_rows(U, X[0], start, end, rows, cols, right), expected[0], atol=1e-14, rtol=0)


@pytest.mark.parametrize("rows, cols", [(6, 10), (10, 6), (7, 7)])
@pytest.mark.parametrize("part", [(0.0, 0.0), (0.25, 0.27), (0.3, 0.9), (1.0, 1.0)])
def test_low_rank_rows_computes_only_the_rows_it_touches(rows: int, cols: int, part: tuple[float, float]) -> None:
    start, end = (int(p * rows * cols) for p in part)
    m, n = sorted((rows, cols))
    piece = low_rank_rows(randn(m, 2), randn(2, n), start, end, rows, cols, projects_right(rows, cols))
    touched = len({i // cols for i in range(start, end)})
    assert piece.untyped_storage().nbytes() <= max(touched, start % cols > 0) * cols * 8


# --- messages -------------------------------------------------------------------------------------------------------


def test_bad_arguments_say_what_to_do() -> None:
    C, U, M = randn(4, 6), randn(4, 2), randn(2, 6)
    with pytest.raises(ValueError, match=r"side-normalised \(m <= n\), got 6 x 4; pass side_normalized"):
        next_basis(C.mT, U, M, 1.0, 0.0)
    with pytest.raises(ValueError, match=r"U and M must be \(\.\.\., 4, r\) and \(\.\.\., r, 6\)"):
        subspace_step(C, U, M.mT, M, 2, BETAS, RHO, EPS, True)
    with pytest.raises(ValueError, match="step must be at least 2 .* got 1; use initial_basis"):
        basis_weights(1, 0.9, 0.9, True)
    with pytest.raises(ValueError, match="step must be at least 1, got 0"):
        moment_scales(0, BETAS, True, None)
    with pytest.raises(ValueError, match="0 <= start <= end <= 24, got 3 and 25"):
        low_rank_rows(U, M, 3, 25, 4, 6, False)
    with pytest.raises(ValueError, match="factors must be .* 6 x 4 parameter with right=False"):
        low_rank_rows(U, M, 0, 24, 6, 4, False)


@pytest.mark.parametrize("feedback", [True, False])
def test_weights_of_tensors_of_steps(feedback: bool) -> None:
    """Also where the momentum's weight is a small difference."""
    steps, written = [2, 3, 500], [0.9, 0.8, 0.908]
    tensors = torch.tensor(steps), torch.tensor(written, dtype=torch.float64)
    of_matrix, of_momentum = basis_weights(tensors[0], 0.908, 0.908, feedback, tensors[1])
    for index, (step, beta1) in enumerate(zip(steps, written, strict=True)):
        wanted = basis_weights(step, 0.908, 0.908, feedback, beta1)
        assert of_matrix == wanted[0]
        assert float(of_momentum[index]) == pytest.approx(wanted[1], rel=0, abs=1e-14)
