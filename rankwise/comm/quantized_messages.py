"""Messages in codes of 8 bits."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from rankwise.comm.message_format import WireFormat
from rankwise.comm.owner_plan import Reply
from rankwise.kernels.dispatch import is_for_cpus, kernels_for, quantization_for
from rankwise.kernels.low_precision_runs import BFLOAT16, BLOCK, SIGNED, LowPrecisionRuns

__all__ = ["QuantizedFormat", "wire_of"]

_BITS = {8: torch.int64, 4: torch.int32, 2: torch.int16}


def wire_of(name: str | None, dtype: torch.dtype) -> WireFormat:
    """Format of matrices in messages.

    Args:
        name: Name of a floating-point type, or "int8"; None: that of the matrices, which rounds nothing.
        dtype: Type of the matrices.
    """
    return QuantizedFormat(dtype) if name == "int8" else WireFormat(dtype if name is None else getattr(torch, name))


class QuantizedFormat(WireFormat):
    """Writes a byte for each value and an exponent for every 64, see :mod:`rankwise.kernels.quantization`.

    Rounding is stochastic: values are right on the average, element by element, although no rank keeps the rounding
    errors. The noise is a function of the message alone, so a run can be repeated and resumed to the bit. A block with
    a value that is not finite is NaN throughout.

    Results that have several values for an element, or that are factors, differ in size from part to part, and results
    of which several ranks get a copy would share their blocks with other elements on each: they travel in bfloat16.
    """

    block: ClassVar[int] = BLOCK
    record: ClassVar[int] = BLOCK + 1

    @property
    def dtype(self) -> torch.dtype:
        """Type of messages: that of the codes."""
        return SIGNED

    @property
    def scratch(self) -> float:
        """Bytes of memory per value, at most: the value, its code, and both as they travel."""
        return self.joined.itemsize + 2 * self.record / self.block

    def back(self, reply: Reply, copied: bool) -> WireFormat:
        """Format of results: bfloat16 where parts would not fill the same blocks on all ranks."""
        return WireFormat(BFLOAT16) if copied or reply.whole is not None or reply.values > 1 else self

    def write(self, values: Tensor) -> Tensor:
        """Write a message of records: the codes of a block and their exponent."""
        codes, exponents = (
            values.new_empty(len(values), dtype=SIGNED),
            values.new_empty(len(values) // BLOCK, dtype=SIGNED),
        )
        if len(values):
            runs = LowPrecisionRuns([codes], [exponents], [0], [0], _seed(values))
            quantization_for(values.device, values.dtype).encode_([values], runs)
        return torch.cat([codes.view(-1, BLOCK), exponents.view(-1, 1)], dim=1).view(-1)

    def read(self, message: Tensor) -> Tensor:
        """Read the values of a message, including zeros that filled blocks."""
        records = message.view(-1, self.record)
        codes, exponents = records[:, :BLOCK].contiguous().view(-1), records[:, BLOCK].contiguous()
        values = torch.empty(len(codes), dtype=self.joined, device=message.device)
        if len(codes):
            quantization_for(values.device, values.dtype).decode_(
                [values], LowPrecisionRuns([codes], [exponents], [0], [0])
            )
        return values


def _seed(values: Tensor) -> int | Tensor:
    """A number that differs from message to message: the sum of their bits, which depends on no order."""
    total = values.view(_BITS[values.element_size()]).sum() & 0x7FFFFFFF
    # Compiled kernels take numbers, which are free to read on a CPU.
    return int(total) if is_for_cpus(kernels_for(values.device, values.dtype)) else total
