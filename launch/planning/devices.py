"""Figures of accelerators, as their makers state them, and of the links between them; users' own replace them."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DEVICES", "Device", "Links", "device_of"]


@dataclass(frozen=True)
class Device:
    """An accelerator.

    Attributes:
        name: Name of the model.
        teraflops: Dense bfloat16 products, 1e12 operations per second.
        terabytes: Memory bandwidth, 1e12 bytes per second.
    """

    name: str
    teraflops: float
    terabytes: float


DEVICES: tuple[Device, ...] = (
    Device("A100", 312.0, 2.04),
    Device("H100", 989.0, 3.35),
    Device("H200", 989.0, 4.8),
    Device("MI300X", 1307.0, 5.3),
)
"""SXM and OAM forms; data sheets of Nvidia and AMD."""


def device_of(text: str) -> Device:
    """An accelerator by its name, or by its figures.

    Args:
        text: A name of :data:`DEVICES`, or teraflops and terabytes per second with a colon between them.

    Raises:
        ValueError: It is neither.
    """
    for device in DEVICES:
        if device.name.lower() == text.lower():
            return device
    try:
        teraflops, terabytes = map(float, text.split(":"))
    except ValueError:
        teraflops = terabytes = 0.0
    if not (teraflops > 0 and terabytes > 0):
        known = ", ".join(device.name for device in DEVICES)
        raise ValueError(f"gpu is {text!r}: it must be one of {known}, or TFLOP/s:TB/s such as 989:3.35")
    return Device(text, teraflops, terabytes)


@dataclass(frozen=True)
class Links:
    """What a rank can send, and how evenly ranks lie on nodes.

    Attributes:
        per_node: Ranks of one node.
        inside: Between ranks of a node, 1e9 bytes per second in one direction.
        across: Between nodes, for each rank.
        latency: Seconds of one collective.
    """

    per_node: int = 8
    inside: float = 300.0
    across: float = 50.0
    latency: float = 20e-6

    def shares(self, sent: float, ranks: int) -> tuple[float, float]:
        """Bytes that stay inside a node and bytes that leave it, if all pairs of ranks exchange as much.

        Args:
            sent: Bytes of one rank.
            ranks: That exchange.
        """
        here = min(self.per_node, ranks) - 1
        stays = sent * here / (ranks - 1) if ranks > 1 else 0.0
        return stays, sent - stays

    def seconds(self, inside: float, across: float, collectives: float) -> float:
        """Time of messages that wait for nothing and hide behind nothing."""
        return inside / (self.inside * 1e9) + across / (self.across * 1e9) + collectives * self.latency
