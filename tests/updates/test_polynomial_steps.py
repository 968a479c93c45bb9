"""Newton-Schulz with a polynomial for each step, on matrices and on their Gram matrices."""

from __future__ import annotations

import weakref
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from rankwise.updates import polynomial_steps
from rankwise.updates.newton_schulz import newton_schulz
from rankwise.updates.polynomial_steps import iterate, iterate_on_gram, operations, orthogonalise, scratch
from rankwise.updates.polynomials import quintics

F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
SETS = ["polar_express", "cans"]


def basis(rows: int, columns: int) -> tuple[Tensor, Tensor]:
    matrix = torch.randn(rows, columns, dtype=F64, generator=torch.Generator().manual_seed(rows + columns))
    u, _, vh = torch.linalg.svd(matrix, full_matrices=False)
    return u, vh


def with_values(rows: int, columns: int, sigma: Tensor) -> Tensor:
    u, vh = basis(rows, columns)
    return u @ torch.diag(sigma / sigma.norm()) @ vh


def spectra(count: int) -> dict[str, Tensor]:
    ones, zeros = torch.ones(count, dtype=F64), torch.zeros(count, dtype=F64)
    return {
        "flat": ones,
        "to 1e-2": torch.logspace(0, -2, count, dtype=F64),
        "to 1e-6": torch.logspace(0, -6, count, dtype=F64),
        "to 1e-12": torch.logspace(0, -12, count, dtype=F64),
        "quarter of the rank": torch.cat([ones[: count // 4], zeros[count // 4 :]]),
        "rank one": torch.cat([ones[:1], zeros[1:]]),
    }


def images(sigma: Tensor, name: str, steps: int) -> Tensor:
    sigma = sigma / sigma.norm()
    for a, b, c in quintics(name, steps):
        sigma = a * sigma + b * sigma**3 + c * sigma**5
    return sigma


def largest(matrix: Tensor) -> float:
    return float(torch.linalg.svdvals(matrix.double()).max())


@pytest.mark.parametrize("steps", [3, 4, 5, 8])
@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("shape", [(12, 12), (12, 30), (30, 12), (3, 12, 40)], ids=str)
def test_equals_the_polynomials_of_the_singular_values(shape: tuple[int, ...], name: str, steps: int) -> None:
    stack = torch.randn(shape, dtype=F64, generator=torch.Generator().manual_seed(7))
    before = stack.clone()
    found = newton_schulz(stack, steps, eps=0.0, coefficients=name)
    assert torch.equal(stack, before) and found.shape == stack.shape
    u, sigma, vh = torch.linalg.svd(stack, full_matrices=False)
    ends = torch.stack([images(own, name, steps) for own in sigma.reshape(-1, 12)]).reshape(sigma.shape)
    torch.testing.assert_close(found, u @ torch.diag_embed(ends) @ vh, rtol=0, atol=1e-10)


# --- which form ------------------------------------------------------------------------------------------------------


def counted(shape: tuple[int, ...], dtype: torch.dtype, name: str, steps: int = 5) -> float:
    with FlopCounterMode(display=False) as counter:
        newton_schulz(torch.ones(shape, dtype=dtype), steps, coefficients=name)
    return float(counter.get_total_flops())


@pytest.mark.parametrize("dtype", [F64, F32, F16])
@pytest.mark.parametrize("shape", [(10, 10), (10, 15), (10, 16), (16, 10), (10, 70), (70, 10)], ids=str)
def test_the_form_with_less_work_is_taken(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """From one and a half times as long as wide on, with five steps."""
    short, long = min(shape), max(shape)
    whole, on_gram = (operations(short, long, 5, 1.0, way) for way in (False, True))
    assert counted(shape, dtype, "cans") == min(whole, on_gram)
    assert (on_gram < whole) == (long > 1.5 * short)
    assert whole == 5 * (4 * short**2 * long + 2 * short**3)


@pytest.mark.parametrize(("name", "dtype"), [("published", F64), ("published", F32), ("cans", BF16)])
def test_what_was_recorded_and_what_is_not_stable_stay_as_they_are(name: str, dtype: torch.dtype) -> None:
    assert counted((6, 60), dtype, name) == operations(6, 60, 5, 1.0, False)


def test_published_bits() -> None:
    """As the iteration was written before there were other polynomials."""
    x = torch.randn(2, 20, 90, generator=torch.Generator().manual_seed(0))
    expected = x / (torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = expected @ expected.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315)
        expected = torch.baddbmm(expected, polynomial, expected, beta=3.4445)
    assert torch.equal(newton_schulz(x), expected)


@pytest.mark.parametrize("steps", range(3, 9))
@pytest.mark.parametrize("symmetric", [0.5, 1.0])
def test_work_of_both_forms(symmetric: float, steps: int) -> None:
    """By hand, in products: two long ones a run of three steps; symmetric ones for Q and R between its steps."""
    runs = [min(3, steps - start) for start in range(0, steps, 3)]
    short, long = 7, 31
    square, cube = 2 * short**2 * long, 2 * short**3
    by_hand = sum((symmetric + 1) * square + symmetric * (run + 3 * (run - 1)) * cube for run in runs)
    assert operations(short, long, steps, symmetric, True) == pytest.approx(by_hand)


# --- stability -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [5, 8])
@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("dtype", [F32, F16])
@pytest.mark.parametrize("shape", [(64, 64), (48, 150)], ids=str)
def test_gram_matrices_bear_every_spectrum(shape: tuple[int, int], dtype: torch.dtype, name: str, steps: int) -> None:
    """Bounds as of the iteration on matrices; errors of at most ten times its own (measured: up to six)."""
    table, bound = quintics(name, steps), 1.13 if steps == 5 else 1.005
    for sigma in spectra(48).values():
        values = sigma if shape[0] == 48 else torch.cat([sigma, sigma[-1:].expand(16)])
        exact = with_values(*shape, values)[None]
        expected, plain = iterate(exact, table), iterate(exact.to(dtype), table).double()
        found = iterate_on_gram(exact.to(dtype), table).double()
        assert largest(found[0]) < bound and largest(plain[0]) < bound
        assert (found - expected).norm() < 10 * (plain - expected).norm() + 1e-7 * expected.norm()


MEASURED = {
    **{name: sigma for name, sigma in spectra(192).items() if name != "to 1e-2"},
    "1/i": 1 / torch.arange(1.0, 193.0, dtype=F64),
    "1/i^2": torch.arange(1.0, 193.0, dtype=F64) ** -2,
    "two levels": torch.cat([torch.ones(96, dtype=F64), torch.full((96,), 0.01, dtype=F64)]),
}


@pytest.mark.parametrize("spectrum", MEASURED)
def test_the_published_polynomial_on_gram_matrices_in_float16(spectrum: str) -> None:
    """Gains of directions above 0.001 of the norm, and what is off all directions, beside bfloat16 on matrices."""
    left, right = basis(192, 512)
    sigma = MEASURED[spectrum] / MEASURED[spectrum].norm()
    exact = with_values(192, 512, sigma)[None]
    gains, off = [], []
    for dtype in (F16, BF16):
        found = orthogonalise(exact.to(dtype), quintics("published", 5))[0].double()
        gains.append((left.mT @ found @ right.mT).diagonal())
        off.append(float((found - left @ torch.diag(gains[-1]) @ right).norm()))
    large = gains[0][sigma > 1e-3]
    assert 0.47 < float(large.min()) and float(large.max()) < 1.21
    assert off[0] < off[1] or spectrum == "rank one"
    assert float(gains[0].abs().max()) < 1.21


@pytest.mark.parametrize("name", SETS)
def test_without_restarts_they_do_not(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What rounding leaves below zero grows by the square of the slopes."""
    monkeypatch.setattr(polynomial_steps, "RESTART", 8)
    x = with_values(48, 150, spectra(48)["rank one"])[None].to(F16)
    assert not largest(iterate_on_gram(x, quintics(name, 8))[0].nan_to_num(1e4, 1e4, -1e4).clamp(-1e4, 1e4)) < 1.13


@pytest.mark.parametrize("name", SETS)
def test_bfloat16_needs_the_margin_above_the_interval(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Why both sets have it, and why Gram matrices are not formed in that type."""
    table = quintics(name, 8)
    matrices = [with_values(64, 96, sigma)[None].to(BF16) for sigma in spectra(64).values()]
    assert max(largest(iterate(x, table)[0]) for x in matrices) < 1.02
    on_gram = [iterate_on_gram(x, table)[0].nan_to_num(1e9, 1e9, -1e9).clamp(-1e9, 1e9) for x in matrices]
    assert max(map(largest, on_gram)) > 1.5


@pytest.mark.parametrize("dtype", [F32, F16, BF16])
@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("columns", [20, 90])
def test_zeros_scales_and_what_is_not_finite(columns: int, name: str, dtype: torch.dtype) -> None:
    whole = torch.randn(7, 20, columns, generator=torch.Generator().manual_seed(columns))
    stack = whole.clone()
    stack[1] = 0.0
    stack[2], stack[3] = stack[2] * 1e15, stack[3] * 1e-15
    stack[4, 3, 5], stack[5, 0, 0] = torch.nan, torch.inf
    found = newton_schulz(stack, 5, dtype, eps=0.0, coefficients=name)
    alone = newton_schulz(whole, 5, dtype, eps=0.0, coefficients=name)
    tolerance = {F32: 1e-4, F16: 1e-2, BF16: 0.1}[dtype]
    assert not found[1].isfinite().any(), "0 / 0 without eps"
    assert torch.equal(newton_schulz(stack[1], 5, dtype, coefficients=name), torch.zeros(20, columns))
    torch.testing.assert_close(found[[0, 2, 3, 6]], alone[[0, 2, 3, 6]], rtol=0, atol=tolerance)
    assert not found[4].isfinite().any() and not found[5].isfinite().all()
    assert alone.isfinite().all()


@pytest.mark.parametrize("name", ["published", *SETS])
def test_distance_from_orthogonality_falls_with_the_steps(name: str) -> None:
    """Of values from 0.002 of the norm up; the published polynomial stays where it is."""
    sigma = torch.cat([torch.tensor([1.0]), torch.logspace(0, -2, 19)]).double()
    matrix = with_values(20, 64, sigma)
    distances = []
    for steps in (4, 5, 6, 7):
        u = newton_schulz(matrix, steps, coefficients=name)
        distances.append(float((u @ u.mT - torch.eye(20)).norm()))
    if name == "published":
        assert min(distances) > 0.5
    else:
        assert all(later < 0.5 * earlier for earlier, later in pairwise(distances)) and distances[-1] < 1e-4


@pytest.mark.parametrize("shape", [(0, 4, 50), (3, 0, 5), (3, 4, 0)])
def test_empty_matrices(shape: tuple[int, ...]) -> None:
    assert newton_schulz(torch.empty(shape), coefficients="cans").shape == shape


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="'polar_express' has polynomials for 3 to 8 steps, got 9"):
        newton_schulz(torch.ones(2, 2), 9, coefficients="polar_express")
    with pytest.raises(ValueError, match="coefficients must be one of published, polar_express, cans"):
        newton_schulz(torch.ones(2, 2), coefficients="chebyshev")
    with pytest.raises(ValueError, match="steps must be at least 1"):
        newton_schulz(torch.ones(2, 2), 0, coefficients="cans")


class Living(TorchDispatchMode):
    """Elements of the tensors that are made, as long as one of those that share them is there."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._users: Counter[int] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and not any(result is each for each in args):
            storage = result.untyped_storage()
            place, elements = storage._cdata, storage.nbytes() // result.itemsize
            if not self._users[place]:
                self.now += elements
                self.most = max(self.most, self.now)
            self._users[place] += 1
            weakref.finalize(result, self._gone, place, elements)
        return result

    def _gone(self, place: int, elements: int) -> None:
        self._users[place] -= 1
        if not self._users[place]:
            self.now -= elements


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(("rows", "columns"), [(16, 16), (16, 44), (16, 64)])
@pytest.mark.parametrize("name", ["published", *SETS])
def test_no_more_is_there_at_once_than_is_told(
    name: str, rows: int, columns: int, dtype: torch.dtype, turned: bool
) -> None:
    table = quintics(name, 5)
    shape = (2, columns, rows) if turned else (2, rows, columns)
    with Living() as living:
        orthogonalise(torch.zeros(shape, dtype=dtype), table, turned=turned)
    bound = 2 * scratch(rows, columns, dtype, table)
    assert living.most <= bound
    if len(set(table)) == 1 or dtype == BF16 or columns == 64:
        assert living.most == bound, "neither is less"
    assert living.now == 0


@pytest.mark.parametrize("shape", [(2, 16, 44), (2, 44, 16)])
def test_nor_is_the_start_kept_by_who_made_it(shape: tuple[int, ...]) -> None:
    matrix = torch.ones(shape)
    with Living() as living:
        newton_schulz(matrix)
    given, norms = 16 * 44, 4
    assert living.most <= 2 * (given + scratch(16, 44, F32, quintics("published", 5)) + norms)
