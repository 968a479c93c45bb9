"""What the exchanges have sent, counted where it is sent."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

__all__ = ["Traffic"]


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
