"""What ``rankwise plan`` says is on its way while something is computed: against real ranks, and by hand."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from rankwise.comm.exchange import MatrixExchange
from rankwise.comm.owner_plan import Batch, MatrixTask, plan_matrices
from rankwise.comm.volume import BatchVolume, Flow
from rankwise.launch.planning.devices import Links
from rankwise.launch.planning.overlap import BatchLoad, Pipeline, Span, Speeds, pipeline_of, run_through
from rankwise.layout.layout import Layout, Shard
from rankwise.plan.step_costs import Joint, StepCosts
from rankwise.step.matrices import MatrixRule, step_matrices

SHAPES = {f"m{index}": (4, 6) for index in range(8)}
SPEEDS = Speeds(lambda flow: 1.0, lambda flops: flops, lambda elements: 0.0)


class Doubling(MatrixRule):
    """Doubles what it gathers."""

    def __init__(self, exchange: MatrixExchange) -> None:
        self.unit = SimpleNamespace(exchange=exchange, layout=exchange.layout, missing=frozenset)  # type: ignore[assignment]
        self.health = SimpleNamespace(add=lambda name, value: None)  # type: ignore[assignment]
        self.values: list[Tensor | None] = [torch.ones(part.numel) for part in exchange.layout.mine]

    def gather(self, in_place: Collection[int]) -> Sequence[Tensor | None]:
        return self.values

    def update(self, batch: Batch, tasks: Sequence[MatrixTask], stack: Tensor, spent: bool = False) -> Tensor:
        return 2 * stack

    def step(self, batch: Batch, indices: Sequence[int], results: Sequence[Tensor]) -> None:
        assert all(torch.equal(result, torch.full_like(result, 2.0)) for result in results)


def _exchange(rank: int, group: Any) -> MatrixExchange:
    """Eight matrices, each cut in two: four batches of one for each rank."""
    ranks = [
        tuple(
            Shard(key, 12 * holder, 12 * holder + 12, 12 * i, shape=shape, tensor=0)
            for i, (key, shape) in enumerate(SHAPES.items())
        )
        for holder in range(2)
    ]
    layout = Layout(tuple(ranks), rank, group)
    plan, _ = plan_matrices(layout, [MatrixTask(key, (key,), None, 1.0) for key in SHAPES], [0.0, 0.0], 24)
    return MatrixExchange(layout, plan, torch.device("cpu"), torch.float32)


def _recorded(rank: int, world: int) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    """The phases that a profiler shows, and when messages begin and are waited for."""
    exchange, log = _exchange(rank, dist.group.WORLD), []

    def logging(name: str, event: str, plan_of: Callable[..., Any]) -> None:
        inner = getattr(exchange, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            log.append((event, exchange.batches.index(plan_of(args[0]))))
            return inner(*args, **kwargs)

        setattr(exchange, name, call)

    logging("start_gather", "gather", lambda plan: plan)
    logging("finish_gather", "compute", lambda plan: plan)
    logging("start_return", "return", lambda plan: plan)
    logging("finish_return", "deliver", lambda returning: returning.plan)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step_matrices(Doubling(exchange))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    ours = sorted(
        (one["ts"], one["name"]) for one in events if one.get("name", "").startswith("rankwise: ") and "ts" in one
    )
    shown = [(name.split()[1], int(name.split()[2])) for _, name in dict.fromkeys(ours)]
    return log, shown


def _simulated(speeds: Speeds) -> list[Span]:
    exchange = _exchange(0, None)
    pipeline = pipeline_of(exchange, StepCosts(), range(2))
    assert len(pipeline.batches) == 4 and all(flow.sent for load in pipeline.batches for flow in load.volume)
    return run_through(pipeline, [0.0, 0.0], speeds)


def _under_way(order: Sequence[tuple[str, int]]) -> dict[int, set[tuple[str, int]]]:
    """By computed batch, the messages that have begun and are waited for later."""
    found: dict[int, set[tuple[str, int]]] = {}
    begun: set[tuple[str, int]] = set()
    for phase, number in order:
        if phase in ("gather", "return"):
            begun.add((phase, number))
        else:
            begun.remove(("gather" if phase == "compute" else "return", number))
            if phase == "compute":
                found[number] = set(begun)
    return found


def test_messages_are_under_way_on_real_ranks_while_the_plan_says_so() -> None:
    spans = _simulated(SPEEDS)
    order = [(span.phase, span.number) for span in spans if span.phase != "in place"]
    # Of messages that take far longer than anything else, all that may be under way is.
    slow = _simulated(SPEEDS._replace(message=lambda flow: 100.0))
    for log, shown in run_ranks(2, _recorded):
        assert log == order
        assert sorted(shown) == sorted(order) and shown == order
        under_way = _under_way(log)
        assert under_way == {0: {("gather", 1)}, 1: {("gather", 2), ("return", 0)}} | {
            2: {("gather", 3), ("return", 1)},
            3: {("return", 2)},
        }
        for found in (spans, slow):
            for computed in (span for span in found if span.phase == "compute"):
                meanwhile = {
                    (span.phase, span.number)
                    for span in found
                    if span.phase in ("gather", "return") and span.start < computed.end and span.end > computed.start
                }
                assert meanwhile <= under_way[computed.number]


def _pipeline(computed: Sequence[float], sent: Sequence[bool], in_place: float = 0.0) -> Pipeline:
    flows = [Flow({0: 1}, {1: 1}) if one else Flow({}, {}) for one in sent]
    loads = (BatchLoad(BatchVolume(flow, flow), {0: work}, {0: 1}) for work, flow in zip(computed, flows, strict=True))
    return Pipeline((0, 1), tuple(loads), {1: in_place})


@pytest.mark.parametrize(
    ("computed", "message", "ends"),
    [
        # One message before the first computation and one after the last are seen, and no other.
        ([2.0, 2.0, 2.0], 1.0, 8.0),
        # The network never rests: G0 G1 R0 G2 R1 R2, and the last result waits for the last computation only.
        ([1.0, 1.0, 1.0], 2.0, 12.0),
        # Nothing to hide behind.
        ([5.0], 3.0, 11.0),
    ],
)
def test_times_written_out(computed: list[float], message: float, ends: float) -> None:
    free = [0.0, 0.0]
    spans = run_through(
        _pipeline(computed, [True] * len(computed)), free, SPEEDS._replace(message=lambda flow: message)
    )
    assert max(free) == ends == max(span.end for span in spans)


def test_batches_that_stay_wait_for_nobody_and_ranks_wait_for_the_last() -> None:
    free = [0.0, 7.0]
    run_through(_pipeline([2.0, 2.0], [False, False], in_place=3.0), free, SPEEDS)
    assert free == [4.0, 10.0]
    free = [0.0, 7.0]
    run_through(_pipeline([2.0], [True]), free, SPEEDS)
    assert free == [11.0, 11.0]  # gathered from 7 to 8, computed until 10, back at 11


def test_the_last_pass_and_matrices_in_place_hide_the_last_results() -> None:
    free = [0.0, 0.0]
    run_through(_pipeline([2.0], [True], in_place=5.0), free, SPEEDS._replace(deliver=lambda elements: 0.5 * elements))
    assert free == [4.5, 6.0]  # results are there at 4; the other rank has its own matrices until 1 + 5


def test_rings_share_the_cards_of_a_node() -> None:
    """Two passes of 64 ranks' sums, one of a scattered one, and everybody's parts; at borders all cards together."""
    assert [Joint(640, kind).passed(64) for kind in ("sum", "scatter", "gather")] == [1260, 630, 40_320]
    assert Links().ring_seconds(3e11, 8) == Links().ring_seconds(3e11, 64) == 1.0
    assert Links(across=25.0).ring_seconds(2e11, 64) == 1.0
    assert Links(per_node=4, across=25.0).ring_seconds(1e11, 4) == pytest.approx(1 / 3)
