"""What matrices of offloaded weights cost: on the host's cores, or on the device, to which they come over a link."""

from __future__ import annotations

from dataclasses import dataclass

from rankwise.launch.planning.rank_figures import Figures
from rankwise.plan.work_device import HOST_OPERATIONS, LINK_BYTES

__all__ = ["OffloadCost", "offload_cost"]


@dataclass(frozen=True)
class OffloadCost:
    """Cost of both ways on the slowest rank.

    Attributes:
        up: Bytes that go to the device in a step, if it multiplies.
        down: Bytes that come back.
        on_device: Whether the device multiplies.
        link_ms: Milliseconds of the link, both ways at once.
        host_ms: Milliseconds of the host's cores, if they multiply.
    """

    up: float
    down: float
    on_device: bool
    link_ms: float
    host_ms: float

    @property
    def words(self) -> str:
        """The cost in a sentence."""
        place = "the device" if self.on_device else "the host's cores"
        return (
            f"Weights and states are on the host, and matrices are multiplied on {place}. On the device that takes "
            f"{self.up / 2**20:,.1f} MiB up and {self.down / 2**20:,.1f} MiB down a step, {self.link_ms:,.1f} ms at "
            f"{LINK_BYTES / 1e9:g} GB/s; on the host's cores {self.host_ms:,.1f} ms at {HOST_OPERATIONS / 1e12:g} "
            "TFLOP/s for a rank."
        )


def offload_cost(found: Figures) -> OffloadCost | None:
    """Return the cost of a plan's matrices; None where nothing is kept on the host."""
    if not any(rank.bytes_up for rank in found.ranks):
        return None
    up = max(rank.bytes_up + rank.periodic_up / rank.period for rank in found.ranks)
    down = max(rank.bytes_down + rank.periodic_down / rank.period for rank in found.ranks)
    on_device = any(exchange.link is not None for exchange, _ in found.exchanges)
    flops = max(rank.matrix_flops for rank in found.ranks)
    return OffloadCost(up, down, on_device, 1e3 * max(up, down) / LINK_BYTES, 1e3 * flops / HOST_OPERATIONS)
