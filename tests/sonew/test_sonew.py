"""SONew's update against dense linear algebra in double precision, and its behaviour on cut chains."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rankwise.sonew.banded import banded_factors
from rankwise.sonew.formulas import GRAFTS, graft_direction, graft_ratio
from rankwise.sonew.rule import apply_factors, direction, statistics

F64 = torch.float64
few = settings(deadline=None, max_examples=25, derandomize=True)
seeds = st.integers(0, 2**20)


def random(seed: int, *shape: int, dtype: torch.dtype = F64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64).to(dtype)


def edge_tensors(dense: Tensor, band: int) -> list[Tensor]:
    """Diagonals 1..band of a dense matrix, stored like its main diagonal."""
    n = dense.shape[-1]
    return [
        torch.nn.functional.pad(dense.diagonal(k), (0, k)) if k < n else torch.zeros(n, dtype=dense.dtype)
        for k in range(1, band + 1)
    ]


def covariance(seed: int, n: int, ridge: float = 1e-2) -> Tensor:
    """A random, well-conditioned dense positive definite matrix."""
    samples = random(seed, 2 * n + 3, n)
    return samples.T @ samples / len(samples) + ridge * torch.eye(n, dtype=F64)


def dense_preconditioner(H: Tensor, band: int) -> Tensor:
    """Oracle: the maximum-determinant completion's inverse, one dense regression per row, X = L D L^T."""
    n = H.shape[0]
    L, D = torch.eye(n, dtype=F64), torch.zeros(n, dtype=F64)
    for j in range(n):
        later = list(range(j + 1, min(j + band, n - 1) + 1))
        psi = torch.linalg.solve(H[later][:, later], H[later, j]) if later else H.new_zeros(0)
        L[later, j] = -psi
        D[j] = 1.0 / (H[j, j] - H[j, later] @ psi)
    return L @ torch.diag(D) @ L.T


def clique_preconditioner(H: Tensor, cliques: list[range]) -> Tensor:
    """Second oracle: sum of inverses over the cliques of an interval graph minus those over their separators."""
    X = torch.zeros_like(H)
    for left, right in zip([range(0), *cliques], cliques, strict=False):
        for members, sign in ((right, 1.0), (range(right.start, left.stop), -1.0)):
            index = torch.tensor(list(members), dtype=torch.long)
            X[index[:, None], index] += sign * torch.linalg.inv(H[index][:, index]) if len(index) else 0.0
    return X


def preconditioner(H: Tensor, band: int, tolerance: float = 0.0) -> Tensor:
    """The matrix our direction multiplies by, column by column: the unit vectors are a batch of momenta."""
    n = H.shape[0]
    batch = [x.expand(n, n) for x in (H.diagonal(), *edge_tensors(H, band))]
    return direction(torch.eye(n, dtype=F64), batch[0], batch[1:], eps=0.0, gamma=tolerance).T


def averages(seed: int, steps: int, *shape: int, band: int, beta2: float = 0.9, dtype: torch.dtype = F64):
    """Gradients of a few steps with correlated neighbours, and the statistics after them, bias-corrected."""
    m = d = torch.zeros(shape, dtype=dtype)
    edges = [torch.zeros(shape, dtype=dtype) for _ in range(band)]
    gradients = [random(seed + t, *shape).cumsum(-1).sin().to(dtype) * 0.1 for t in range(steps)]
    for g in gradients:
        m, d, edges = statistics(g, m, d, edges, (0.9, beta2))
    c1, c2 = 1 - 0.9**steps, 1 - beta2**steps
    return gradients, (m / c1, d / c2, [e / c2 for e in edges])


def norm(x: Tensor) -> float:
    return x.norm().item()


# ---------------------------------------------------------------- the preconditioner


@few
@given(seed=seeds, n=st.integers(1, 14), band=st.sampled_from([0, 1, 2, 4, 20]))
def test_direction_is_the_maximum_determinant_completion(seed, n, band):
    H = covariance(seed, n)
    X = preconditioner(H, band)
    cliques = [range(j, j + min(band, n - 1) + 1) for j in range(max(n - band, 1))]
    for oracle in (dense_preconditioner(H, band), clique_preconditioner(H, cliques)):
        assert (X - oracle).abs().max() < 1e-10 * oracle.abs().max()
    inside = (torch.arange(n)[:, None] - torch.arange(n)).abs() <= band
    assert (X[~inside] == 0).all()
    assert (torch.linalg.inv(X) - H)[inside].abs().max() < 1e-10 * H.abs().max()
    assert abs((X @ H).trace().item() - n) < 1e-9
    if band >= n - 1:
        assert (X @ H - torch.eye(n, dtype=F64)).abs().max() < 1e-9


def test_raw_averages_with_scaled_damping_give_the_corrected_direction():
    _, (m, d, e) = averages(3, 6, 4, 9, band=2)
    c1, c2 = 0.4, 0.07
    raw = direction(m * c1, d * c2, [x * c2 for x in e], 1e-4 * c2, 1e-4) * (c2 / c1)
    assert torch.allclose(raw, direction(m, d, e, 1e-4, 1e-4), rtol=1e-10, atol=0)


def test_no_edges_is_the_diagonal_method():
    m, d = random(1, 3, 5), random(2, 3, 5).square()
    expected = m / (d + 0.3)
    assert torch.equal(direction(m, d, [], 0.3), expected)
    zeros = [torch.zeros_like(m)] * 3
    assert torch.allclose(direction(m, d, zeros, 0.3), expected, rtol=1e-15)


@pytest.mark.parametrize("band", [1, 3])
def test_leading_dimensions_and_cut_chains_are_independent(band):
    """A stack of chains, and one chain with zero edges at the cuts, equal the chains one by one."""
    _, (m, d, e) = averages(7, 5, 2, 3, 8, band=band)
    batched = direction(m, d, e, 1e-6, 1e-4)
    stacked = direction(m, d, torch.stack(e), 1e-6, 1e-4)
    one_chain = direction(m.flatten(), d.flatten(), [x.flatten() for x in e], 1e-6, 1e-4).view_as(m)
    for a in range(2):
        for b in range(3):
            alone = direction(m[a, b], d[a, b], [x[a, b] for x in e], 1e-6, 1e-4)
            for other in (batched, stacked, one_chain):
                assert torch.equal(other[a, b], alone)


# ---------------------------------------------------------------- degenerate statistics


@few
@given(seed=seeds, n=st.integers(2, 24), band=st.integers(1, 5), rank=st.integers(1, 4), log_tol=st.integers(-6, -1))
def test_direction_stays_a_descent_direction(seed, n, band, rank, log_tol):
    """X is positive definite after any drops, also for statistics of lower rank than the band."""
    samples = random(seed, rank, n)
    H = samples.T @ samples
    X = preconditioner(H, band, 10.0**log_tol)
    assert torch.isfinite(X).all()
    assert torch.linalg.eigvalsh((X + X.T) / 2)[0] > 0
    m = random(seed + 1, n)
    assert m @ direction(m, H.diagonal(), edge_tensors(H, band), 0.0, 10.0**log_tol) > 0


def pruned_preconditioner(H: Tensor, band: int, tolerance: float) -> Tensor:
    """Oracle of the edge rule: a window is kept if in none of its sub-windows an end is degenerate."""
    n = H.shape[0]

    def end_is_free(a: int, b: int) -> bool:
        inverse = torch.linalg.inv(H[a : b + 1, a : b + 1])
        return all(1 / inverse[i, i] > tolerance * H[j, j] for i, j in ((0, a), (-1, b)))

    def kept(a: int, b: int) -> bool:
        return all(end_is_free(i, j) for i in range(a, b) for j in range(i + 1, b + 1))

    reach = [max(b for b in range(a, min(a + band, n - 1) + 1) if kept(a, b)) for a in range(n)]
    cliques = [range(a, r + 1) for a, r in enumerate(reach) if a == 0 or r > reach[a - 1]]
    return clique_preconditioner(H, cliques)


@few
@given(seed=seeds, n=st.integers(2, 16), band=st.integers(1, 4), tolerance=st.sampled_from([0.05, 0.3, 0.6]))
def test_dropped_windows_leave_the_exact_preconditioner_of_the_kept_edges(seed, n, band, tolerance):
    H = covariance(seed, n)
    oracle = pruned_preconditioner(H, band, tolerance)
    assert (preconditioner(H, band, tolerance) - oracle).abs().max() < 1e-9 * oracle.abs().max()


def test_a_window_is_dropped_with_any_window_inside_it():
    """x1 = x2 + x3/100 + a little noise: given its neighbours x1 is degenerate, x3 is not; mirrored as well."""
    parts = torch.eye(6, dtype=F64)
    x = parts.clone()
    x[1] = parts[2] + 0.01 * parts[3] + 0.003 * parts[1]
    x += 0.1 * parts[[5, 5, 5, 5, 5, 4]] * torch.tensor([1, 0, 0, 0, 1, 1], dtype=F64)[:, None]
    H = x @ x.T
    for matrix in (H, H.flip(0, 1)):
        for band in (2, 3, 4):
            oracle = pruned_preconditioner(matrix, band, 3e-5)
            assert (oracle - dense_preconditioner(matrix, band)).abs().max() > 0.1
            assert (preconditioner(matrix, band, 3e-5) - oracle).abs().max() < 1e-9 * oracle.abs().max()


def test_degenerate_neighbours_are_separated_exactly():
    """Proportional by a power of two: the variance left is exactly 0, and the chain splits there, eps or not."""
    base = random(4, 6, 12, dtype=torch.float32)
    base[:, 6] = base[:, 5] * 4
    d = base.square().mean(0)
    e = [torch.nn.functional.pad((base[:, :-1] * base[:, 1:]).mean(0), (0, 1))]
    m = random(5, 12, dtype=torch.float32)
    apart = torch.cat([direction(m[s], d[s], [e[0][s]], 0.0, 0.0) for s in (slice(0, 6), slice(6, 12))])
    cut = e[0].clone()
    cut[5] = 0
    assert torch.equal(direction(m, d, e, 0.0, 0.0), direction(m, d, [cut], 0.0, 0.0))
    assert torch.allclose(direction(m, d, e, 0.0, 0.0), apart, rtol=1e-5)


@pytest.mark.parametrize("band", [1, 2, 4])
@pytest.mark.parametrize("tolerance", [0.0, 1e-4])
def test_coordinates_that_never_saw_a_gradient(band, tolerance):
    """Zero statistics and no damping: padding and unused rows get 0, and their neighbours ignore them."""
    gradients, (m, d, e) = averages(1, 12, 20, band=band)
    g = torch.stack(gradients)
    g[:, 7:9] = 0
    m, d, e = g[0] * 0, g[0] * 0, [g[0] * 0] * band
    for row in g:
        m, d, e = statistics(row, m, d, e, (0.9, 0.9))
    u = direction(m, d, e, 0.0, tolerance)
    assert torch.isfinite(u).all() and (u[7:9] == 0).all()
    for s in (slice(0, 7), slice(9, 20)):
        alone = direction(m[s], d[s], [x[s] for x in e], 0.0, tolerance)
        assert torch.allclose(u[s], alone, rtol=1e-9)
    assert (direction(torch.ones(4), torch.zeros(4), [torch.zeros(4)] * band, 0.0, tolerance) == 0).all()


@pytest.mark.parametrize("band", [1, 3])
def test_not_a_number_counts_as_dropped(band):
    """An overflown second moment makes its edges inf / inf: its neighbours take their step without it."""
    _, (m, d, e) = averages(1, 12, 20, band=band)
    d[8] = math.inf
    for k, x in enumerate(e, start=1):
        x[[8, 8 - k]] = math.inf
    u = direction(m, d, e, 1e-6, 1e-4)
    assert torch.isfinite(u).all() and u[8] == 0
    far = direction(m[9:], d[9:], [x[9:] for x in e], 1e-6, 1e-4)
    assert torch.allclose(u[9:], far, rtol=1e-9)


@few
@given(seed=seeds, n=st.integers(2, 20), band=st.integers(1, 4), delta=st.sampled_from([1e-3, 0.1]))
def test_relative_damping_bounds_every_conditional_variance(seed, n, band, delta):
    """Even for a rank-one H, and without dropping anything."""
    g = random(seed, n)
    H = g[:, None] * g
    edges = edge_tensors(H, band)
    coefficients, schur = banded_factors(H.diagonal() * (1 + delta), edges, 0.0)
    assert (schur >= delta * H.diagonal() * (1 - 1e-6)).all()
    assert all((c[: n - k] != 0).all() for k, c in enumerate(coefficients[: n - 1], start=1))
    m = random(seed + 1, n)
    u = direction(m, H.diagonal() * (1 + delta), edges, 0.0, 0.0)
    assert torch.equal(u, apply_factors(coefficients, schur, m))


@pytest.mark.parametrize("band", [1, 2, 4])
def test_single_precision_follows_double_precision(band):
    """Well-conditioned statistics to rounding; in the first steps a typical (median) coordinate to a percent."""
    for steps, bound in ((1, 1e-2), (2, 1e-2), (40, 1e-4)):
        g = [random(t, 512, dtype=torch.float32) * 2e-2 for t in range(steps)]
        results = []
        for dtype in (torch.float32, F64):
            m = d = torch.zeros(512, dtype=dtype)
            e = [torch.zeros(512, dtype=dtype)] * band
            for x in g:
                m, d, e = statistics(x.to(dtype), m, d, e, (0.9, 0.99))
            c1, c2 = 1 - 0.9**steps, 1 - 0.99**steps
            results.append(direction(m / c1, d / c2, [x / c2 for x in e], 1e-8, 1e-4).double())
        single, double = results
        relative = (single - double).abs() / double.abs().clamp_min(1e-12)
        assert relative.median() < bound
        if steps == 40:
            assert norm(single - double) < 1e-5 * norm(double)


# ---------------------------------------------------------------- statistics


@few
@given(seed=seeds, n=st.integers(1, 9), band=st.integers(0, 6), steps=st.integers(1, 4))
def test_statistics_are_averages_of_products(seed, n, band, steps):
    """Chains shorter than the band included; entries past the end stay exactly zero."""
    beta1, beta2 = 0.8, 0.95
    m = d = torch.zeros(2, n, dtype=F64)
    e = [torch.zeros(2, n, dtype=F64)] * band
    M, H = torch.zeros(2, n, dtype=F64), torch.zeros(2, n, n, dtype=F64)
    for t in range(steps):
        g = random(seed + t, 2, n)
        m, d, e = statistics(g, m, d, e, (beta1, beta2))
        M = beta1 * M + (1 - beta1) * g
        H = beta2 * H + (1 - beta2) * g[:, :, None] * g[:, None, :]
    assert torch.allclose(m, M, rtol=1e-12, atol=1e-14)
    assert torch.allclose(d, H.diagonal(dim1=1, dim2=2), rtol=1e-12, atol=1e-14)
    assert len(e) == band
    for k, x in enumerate(e, start=1):
        assert x.shape == (2, n)
        assert (x[:, max(n - k, 0) :] == 0).all()
        if k < n:
            assert torch.allclose(x[:, : n - k], H.diagonal(k, dim1=1, dim2=2), rtol=1e-12, atol=1e-14)


def test_inputs_are_not_changed():
    g, m, d = random(1, 3, 6), random(2, 3, 6), random(3, 3, 6).square() + 1
    e = [random(4, 3, 6) * 0.1, random(5, 3, 6) * 0.1]
    before = [x.clone() for x in (g, m, d, *e)]
    statistics(g, m, d, e, (0.9, 0.99))
    direction(m, d, e)
    for kind in GRAFTS:
        graft, _ = graft_direction(kind, g, m, d, d, rms=d, grad_norm=g.norm())
        if graft is not None:
            graft.zero_()
    assert all(torch.equal(a, b) for a, b in zip(before, (g, m, d, *e), strict=True))


# ---------------------------------------------------------------- cut chains


def embedded(x: Tensor, lo: int, hi: int, halo: int, width: int) -> Tensor:
    """The shard [lo, hi) with `halo` elements on either side in a zero row of `width`, chain ends zero."""
    row = torch.zeros(width, dtype=x.dtype)
    for target, i in enumerate(range(lo - halo, hi + halo)):
        if 0 <= i < len(x):
            row[target] = x[i]
    return row


def sharded(gradients: list[Tensor], band: int, halo: int, borders: list[int], eps: float, tolerance: float):
    """Directions of all steps, each shard evolving its own halo state from the halo of the gradients."""
    n = len(gradients[0])
    pieces = list(zip(borders, borders[1:], strict=False))
    width = max(hi - lo for lo, hi in pieces) + 2 * halo + 3
    shape = (len(pieces), width)
    m = d = torch.zeros(shape, dtype=gradients[0].dtype)
    e = [torch.zeros(shape, dtype=gradients[0].dtype)] * band
    outputs = []
    for step, g in enumerate(gradients, start=1):
        rows = torch.stack([embedded(g, lo, hi, halo, width) for lo, hi in pieces])
        m, d, e = statistics(rows, m, d, e, (0.9, 0.95))
        c1, c2 = 1 - 0.9**step, 1 - 0.95**step
        u = direction(m / c1, d / c2, [x / c2 for x in e], eps, tolerance)
        fields = [torch.cat([x[r, halo : halo + hi - lo] for r, (lo, hi) in enumerate(pieces)]) for x in (m, d, *e, u)]
        assert all(len(f) == n for f in fields)
        outputs.append(fields)
    return outputs


@few
@given(data=st.data())
def test_shards_with_a_halo_equal_the_whole_chain(data):
    """Bit for bit, in both precisions, with dropped edges: cuts anywhere, shards shorter than the band included."""
    band = data.draw(st.integers(0, 5), "band")
    n = data.draw(st.integers(1, 40), "n")
    cuts = data.draw(st.lists(st.integers(0, n), max_size=6), "cuts")
    dtype = data.draw(st.sampled_from([torch.float32, F64]), "dtype")
    eps, tolerance = data.draw(st.sampled_from([(1e-8, 1e-4), (1e-3, 0.0), (0.0, 1e-3), (1e-6, 0.3)]), "guards")
    seed = data.draw(seeds, "seed")
    gradients = [random(seed + t, n, dtype=dtype) * 0.1 for t in range(4)]
    whole = sharded(gradients, band, 0, [0, n], eps, tolerance)
    pieces = sharded(gradients, band, band, sorted({0, n, *cuts}), eps, tolerance)
    for expected, got in zip(whole, pieces, strict=True):
        for x, y in zip(expected, got, strict=True):
            assert torch.isfinite(x).all()
            assert torch.equal(x, y)


@pytest.mark.parametrize("band", [1, 2, 4])
@pytest.mark.parametrize("tolerance", [0.0, 1e-4])
def test_whatever_lies_beyond_the_halo_is_ignored(band, tolerance):
    """Stored edges that leave the halo may hold anything: u needs the elements i - b .. i + b only."""
    _, (m, d, e) = averages(9, 8, 30, band=band)
    whole = direction(m, d, e, 1e-8, tolerance)
    lo, hi = 11, 13
    window = slice(lo - band, hi + band)
    junk = torch.full((7,), 1e3, dtype=F64)
    pad = [torch.cat([junk, x[window], junk]) for x in (m, d, *e)]
    got = direction(pad[0], pad[1], pad[2:], 1e-8, tolerance)[7 + band : 7 + band + hi - lo]
    assert torch.equal(got, whole[lo:hi])


@pytest.mark.parametrize("band", [1, 2, 4])
def test_a_shorter_halo_is_not_enough(band):
    gradients = [random(t, 24) for t in range(8)]
    whole = sharded(gradients, band, 0, [0, 24], 1e-4, 0.0)[-1][-1]
    short = sharded(gradients, band, band - 1, [0, 7, 15, 24], 1e-4, 0.0)[-1][-1]
    assert norm(short - whole) > 1e-2 * norm(whole)


# ---------------------------------------------------------------- damping and grafting


@pytest.mark.parametrize("kind", [k for k in GRAFTS if k != "none"])
@pytest.mark.parametrize("band", [0, 1, 3])
def test_grafted_update_has_the_norm_of_the_graft(kind, band):
    gradients, (m, d, e) = averages(2, 5, 6, 7, band=band)
    g = gradients[-1]
    graft, _ = graft_direction(kind, g, m, d * 0.4, d, rms=d * 0, grad_norm=g.norm())
    u = direction(m, d, e)
    grafted = u * graft_ratio(graft.square().sum(), u.square().sum())
    assert abs(norm(grafted) / norm(graft) - 1) < 1e-12


def test_graft_directions():
    g, m, d = random(1, 4, 5), random(2, 4, 5), random(3, 4, 5).square()
    c2, eps = 0.3, 1e-3
    results = {k: graft_direction(k, g, m, d * c2, d, eps, rms=d, grad_norm=g.norm(), beta2=0.8) for k in GRAFTS}
    assert torch.allclose(results["adam"][0], m / (d.sqrt() + eps))
    assert torch.allclose(results["adam_official"][0], m / ((d * c2).sqrt() + 1e-8))
    assert torch.equal(results["sgd"][0], g) and torch.equal(results["momentum"][0], m)
    assert results["none"][0] is None
    unit = g / norm(g)
    q = 0.8 * d + 0.2 * unit**2
    assert torch.allclose(results["rmsprop"][1], q)
    assert torch.allclose(results["rmsprop"][0], unit / (q.sqrt() + eps))
    assert all(results[k][1] is d for k in GRAFTS if k != "rmsprop")


@pytest.mark.parametrize("kind", ["adam", "adam_official", "rmsprop"])
def test_zero_gradient_leaves_the_weights(kind):
    """The published code makes 0 / 0 of it."""
    zero = torch.zeros(3, 4)
    graft, q = graft_direction(kind, zero, zero, zero, zero, rms=zero, grad_norm=zero.norm())
    for eps in (1e-8, 0.0):
        u = direction(zero, zero, [zero], eps)
        step = u * graft_ratio(graft.square().sum(), u.square().sum())
        assert torch.equal(step, zero) and torch.equal(q, zero)
    # A graft of some length cannot revive an update of length zero.
    assert graft_ratio(torch.tensor(2.0), torch.tensor(0.0)) == 0
    assert torch.allclose(graft_ratio(torch.tensor([8.0, 0.0]), torch.tensor([2.0, 1.0])), torch.tensor([2.0, 0.0]))


# ---------------------------------------------------------------- arguments


def test_an_unknown_graft_is_explained():
    x = torch.ones(3, 4)
    with pytest.raises(ValueError, match=r"kind='adamw' must be one of adam, adam_official"):
        graft_direction("adamw", x, x, x, x)
