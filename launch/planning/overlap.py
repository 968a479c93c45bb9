"""This module computes how much of the exchange overlaps with computation, with one network and a device per rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rankwise.comm.exchange import MatrixExchange
from rankwise.comm.message_format import Traffic
from rankwise.comm.volume import BatchVolume, Flow, batch_volumes, sent_in
from rankwise.plan.step_costs import StepCosts
from rankwise.step.matrices import phases

__all__ = ["BatchLoad", "Pipeline", "Span", "Speeds", "pipeline_of", "run_through"]


class BatchLoad(NamedTuple):
    """The work of one batch on the ranks, by their places.

    Attributes:
        volume: Bytes that travel.
        flops: Operations of the matrix rule.
        delivered: Elements that a rank steps when results have arrived.
    """

    volume: BatchVolume
    flops: Mapping[int, float]
    delivered: Mapping[int, int]


@dataclass(frozen=True)
class Pipeline:
    """The batches of one unit, in order.

    Attributes:
        places: Places of the ranks that take part in its messages.
        batches: Batches that travel and are computed.
        in_place: Floating-point operations of matrices that are stepped where they lie, by place.
    """

    places: tuple[int, ...]
    batches: tuple[BatchLoad, ...]
    in_place: Mapping[int, float]

    def sent(self) -> dict[int, Traffic]:
        """Return what each rank sends, by place."""
        return sent_in((batch.volume for batch in self.batches), self.places)

    def delivered(self, place: int) -> int:
        """Return the number of elements that a rank steps when results have arrived."""
        return sum(batch.delivered.get(place, 0) for batch in self.batches)


class Speeds(NamedTuple):
    """Functions that return the seconds of a step's parts.

    Attributes:
        message: Seconds of a message of all ranks.
        compute: Seconds of so many operations of the matrix rule.
        deliver: Seconds of the last pass over so many elements.
    """

    message: Callable[[Flow], float]
    compute: Callable[[float], float]
    deliver: Callable[[float], float]


class Span(NamedTuple):
    """The time of a batch's phase in seconds, from the rank that begins first to the one that ends last."""

    phase: str
    number: int
    start: float
    end: float


def pipeline_of(exchange: MatrixExchange, work: StepCosts, places: Sequence[int]) -> Pipeline:
    """Return the batches of a unit that is planned or imagined.

    Args:
        exchange: Exchange of the unit.
        work: Costs of the unit's step.
        places: Places of its ranks among all ranks.
    """
    layout, plan = exchange.layout, exchange.plan
    batches: list[BatchLoad] = []
    in_place: dict[int, float] = {}
    for batch, volume in zip(plan.batches, batch_volumes(layout, plan, exchange.wire, work.reply), strict=True):
        flops: dict[int, float] = {}
        delivered: dict[int, int] = {}
        for task in batch.tasks:
            place = places[plan.owners[task.key]]
            shares = [layout.elements(part) for part in task.parts]
            if exchange.one_by_one and all(share.keys() == {plan.owners[task.key]} for share in shares):
                in_place[place] = in_place.get(place, 0.0) + task.cost
                continue
            flops[place] = flops.get(place, 0.0) + task.cost
            for share in shares:
                for holder, held in share.items():
                    delivered[places[holder]] = delivered.get(places[holder], 0) + held
        if flops:
            placed = BatchVolume(*(_placed(flow, places) for flow in volume))
            batches.append(BatchLoad(placed, flops, delivered))
    return Pipeline(tuple(places), tuple(batches), in_place)


def _placed(flow: Flow, places: Sequence[int]) -> Flow:
    return Flow(*({places[rank]: size for rank, size in side.items()} for side in flow))


def run_through(pipeline: Pipeline, free: list[float], speeds: Speeds) -> list[Span]:
    """Go through the phases of a step in the order of :func:`rankwise.step.matrices.phases`.

    A message begins when the one before it has ended and all ranks have come to it, and ends for all at once.

    Args:
        pipeline: Batches of a unit.
        free: Time at which each place's device is free, which is overwritten with the time after the step.
        speeds: Speeds of network and device.

    Returns:
        The times of the phases, in their order.
    """
    spans: list[Span] = []
    arrived: dict[tuple[str, int], float] = {}
    network = 0.0

    def occupy(phase: str, number: int, after: float, seconds: Mapping[int, float]) -> None:
        starts = {place: max(free[place], after) for place in pipeline.places}
        for place, start in starts.items():
            free[place] = start + seconds.get(place, 0.0)
        spans.append(Span(phase, number, min(starts.values()), max(free[place] for place in pipeline.places)))

    for phase, number in phases(len(pipeline.batches)):
        if phase == "in place":
            seconds = {place: speeds.compute(flops) for place, flops in pipeline.in_place.items()}
            occupy(phase, number, 0.0, seconds)
            continue
        load = pipeline.batches[number]
        if phase == "compute":
            seconds = {place: speeds.compute(flops) for place, flops in load.flops.items()}
            occupy(phase, number, arrived["gather", number], seconds)
        elif phase == "deliver":
            seconds = {place: speeds.deliver(held) for place, held in load.delivered.items()}
            occupy(phase, number, arrived["return", number], seconds)
        else:
            flow = load.volume.gather if phase == "gather" else load.volume.back
            start = max(network, *(free[place] for place in pipeline.places))
            if flow.sent:
                network = start + speeds.message(flow)
            arrived[phase, number] = network if flow.sent else 0.0
            spans.append(Span(phase, number, start, network if flow.sent else start))
    return spans
