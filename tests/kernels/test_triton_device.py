"""The compiled kernels on a GPU: the plain functions' results, no wait for the device, the same bits twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from given_gradients import Training  # noqa: E402
from preconditioning import preconditioned_together  # noqa: E402
from triton_runs import assert_runs_close, copies, runs  # noqa: E402

from rankwise import MARS, LDAdam, SONew  # noqa: E402
from rankwise.kernels import lists as foreach  # noqa: E402
from rankwise.kernels import triton  # noqa: E402
from rankwise.kernels.dispatch import using  # noqa: E402
from rankwise.kernels.passes import Pass, Scalars  # noqa: E402
from rankwise.ldadam import rule as ldadam  # noqa: E402
from rankwise.ldadam.cuda.low_rank_moments import advance_moments_  # noqa: E402
from rankwise.ldadam.cuda.low_rank_step import Factors, low_rank_step_  # noqa: E402
from rankwise.mars.rule import corrected_gradient  # noqa: E402
from rankwise.mkor import formulas as mkor  # noqa: E402
from rankwise.mkor.cuda.factor_updates import update_factors_  # noqa: E402
from rankwise.sonew import banded  # noqa: E402
from rankwise.sonew import rule as sonew  # noqa: E402
from rankwise.sonew.cuda import sonew_directions  # noqa: E402
from rankwise.updates import newton_schulz as linalg  # noqa: E402

DEVICE = torch.device("cuda:0")
LENGTHS = (5000, 0, 1, 2048, 100_003, 7)
BETAS = (0.9, 0.97)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@contextmanager
def no_waiting() -> Iterator[None]:
    """Any wait for the device is an error."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def fields(count: int, offset: int = 0) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(count)
    flats = [torch.cat(runs(LENGTHS, generator)).to(DEVICE) for _ in range(count)]
    padded = [torch.cat([flat.new_zeros(offset), flat])[offset:] for flat in flats]
    return [list(flat.split(LENGTHS)) for flat in padded]


def twice(call: Callable[[], list[Tensor]]) -> list[Tensor]:
    """Results of a call on fresh inputs; those of a second one, which may not wait, are the same bits."""
    first = call()
    with no_waiting():
        second = call()
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    return [value.cpu() for value in first]


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("rule", ["adamw", "lion"])
def test_mars(rule: Any, offset: int) -> None:
    start = fields(5, offset)
    start[4] = [value.square() for value in start[4]]
    coefficients = torch.rand(len(LENGTHS), device=DEVICE)
    scalars = Scalars(lr=0.1, betas=BETAS, eps=1e-6, weight_decay=0.1, step=2, k=0.4, advance=True)
    names = ("param", "grad", "reference", "exp_avg", "exp_avg_sq")[: 5 if rule == "adamw" else 4]
    used = start[: len(names)]

    def call() -> list[Tensor]:
        # On the same memory, whose addresses are known to the second call.
        for mine, value in zip(work, used, strict=True):
            torch._foreach_copy_(mine, value)
        triton.run(Pass(rule, dict(zip(names, work, strict=True)), scalars, coefficients))
        return [value.clone() for field in work for value in field]

    work = [[value.clone() for value in field] for field in used]
    found = twice(call)
    wanted = [copies(field) for field in used]
    foreach.run(Pass(rule, dict(zip(names, wanted, strict=True)), scalars, coefficients.double()))
    assert_runs_close(found, [value.cpu() for field in wanted for value in field])


def test_norms() -> None:
    grads, references = fields(2)
    found = twice(lambda: [triton.squared_norms(grads, references, 0.4), triton.squared_norms(grads)])
    corrected = [corrected_gradient(g.double(), h.double(), 0.4, 0.5) for g, h in zip(grads, references, strict=True)]
    torch.testing.assert_close(
        found[0].cpu(), torch.stack([c.square().sum() for c in corrected]).cpu(), rtol=1e-6, atol=0
    )
    squares = torch.stack([g.double().square().sum() for g in grads])
    torch.testing.assert_close(found[1].cpu(), squares.cpu(), rtol=1e-13, atol=0)


class Whole:
    """A parameter that is one chain."""

    start = 0
    chain = None


@pytest.mark.parametrize("band", [0, 1, 4])
def test_sonew(band: int) -> None:
    start = fields(3 + band)
    start[2] = [value.square() + 1.0 for value in start[2]]
    start[3:] = [[value * 0.1 for value in field] for field in start[3:]]
    for distance, field in enumerate(start[3:], start=1):
        for value in field:
            value[max(0, value.numel() - distance) :] = 0.0
    work = [[value.clone() for value in field] for field in start]

    def call() -> list[Tensor]:
        for mine, value in zip(work, start, strict=True):
            torch._foreach_copy_(mine, value)
        squares = sonew_directions(
            [Whole()] * len(LENGTHS),
            *work[:3],
            work[3:],
            [None] * len(LENGTHS),
            betas=BETAS,
            eps=1e-3,
            gamma=1e-2,
            step=2,
            graft="momentum",
            graft_eps=0.0,
            out=work[0],
        )
        return [*(value.clone() for field in work for value in field), *squares]

    found = twice(call)
    count = len(LENGTHS)
    corrections = [1 - beta**2 for beta in BETAS]
    for index in range(count):
        wide = [field[index].cpu().double() for field in start]
        momentum, diagonal, edges = sonew.statistics(wide[0], wide[1], wide[2], wide[3:], BETAS)
        damped = diagonal / corrections[1] + 1e-3
        factors = banded.banded_factors(damped, [edge / corrections[1] for edge in edges], 1e-2)
        direction = sonew.apply_factors(*factors, momentum / corrections[0])
        assert_runs_close([found[index]], [direction], 1e-4)
        assert_runs_close(found[index + count : count * (3 + band) : count], [momentum, diagonal, *edges])
        squares = torch.stack([direction.square().sum(), (momentum / corrections[0]).square().sum()])
        torch.testing.assert_close(torch.stack([found[-2][index], found[-1][index]]), squares, rtol=1e-4, atol=0)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-3), (torch.bfloat16, 0.1)])
@pytest.mark.parametrize("shape", [(3, 256, 512), (2, 300, 130)])
def test_newton_schulz(shape: tuple[int, ...], dtype: torch.dtype, tolerance: float) -> None:
    from rankwise.kernels.triton.symmetric_newton_schulz import HALVED, newton_schulz
    from rankwise.updates.polynomial_steps import PLAIN

    matrix = torch.randn(shape, device=DEVICE)
    (found,) = twice(lambda: [newton_schulz(matrix, 5, dtype)])
    torch.testing.assert_close(found.double(), linalg.newton_schulz(matrix.cpu().double(), 5), rtol=0, atol=tolerance)
    # The kernel itself, whatever the shape decides, on matrices as they lie and transposed.
    for stack in (matrix.to(dtype), matrix.mT.contiguous().to(dtype).mT):
        (gram,) = twice(lambda stack=stack: [HALVED.square(stack)])
        there = gram.to(DEVICE) / 512
        (image,) = twice(lambda there=there: [HALVED.step(there, there, there, -4.8, 2.0)])
        for value, wanted in (
            (gram, PLAIN.square(stack.cpu().double())),
            (image, PLAIN.step(*3 * [(gram / 512).double()], -4.8, 2.0)),
        ):
            assert torch.equal(value, value.mT)
            assert (value.double() - wanted).norm() < (1e-5 if dtype == torch.float32 else 2**-8) * wanted.norm()


def test_products_are_timed_once() -> None:
    from rankwise.kernels.triton.chosen_products import chosen, forget_times
    from rankwise.kernels.triton.symmetric_newton_schulz import HALVED

    x = torch.randn(2, 512, 1024, device=DEVICE, dtype=torch.bfloat16)
    forget_times()
    try:
        first = chosen(HALVED, x, timed=True)
        with no_waiting():
            assert chosen(HALVED, x, timed=True) == first
    finally:
        forget_times()


@pytest.mark.parametrize(("product", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.02)])
def test_preconditioning(product: torch.dtype, tolerance: float) -> None:
    from rankwise.mkor.preconditioning import Gradient

    gradients = []
    for rows, columns in ((256, 512), (300, 131), (256, 512)):
        runs_of_one = torch.randn(rows * columns, device=DEVICE).tensor_split([columns * 7 + 3])
        sides = (torch.randn(side, side, device=DEVICE) / side**0.5 for side in (rows, columns))
        gradients.append(Gradient(rows, columns, runs_of_one, (), False, *(side.to(product) for side in sides)))

    def call() -> list[Tensor]:
        found, factors = preconditioned_together(gradients, product, True)
        assert factors is not None
        return [run.float() * factor for run, factor in zip(found, factors, strict=True)]

    found = twice(call)
    for place, gradient in enumerate(gradients):
        sides = [side.cpu().double() for side in (gradient.left, gradient.right)]
        given = torch.cat(gradient.weights).cpu().double().view(gradient.rows, gradient.columns)
        wanted = mkor.precondition(given, *sides, "joint")
        matrix = torch.cat(found[2 * place : 2 * place + 2]).double().view(wanted.shape)
        assert (matrix - wanted).norm() < tolerance * wanted.norm()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 3e-6), (torch.bfloat16, 2**-7)])
def test_factors(dtype: torch.dtype, tolerance: float) -> None:
    roots = torch.randn(3, 301, 301, device=DEVICE) / 301**0.5
    start = (roots @ roots.mT / 4 + 0.5 * torch.eye(301, device=DEVICE)).to(dtype)
    vectors = torch.randn(3, 301, device=DEVICE)
    vectors[1, 5] = torch.nan
    work = [matrix.clone() for matrix in start]

    def call() -> list[Tensor]:
        torch._foreach_copy_(work, list(start))
        taken = update_factors_(work, vectors, decay=0.9)
        return [*(matrix.clone() for matrix in work), taken]

    *found, taken = twice(call)
    wanted, ok = mkor.update_factor(start.cpu().double(), vectors.cpu().double(), 0.9, threshold=1e4)
    assert taken.tolist() == ok.tolist() == [True, False, True]
    assert_runs_close(found, list(wanted), tolerance)
    assert all(torch.equal(matrix, matrix.mT) for matrix in (found[0], found[2]))


def test_low_rank() -> None:
    batch, rank, length = 2, 48, 200
    projected, first = torch.randn(2, batch, rank, length, device=DEVICE)
    second = first.square() * 3 + 0.1
    rotation = torch.linalg.qr(torch.randn(batch, rank, rank, device=DEVICE))[0].contiguous()
    inputs = (projected, rotation, first, second)
    settings: dict[str, Any] = {"step": 3, "betas": BETAS, "eps": 1e-6, "error_feedback": True}
    wanted = ldadam.low_rank_moments(*(value.cpu().double() for value in inputs), **settings)

    def advance() -> list[Tensor]:
        moved = [first.clone(), second.clone()]
        directions = advance_moments_(projected, rotation, *(list(moment) for moment in moved), **settings)
        return [*moved, torch.stack([half.float().sum(0) for half in directions])]

    found = twice(advance)
    assert_runs_close(found, wanted, 1e-4)

    basis = torch.randn(64, rank, device=DEVICE)
    start = torch.zeros(64 * length, device=DEVICE)
    param, error = start.clone(), start.clone()
    part = [Factors(0, basis, found[2][0].to(DEVICE), found[0][0].to(DEVICE))]

    def step() -> list[Tensor]:
        param.copy_(start)
        low_rank_step_([param], part, [start], [error], cols=length, right=False, lr=1.0, weight_decay=0.0)
        return [param.clone(), error.clone()]

    products = [basis.cpu().double() @ found[index][0].double() for index in (2, 0)]
    assert_runs_close(twice(step), [-product.reshape(-1) for product in products], 3e-5)


KINDS: list[tuple[Any, dict[str, Any]]] = [
    (MARS, {"variant": "adamw", "optimize_1d": True}),
    (MARS, {"variant": "lion"}),
    (MARS, {"variant": "shampoo", "ns_dtype": "float32"}),
    (MARS, {"variant": "muon", "ns_dtype": "float32"}),
    (MARS, {"variant": "muon", "ns_dtype": "float32", "ns_coefficients": "cans"}),
    (SONew, {"band": 0}),
    (SONew, {"band": 1}),
    (SONew, {"band": 4, "graft": "momentum"}),
    (SONew, {"band": 1, "graft": "rmsprop"}),
    (LDAdam, {"rank": 8}),
    (LDAdam, {"rank": 8, "error_feedback": False}),
]


def training(kind: Any, options: dict[str, Any]) -> Training:
    return Training(kind, options, (96, 200, 96, 200), DEVICE)


@pytest.mark.parametrize("module", [triton, foreach], ids=["triton", "foreach"])
@pytest.mark.parametrize(("kind", "options"), KINDS, ids=str)
def test_replays_of_a_captured_step_are_steps(kind: Any, options: dict[str, Any], module: ModuleType) -> None:
    run, twin = training(kind, {**options, "capturable": True}), training(kind, options)
    with using(module):
        graph = run.captured(3)
        for index in range(3):
            twin.step(index)
        for index in range(3, 8):
            run.prepare(index)
            with no_waiting():
                graph.replay()
            twin.step(index)
        run.step(8)
        twin.step(8)
    assert_runs_close(run.values(), twin.values(), 1e-4)
    assert {float(state["step"]) for state in run.optimizer.state.values()} == {9.0}


def test_a_step_that_would_be_repeated_is_refused() -> None:
    run = training(MARS, {})
    run.step(0)
    run.prepare(1)
    with pytest.raises(RuntimeError, match="build it with capturable=True"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        run.optimizer.step()


def test_a_step_can_be_captured() -> None:
    params, grads, exp_avgs, exp_avg_sqs = fields(4)
    exp_avg_sqs = [value.square() for value in exp_avg_sqs]
    lr = torch.tensor(0.1, device=DEVICE)

    def step() -> None:
        named = {"param": params, "grad": grads, "exp_avg": exp_avgs, "exp_avg_sq": exp_avg_sqs}
        triton.run(Pass("adamw", named, Scalars(lr=lr, betas=BETAS, eps=1e-6, step=2)))

    step()
    before = [value.clone() for field in (params, exp_avgs, exp_avg_sqs) for value in field]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    graph.replay()
    replayed = [value.clone() for value in params]
    torch._foreach_copy_([*params, *exp_avgs, *exp_avg_sqs], before)
    step()
    assert all(torch.equal(a, b) for a, b in zip(params, replayed, strict=True))
