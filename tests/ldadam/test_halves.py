"""LDAdam's products of bfloat16 halves, in Triton's interpreter, against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from rankwise.ldadam.in_place import LowRankStep  # noqa: E402

pytestmark = pytest.mark.usefixtures("interpreter")


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("offset", [0, 1])
def test_two_halves_make_the_number(scaled: bool, offset: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the last bit but seven, of full tiles and pieces, aligned or not; of rows that are scaled, too."""
    from rankwise.ldadam.cuda import halves

    monkeypatch.setattr(halves, "TILE", 64)
    sizes = ((130, 0), (64, -20), (7, 20), (3, None))
    tensors = [
        (randn(2 * size + offset, seed=size) * (0.0 if power is None else 10.0**power))[offset:].view(1, 2, size)
        for size, power in sizes
    ]
    wanted = tensors
    if scaled:
        peaks = [tensor.abs().amax(-1, keepdim=True) for tensor in tensors]
        wanted = [tensor / torch.where(peak > 0, peak, 1.0) for tensor, peak in zip(tensors, peaks, strict=True)]
    found = halves.in_halves(tensors, scaled)
    assert len({half.stride(0) for half in found}) == 1
    for (high, low), number in zip(found, wanted, strict=True):
        assert torch.equal(high, number.bfloat16()) and torch.equal(low, (number - high.float()).bfloat16())
        assert ((high.double() + low.double() - number.double()).abs() <= 2.0**-17 * number.double().abs()).all()


ROWS, COLUMNS, RANK = 384, 1024, 64


def matrix_of(spectrum: str) -> Tensor:
    if spectrum == "flat":
        return randn(ROWS, COLUMNS, seed=0)
    left, right = (torch.linalg.qr(randn(side, ROWS, seed=side))[0] for side in (ROWS, COLUMNS))
    index = torch.arange(1.0, ROWS + 1)
    values = {"1/i": 1 / index, "1/i^2": 1 / index**2, "to 1e-6": 10 ** (-6 * (index - 1) / (ROWS - 1))}[spectrum]
    return (left * values) @ right.mT


# The sine of the angle to the float64 basis: least, most.
SPECTRA = {"flat": (2e-6, 2e-5), "1/i": (5e-6, 5e-5), "1/i^2": (2e-4, 2e-3), "to 1e-6": (2e-6, 5e-5)}


@pytest.mark.parametrize(
    "spectrum", [one if one == "1/i^2" else pytest.param(one, marks=pytest.mark.exhaustive) for one in SPECTRA]
)
def test_errors_of_a_step(spectrum: str) -> None:
    """The basis, the projection in it, the error buffer for what it loses, and orthonormality, which is float32's."""
    from rankwise.ldadam.cuda.grouped_matrices import ldadam_matrices_

    C = matrix_of(spectrum)
    U = torch.linalg.qr(C @ (C.mT @ randn(ROWS, RANK, seed=5)))[0].contiguous()
    group: dict[str, Any] = {"lr": 0.0, "betas": (0.908, 0.99), "rho": 0.908, "eps": 1e-8, "error_feedback": True}
    moments = torch.zeros(2, RANK, COLUMNS)
    state = {"basis": U.clone(), "exp_avg": moments[0], "exp_avg_sq": moments[1]}
    source, weight = C.flatten().clone(), torch.zeros(ROWS * COLUMNS)
    job = LowRankStep((ROWS, COLUMNS), False, None, source, weight, state, 1000, group)
    assert float(ldadam_matrices_([job]).kept) == 0.0

    exact, found, Z = C.double(), state["basis"].double(), state["exp_avg"].double()
    half = torch.linalg.qr(exact.mT @ U.double())[0]
    wanted = torch.linalg.qr(exact @ half)[0]
    sine = torch.linalg.matrix_norm(found - wanted @ (wanted.mT @ found), 2).item()
    projected = found.mT @ exact
    projection = ((Z / (1 - 0.908) - projected).norm() / projected.norm()).item()
    buffer = exact - found @ Z
    conserved = ((source.double().view_as(buffer) - buffer).norm() / buffer.norm()).item()
    orthonormal = (found.mT @ found - torch.eye(RANK)).abs().max().item()
    low, high = SPECTRA[spectrum]
    assert low < sine < high
    assert 1e-6 < projection < 5e-6 and 1e-7 < conserved < 7e-7 and orthonormal < 7e-7


def test_training_is_tried_with_these_products() -> None:
    """What ``benchmarks.device_numerics`` multiplies in place of float32, and nothing else."""
    from benchmarks.device_numerics import ARMS, PAIRS, Halves, interval

    left, right = randn(30, 50, seed=1), randn(50, 20, seed=2)
    exact = left.double() @ right.double()
    with Halves():
        found, narrow, wide = left @ right, left.bfloat16() @ right.bfloat16(), left.double() @ right.double()
    assert 1e-7 < ((found.double() - exact).norm() / exact.norm()).item() < 1e-5
    assert torch.equal(narrow, left.bfloat16() @ right.bfloat16()) and torch.equal(wide, exact)
    assert {name for pair in PAIRS for name in pair} == set(ARMS)
    assert interval([1.0, 2.0, 3.0]) == (2.0, pytest.approx(4.303 / 3**0.5))
