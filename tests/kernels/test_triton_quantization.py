"""Block-wise quantization in one launch, in the interpreter, against the plain form: the same bits."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from test_quantization import LENGTHS, assert_same_bits, values_of  # noqa: E402

from rankwise.kernels import triton  # noqa: E402
from rankwise.kernels.forms import quantization_for, using  # noqa: E402

pytestmark = pytest.mark.usefixtures("interpreter")


def test_the_same_bits(launches: list[str]) -> None:
    from rankwise.kernels.triton import launched_quantization as launched

    with using(triton):
        assert quantization_for(torch.device("cpu"), torch.float32) is launched
    runs = [values_of(numel, seed) for seed, numel in enumerate((*LENGTHS, 0))]
    runs.append(values_of(5001, 99)[1:])  # begins where wide accesses do not
    runs[3][7], runs[4][100] = torch.nan, -torch.inf
    assert_same_bits(launched, runs, has_nans=True)
    assert len(launches) == 3


def test_other_lengths_are_refused() -> None:
    from rankwise.kernels.triton import launched_quantization as launched

    values, kept = torch.zeros(65), torch.zeros(80, dtype=torch.uint8)
    with pytest.raises(ValueError, match="of its length"):
        launched.add_dequantized([values], [kept], [values[1:]])
    with pytest.raises(ValueError, match="bytes in a row"):
        launched.quantize_([values], [kept[1:]])
