"""Messages in codes have the same bits in every form of the kernels, whose seeds lie on the device or the host."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from rankwise.comm.quantized_messages import QuantizedFormat
from rankwise.kernels import lists, native, triton
from rankwise.kernels.dispatch import using
from rankwise.kernels.low_precision_runs import BLOCK


def _message(module: ModuleType, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    with using(module):
        wire = QuantizedFormat(torch.float32)
        message = wire.write(values)
        return message, wire.read(message)


def _values() -> torch.Tensor:
    values = torch.randn(40 * BLOCK, generator=torch.Generator().manual_seed(0))
    values *= 2.0 ** torch.arange(-20, 20).repeat_interleave(BLOCK)
    values[5 * BLOCK + 3], values[9 * BLOCK : 10 * BLOCK] = torch.nan, 0.0
    return values


@pytest.mark.parametrize("module", [native, triton], ids=["native", "triton"])
def test_every_form_writes_and_reads_the_same_bits(module: ModuleType, interpreter: None) -> None:
    if module is triton:
        pytest.importorskip("triton")
    elif not native.is_available():
        pytest.skip("no compiler")
    message, back = _message(module, _values())
    plain, expected = _message(lists, _values())
    assert torch.equal(message, plain) and torch.equal(back.nan_to_num(7.0), expected.nan_to_num(7.0))
    assert int(back.isnan().sum()) == BLOCK and not back[9 * BLOCK : 10 * BLOCK].any()
    assert message.dtype == torch.int8 and len(message) == 40 * (BLOCK + 1)
