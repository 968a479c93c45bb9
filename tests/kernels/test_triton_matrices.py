"""MKOR's factors, LDAdam's subspace and Newton-Schulz."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from triton_runs import assert_runs_close  # noqa: E402

from rankwise.kernels.orthogonal_step import OrthogonalStep
from rankwise.ldadam import rule as ldadam
from rankwise.ldadam.formulas import projects_right
from rankwise.ldadam.low_rank_products import low_rank_rows
from rankwise.mkor import formulas as mkor
from rankwise.updates import newton_schulz as linalg
from rankwise.updates.polynomial_steps import orthogonalise
from rankwise.updates.polynomials import quintics

pytestmark = pytest.mark.usefixtures("interpreter")


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# --- Newton-Schulz ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1, 5, 7), (3, 70, 33), (2, 65, 130)])
def test_symmetric_product(shape: tuple[int, int, int]) -> None:
    from rankwise.kernels.triton.symmetric_newton_schulz import symmetric_product, symmetric_step

    x = torch.randn(shape, generator=generator(0))
    gram = symmetric_product(x)
    assert torch.equal(gram, gram.mT)
    torch.testing.assert_close(gram.double(), x.double() @ x.double().mT, rtol=1e-5, atol=1e-4)
    shifted = torch.full_like(gram, torch.nan)
    polynomial = symmetric_step(gram, gram, gram, -4.0, 2.0, shifted, 3.0)
    assert torch.equal(polynomial, polynomial.mT)
    assert torch.equal(shifted, polynomial + 3.0 * torch.eye(shape[1]))
    wanted = -4.0 * gram.double() + 2.0 * gram.double() @ gram.double()
    torch.testing.assert_close(polynomial.double(), wanted, rtol=1e-5, atol=1e-5 * wanted.abs().max().item())


@pytest.mark.parametrize("described", [False, True])
@pytest.mark.parametrize("shape", [(1, 40, 24), (2, 136, 264), (2, 304, 64)])
def test_symmetric_step_and_descriptors(
    shape: tuple[int, int, int], described: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products of symmetric matrices that commute, and of matrices that lie transposed or not, whoever copies tiles."""
    from rankwise.kernels.triton import symmetric_newton_schulz as kernels

    pytest.importorskip("triton.tools.tensor_descriptor")
    monkeypatch.setattr(kernels, "_has_descriptors", lambda device: described)
    seen = []
    make = kernels._descriptor
    monkeypatch.setattr(kernels, "_descriptor", lambda *given: seen.append(given) or make(*given))
    x = (torch.randn(shape, generator=generator(11)) / shape[2] ** 0.5).half()
    gram = kernels.symmetric_product(x)
    assert torch.equal(gram, gram.mT)
    assert torch.equal(gram, kernels.symmetric_product(x.mT.contiguous().mT))
    torch.testing.assert_close(gram.double(), x.double() @ x.double().mT, rtol=1e-3, atol=1e-3)
    square = kernels.symmetric_step(gram, gram, gram, 0.0)
    found = kernels.symmetric_step(gram, square, gram, -2.0)
    assert torch.equal(found, found.mT) and len(seen) == (8 if described else 0)
    wanted = gram.double() @ square.double() - 2.0 * gram.double()
    torch.testing.assert_close(found.double(), wanted, rtol=2e-3, atol=4e-3)
    if shape[1] > 200:
        return
    # Either half of a pair is what it is alone; what gets a result gets all of it.
    pair, room = torch.stack((gram, square)), torch.full_like(gram, torch.nan)
    for half, product in zip(pair, kernels.HALVED.both(square, pair, -2.0), strict=True):
        assert kernels.symmetric_step(square, half, half, -2.0, out=room) is room and torch.equal(room, product)


def test_what_a_descriptor_cannot_describe_is_read_by_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that begin at no multiple of 16 bytes; float32, which is not for tensor cores."""
    from rankwise.kernels.triton import symmetric_newton_schulz as kernels

    monkeypatch.setattr(kernels, "_has_descriptors", lambda device: True)
    monkeypatch.setattr(kernels, "_descriptor", lambda *given: pytest.fail("it cannot"))
    for x in (
        torch.randn(1, 20, 36).half(),
        torch.randn(2, 20, 44, dtype=torch.float32),
        torch.randn(1, 20, 36).mT.half(),
    ):
        torch.testing.assert_close(
            kernels.symmetric_product(x).float(), (x.float() @ x.float().mT), rtol=1e-2, atol=1e-1
        )


def test_the_triangle_has_every_tile_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 40 rows of tiles; roots are rounded on the way from programs to tiles."""
    from rankwise.kernels.triton import symmetric_newton_schulz as kernels

    x = torch.randn(1, 64 * 12 - 5, 3, generator=generator(12))
    torch.testing.assert_close(kernels.symmetric_product(x), x @ x.mT, rtol=1e-5, atol=1e-4)
    tiles = 3000
    program = torch.arange(tiles * (tiles + 1) // 2, dtype=torch.int64)
    below = ((torch.sqrt(8.0 * program.float() + 1.0) - 1.0) * 0.5).int().long()
    below -= (below * (below + 1) // 2 > program).long()
    below += ((below + 1) * (below + 2) // 2 <= program).long()
    beside = program - below * (below + 1) // 2
    assert bool(((beside >= 0) & (beside <= below) & (below < tiles)).all())


def test_symmetric_product_of_a_transposed_view() -> None:
    from rankwise.kernels.triton.symmetric_newton_schulz import symmetric_product

    x = torch.randn(2, 40, 20, generator=generator(1)).mT
    torch.testing.assert_close(symmetric_product(x), x @ x.mT, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("shape", [(20, 40), (2, 70, 30), (0, 4)])
def test_newton_schulz(shape: tuple[int, ...], dtype: torch.dtype | None) -> None:
    from rankwise.kernels.triton.symmetric_newton_schulz import newton_schulz

    matrix = torch.randn(shape, generator=generator(2))
    found = newton_schulz(matrix, 5, dtype)
    wanted = linalg.newton_schulz(matrix.double(), 5)
    assert found.shape == matrix.shape and found.dtype == matrix.dtype
    tolerance = 1e-4 if dtype is None else 0.05
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=tolerance)


@pytest.mark.parametrize("dtype", [None, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("shape", "on_gram"), [((20, 29), False), ((2, 70, 30), True), ((20, 30), True)])
@pytest.mark.parametrize("name", ["polar_express", "cans"])
def test_a_polynomial_for_each_step(
    name: str, shape: tuple[int, ...], on_gram: bool, dtype: torch.dtype | None, launches: list[str]
) -> None:
    """Two launches a step on matrices; on Gram matrices, 1.5 times as long as wide, one a step and a run, and three
    between steps, of which a run of three steps does two at once."""
    from rankwise.kernels.triton.symmetric_newton_schulz import newton_schulz

    matrix = torch.randn(shape, generator=generator(2))
    found = newton_schulz(matrix, 5, dtype, coefficients=name)
    wanted = linalg.newton_schulz(matrix.double(), 5, coefficients=name)
    tolerance = 1e-4 if dtype is None else 0.02 if dtype == torch.float16 else 0.1
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=tolerance)
    assert len(launches) == (5 + 2 + 3 * 3 - 1 if on_gram and dtype != torch.bfloat16 else 5 * 2)


@pytest.mark.parametrize("product", [torch.float32, torch.bfloat16])
def test_steps_along_orthogonal_momenta(
    product: torch.dtype, launches: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tall, wide and unaligned ones, by other polynomials, types and rates, three of a shape in stacks of two."""
    from rankwise.kernels.triton import orthogonal_steps, steps

    of_one = product.itemsize * 20 * (2 * 35 + 20)
    monkeypatch.setattr(orthogonal_steps, "SCRATCH", 3 * of_one - 1)
    monkeypatch.setattr(steps, "TILES", 2)
    monkeypatch.setattr(steps, "PASS_TILE", 64)
    # Signs of what is rounded may be others, and so may what decays.
    exact = product == torch.float32
    jobs = [
        OrthogonalStep((20, 35), *_filled(3 * 20 * 35, 0), 1e-7, 3.0, 0.1, 5, weight_decay=0.5),
        OrthogonalStep((40, 16), *_filled(40 * 16, 1), 0.5, 0.2, torch.tensor(0.1), 5, "cans", 0.5, cautious=exact),
        OrthogonalStep((18, 35), *_filled(18 * 35, 2), 1e-7, 1.0, 0.2, 5, product=torch.float16),
    ]
    wanted = [_stepped(job) for job in jobs]
    before = [(job.momenta[0].clone(), job.weights[0].clone()) for job in jobs]
    results: list[weakref.ref[Tensor]] = []

    def alone(*given: Any) -> Tensor:
        assert not [result for result in results if result() is not None], "the factors before are still there"
        found = orthogonalise(*given)
        results.append(weakref.ref(found))
        return found

    monkeypatch.setattr(orthogonal_steps, "orthogonalise", alone)
    orthogonal_steps.orthogonal_steps_(jobs, product)
    for job, weight, (momentum, start) in zip(jobs, wanted, before, strict=True):
        assert torch.equal(job.momenta[0], momentum)
        tolerance = 1e-5 if exact and job.product is None else 0.03
        assert (job.weights[0] - weight).norm() < tolerance * (start - weight).norm()
    # Float16; a stack of two, one of one, and the other shape. One ends as the next begins, if both have as many bits.
    found = [launches.count(name) for name in ("step_and_normalise_kernel", "update_kernel", "norm_kernel")]
    assert found == [6 if exact else 5, 0, 4]


@pytest.mark.parametrize("known", [True, False])
def test_norms_that_are_known_are_not_measured_again(known: bool, launches: list[str]) -> None:
    """In another order than the stacks; four times the norm gives a quarter of the start."""
    from rankwise.kernels.triton.orthogonal_steps import orthogonal_steps_

    jobs = [OrthogonalStep((8, 12), *_filled(96, offset), 1e-7, 1.0, 0.1, 1) for offset in (0, 1, 2)]
    jobs.append(OrthogonalStep((6, 5), *_filled(30 if known else 2 * 30, 3), 1e-7, 1.0, 0.1, 1))
    before = [job.weights[0].clone() for job in jobs]
    vectors = [torch.full((4,), torch.nan, dtype=torch.float64) for _ in range(2)]
    for job, place in zip(jobs, (2, 1, 0, 3), strict=True):
        vector = vectors[0 if known or place == 1 else 1]
        vector[place] = 16 * job.momenta[0].double().square().sum()
        job.squares = [(vector, place)]
    orthogonal_steps_(jobs, torch.float32)
    assert launches.count("norm_kernel") == (0 if known else 2), "two vectors; two matrices in a run"
    for job, weight in zip(jobs, before, strict=True):
        scale = 0.25 if known else 1.0
        x = scale * job.momenta[0].double().view(-1, *job.shape)
        x /= (x / scale).norm(dim=(-2, -1), keepdim=True)
        gram = x @ x.mT
        a, b, c = quintics("published", 1)[0]
        direction = a * x + (b * gram + c * gram @ gram) @ x
        torch.testing.assert_close(
            job.weights[0].double(), weight.double() - 0.1 * direction.flatten(), rtol=0, atol=1e-5
        )


def test_a_pair_for_each_of_a_stack_is_no_larger_than_a_grid() -> None:
    from rankwise.kernels.triton.orthogonal_steps import _stacks

    pair = torch.empty(2, 70_000, device="meta")
    stacks = list(_stacks([OrthogonalStep((1, 1), pair[:1], pair[1:], 1e-7, 0.2, 0.1, 5)], torch.bfloat16))
    assert [len(found) for _, found in stacks] == [32_767, 32_767, 4_466]


def _filled(length: int, offset: int) -> tuple[list[Tensor], list[Tensor]]:
    found = torch.randn(2, length + offset, generator=generator(length))[:, offset:]
    return [found[0]], [found[1].contiguous()]


def _stepped(job: OrthogonalStep) -> Tensor:
    directions = job.factor * linalg.newton_schulz(
        job.momenta[0].double().view(-1, *job.shape), job.steps, eps=job.eps, coefficients=job.coefficients
    )
    weight, directions = job.weights[0].double(), directions.reshape(-1)
    decay = job.weight_decay * (~(directions * weight < 0) if job.cautious else torch.ones(len(weight)))
    return weight - float(job.lr) * (decay * weight + directions)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_one_triangle_is_multiplied(
    launches: list[str], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton.runtime.interpreter import InterpreterBuilder

    from rankwise.kernels.triton.symmetric_newton_schulz import symmetric_product

    blocks = 0
    dot = InterpreterBuilder.create_dot

    def counted(*args: object) -> object:
        nonlocal blocks
        blocks += 1
        return dot(*args)

    x = torch.randn(1, 150, 20, generator=generator(3)).to(dtype)
    monkeypatch.setattr(InterpreterBuilder, "create_dot", counted)
    symmetric_product(x)
    tiles = 3 if dtype == torch.float32 else 2
    assert blocks == tiles * (tiles + 1) // 2
    assert launches == ["_symmetric_kernel"]


# --- MKOR ------------------------------------------------------------------------------------------------------------


def factors(count: int, length: int, seed: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    roots = torch.randn(count, length, length, generator=generator(seed)) / length**0.5
    inverses = roots @ roots.mT / 4 + 0.5 * torch.eye(length)
    # Some libraries' products of a matrix and its transpose are not symmetric to the bit.
    inverses = (inverses + inverses.mT) / 2
    return [inverse.to(dtype).contiguous() for inverse in inverses]


@pytest.mark.parametrize("decay", [0.9, 1.0])
def test_update_factors(decay: float) -> None:
    from rankwise.mkor.cuda.factor_updates import update_factors_

    inverses = factors(3, 37, 4)
    vectors = torch.randn(3, 37, generator=generator(5))
    wanted = mkor.rank1_inverse_update(torch.stack(inverses).double(), vectors.double(), decay)
    assert update_factors_(inverses, vectors, decay=decay).tolist() == [True] * 3
    assert_runs_close(inverses, list(wanted), 2e-6)
    assert all(torch.equal(inverse, inverse.mT) for inverse in inverses)


def test_factors_in_bfloat16() -> None:
    from rankwise.mkor.cuda.factor_updates import update_factors_

    inverses = factors(2, 40, 6, torch.bfloat16)
    vectors = torch.randn(2, 40, generator=generator(7))
    wanted = mkor.rank1_inverse_update(torch.stack(inverses), vectors, 0.95)
    update_factors_(inverses, vectors, decay=0.95)
    # A sum in another order may round to the next number of that type.
    assert_runs_close(inverses, list(wanted), 2**-8)


def test_what_is_not_finite_stays_where_it_is() -> None:
    """A bad vector, a broken inverse, an indefinite one, a broken one not seen; their neighbour moves as always."""
    from rankwise.mkor.cuda.factor_updates import update_factors_

    inverses = factors(6, 20, 8)
    vectors = torch.randn(6, 20, generator=generator(9))
    vectors[0, 3], vectors[1, 19] = torch.nan, torch.inf
    inverses[2][4, 5] = inverses[4][0, 0] = torch.nan
    inverses[3].mul_(-30.0)
    seen = torch.tensor([True, True, True, True, False, True])
    before = [inverse.clone() for inverse in inverses]
    wanted = mkor.rank1_inverse_update(torch.stack(before), vectors, 0.9)
    ok = update_factors_(inverses, vectors, decay=0.9, seen=seen)
    assert ok.tolist() == [False, False, False, False, False, True]
    for index in range(5):
        torch.testing.assert_close(inverses[index], before[index], rtol=0, atol=0, equal_nan=True)
    assert_runs_close([inverses[5]], [wanted[5]])


def test_three_launches_for_any_number_of_factors(launches: list[str]) -> None:
    from rankwise.mkor.cuda.factor_updates import update_factors_

    for count in (1, 5):
        launches.clear()
        update_factors_(factors(count, 6, 14), torch.ones(count, 6), decay=0.9)
        assert launches == ["_measure_kernel", "_decide_kernel", "_move_kernel"]


@pytest.mark.parametrize(
    ("inverses", "options", "message"),
    [
        ([torch.eye(4)], {}, "need 1 inverses"),
        ([torch.eye(3, dtype=torch.float64)], {}, "float32, bfloat16 or float16"),
        ([torch.eye(3)], {"seen": torch.ones(1)}, "booleans"),
    ],
)
def test_wrong_factors_are_refused(inverses: list[Tensor], options: dict[str, Any], message: str) -> None:
    from rankwise.mkor.cuda.factor_updates import update_factors_

    with pytest.raises(ValueError, match=message):
        update_factors_(inverses, torch.ones(1, 3), decay=0.9, **options)


# --- LDAdam ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [2, 9])
@pytest.mark.parametrize("feedback", [True, False])
@pytest.mark.parametrize(("rank", "variance"), [(35, 3.0), (4, 0.0)])
def test_low_rank_moments(step: int, feedback: bool, rank: int, variance: float) -> None:
    """Also with estimates of a variance below zero, which count by their size."""
    from rankwise.ldadam.cuda.low_rank_moments import advance_moments_

    batch, length = 2, 70
    source = generator(step)
    projected, first = (torch.randn(batch, rank, length, generator=source) for _ in range(2))
    # Large enough for a positive variance: a difference of two nearly equal numbers would only show rounding.
    second = first.square() * variance + (0.1 if variance else 0.0)
    rotation = torch.linalg.qr(torch.randn(batch, rank, rank, generator=source))[0].contiguous()
    settings: dict[str, Any] = {"step": step, "betas": (0.9, 0.97), "eps": 1e-6, "error_feedback": feedback}
    inputs = (projected, rotation, first, second)
    wanted = ldadam.low_rank_moments(*(value.double() for value in inputs), **settings)
    directions = advance_moments_(projected, rotation, list(first), list(second), **settings)
    assert_runs_close([first, second], wanted[:2], 1e-4)
    if variance:
        assert_runs_close([torch.stack([half.float().sum(0) for half in directions])], wanted[2:], 1e-4)


CUTS = (0, 17, 18, 18, 100, 1400, 2100)


@pytest.mark.parametrize("feedback", [None, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(30, 70), (70, 30)])
def test_low_rank_step(shape: tuple[int, int], feedback: torch.dtype | None, launches: list[str]) -> None:
    """Two matrices, one whole and one cut in the middle of rows, in one launch."""
    from rankwise.ldadam.cuda.low_rank_step import Factors, low_rank_step_

    (rows, cols), rank, lr, decay = shape, 5, 0.1, 0.2
    short, long = min(shape), max(shape)
    source = generator(rows)
    right = projects_right(rows, cols)
    params, sources, errors, factors_, wanted, wanted_errors = [], [], [], [], [], []
    for cuts in ((0, rows * cols), CUTS):
        basis = torch.randn(short, rank, generator=source)
        direction, kept = torch.randn(2, rank, long, generator=source)
        for start, end in zip(cuts, cuts[1:], strict=False):
            params.append(torch.randn(end - start + 1, generator=source)[1:])
            sources.append(torch.randn(end - start, generator=source))
            errors.append(torch.zeros(end - start, dtype=feedback or torch.float32))
            factors_.append(Factors(start, basis, direction, kept if feedback else None))
            run = (start, end, rows, cols, right)
            moved, lost = (low_rank_rows(basis.double(), x.double(), *run) for x in (direction, kept))
            wanted.append(params[-1].double() * (1 - lr * decay) - lr * moved)
            wanted_errors.append(sources[-1].double() - lost)
    parts = (sources, errors) if feedback else (None, None)
    low_rank_step_(params, factors_, *parts, cols=cols, right=right, lr=lr, weight_decay=decay)
    assert_runs_close(params, wanted, 1e-5)
    if feedback is not None:
        assert_runs_close(errors, wanted_errors, 1e-5 if feedback == torch.float32 else 2**-8)
    assert launches == ["_halves_kernel", "_step_kernel"]


def test_the_error_may_take_the_place_of_its_source() -> None:
    from rankwise.ldadam.cuda.low_rank_step import Factors, low_rank_step_

    source = generator(3)
    basis, direction, kept = (torch.randn(shape, generator=source) for shape in ((4, 2), (2, 6), (2, 6)))
    param, matrix = torch.zeros(24), torch.randn(24, generator=source)
    wanted = matrix.double() - (basis.double() @ kept.double()).reshape(-1)
    part = [Factors(0, basis, direction, kept)]
    low_rank_step_([param], part, [matrix], [matrix], cols=6, right=False, lr=torch.tensor(0.5), weight_decay=0.0)
    assert_runs_close([matrix, param], [wanted, -0.5 * (basis.double() @ direction.double()).reshape(-1)], 1e-5)
