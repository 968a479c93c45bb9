"""Section "algebra": symmetric products beside the library's by shape, and the factorisations of LDAdam."""

from __future__ import annotations

import math
from functools import partial

import torch

from benchmarks.gpu.items import Figure, Found, Item, Place, Skipped
from benchmarks.gpu.predictions import PRODUCTS

__all__ = ["algebra_items"]

_SHAPES = (
    (32, 512, 2048),
    (16, 768, 3072),
    (4, 2048, 2048),
    (2, 2048, 5461),
    (2, 2048, 8192),
    (1, 4096, 4096),
    (1, 4096, 11008),
    (1, 4096, 14336),
    (1, 8192, 8192),
)


def algebra_items(place: Place) -> list[Item]:
    """Products by shape; Cholesky, triangular solves, the first basis."""
    shapes = ((1, 64, 128),) if place.tiny else _SHAPES
    items = [Item("products " + "x".join(map(str, shape)), 8.0, partial(_products, place, shape)) for shape in shapes]
    library = ((1, 32, 64),) if place.tiny else ((1, 4096, 11008), (1, 4097, 11009))
    items += [Item("library " + "x".join(map(str, shape)), 4.0, partial(_library, place, shape)) for shape in library]
    for rank in (16,) if place.tiny else (16, 64, 256, 512):
        for batch in (1, 2) if place.tiny else (1, 8, 28, 112):
            items.append(Item(f"cholesky {batch}x{rank}", 3.0, partial(_cholesky, place, batch, rank)))
    for side in (32,) if place.tiny else (2048, 4096):
        items.append(Item(f"first basis {side}", 10.0, partial(_first_basis, place, side)))
    return items


def _products(place: Place, shape: tuple[int, int, int]) -> Found:
    if not place.on_cuda:
        raise Skipped("the symmetric kernel needs a CUDA device")
    from rankwise.kernels.triton.chosen_products import Shape, by_shape
    from rankwise.kernels.triton.symmetric_newton_schulz import (
        newton_schulz,
        symmetric_product,
        symmetric_step,
    )
    from rankwise.updates.newton_schulz import newton_schulz as plain
    from rankwise.updates.polynomial_steps import PLAIN, operations, operations_on_devices

    batch, m, n = shape
    x = torch.randn(batch, m, n, device=place.device, dtype=torch.bfloat16) / math.sqrt(n)
    gram = PLAIN.square(x)
    polynomial = (-4.775, 2.0315)
    times = [
        place.seconds(lambda: symmetric_product(x)),
        place.seconds(lambda: PLAIN.square(x)),
        place.seconds(lambda: symmetric_step(gram, gram, gram, *polynomial)),
        place.seconds(lambda: PLAIN.step(gram, gram, gram, *polynomial)),
        place.seconds(lambda: torch.baddbmm(x, gram, x, beta=3.4)),
    ]
    matrix = torch.randn(batch, m, n, device=place.device)
    ours = place.seconds(lambda: newton_schulz(matrix, 5, torch.bfloat16, timed=True), 5)
    theirs = place.seconds(lambda: plain(matrix, 5, torch.bfloat16), 5)
    on_gram = place.seconds(lambda: newton_schulz(matrix, 5, torch.float16, timed=True), 5)
    half = gram.half()
    step = place.seconds(lambda: symmetric_step(half, half, half, 3.4))
    whole_step = place.seconds(lambda: PLAIN.step(half, half, half, 3.4))
    square, cube = 2.0 * batch * m * m * n, 2.0 * batch * m**3
    done = (square / 2, square, cube / 2, cube, square)
    names = ("symmetric product", "library product", "symmetric polynomial", "library polynomial", "last product")
    peak = None if place.peaks is None else place.peaks.bfloat16 / 1e12
    low, high = (None, None) if peak is None else (end * peak for end in PRODUCTS["bfloat16"])
    figures = [
        Figure(name, flops / seconds / 1e12, "TFLOP/s done", low, high)
        for name, flops, seconds in zip(names, done, times, strict=True)
    ]
    best = 5 * (min(times[:2]) + min(times[2:4]) + times[4])
    gains = [times[1] / times[0], times[3] / times[2]]
    figures += [Figure(name, gain, "x the library's speed") for name, gain in zip(names[::2], gains, strict=False)]
    taken = times[0 if by_shape(Shape("square", batch, m, n, False, x.dtype, x.device)) else 1]
    figures.append(Figure("square that the shape decides for, over the best", taken / min(times[:2]), "x", 1.0, 1.1))
    figures.append(Figure("newton-schulz over its products", ours / best, "x", 0.9, 1.3, goal=1.15))
    figures.append(Figure("symmetric step in float16", cube / 2 / step / 1e12, "TFLOP/s done", low, high))
    figures.append(Figure("symmetric step in float16", whole_step / step, "x the library's speed"))
    # Long matrices: on Gram matrices two thirds of the work at 4096 x 11008.
    expected = operations_on_devices(m, n, 5) / operations(m, n, 5, 0.5, False)
    ends = (0.8 * expected, 1.25 * expected) if place.peaks is not None else (None, None)
    figures.append(Figure("newton-schulz in float16 over bfloat16", on_gram / ours, "x", *ends, goal=expected))
    figures.append(Figure("newton-schulz of the library over its products", theirs / best, "x"))
    return Found(figures)


def _library(place: Place, shape: tuple[int, int, int]) -> Found:
    """Products as they are used by MKOR and by nothing else; an odd side costs alignment."""
    _, m, n = shape
    figures = []
    for dtype, kind in ((torch.bfloat16, "bfloat16"), (torch.float32, "float32")):
        left, right = torch.randn(m, m, device=place.device).to(dtype), torch.randn(m, n, device=place.device).to(dtype)
        rate = 2.0 * m * m * n / place.seconds(partial(torch.mm, left, right)) / 1e12
        peak = None if place.peaks is None else place.peaks.rate(kind) / 1e12
        slack = 1.0 if m % 16 == 0 else 0.2
        low, high = (None, None) if peak is None else (PRODUCTS[kind][0] * slack * peak, PRODUCTS[kind][1] * peak)
        figures.append(Figure(f"product of {kind}", rate, "TFLOP/s", low, high))
    return Found(figures)


def _cholesky(place: Place, batch: int, rank: int) -> Found:
    from rankwise.updates.orthonormal import triangular_factor

    roots = torch.randn(batch, rank, 2 * rank, device=place.device)
    gram = roots @ roots.mT / rank
    factor = place.seconds(lambda: triangular_factor(gram))
    lower = torch.linalg.cholesky(gram)
    columns = torch.randn(batch, rank, 64 if place.tiny else 11008, device=place.device)
    solve = place.seconds(lambda: torch.linalg.solve_triangular(lower, columns, upper=False))
    identity = torch.eye(rank, device=place.device).expand_as(lower)
    inverse = place.seconds(lambda: torch.linalg.solve_triangular(lower, identity, upper=False))
    known = place.peaks is not None
    return Found(
        [
            Figure("triangular inverse", inverse / batch * 1e6, "us a matrix", None, 300 if known else None),
            Figure("cholesky", factor / batch * 1e6, "us a matrix", None, 400 if known else None),
            Figure("triangular solve", solve / batch * 1e6, "us a matrix", None, 800 if known else None),
        ]
    )


def _first_basis(place: Place, side: int) -> Found:
    """The first step of LDAdam pays this for every matrix."""
    from rankwise.updates.orthonormal import initial_basis

    matrix = torch.randn(side, 2 * side, device=place.device)
    seconds = place.seconds(lambda: initial_basis(matrix, min(side, 256)), 1, 1)
    return Found([Figure("first basis", seconds, "s", None, 2.0 if place.peaks is not None else None)])
