"""Whatever the cut, owners see whole matrices and holders get their pieces, with no message more than planned."""

from __future__ import annotations

import itertools
import json
import random
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from collectives import recorded
from random_layouts import random_fragments
from ranks import run_ranks
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from rankwise.sharding import Batch, Fragment, Layout, MatrixExchange, MatrixPlan, MatrixTask, Reply, plan_matrices

CPU = torch.device("cpu")
SEEDS = 25
PAYLOAD = 3
REPLIES = {"pieces": Reply(), "two values": Reply(values=2), "payload": Reply(whole=PAYLOAD)}


def _shapes(seed: int) -> dict[str, tuple[int, ...]]:
    """Matrices, some with a bias to travel with, and a vector that belongs to no task."""
    rng = random.Random(seed)
    shapes: dict[str, tuple[int, ...]] = {"free": (7,)}
    for index in range(rng.randint(1, 6)):
        shape = rng.choice([(4, 5), (3, 7), (6, 6), (1, 9)])
        shapes[f"m{index}.weight"] = shape
        if rng.random() < 0.5:
            shapes[f"m{index}.bias"] = shape[:1]
    return shapes


def _tasks(shapes: dict[str, tuple[int, ...]]) -> list[MatrixTask]:
    tasks = []
    for key, shape in shapes.items():
        if key.endswith("weight"):
            bias = key.replace("weight", "bias")
            parts = (key, bias) if bias in shapes else (key,)
            tasks.append(MatrixTask(key, parts, (shape, len(parts)), float(prod(shape))))
    return tasks


def _whole(shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    first, whole = 1, {}
    for key, shape in shapes.items():
        whole[key] = torch.arange(first, first + prod(shape), dtype=torch.float64)
        first += prod(shape)
    return whole


@dataclass
class Probe:
    """Runs an exchange and compares everything it hands out with what it must be."""

    layout: Layout
    tasks: list[MatrixTask]
    whole: dict[str, Tensor]
    batch_elements: int = 50
    at_once: bool = False
    events: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        world = self.layout.world_size
        self.plan, _ = plan_matrices(self.layout, self.tasks, [0.0] * world, self.batch_elements)
        self.exchange = MatrixExchange(self.layout, self.plan, CPU, torch.float64, one_by_one=self.at_once)

    def matrix(self, task: MatrixTask) -> Tensor:
        return torch.cat([self.whole[part] for part in task.parts])

    def run(self, reply: str = "pieces") -> dict[str, list[int]]:
        used = {part for task in self.tasks for part in task.parts}
        sources = [
            self.whole[fragment.key][fragment.start : fragment.end] if fragment.key in used else None
            for fragment in self.layout.mine
        ]
        delivered: Counter[int] = Counter()
        computed: Counter[str] = Counter()

        def compute(batch: Batch, tasks: Sequence[MatrixTask], stack: Tensor) -> Tensor:
            self.events.append(("compute", next(i for i, b in enumerate(self.plan.batches) if tasks[0] in b.tasks)))
            assert not self.at_once or not any(map(self.in_place, tasks))
            assert tasks and all(self.plan.owners[task.key] == self.layout.rank for task in tasks)
            assert torch.equal(stack, torch.stack([self.matrix(task) for task in tasks]))
            computed.update(task.key for task in tasks)
            if reply == "payload":
                return self.payload_of(stack)
            return stack.square() if reply == "pieces" else torch.cat([stack.square(), -stack], dim=1)

        def deliver(task: MatrixTask, index: int, values: Tensor) -> None:
            self.events.append(("deliver", task.key))
            fragment = self.layout.mine[index]
            assert fragment.key in task.parts
            result = self.matrix(task).square()
            first = sum(self.whole[part].numel() for part in task.parts[: task.parts.index(fragment.key)])
            own = slice(first + fragment.start, first + fragment.end)
            expected = result[own]
            if reply == "two values":
                expected = torch.cat([expected, -self.matrix(task)[own]])
            if reply == "payload":
                expected = self.payload_of(self.matrix(task)[None])[0]
            assert torch.equal(values, expected)
            delivered[index] += 1

        def here(task: MatrixTask, indices: Sequence[int], values: Sequence[Tensor]) -> None:
            assert self.plan.owners[task.key] == self.layout.rank and self.in_place(task)
            assert [self.layout.mine[index].key for index in indices] == list(task.parts)
            assert all(value is sources[index] for index, value in zip(indices, values, strict=True))
            computed[task.key] += 1
            delivered.update(indices)

        with recorded("all_to_all_single", "all_reduce", log=self.events.append) as calls:
            at_once = here if self.at_once else None
            self.exchange.run(sources, compute, deliver, lambda batch: REPLIES[reply], at_once=at_once)
        expected_deliveries = {i: 1 for i, fragment in enumerate(self.layout.mine) if fragment.key in used}
        assert dict(delivered) == expected_deliveries
        owned = [task.key for task in self.exchange.owned()]
        assert dict(computed) == dict.fromkeys(owned, 1)
        assert set(owned) == {key for key, owner in self.plan.owners.items() if owner == self.layout.rank}
        assert not calls["all_reduce"]
        return calls

    def in_place(self, task: MatrixTask) -> bool:
        """Whether its owner alone has it, each part in one run."""
        runs = [(rank, run) for rank, runs in enumerate(self.layout.ranks) for run in runs if run.key in task.parts]
        return {rank for rank, _ in runs} == {self.plan.owners[task.key]} and all(run.is_whole for _, run in runs)

    @staticmethod
    def payload_of(stack: Tensor) -> Tensor:
        return torch.stack([stack.sum(1), stack[:, 0], stack[:, -1]], dim=1)

    def crossing(self, batch: Batch) -> bool:
        holders = self.layout.holders
        return any(
            holder != self.plan.owners[task.key]
            for task in batch.tasks
            for part in task.parts
            for holder in holders[part]
        )

    def payload_bytes(self) -> int:
        """What all ranks together send when payloads return."""
        holders = self.layout.holders
        recipients = sum(
            len({holder for part in task.parts for holder in holders[part]} - {self.plan.owners[task.key]})
            for task in self.tasks
        )
        return 8 * PAYLOAD * recipients


def _check(rank: int, world: int, group: Any) -> list[dict[str, Any]]:
    found = []
    for seed in range(SEEDS):
        for replicated in (False, True) if world > 1 else (False,):
            for reply, at_once in [*itertools.product(REPLIES, [False]), ("pieces", True)]:
                shapes = _shapes(seed)
                layout = Layout(random_fragments(shapes, world, seed, replicated), rank, group, replicated)
                probe = Probe(layout, _tasks(shapes), _whole(shapes), at_once=at_once)
                calls = probe.run(reply)["all_to_all_single"]
                travelling = sum(map(probe.crossing, probe.plan.batches))
                assert len(calls) == travelling * (1 if replicated else 2)
                found.append(
                    {
                        "replicated": replicated,
                        "reply": reply,
                        "sent": sum(calls),
                        "planned": probe.exchange.bytes_per_gather,
                        "payload_bytes": probe.payload_bytes(),
                        "numel": sum(probe.matrix(task).numel() for task in probe.tasks),
                        "travelling": travelling,
                        "at once": at_once and sum(map(probe.in_place, probe.tasks)),
                    }
                )
    return found


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_random_layouts(world: int) -> None:
    ranks = [_check(0, 1, None)] if world == 1 else run_ranks(world, _check_in_world)
    for cases in zip(*ranks, strict=True):
        case, sent = cases[0], sum(other["sent"] for other in cases)
        planned = sum(other["planned"] for other in cases)
        pieces = 8 * case["numel"] * (world - 1) if case["replicated"] else planned
        returned = {"pieces": pieces, "two values": 2 * pieces, "payload": case["payload_bytes"]}
        assert planned == 0 or not case["replicated"]
        assert sent == planned + returned[case["reply"]]
    assert world == 1 or any(case["travelling"] for case in ranks[0])
    assert any(case["at once"] for case in ranks[0])


def _check_in_world(rank: int, world: int) -> list[dict[str, Any]]:
    return _check(rank, world, dist.group.WORLD)


def _stay_at_home(rank: int, world: int) -> tuple[int, int]:
    shapes = {f"m{index}.weight": (4, 5) for index in range(2 * world)}
    ranks = [
        tuple(Fragment(key, shape, 0, 20, 0, 0) for i, (key, shape) in enumerate(shapes.items()) if i % world == holder)
        for holder in range(world)
    ]
    probe = Probe(Layout(tuple(ranks), rank, dist.group.WORLD), _tasks(shapes), _whole(shapes))
    return len(probe.run()["all_to_all_single"]), probe.exchange.bytes_per_gather


def test_matrices_whole_on_their_owners_send_nothing() -> None:
    assert run_ranks(3, _stay_at_home) == [(0, 0)] * 3


def _pipeline(rank: int, world: int) -> list[Any]:
    # Each matrix is cut in the middle and every rank owns one of each batch.
    shapes = {f"m{index}.weight": (4, 5) for index in range(8)}
    ranks: list[list[Fragment]] = [[], []]
    for key, shape in shapes.items():
        ranks[0].append(Fragment(key, shape, 0, 9, 0, 0))
        ranks[1].append(Fragment(key, shape, 9, 20, 0, 0))
    layout = Layout(tuple(map(tuple, ranks)), rank, dist.group.WORLD)
    probe = Probe(layout, _tasks(shapes), _whole(shapes), batch_elements=20)
    assert len(probe.plan.batches) == 4
    batch_of = {task.key: index for index, batch in enumerate(probe.plan.batches) for task in batch.tasks}
    probe.run()
    return [("deliver", batch_of[event[1]]) if event[0] == "deliver" else event for event in probe.events]


def test_the_next_gather_leaves_before_the_computation() -> None:
    message = "all_to_all_single"
    expected: list[Any] = [message]  # the first gather
    for index in range(4):
        expected += [message] * (index < 3)  # the next gather
        expected += [("compute", index), message]  # and this batch's results
        expected += [("deliver", index - 1)] * 2 * (index > 0)
    expected += [("deliver", 3)] * 2
    for events in run_ranks(2, _pipeline):
        assert events == expected


def test_a_single_process_skips_tasks_without_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    # Fresh memory may happen to be zero.
    monkeypatch.setattr(torch, "empty", lambda *shape, **kwargs: torch.full(shape, torch.nan, **kwargs))
    shapes = {"a.weight": (2, 3), "a.bias": (2,), "b.weight": (2, 3), "b.bias": (2,)}
    fragments = [Fragment(key, shape, 0, prod(shape), 0, 0) for key, shape in shapes.items()]
    layout, tasks, whole = Layout.single(fragments), _tasks(shapes), _whole(shapes)
    plan, _ = plan_matrices(layout, tasks, [0.0])
    exchange = MatrixExchange(layout, plan, CPU, torch.float64)
    stacks: list[Tensor] = []
    delivered: dict[int, Tensor] = {}

    def compute(batch: Batch, tasks: Sequence[MatrixTask], stack: Tensor) -> Tensor:
        stacks.append(stack)
        return stack + 1

    def run(missing: set[str]) -> None:
        stacks.clear()
        delivered.clear()
        sources = [None if fragment.key in missing else whole[fragment.key] for fragment in fragments]
        exchange.run(sources, compute, lambda task, index, values: delivered.__setitem__(index, values.clone()))

    run({"a.weight", "a.bias"})
    assert [tuple(stack.shape) for stack in stacks] == [(1, 8)] and set(delivered) == {2, 3}
    # A frozen bias counts as zero: its weight is still updated.
    run({"a.bias"})
    assert torch.equal(stacks[0][0], torch.cat([whole["a.weight"], torch.zeros(2)]))
    assert set(delivered) == {0, 2, 3} and torch.equal(delivered[0], whole["a.weight"] + 1)
    run(set(shapes))
    assert not stacks and not delivered


def test_at_once_a_part_without_gradient_is_zero() -> None:
    shapes = {"a.weight": (2, 3), "a.bias": (2,), "b.weight": (2, 3), "b.bias": (2,)}
    fragments = [Fragment(key, shape, 0, prod(shape), 0, 0) for key, shape in shapes.items()]
    layout, tasks, whole = Layout.single(fragments), _tasks(shapes), _whole(shapes)
    plan, _ = plan_matrices(layout, tasks, [0.0])
    exchange = MatrixExchange(layout, plan, CPU, torch.float64, one_by_one=True)
    found: dict[str, Tensor] = {}

    def here(task: MatrixTask, indices: Sequence[int], values: Sequence[Tensor]) -> None:
        found[task.key] = torch.cat(list(values))

    for missing in ({"a.weight", "a.bias", "b.bias"}, {"a.weight"}, set(shapes)):
        found.clear()
        sources = [None if fragment.key in missing else whole[fragment.key] for fragment in fragments]
        exchange.run(sources, _never, _never, at_once=here)
        assert set(found) == {task.key for task in tasks if not missing.issuperset(task.parts)}
        for task in tasks:
            parts = [whole[part] * (part not in missing) for part in task.parts]
            assert task.key not in found or torch.equal(found[task.key], torch.cat(parts))


def _never(*_: Any) -> Any:
    raise AssertionError("they are computed at once")


def test_slices_are_never_computed_at_once() -> None:
    """They are computed together with those of other ranks, even one that is whole on its owner."""
    layout = Layout.single([Fragment("m", (2, 3), 0, 6, 0, 0)])
    task = MatrixTask("m", ("m",), (2, 3), 1.0, whole="matrix")
    plan = MatrixPlan({"m": 0}, (Batch((2, 3), (task,), partners=(0,)),))
    exchange = MatrixExchange(layout, plan, CPU, torch.float64, one_by_one=True)
    found: list[Tensor] = []
    deliver = lambda task, index, values: found.append(values.clone())  # noqa: E731
    exchange.run([torch.ones(6).double()], lambda batch, tasks, stack: stack + 1, deliver, at_once=_never)
    assert torch.equal(found[0], torch.full((6,), 2.0, dtype=torch.float64))


def test_missing_values_on_several_ranks_are_refused() -> None:
    ranks = ((Fragment("m.weight", (2, 2), 0, 3, 0, 0),), (Fragment("m.weight", (2, 2), 3, 4, 0, 0),))
    layout = Layout(ranks, rank=1)
    plan, _ = plan_matrices(layout, [MatrixTask("m.weight", ("m.weight",), (), 1.0)], [0.0, 5.0])
    exchange = MatrixExchange(layout, plan, CPU, torch.float64)
    with pytest.raises(RuntimeError, match="'m.weight' has no values on this rank"):
        exchange.run([None], lambda batch, tasks, stack: stack, lambda task, index, values: None)


def test_results_have_the_type_of_the_wire_on_every_rank() -> None:
    layout = Layout.single([Fragment("m.weight", (2, 2), 0, 4, 0, 0)])
    plan, _ = plan_matrices(layout, [MatrixTask("m.weight", ("m.weight",), (), 1.0)], [0.0])
    exchange = MatrixExchange(layout, plan, CPU, torch.float32)
    found: list[Tensor] = []
    values = torch.tensor([1.0, 2.0, 3.0, 1.0 + 2**-30], dtype=torch.float64)
    exchange.run([values], lambda batch, tasks, stack: stack.double(), lambda task, index, piece: found.append(piece))
    assert found[0].dtype == torch.float32 and torch.equal(found[0], values.float())


def _round_trip(rank: int, world: int) -> list[tuple[bool, Tensor, Tensor]]:
    """Per fragment: whether this rank owns it, its values, and what its owner, who changes nothing, gives back."""
    cuts = ((0, 9), (9, 20))
    shapes = {f"m{index}.weight": (4, 5) for index in range(4)}
    ranks = [tuple(Fragment(key, shape, *cut, 0, 0) for key, shape in shapes.items()) for cut in cuts]
    layout = Layout(tuple(ranks), rank, dist.group.WORLD)
    plan, _ = plan_matrices(layout, _tasks(shapes), [0.0] * world)
    exchange = MatrixExchange(layout, plan, CPU, torch.float32, torch.bfloat16)
    sources = [
        torch.randn(fragment.numel, generator=torch.Generator().manual_seed(i))
        for i, fragment in enumerate(layout.mine)
    ]
    found: list[tuple[bool, Tensor, Tensor]] = []

    def deliver(task: MatrixTask, index: int, values: Tensor) -> None:
        found.append((plan.owners[task.key] == rank, sources[index], values.clone()))

    with recorded("all_to_all_single") as calls:
        exchange.run(sources, lambda batch, tasks, stack: stack, deliver)
    assert calls["all_to_all_single"][0] == exchange.bytes_per_gather
    return found


def test_only_what_crosses_ranks_is_rounded() -> None:
    for found in run_ranks(2, _round_trip):
        assert {owned for owned, *_ in found} == {False, True}
        for owned, values, returned in found:
            assert returned.dtype == torch.float32
            assert torch.equal(returned, values if owned else values.bfloat16().float())


def _trace(rank: int, world: int) -> list[dict[str, Any]]:
    """The events of a profiled run of four batches that all travel."""
    shapes = {f"m{index}.weight": (4, 5) for index in range(8)}
    ranks = [tuple(Fragment(key, shape, *cut, 0, 0) for key, shape in shapes.items()) for cut in ((0, 9), (9, 20))]
    probe = Probe(Layout(tuple(ranks), rank, dist.group.WORLD), _tasks(shapes), _whole(shapes), batch_elements=20)
    with profile(activities=[ProfilerActivity.CPU]) as recorder:
        probe.run()
    with tempfile.TemporaryDirectory() as folder:
        recorder.export_chrome_trace(f"{folder}/trace.json")
        trace = json.loads(Path(f"{folder}/trace.json").read_text())
    return [event for event in trace["traceEvents"] if event.get("ph") == "X"]


def test_the_pipeline_is_visible_in_a_profile() -> None:
    for events in run_ranks(2, _trace):
        started = {event["name"]: event["ts"] for event in events if event["name"].startswith("rankwise: ")}
        ended = {event["name"]: event["ts"] + event["dur"] for event in events if event["name"] in started}
        phases = ("gather", "compute", "return", "deliver")
        assert set(started) == {f"rankwise: {phase} {batch}" for phase in phases for batch in range(4)}
        messages = sorted(event["ts"] for event in events if event["name"] == "c10d::alltoall_base_")
        assert len(messages) == 8

        for batch in range(4):
            for name in (f"rankwise: gather {batch}", f"rankwise: return {batch}"):
                assert any(started[name] <= moment <= ended[name] for moment in messages)
            # The next batch is under way before this one is computed, and this one's results before the next is.
            if batch < 3:
                assert ended[f"rankwise: gather {batch + 1}"] <= started[f"rankwise: compute {batch}"]
                assert ended[f"rankwise: return {batch}"] <= started[f"rankwise: compute {batch + 1}"]
                assert ended[f"rankwise: compute {batch + 1}"] <= started[f"rankwise: deliver {batch}"]
