"""Newton-Schulz with the processor's matrix tiles against fp64, and what happens on processors without them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rankwise.kernels import lists, native
from rankwise.kernels.dispatch import newton_schulz_for, using
from rankwise.kernels.native import building
from rankwise.kernels.native import products as library
from rankwise.kernels.native import tiled_newton_schulz as tiles
from rankwise.kernels.native.products import products
from rankwise.updates import newton_schulz as linalg

CPU, BF16 = torch.device("cpu"), torch.bfloat16
on_tiles = pytest.mark.skipif(products() is None, reason="the processor has no matrix tiles, or no compiler")
# Blocks are 32 x 32; the last two have more columns of blocks than a group that is packed at once.
SHAPES = [
    (1, 1),
    (1, 7),
    (7, 1),
    (32, 32),
    (64, 32),
    (31, 33),
    (33, 31),
    (100, 40),
    (40, 100),
    (200, 3000),
    (3000, 200),
]


def stack_of(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def error(found: Tensor, exact: Tensor) -> float:
    return float((found - exact).norm() / exact.norm())


@on_tiles
@pytest.mark.parametrize(
    ("steps", "name"), [(1, "published"), (5, "published"), (5, "polar_express"), (8, "polar_express"), (6, "cans")]
)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_as_exact_as_the_library(shape: tuple[int, int], steps: int, name: str) -> None:
    """Both round the same results to bfloat16, so that their errors are nearly the same ones; or at least as large,
    where steeper polynomials carry on what the order of the sums has done to the first roundings."""
    stack = stack_of(3, *shape)
    before = stack.clone()
    found = tiles.newton_schulz(stack, steps, BF16, coefficients=name)
    exact = linalg.newton_schulz(stack.double(), steps, coefficients=name)
    library = linalg.newton_schulz(stack, steps, BF16, coefficients=name)
    assert torch.equal(stack, before) and found.dtype == torch.float32 and found.shape == stack.shape
    assert error(found, exact) < 1.05 * error(library, exact) + 1e-4
    share = 0.5 if name == "published" else 1.5
    assert error(found, library.double()) < share * error(library, exact) + 1e-4


@on_tiles
@pytest.mark.parametrize("shape", [(70, 130), (130, 70)], ids=str)
def test_bits_depend_on_neither_threads_nor_stack(shape: tuple[int, int]) -> None:
    stack = stack_of(7, *shape)
    once = tiles.newton_schulz(stack, 5, BF16)
    before = torch.get_num_threads()
    try:
        for threads in (2, 3, 5):  # by matrix, or all threads at every matrix
            torch.set_num_threads(threads)
            assert torch.equal(tiles.newton_schulz(stack, 5, BF16), once)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(tiles.newton_schulz(stack[3], 5, BF16), once[3])
    assert torch.equal(tiles.newton_schulz(stack.view(7, 1, *shape), 5, BF16).view(7, *shape), once)


@on_tiles
def test_strides_and_transposes() -> None:
    stack = stack_of(2, 64, 90)
    once = tiles.newton_schulz(stack, 5, BF16)
    assert torch.equal(tiles.newton_schulz(stack.mT, 5, BF16).mT, once)
    wide = stack_of(2, 64, 180)[:, :, ::2]
    assert torch.equal(tiles.newton_schulz(wide, 5, BF16), tiles.newton_schulz(wide.contiguous(), 5, BF16))


@on_tiles
def test_zeros_and_what_is_not_finite_stay_where_they_are() -> None:
    stack = stack_of(5, 40, 50)
    whole = tiles.newton_schulz(stack, 5, BF16)
    stack[1], stack[2, 3, 4], stack[3, 5, 6] = 0.0, torch.nan, torch.inf
    found = tiles.newton_schulz(stack, 5, BF16)
    assert torch.equal(found[1], torch.zeros(40, 50))
    assert not found[2].isfinite().any() and not found[3].isfinite().any()
    assert torch.equal(found[[0, 4]], whole[[0, 4]])


@on_tiles
@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1e12])
def test_scales(scale: float) -> None:
    stack = stack_of(2, 40, 50)
    found = tiles.newton_schulz(stack * scale, 5, BF16, eps=0.0)
    assert error(found, linalg.newton_schulz(stack.double(), eps=0.0)) < 0.02


@on_tiles
def test_eps_counts() -> None:
    matrix = stack_of(40, 50)
    found = tiles.newton_schulz(matrix, 1, BF16, eps=30.0)
    assert error(found, linalg.newton_schulz(matrix.double(), 1, eps=30.0)) < 0.01


@on_tiles
def test_the_libraries_own_use_of_the_tiles_is_not_disturbed() -> None:
    """Its products have other shapes of tiles than ours."""
    left, right = stack_of(50, 70).to(BF16), stack_of(70, 90).to(BF16)
    expected = left @ right
    for _ in range(3):
        tiles.newton_schulz(stack_of(33, 70), 2, BF16)
        assert torch.equal(left @ right, expected)


@on_tiles
def test_weights_are_stepped_where_they_lie() -> None:
    """Three in a row, a tall one with other steps, and the largest; each as if it were alone."""
    shapes, lengths = [(33, 50), (90, 20), (140, 170)], [3, 1, 1]
    names = ["published", "published", "polar_express"]
    momenta = [stack_of(count, *shape) for shape, count in zip(shapes, lengths, strict=True)]
    weights = [stack_of(count, *shape) + 1.0 for shape, count in zip(shapes, lengths, strict=True)]
    eps, factors, steps = [1e-7, 3.0, 9.0], [1.0, 0.2, 5.0], [5, 2, 5]
    expected = [
        weight - 0.1 * factor * tiles.newton_schulz(momentum, count, BF16, offset, name)
        for weight, momentum, factor, count, offset, name in zip(
            weights, momenta, factors, steps, eps, names, strict=True
        )
    ]
    before = [momentum.clone() for momentum in momenta]
    tiles.orthogonal_steps_(
        [
            tiles.OrthogonalStep(shape, momentum.view(-1), weight.view(-1), offset, factor, 0.1, count, name)
            for shape, momentum, weight, offset, factor, count, name in zip(
                shapes, momenta, weights, eps, factors, steps, names, strict=True
            )
        ]
    )
    assert all(map(torch.equal, momenta, before))
    for found, wanted in zip(weights, expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)


@on_tiles
def test_no_jobs_are_no_steps() -> None:
    tiles.orthogonal_steps_([])


@pytest.mark.parametrize(
    ("dtype", "product"), [(torch.float32, None), (torch.float64, BF16), (torch.float64, None), (BF16, BF16)]
)
def test_other_types_go_to_the_library(dtype: torch.dtype, product: torch.dtype | None) -> None:
    matrix = stack_of(20, 30).to(dtype)
    for name in ("published", "cans"):
        found = tiles.newton_schulz(matrix, 5, product, coefficients=name)
        assert torch.equal(found, linalg.newton_schulz(matrix, 5, product, coefficients=name))


def test_what_is_refused_is_what_the_library_refuses() -> None:
    with pytest.raises(ValueError, match=r"matrix must be \(..., m, n\)"):
        tiles.newton_schulz(stack_of(3), 5, BF16)
    with pytest.raises(ValueError, match="steps must be at least 1"):
        tiles.newton_schulz(stack_of(3, 3), 0, BF16)
    assert tiles.newton_schulz(torch.empty(0, 3, 4), 5, BF16).shape == (0, 3, 4)


@on_tiles
def test_it_is_what_steps_use() -> None:
    assert newton_schulz_for(CPU) is tiles.newton_schulz
    with using(lists):
        assert newton_schulz_for(CPU) is linalg.newton_schulz


@pytest.fixture
def built_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for cached in (building.library, products):
        cached.cache_clear()
    yield
    for cached in (building.library, products):
        cached.cache_clear()


@pytest.mark.skipif(not native.is_available(), reason="no compiler")
@pytest.mark.usefixtures("built_anew")
def test_a_processor_without_tiles_takes_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_FLAGS", ("-U__AMX_BF16__",))
    assert building.library(library._SOURCE, library._FLAGS) is not None and products() is None
    matrix = stack_of(20, 30)
    assert torch.equal(tiles.newton_schulz(matrix, 5, BF16), linalg.newton_schulz(matrix, 5, BF16))
