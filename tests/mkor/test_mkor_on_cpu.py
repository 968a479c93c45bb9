"""MKOR's forms for CPUs, and its optimizer on every kind of kernels, against dense linear algebra in fp64."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from factor_windows import dense as dense_inverse
from preconditioning import (
    BF16,
    UNIT,
    assert_rounded_as_promised,
    dense,
    frobenius_error,
    generator,
    inverses,
    preconditioned,
    problem,
)
from simulated import Conv1D
from torch import Tensor, nn

from rankwise import MKOR
from rankwise.kernels import lists as foreach
from rankwise.kernels import native, triton
from rankwise.kernels.dispatch import using
from rankwise.mkor import cpu as mkor_cpu
from rankwise.mkor import formulas as mkor
from rankwise.mkor.vector_windows import factor_of
from rankwise.mkor.workspace import Workspace


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mkor_cpu, "_BLOCK", 50)


# --- factors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", UNIT)
@pytest.mark.parametrize("length", [1, 7, 37])
def test_dense_factors_follow_the_pure_function(length: int, dtype: torch.dtype) -> None:
    """One rounding to the storage type, and exact symmetry."""
    actual = inverses(2, length, 1, dtype)
    old = torch.stack(actual).double()
    vectors = torch.randn(2, length, generator=generator(2), dtype=torch.float64)
    vectors = vectors if dtype == torch.float64 else vectors.float()
    expected = mkor.rank1_inverse_update(old, vectors.double(), 0.9)
    assert mkor_cpu.update_factors_(actual, vectors, decay=0.9).tolist() == [True, True]
    arithmetic = 20 * UNIT[torch.float64 if dtype == torch.float64 else torch.float32]
    for found, wanted in zip(actual, expected, strict=True):
        assert torch.equal(found, found.mT)
        assert (found.double() - wanted).abs().max() <= (UNIT[dtype] + arithmetic) * wanted.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_what_is_not_finite_stays_where_it_is(dtype: torch.dtype) -> None:
    """A bad vector, a broken inverse, an indefinite one, a broken one not seen; their neighbour moves as always."""
    actual = inverses(6, 20, 3, dtype)
    vectors = torch.randn(6, 20, generator=generator(4))
    vectors[0, 3], vectors[1, 19] = torch.nan, torch.inf
    actual[2][4, 5] = actual[4][0, 0] = torch.nan
    actual[3].mul_(-30.0)
    before = [inverse.clone() for inverse in actual]
    expected = mkor.rank1_inverse_update(torch.stack(before), vectors, 0.9)
    seen = torch.tensor([True, True, True, True, False, True])
    ok = mkor_cpu.update_factors_(actual, vectors, decay=0.9, seen=seen)
    assert ok.tolist() == [False, False, False, False, False, True]
    for index in range(5):
        torch.testing.assert_close(actual[index], before[index], rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(actual[5], expected[5], rtol=2 * UNIT[dtype], atol=4 * UNIT[dtype])


# --- preconditioning -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sides", ["both", "left", "right"])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rescale", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BF16])
def test_products_are_rounded_as_often_as_promised(
    dtype: torch.dtype, rescale: bool, bias: bool, turned: bool, sides: str
) -> None:
    assert_rounded_as_promised(dtype, (12, 9), rescale=rescale, bias=bias, turned=turned, sides=sides)


def test_degenerate_products_fall_back_to_the_gradient() -> None:
    grads = torch.ones(5, 6)
    grads[0] = 0.0
    left = [torch.eye(2), *(torch.full((2, 2), value) for value in (0.0, torch.nan, torch.inf)), 3 * torch.eye(2)]
    found = preconditioned(grads, (2, 3), left, None)
    assert torch.equal(found[1:4], torch.ones(3, 6)) and not found[0].any()
    assert torch.allclose(found[4], torch.ones(6))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_identities_change_no_bit(dtype: torch.dtype) -> None:
    grads = torch.randn(2, 31 * 24, generator=generator(9)).to(dtype)
    eyes = [[torch.eye(n, dtype=dtype)] * 2 for n in (31, 24)]
    assert torch.equal(preconditioned(grads, (31, 23), *eyes), grads)
    assert torch.equal(preconditioned(grads, (23, 31), eyes[1], eyes[0], turned=True), grads)


def test_a_workspace_grows_and_is_reused() -> None:
    space = Workspace()
    large = space.take("factor", (7, 5), BF16)
    assert space.take("factor", (3, 4), BF16).data_ptr() == large.data_ptr()
    assert len({space.take(name, (7, 5), dtype).data_ptr() for name in "ab" for dtype in (BF16, torch.float32)}) == 4
    grown = space.take("factor", (6, 6), BF16)
    assert grown.shape == (6, 6) and grown.is_contiguous() and grown.dtype == BF16


# --- the optimizer ---------------------------------------------------------------------------------------------------


def trained(dtype: torch.dtype = torch.float32, **options: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights and factors after four steps, every other one a factor step, and the starting weights."""
    torch.manual_seed(0)
    layers = [nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 8), Conv1D(5, 8), nn.Linear(5, 4, bias=False)]
    model = nn.Sequential(*layers).to(dtype)
    if options.get("rule") != "sketch":
        options["output_gain"] = 5.0
    optimizer = MKOR(model.named_parameters(), lr=1e-2, backend="sgd", update_interval=2, **options)
    optimizer.capture(model)
    for step in range(4):
        optimizer.zero_grad()
        x = torch.randn(7, 6, generator=generator(step)).to(dtype) + 0.5
        model(x).square().mean().backward()
        optimizer.step()
    factors = {
        f"{name} {side}": dense_inverse(factor)
        for name, state in optimizer.matrix_states.items()
        for side in ("left", "right")
        if (factor := factor_of(state, side)) is not None
    }
    assert len(factors) == 10
    return {name: value.detach().double() for name, value in model.named_parameters()}, factors


def largest_difference(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    return max(float((actual[name].double() - value.double()).abs().max()) for name, value in expected.items())


@pytest.mark.parametrize("rule", ["official", "sketch"])
@pytest.mark.parametrize("rescale", ["joint", None])
@pytest.mark.parametrize("factor_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "kernels", [pytest.param(native, marks=pytest.mark.compiled), triton], ids=["native", "triton"]
)
def test_every_form_makes_the_same_step(
    kernels: Any, factor_dtype: str, rescale: str | None, rule: str, request: pytest.FixtureRequest
) -> None:
    """As the plain functions, and in float32 as fp64; the Triton kernels run, where they do, in the interpreter."""
    launched: list[str] = []
    if kernels is triton:
        launched = request.getfixturevalue("launches")
    options = {"factor_dtype": factor_dtype, "product_dtype": factor_dtype, "rescale": rescale, "rule": rule}
    with using(foreach):
        plain, plain_factors = trained(**options)
        wide = {"factor_dtype": "float64", "product_dtype": "float64"}
        exact, exact_factors = trained(torch.float64, **options | wide)
    assert launched == []
    with using(kernels):
        found, found_factors = trained(**options)
    if kernels is triton:
        moving = {"_measure_kernel", "_decide_kernel", "_move_kernel"}
        assert moving & set(launched) == (moving if rule == "sketch" else set())
        assert "_gather_kernel" in launched and ("_choose_kernel" in launched) == (rescale is not None)
    bound = 1e-6 if factor_dtype == "float32" else 2 * UNIT[BF16]
    assert largest_difference(found, plain) < bound * 0.1 + 1e-6
    assert largest_difference(found_factors, plain_factors) <= bound
    if factor_dtype == "float32":
        assert largest_difference(found, exact) < 1e-6
        assert largest_difference(found_factors, exact_factors) < 5e-6
    else:
        assert 1e-6 < largest_difference(found, exact) < 2 * UNIT[BF16]


@pytest.mark.compiled
def test_cpus_take_their_own_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    called = dict.fromkeys(("precondition_into", "update_factors_", "multiply_"), 0)

    def counted(name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            called[name] += 1
            return function(*args, **kwargs)

        return call

    for name in called:
        monkeypatch.setattr(mkor_cpu, name, counted(name, getattr(mkor_cpu, name)))
    monkeypatch.setattr("rankwise.mkor.native.products", lambda: None)
    with using(native):
        trained()
        # Five matrices, four steps; a matrix that lies whole comes alone.
        assert called == {"precondition_into": 4 * 5, "update_factors_": 0, "multiply_": 4 * 5}
        trained(rule="sketch")
    # Two steps move both factors, those of the two square matrices in one call.
    assert called == {"precondition_into": 2 * 4 * 5, "update_factors_": 2 * (2 * 5 - 2), "multiply_": 4 * 5}


@pytest.mark.parametrize(
    "kernels", [pytest.param(native, marks=pytest.mark.compiled), triton], ids=["native", "triton"]
)
def test_float64_factors_of_float32_parameters(kernels: Any, interpreter: None) -> None:
    """No Triton kernel moves these."""
    exact, exact_factors = trained(torch.float64, factor_dtype="float64")
    with using(kernels):
        found, found_factors = trained(factor_dtype="float64")
    assert largest_difference(found, exact) < 1e-6
    assert largest_difference(found_factors, exact_factors) < 5e-6


@pytest.mark.parametrize("sides", ["both", "left", "right"])
@pytest.mark.parametrize("bias", [False, True])
def test_factors_are_converted_a_block_at_a_time(bias: bool, sides: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For products in float32 of factors in bfloat16: no rounding but float32's, and no copy of a whole factor."""
    monkeypatch.setattr(mkor_cpu, "_CONVERTED", 40)
    monkeypatch.setattr(mkor_cpu, "_LEAST_SIDE", 3)
    asked: list[tuple[str, int]] = []
    take = Workspace.take

    def noted(space: Any, name: str, shape: Any, dtype: torch.dtype) -> Tensor:
        asked.append((name, math.prod(shape)))
        return take(space, name, shape, dtype)

    monkeypatch.setattr(Workspace, "take", noted)
    matrices, flat, left, right = problem(bias, BF16)
    into = partial(mkor_cpu.precondition_into, product=torch.float32)
    given = (None if sides == "right" else left), (None if sides == "left" else right)
    for index, found in enumerate(preconditioned(flat, (12, 9), *given, into=into)):
        own = [None if side is None else side[index] for side in given]
        wanted = dense(matrices[index], own[0], own[1], True)
        parts = [found[:108].view(12, 9), found[108:, None]]
        assert frobenius_error(torch.cat(parts[: 1 + bias], 1), wanted) < 1e-6
    sizes = [size for name, size in asked if name == "operand"]
    assert sizes and max(sizes) <= 40
    assert bias or "factor" not in {name for name, _ in asked}, "a gradient that is an operand as it lies"


def test_float64_parameters_are_multiplied_in_float64() -> None:
    """Whatever the factors' type: rounding only in the factors."""
    matrices, _, left, right = problem(False, BF16)
    for index, found in enumerate(preconditioned(matrices.flatten(1), (12, 9), left, right)):
        assert frobenius_error(found.view(12, 9), dense(matrices[index], left[index], right[index], True)) < 1e-14
