"""MKOR's products with the processor's matrix tiles, against dense products in fp64 and the form that blocks serve."""

from __future__ import annotations

import pytest
import torch
from preconditioning import BF16, assert_rounded_as_promised, preconditioned, problem

from rankwise.kernels import lists, native
from rankwise.kernels.dispatch import using
from rankwise.kernels.native.products import products
from rankwise.mkor import cpu as mkor_cpu
from rankwise.mkor.dispatch import precondition_into_for
from rankwise.mkor.native import precondition_into

CPU = torch.device("cpu")
on_tiles = pytest.mark.skipif(products() is None, reason="the processor has no matrix tiles, or no compiler")
# Blocks are 32 x 32; biases ride along in a block of their own, or in the last one of the weight.
SHAPES = [(1, 1), (12, 9), (32, 32), (31, 33), (64, 100)]


@on_tiles
@pytest.mark.parametrize("sides", ["both", "left", "right"])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_are_rounded_as_often_as_promised(
    shape: tuple[int, int], bias: bool, turned: bool, sides: str
) -> None:
    if shape == (1, 1) and not bias:
        pytest.skip("rescaled, a number alone is itself")
    options = {"bias": bias, "turned": turned, "sides": sides, "into": precondition_into}
    assert_rounded_as_promised(BF16, shape, rescale=True, **options)  # type: ignore[arg-type]


@on_tiles
@pytest.mark.parametrize("rescale", [False, True])
def test_as_exact_as_the_general_form(rescale: bool) -> None:
    """Both round the same results to bfloat16; groups of columns are packed one after the other here."""
    _, flat, left, right = problem(True, BF16, (150, 1500))
    found, other = (
        preconditioned(flat, (150, 1500), left, right, rescale, into=into)
        for into in (precondition_into, mkor_cpu.precondition_into)
    )
    differing = (found - other).abs() > 1e-6 * other.abs()
    assert (found - other).norm() < 1e-3 * other.norm() and float(differing.float().mean()) < 0.05


@on_tiles
def test_bits_do_not_depend_on_threads() -> None:
    _, flat, left, right = problem(True, BF16, (70, 130))
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append(preconditioned(flat, (70, 130), left, right, into=precondition_into))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


@on_tiles
def test_degenerate_products_fall_back_to_the_gradient() -> None:
    grads = torch.ones(5, 6)
    grads[0] = 0.0
    left = [torch.eye(2), *(torch.full((2, 2), value) for value in (0.0, torch.nan, torch.inf)), 3 * torch.eye(2)]
    found = preconditioned(grads, (2, 3), [side.to(BF16) for side in left], None, into=precondition_into)
    assert torch.equal(found[1:4], torch.ones(3, 6)) and not found[0].any()
    assert torch.allclose(found[4], torch.ones(6))


@on_tiles
@pytest.mark.parametrize("scale", [1e-20, 1e15])
def test_norms_neither_overflow_nor_vanish(scale: float) -> None:
    _, flat, left, right = problem(False, BF16)
    expected = preconditioned(flat, (12, 9), left, right, into=precondition_into)
    found = preconditioned(flat * scale, (12, 9), left, right, into=precondition_into)
    assert (found / scale - expected).norm() < 1e-2 * expected.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_other_types_go_to_the_general_form(dtype: torch.dtype) -> None:
    _, flat, left, right = problem(True, dtype)
    found, other = (
        preconditioned(flat.to(dtype), (12, 9), left, right, into=into)
        for into in (precondition_into, mkor_cpu.precondition_into)
    )
    assert torch.equal(found, other)


@pytest.mark.skipif(not native.is_available(), reason="no compiler")
def test_it_is_what_steps_use() -> None:
    assert precondition_into_for(CPU, torch.float32) is precondition_into
    with using(lists):
        assert precondition_into_for(CPU, torch.float32) is None
