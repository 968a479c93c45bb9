"""CholeskyQR of matrices of which several holders have some rows each."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from rankwise.updates.orthonormal import Gather, householder_qr, row_block_cholesky_qr, row_block_cholesky_qr2

Factorisation = Callable[[Tensor, Gather], tuple[Tensor, Tensor]]


def _together(factorise: Factorisation, blocks: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The joined rows of all holders, each in a thread, and the boolean on which they agree."""
    barrier, messages = threading.Barrier(len(blocks)), [torch.empty(0)] * len(blocks)

    def hold(index: int) -> tuple[Tensor, Tensor]:
        def gather(message: Tensor) -> Tensor:
            messages[index] = message
            barrier.wait()
            stacked = torch.stack(messages)
            barrier.wait()
            return stacked

        return factorise(blocks[index], gather)

    with ThreadPoolExecutor(len(blocks)) as pool:
        results = list(pool.map(hold, range(len(blocks))))
    assert all(torch.equal(failed, results[0][1]) for _, failed in results)
    return torch.cat([rows for rows, _ in results], dim=-2), results[0][1]


def _matrix(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("cuts", [(7,), (3, 4, 13), (1, 1, 18)], ids=str)
def test_blocks_equal_the_whole(cuts: tuple[int, ...]) -> None:
    matrix = _matrix(0, 2, sum(cuts), 5)
    blocks = matrix.split(list(cuts), dim=-2)
    basis, failed = _together(row_block_cholesky_qr2, blocks)
    assert not failed.any()
    torch.testing.assert_close(basis, householder_qr(matrix), rtol=0, atol=1e-13)
    once, failed = _together(row_block_cholesky_qr, blocks)
    assert not failed.any()
    torch.testing.assert_close(once, householder_qr(matrix), rtol=0, atol=1e-11)


def test_blocks_of_other_scales_and_graded_columns() -> None:
    """Squares of single-precision entries beyond their range, of columns and of whole blocks."""
    columns = 10.0 ** torch.tensor([0.0, -12.0, -24.0, 24.0])
    matrix = _matrix(1, 18, 4) * columns
    matrix[:9, 1] *= 1e-6
    matrix[9:, 2] *= 1e3
    exact = householder_qr(matrix)
    basis, failed = _together(row_block_cholesky_qr2, matrix.float().split(9))
    assert not failed.any()
    torch.testing.assert_close(basis.double(), exact, rtol=0, atol=2e-6)


@pytest.mark.parametrize("kind", ["zero", "deficient", "nan"])
def test_unusable_matrices_are_flagged(kind: str) -> None:
    matrix = _matrix(2, 2, 12, 3)
    if kind == "zero":
        matrix[1] = 0
    elif kind == "deficient":
        matrix[1, :, 2] = matrix[1, :, 0] + matrix[1, :, 1]
    else:
        matrix[1, 5, 1] = torch.nan
    for factorise in (row_block_cholesky_qr, row_block_cholesky_qr2):
        basis, failed = _together(factorise, matrix.split(4, dim=-2))
        assert failed.tolist() == [False, True]
        torch.testing.assert_close(basis[0], householder_qr(matrix[0]), rtol=0, atol=1e-12)
