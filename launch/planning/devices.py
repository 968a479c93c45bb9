"""Figures of accelerators, as their makers state them, and of the links between them; users' own replace them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from rankwise.launch.typed_options import count, share

__all__ = ["DEVICES", "SPEED", "Device", "Links", "device_of"]

SPEED = "Its speed"
"""Panel of the options of ``rankwise plan``."""


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
        latency: Microseconds of one collective.
    """

    per_node: Annotated[int, count("Ranks of a node.", SPEED, "--gpus-per-node")] = 8
    inside: Annotated[float, share("GB/s in a node.", SPEED, "--node-gbps", least=0.001)] = 300.0
    across: Annotated[float, share("GB/s between nodes.", SPEED, "--net-gbps", least=0.001)] = 50.0
    latency: Annotated[float, share("Of a collective.", SPEED, "--latency-us", least=0)] = 20.0

    def shares(self, sent: float, ranks: int) -> tuple[float, float]:
        """Bytes that stay inside a node and bytes that leave it, if all pairs of ranks exchange as much.

        Args:
            sent: Bytes of one rank.
            ranks: Ranks that exchange.
        """
        here = min(self.per_node, ranks) - 1
        stays = sent * here / (ranks - 1) if ranks > 1 else 0.0
        return stays, sent - stays

    def seconds(self, inside: float, across: float, collectives: float) -> float:
        """Time of messages that wait for nothing and hide behind nothing."""
        return inside / (self.inside * 1e9) + across / (self.across * 1e9) + collectives * (self.latency * 1e-6)
