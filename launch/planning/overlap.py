"""What of the exchange is hidden behind computation: the batches of a step on one network and one device a rank."""

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
    """What one batch asks of the ranks, by their places.

    Attributes:
        volume: Bytes that travel.
        flops: Flops of the matrix rule.
        delivered: Elements that a rank steps when the results are there.
    """

    volume: BatchVolume
    flops: Mapping[int, float]
    delivered: Mapping[int, int]


@dataclass(frozen=True)
class Pipeline:
    """The batches of one unit, in order.

    Attributes:
        places: The ranks that join its messages.
        batches: What travels, or is computed in between.
        in_place: Floating-point operations of matrices that are stepped where they lie, by place.
    """

    places: tuple[int, ...]
    batches: tuple[BatchLoad, ...]
    in_place: Mapping[int, float]

    def sent(self) -> dict[int, Traffic]:
        """By place."""
        return sent_in((batch.volume for batch in self.batches), self.places)

    def delivered(self, place: int) -> int:
        """Elements that a rank steps when results are there."""
        return sum(batch.delivered.get(place, 0) for batch in self.batches)


class Speeds(NamedTuple):
    """Seconds of what a step does.

    Attributes:
        message: Message of all ranks.
        compute: Of so many operations of the matrix rule.
        deliver: Of so many elements' last pass.
    """

    message: Callable[[Flow], float]
    compute: Callable[[float], float]
    deliver: Callable[[float], float]


class Span(NamedTuple):
    """When a phase of a batch lasts, from the rank that begins first to the one that ends last, in seconds."""

    phase: str
    number: int
    start: float
    end: float


def pipeline_of(exchange: MatrixExchange, work: StepCosts, places: Sequence[int]) -> Pipeline:
    """The batches of a unit that is planned or imagined.

    Args:
        exchange: The unit's.
        work: The unit's.
        places: Places of its ranks, among all.
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
    """Go through the phases of a step as :func:`rankwise.step.matrices.phases` has them.

    A message begins when the one before it has ended and all ranks have come to it, and ends for all at once.

    Args:
        pipeline: The batches.
        free: When each place's device is free; overwritten with when it is free again.
        speeds: Speeds of network and device.

    Returns:
        The phases in their order.
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
