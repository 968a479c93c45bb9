"""SONew's passes for CPUs against the pure functions in fp64, run by run."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rankwise.sonew import native as native_sonew
from rankwise.sonew import rule as sonew
from rankwise.sonew.chain_runs import ChainRun, Margins
from rankwise.sonew.formulas import graft_direction
from rankwise.sonew.native import sonew_directions
from rankwise.updates.adamw import bias_corrections

BETAS, EPS, GAMMA, GRAFT_EPS = (0.9, 0.99), 1e-6, 0.05, 1e-6


pytestmark = pytest.mark.compiled


@pytest.fixture(autouse=True, scope="module")
def _small_blocks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native_sonew, "_TILE", 7)
        yield


def _problem(rows: int, columns: int, band: int, by_row: bool, seed: int) -> tuple[list[Tensor], list[Tensor]]:
    """A gradient and statistics as a few steps leave them, in fp64."""
    generator = torch.Generator().manual_seed(seed)
    shape = (rows, columns) if by_row else (rows * columns,)
    # Statistics of very different sizes meet in one window.
    scale = 10.0 ** (-3.0 * torch.rand(shape, dtype=torch.float64, generator=generator))
    fields = [torch.zeros(shape, dtype=torch.float64) for _ in range(2 + band)]
    for _ in range(3):
        grad = scale * torch.randn(shape, dtype=torch.float64, generator=generator)
        momentum, diagonal, edges = sonew.statistics(grad, fields[0], fields[1], fields[2:], BETAS)
        fields = [momentum, diagonal, *edges]
    grad = scale * torch.randn(shape, dtype=torch.float64, generator=generator)
    grad.view(-1)[::5] = 0.0
    return [grad, *fields], fields


def _expected(fields: list[Tensor], graft: str, step: int) -> tuple[list[Tensor], Tensor, Tensor | None]:
    grad, momentum, diagonal, *edges = fields
    momentum, diagonal, edges = sonew.statistics(grad, momentum, diagonal, edges, BETAS)
    c1, c2 = bias_corrections(BETAS, step)
    hats = [edge / c2 for edge in edges]
    direction = sonew.direction(momentum / c1, diagonal / c2, hats, eps=EPS, gamma=GAMMA)
    taken, _ = graft_direction(graft, grad, momentum / c1, diagonal, diagonal / c2, eps=GRAFT_EPS)
    return [momentum, diagonal, *edges], direction, taken


def _margins(fields: list[Tensor], start: int, end: int, band: int) -> Margins:
    """The neighbours in flat order, zeros past the parameter's ends."""
    padded = [torch.cat([field.new_zeros(band), field.reshape(-1), field.new_zeros(band)]) for field in fields]
    left = torch.stack([field[start : start + band] for field in padded])
    right = torch.stack([field[end + band : end + 2 * band] for field in padded])
    return Margins(left, right)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("by_row", [True, False])
@pytest.mark.parametrize("band", [0, 1, 2, 4])
@settings(deadline=None, max_examples=25)
@given(
    rows=st.integers(1, 5),
    columns=st.integers(1, 12),
    cuts=st.lists(st.floats(0.0, 1.0), max_size=3),
    graft=st.sampled_from(["adam", "adam_official", "sgd", "momentum", "none"]),
    seed=st.integers(0, 2**16),
)
def test_runs_follow_the_whole_parameter(band, by_row, dtype, rows, columns, cuts, graft, seed) -> None:
    fields, _ = _problem(rows, columns, band, by_row, seed)
    states, direction, taken = _expected(fields, graft, step=4)
    numel = rows * columns
    edges = sorted({0, numel, *(int(cut * numel) for cut in cuts)})
    chain = columns if by_row else None
    runs, margins = [], []
    for start, end in pairwise(edges):
        runs.append(ChainRun(start, chain))
        margins.append(None if (start, end) == (0, numel) else _margins(fields, start, end, band))
        if margins[-1] is not None:
            margins[-1] = Margins(*(side.to(dtype) for side in margins[-1]))
    lengths = [end - start for start, end in pairwise(edges)]
    pieces = [[part.to(dtype) for part in field.reshape(-1).split(lengths)] for field in fields]
    pieces = [[part.clone() for part in parts] for parts in pieces]
    kept = [part.clone() for part in pieces[0]]
    out = [torch.empty_like(part) for part in pieces[0]]
    options = {"betas": BETAS, "eps": EPS, "gamma": GAMMA, "step": 4, "graft": graft, "graft_eps": GRAFT_EPS}
    squares, graft_squares = sonew_directions(runs, *pieces[:3], pieces[3:], margins, out=out, **options)

    assert all(torch.equal(a, b) for a, b in zip(pieces[0], kept, strict=True))
    close = {"rtol": 1e-9, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 2e-3, "atol": 2e-3}
    for parts, state in zip(pieces[1:], states, strict=True):
        torch.testing.assert_close(torch.cat(parts).double(), state.reshape(-1), rtol=1e-5, atol=1e-7)
    size = float(direction.abs().max())
    torch.testing.assert_close(torch.cat(out).double() / size, direction.reshape(-1) / size, **close)
    assert squares.dtype == graft_squares.dtype == torch.float64
    exact = torch.stack([part.double().square().sum() for part in out])
    torch.testing.assert_close(squares, exact, rtol=1e-5, atol=1e-30)
    grafted = torch.zeros(()) if taken is None else taken.square().sum()
    torch.testing.assert_close(graft_squares.sum(), grafted.double(), rtol=1e-4, atol=1e-9)


def test_an_element_without_a_gradient_stays_where_it_is() -> None:
    """Nothing divides by zero where there is no damping either."""
    fields = [[torch.zeros(9)] for _ in range(5)]
    fields[0][0][4:] = 1.0
    out = [torch.empty(9)]
    options = {"betas": BETAS, "eps": 0.0, "gamma": GAMMA, "step": 1, "graft": "adam", "graft_eps": 1e-8}
    squares, _ = sonew_directions([ChainRun(0, None)], *fields[:3], fields[3:], [None], out=out, **options)
    assert bool(out[0].isfinite().all()) and float(out[0][:3].abs().max()) == 0.0 and float(squares) > 0.0


@pytest.mark.parametrize("graft", ["adam", "adam_official", "momentum"])
@pytest.mark.parametrize("band", [1, 2, 4])
def test_the_bits_are_those_of_the_pure_functions(band: int, graft: str) -> None:
    """A layout may have one rank take the one form and another rank the other."""
    fields = [field.float() for field in _problem(6, 11, band, True, seed=band)[0]]
    c1, c2 = bias_corrections(BETAS, 4)
    momentum, diagonal, edges = sonew.statistics(fields[0], fields[1], fields[2], fields[3:], BETAS)
    direction = sonew.direction(momentum, diagonal, edges, eps=EPS * c2, gamma=GAMMA) * (c2 / c1)
    taken, _ = graft_direction(graft, fields[0], momentum / c1, diagonal, diagonal / c2, eps=GRAFT_EPS)
    lists = [[field.reshape(-1).clone()] for field in fields]
    out = [torch.empty_like(lists[0][0])]
    options = {"betas": BETAS, "eps": EPS, "gamma": GAMMA, "step": 4, "graft": graft, "graft_eps": GRAFT_EPS}
    _, graft_squares = sonew_directions([ChainRun(0, 11)], *lists[:3], lists[3:], [None], out=out, **options)
    for (got,), expected in zip([out, *lists[1:]], [direction, momentum, diagonal, *edges], strict=True):
        assert torch.equal(got, expected.reshape(-1))
    assert taken is not None
    # Torch's own root is not always the nearest number; the compiler's is.
    torch.testing.assert_close(graft_squares[0], taken.double().square().sum(), rtol=1e-7, atol=0.0)


@pytest.mark.parametrize("constant", [False, True])
@pytest.mark.parametrize("eps", [0.0, 1e-8])
@pytest.mark.parametrize("band", [0, 1, 2, 3])
def test_what_is_degenerate_is_dropped_as_by_the_pure_functions(band, eps, constant) -> None:
    """No edge jumps over an element without a gradient where nothing is damped; no NaN in one that is dropped."""
    grad = torch.randn(40, generator=torch.Generator().manual_seed(band))
    if constant:
        grad.fill_(0.5)
    grad[10:25:3] = 0.0
    zeros = [torch.zeros(40) for _ in range(2 + band)]
    momentum, diagonal, edges = sonew.statistics(grad, zeros[0], zeros[1], zeros[2:], BETAS)
    c1, c2 = bias_corrections(BETAS, 1)
    expected = sonew.direction(momentum, diagonal, edges, eps=eps * c2, gamma=0.0) * (c2 / c1)
    out = [torch.empty(40)]
    options = {"betas": BETAS, "eps": eps, "gamma": 0.0, "step": 1, "graft": "none", "graft_eps": 1e-8}
    lists = [[field] for field in zeros]
    sonew_directions([ChainRun(0, None)], [grad], *lists[:2], lists[2:], [None], out=out, **options)
    assert bool(expected.isfinite().all()) and torch.equal(out[0], expected)


@pytest.mark.parametrize("by_row", [True, False])
@pytest.mark.parametrize("band", [0, 1, 2, 4])
def test_pieces_tiles_and_cuts_leave_no_trace(band: int, by_row: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tile is gone through in pieces that fit the first-level cache; here there are several of both."""
    monkeypatch.setattr(native_sonew, "_TILE", 700)
    numel, cuts = 5 * 401, (0, 137, 1440, 1441, 5 * 401)
    fields = [field.float() for field in _problem(5, 401, band, by_row, seed=band)[0]]
    c1, c2 = bias_corrections(BETAS, 4)
    momentum, diagonal, edges = sonew.statistics(fields[0], fields[1], fields[2], fields[3:], BETAS)
    direction = sonew.direction(momentum, diagonal, edges, eps=EPS * c2, gamma=GAMMA) * (c2 / c1)
    graft = (momentum / c1 / ((diagonal / c2).sqrt() + GRAFT_EPS)).double().square().sum()
    for ends in ((0, numel), cuts):
        places = list(pairwise(ends))
        margins = [None if len(places) == 1 else _margins(fields, *place, band) for place in places]
        lists = [[field.reshape(-1)[slice(*place)].clone() for place in places] for field in fields]
        out = [torch.empty_like(part) for part in lists[0]]
        options = {"betas": BETAS, "eps": EPS, "gamma": GAMMA, "step": 4, "graft": "adam", "graft_eps": GRAFT_EPS}
        runs = [ChainRun(start, 401 if by_row else None) for start, _ in places]
        squares, graft_squares = sonew_directions(runs, *lists[:3], lists[3:], margins, out=out, **options)
        for parts, expected in zip([out, *lists[1:]], [direction, momentum, diagonal, *edges], strict=True):
            assert torch.equal(torch.cat(parts), expected.reshape(-1))
        torch.testing.assert_close(squares.sum(), direction.double().square().sum(), rtol=1e-12, atol=0.0)
        torch.testing.assert_close(graft_squares.sum(), graft, rtol=1e-6, atol=0.0)
