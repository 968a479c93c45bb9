"""From operations and bytes to milliseconds, and what part of a training step they are."""

from __future__ import annotations

from dataclasses import dataclass

from rankwise.launch.planning.devices import Device, Links
from rankwise.launch.planning.figures import Figures

__all__ = ["Cost", "cost", "training_seconds"]

_TRAINING = 6  # operations for each token and parameter it meets, forward and backward
_UPDATE = 16  # bytes of an element beside its states: gradient and weight read, weight written, model's copy


@dataclass(frozen=True)
class Cost:
    """Of a step of the optimizer on one kind of device, on its slowest rank; what overlaps is not taken off.

    Attributes:
        device: The kind.
        compute: Milliseconds of the matrix rule.
        memory: Milliseconds of the element-wise passes.
        messages: Milliseconds of the exchange.
        training: Milliseconds of the forward and backward pass.
    """

    device: Device
    compute: float
    memory: float
    messages: float
    training: float

    @property
    def total(self) -> float:
        """Milliseconds of the step."""
        return self.compute + self.memory + self.messages

    @property
    def share(self) -> float:
        """Of a whole training step."""
        return self.total / (self.total + self.training)


def cost(found: Figures, device: Device, links: Links, tokens: int, efficiency: float) -> Cost:
    """What a step costs.

    Args:
        found: The plan.
        device: What computes.
        links: What the ranks are joined by.
        tokens: Of a global batch.
        efficiency: Share of the peak that products reach.
    """
    rate = device.teraflops * 1e12 * efficiency
    compute = max(rank.matrix_flops for rank in found.ranks) / rate
    moved = max(rank.elements * _UPDATE + 2 * rank.element_state_bytes for rank in found.ranks)
    messages = 0.0
    for rank in found.ranks:
        sent = rank.bytes_sent + rank.periodic_bytes / rank.period
        calls = rank.collectives + rank.periodic_collectives / rank.period
        messages = max(messages, links.seconds(*links.shares(sent, found.exchanging), calls))
    training = training_seconds(found, device, tokens, efficiency)
    return Cost(device, 1e3 * compute, 1e3 * moved / (device.terabytes * 1e12), 1e3 * messages, 1e3 * training)


def training_seconds(found: Figures, device: Device, tokens: int, efficiency: float) -> float:
    """Of the forward and backward pass over a global batch."""
    work = _TRAINING * found.active * tokens / len(found.ranks)
    return work / (device.teraflops * 1e12 * efficiency)
