"""Operations and bytes become milliseconds here, and shares of a training step."""

from __future__ import annotations

from dataclasses import dataclass

from rankwise.comm.message_format import Traffic
from rankwise.comm.volume import Flow
from rankwise.launch.planning.devices import Device, Links
from rankwise.launch.planning.overlap import Speeds, run_through
from rankwise.launch.planning.rank_figures import Figures

__all__ = ["Cost", "cost", "training_seconds"]

_TRAINING = 6  # operations for each token and parameter that it meets, forward and backward
_UPDATE = 16  # bytes of an element beside its states: gradient and weight read, weight written, model's copy
_DELIVERY = 12  # bytes of these after a matrix's result has arrived: result and weight read, weight written


@dataclass(frozen=True)
class Cost:
    """Cost of a step of the optimizer on one kind of device, on its slowest rank.

    Attributes:
        device: Kind of device.
        compute: Milliseconds of the matrix rule.
        memory: Milliseconds of the element-wise passes.
        messages: Milliseconds of the exchange, if nothing overlapped with it.
        exposed: Milliseconds in which the device waits for messages, or for other ranks in their batches.
        training: Milliseconds of the forward and backward pass.
    """

    device: Device
    compute: float
    memory: float
    messages: float
    exposed: float
    training: float

    @property
    def hidden(self) -> float:
        """Milliseconds of messages behind the computation of other batches."""
        return max(self.messages - self.exposed, 0.0)

    @property
    def total(self) -> float:
        """Milliseconds of the step."""
        return self.compute + self.memory + self.exposed

    @property
    def serial(self) -> float:
        """Milliseconds of the step if nothing overlapped."""
        return self.compute + self.memory + self.messages

    @property
    def share(self) -> float:
        """Fraction of a whole training step that the optimizer takes."""
        return self.total / (self.total + self.training)


def cost(found: Figures, device: Device, links: Links, tokens: int, efficiency: float) -> Cost:
    """Return the costs of a step.

    Args:
        found: Figures of the plan.
        device: Device that computes.
        links: Links between the ranks.
        tokens: Tokens of a global batch.
        efficiency: Share of the peak that products reach.
    """
    rate, bandwidth = device.teraflops * 1e12 * efficiency, device.terabytes * 1e12

    def seconds(sent: float, collectives: float) -> float:
        return links.seconds(*links.shares(sent, found.exchanging), collectives)

    def message(flow: Flow) -> float:
        return seconds(max(*flow.sent.values(), *flow.received.values()), 1)

    piped, delivered = [Traffic() for _ in found.ranks], [0] * len(found.ranks)
    for pipeline in found.pipelines:
        for place, sent in pipeline.sent().items():
            piped[place].bytes += sent.bytes
            piped[place].collectives += sent.collectives
            delivered[place] += pipeline.delivered(place)
    compute = max(rank.matrix_flops for rank in found.ranks) / rate
    memory = messages = 0.0
    free: list[float] = []
    for rank, matrices, later in zip(found.ranks, piped, delivered, strict=True):
        bytes_sent = rank.bytes_sent + rank.periodic_bytes / rank.period
        collectives = rank.collectives + rank.periodic_collectives / rank.period
        passes = (rank.elements * _UPDATE + 2 * rank.element_state_bytes) / bandwidth
        around = links.ring_seconds(rank.ring_bytes, rank.ring_ranks)
        in_pairs = bytes_sent - rank.joint_bytes
        memory, messages = max(memory, passes), max(messages, around + seconds(in_pairs, collectives))
        # All other messages come first: sums, and what owners get.
        first = around + seconds(in_pairs - matrices.bytes, collectives - matrices.collectives)
        free.append(first + passes - _DELIVERY * later / bandwidth)
    speeds = Speeds(message, lambda flops: flops / rate, lambda elements: _DELIVERY * elements / bandwidth)
    for pipeline in found.pipelines:
        run_through(pipeline, free, speeds)
    exposed = max(max(free) - compute - memory, 0.0)
    training = training_seconds(found, device, tokens, efficiency)
    return Cost(device, *(1e3 * value for value in (compute, memory, messages, exposed, training)))


def training_seconds(found: Figures, device: Device, tokens: int, efficiency: float) -> float:
    """Return the seconds of the forward and backward pass over a global batch."""
    work = _TRAINING * found.active * tokens / len(found.ranks)
    return work / (device.teraflops * 1e12 * efficiency)
