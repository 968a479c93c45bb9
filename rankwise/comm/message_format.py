"""The format of values in the messages of matrices, and the count of what the exchanges have sent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rankwise.comm.owner_plan import Reply

__all__ = ["Traffic", "WireFormat"]


class WireFormat:
    """Writes values one after the other, in a floating-point type.

    Attributes:
        block: Number of values that are written together. What one rank sends another of a matrix fills whole blocks.
        record: Elements of a message that a block takes.
        joined: Type in which values are concatenated before they are written.
    """

    block: ClassVar[int] = 1
    record: ClassVar[int] = 1

    def __init__(self, dtype: torch.dtype) -> None:
        self.joined = dtype

    @property
    def dtype(self) -> torch.dtype:
        """Type of messages."""
        return self.joined

    @property
    def scratch(self) -> float:
        """Bytes of memory per value, at most, while a message is written, under way or read."""
        return self.joined.itemsize

    def bytes_of(self, values: int) -> int:
        """Bytes of a message with this number of values of a matrix."""
        return -(-values // self.block) * self.record * self.dtype.itemsize

    def back(self, reply: Reply, copied: bool) -> WireFormat:
        """Format of results; ``copied``: several ranks hold the same elements, and must get the same values."""
        return self

    def write(self, values: Tensor) -> Tensor:
        """Write a message of whole blocks of values, 1-D, of the type :attr:`joined`."""
        return values

    def read(self, message: Tensor) -> Tensor:
        """Read the values of a message, including zeros that filled blocks."""
        return message


@dataclass
class Traffic:
    """Collectives started and bytes handed to them by this rank.

    Attributes:
        collectives: Number of calls.
        bytes: Payload of this rank's messages: for an all-reduce the vector, for an all-to-all what goes to others.
    """

    collectives: int = 0
    bytes: int = 0

    def count(self, message: Tensor) -> None:
        """Record one collective."""
        self.collectives += 1
        self.bytes += message.numel() * message.element_size()

    def add(self, other: Traffic) -> None:
        """Record what was counted elsewhere."""
        self.collectives += other.collectives
        self.bytes += other.bytes
