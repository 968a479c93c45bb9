"""This module has figures of accelerators from their makers, and of links; users may replace them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from rankwise.launch.typed_options import count, share

__all__ = ["DEVICES", "SPEED", "Device", "Links", "device_of"]

SPEED = "Its speed"
"""Panel of options in the help of ``rankwise plan``."""


@dataclass(frozen=True)
class Device:
    """An accelerator.

    Attributes:
        name: Name of the model.
        teraflops: Rate of dense bfloat16 products, 1e12 operations per second.
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
"""Accelerators in SXM and OAM forms, from data sheets of Nvidia and AMD."""


def device_of(text: str) -> Device:
    """Return an accelerator by its name, or by its figures.

    Args:
        text: A name of :data:`DEVICES`, or teraflops and terabytes per second with a colon between them.

    Raises:
        ValueError: The text is neither.
    """
    for device in DEVICES:
        if device.name.lower() == text.lower():
            return device
    try:
        teraflops, terabytes = map(float, text.split(":"))
    except ValueError:
        teraflops = terabytes = 0.0
    if not (teraflops > 0 and terabytes > 0):
        names = ", ".join(device.name for device in DEVICES)
        raise ValueError(f"gpu is {text!r}: it must be one of {names}, or TFLOP/s:TB/s such as 989:3.35")
    return Device(text, teraflops, terabytes)


@dataclass(frozen=True)
class Links:
    """The links by which ranks exchange messages.

    Attributes:
        per_node: Number of ranks of one node.
        inside: Rate between ranks of a node, 1e9 bytes per second in one direction.
        across: Rate between nodes for each rank, 1e9 bytes per second in one direction.
        latency: Microseconds of one collective.
    """

    per_node: Annotated[int, count("Ranks of a node.", SPEED, "--gpus-per-node")] = 8
    inside: Annotated[float, share("GB/s in a node.", SPEED, "--node-gbps", least=0.001)] = 300.0
    across: Annotated[float, share("GB/s between nodes.", SPEED, "--net-gbps", least=0.001)] = 50.0
    latency: Annotated[float, share("Of a collective.", SPEED, "--latency-us", least=0)] = 20.0

    def shares(self, sent: float, ranks: int) -> tuple[float, float]:
        """Return the bytes that stay inside a node and those that leave it, if all pairs of ranks exchange equally.

        Args:
            sent: Bytes that one rank sends.
            ranks: Number of ranks that exchange.
        """
        here = min(self.per_node, ranks) - 1
        stays = sent * here / (ranks - 1) if ranks > 1 else 0.0
        return stays, sent - stays

    def ring_seconds(self, passed: float, ranks: int) -> float:
        """Return the seconds in which bytes pass each link of a ring; at a node's border all of its cards share them.

        Args:
            passed: Bytes that pass each link.
            ranks: Number of ranks in the ring.
        """
        border = self.per_node * self.across if ranks > self.per_node else self.inside
        return passed / (min(self.inside, border) * 1e9)

    def seconds(self, inside: float, across: float, collectives: float) -> float:
        """Return the seconds of messages that do not wait and do not overlap with anything."""
        return inside / (self.inside * 1e9) + across / (self.across * 1e9) + collectives * (self.latency * 1e-6)
