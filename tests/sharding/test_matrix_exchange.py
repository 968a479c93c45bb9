"""Whatever the cut, owners see whole matrices and holders get their pieces, with no message more than planned."""

from __future__ import annotations

import itertools
import json
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from collectives import recorded
from random_layouts import random_shards
from ranks import run_ranks
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from rankwise.comm.batch_messages import BatchPlan
from rankwise.comm.exchange import MatrixExchange
from rankwise.comm.message_format import WireFormat
from rankwise.comm.owner_plan import Batch, MatrixPlan, MatrixTask, Reply, plan_matrices
from rankwise.layout.layout import Layout, Shard
from rankwise.step.matrices import MatrixRule, step_matrices

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


def run_rule(exchange: MatrixExchange, rule: Any) -> float:
    """Step the matrices of an exchange; how many the rule is said to have updated."""
    counted: Counter[str] = Counter()
    rule.unit = SimpleNamespace(exchange=exchange, layout=exchange.layout, missing=frozenset)
    rule.health = SimpleNamespace(add=lambda name, value: counted.update({name: value}))
    step_matrices(rule)
    return counted["matrices_updated"]


@dataclass
class Probe(MatrixRule):
    """A rule that compares everything it is asked with what it must be."""

    layout: Layout
    tasks: list[MatrixTask]
    whole: dict[str, Tensor]
    batch_elements: int = 50
    at_once: bool = False
    declines: int = 1
    """Which of every two matrices that lie whole on their owners is not taken."""
    answer: str = "pieces"
    events: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        world = self.layout.world_size
        self.plan, _ = plan_matrices(self.layout, self.tasks, [0.0] * world, self.batch_elements)
        self.exchange = MatrixExchange(self.layout, self.plan, CPU, torch.float64, one_by_one=self.at_once)

    def matrix(self, task: MatrixTask) -> Tensor:
        return torch.cat([self.whole[part] for part in task.parts])

    def gather(self, in_place: Collection[int]) -> list[Tensor | None]:
        self.offered = frozenset(in_place)
        used = {part for task in self.tasks for part in task.parts}
        self.sources = [
            self.whole[shard.key][shard.start : shard.end] if shard.key in used else None for shard in self.layout.mine
        ]
        return self.sources

    def reply(self, batch: Batch) -> Reply:
        return REPLIES[self.answer]

    def update(self, batch: Batch, tasks: Sequence[MatrixTask], stack: Tensor, spent: bool = False) -> Tensor:
        self.events.append(("compute", next(i for i, b in enumerate(self.plan.batches) if tasks[0] in b.tasks)))
        assert not self.at_once or all(task.key in self.declined for task in tasks if self.in_place(task))
        assert tasks and all(self.plan.owners[task.key] == self.layout.rank for task in tasks)
        assert set(tasks) <= set(batch.tasks)
        assert torch.equal(stack, torch.stack([self.matrix(task) for task in tasks]))
        self.computed.update(task.key for task in tasks)
        if self.answer == "payload":
            return self.payload_of(stack)
        return stack.square() if self.answer == "pieces" else torch.cat([stack.square(), -stack], dim=1)

    def step(self, batch: Batch, indices: Sequence[int], results: Sequence[Tensor]) -> None:
        tasks = {part: task for task in batch.tasks for part in task.parts}
        self.events.append(("step", sorted({tasks[self.layout.mine[index].key].key for index in indices})))
        for index, values in zip(indices, results, strict=True):
            shard = self.layout.mine[index]
            task = tasks[shard.key]
            first = sum(self.whole[part].numel() for part in task.parts[: task.parts.index(shard.key)])
            own = slice(first + shard.start, first + shard.end)
            expected = self.matrix(task).square()[own]
            if self.answer == "two values":
                expected = torch.cat([expected, -self.matrix(task)[own]])
            if self.answer == "payload":
                expected = self.payload_of(self.matrix(task)[None])[0]
            assert torch.equal(values, expected)
        self.stepped.update(indices)

    def step_in_place(self, matrices: Sequence[BatchPlan]) -> Sequence[BatchPlan]:
        assert matrices is self.exchange.in_place and matrices
        self.events.append("in place")
        for plan in matrices:
            (task,), indices = plan.owned, [piece.shard for piece in plan.local]
            assert self.plan.owners[task.key] == self.layout.rank and self.in_place(task)
            assert self.offered.issuperset(indices)
            assert [self.layout.mine[index].key for index in indices] == list(task.parts)
            if len(self.taken) % 2 == self.declines:
                self.declined.add(task.key)
                self.taken.append("")
            else:
                self.taken.append(task.key)
                self.computed[task.key] += 1
                self.stepped.update(indices)
        return [plan for plan in matrices if plan.owned[0].key in self.declined]

    def run(self, answer: str = "pieces") -> dict[str, list[int]]:
        self.answer = answer
        self.computed: Counter[str] = Counter()
        self.stepped: Counter[int] = Counter()
        self.taken: list[str] = []
        self.declined: set[str] = set()
        with recorded("all_to_all_single", "all_reduce", log=self.events.append) as calls:
            self.updated = run_rule(self.exchange, self)
        used = {part for task in self.tasks for part in task.parts}
        assert dict(self.stepped) == {i: 1 for i, shard in enumerate(self.layout.mine) if shard.key in used}
        owned = [task.key for task in self.exchange.owned()]
        assert dict(self.computed) == dict.fromkeys(owned, 1)
        assert self.updated == len(owned)
        assert set(owned) == {key for key, owner in self.plan.owners.items() if owner == self.layout.rank}
        assert self.events.count("in place") == (1 if self.exchange.in_place else 0)
        assert len(self.taken) == self.at_once * sum(self.in_place(task) for task in self.exchange.owned())
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
            for reply, at_once in itertools.product(REPLIES, (False, True)):
                shapes = _shapes(seed)
                layout = Layout(random_shards(shapes, world, seed, replicated), rank, group, replicated)
                probe = Probe(layout, _tasks(shapes), _whole(shapes), at_once=at_once, declines=seed % 2)
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
                        "taken": sum(map(bool, probe.taken)),
                        "declined": len(probe.declined),
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
    for outcome in ("taken", "declined"):
        assert any(case[outcome] for cases in ranks for case in cases)


def _check_in_world(rank: int, world: int) -> list[dict[str, Any]]:
    return _check(rank, world, dist.group.WORLD)


def _stay_at_home(rank: int, world: int) -> tuple[int, int]:
    shapes = {f"m{index}.weight": (4, 5) for index in range(2 * world)}
    ranks = [
        tuple(
            Shard(key, 0, 20, 0, shape=shape, tensor=0)
            for i, (key, shape) in enumerate(shapes.items())
            if i % world == holder
        )
        for holder in range(world)
    ]
    probe = Probe(Layout(tuple(ranks), rank, dist.group.WORLD), _tasks(shapes), _whole(shapes))
    return len(probe.run()["all_to_all_single"]), probe.exchange.bytes_per_gather


def test_matrices_whole_on_their_owners_send_nothing() -> None:
    assert run_ranks(3, _stay_at_home) == [(0, 0)] * 3


def _pipeline(rank: int, world: int) -> list[Any]:
    # Each matrix is cut in the middle and every rank owns one of each batch.
    shapes = {f"m{index}.weight": (4, 5) for index in range(8)}
    ranks: list[list[Shard]] = [[], []]
    for key, shape in shapes.items():
        ranks[0].append(Shard(key, 0, 9, 0, shape=shape, tensor=0))
        ranks[1].append(Shard(key, 9, 20, 0, shape=shape, tensor=0))
    layout = Layout(tuple(map(tuple, ranks)), rank, dist.group.WORLD)
    probe = Probe(layout, _tasks(shapes), _whole(shapes), batch_elements=20)
    assert len(probe.plan.batches) == 4
    batch_of = {task.key: index for index, batch in enumerate(probe.plan.batches) for task in batch.tasks}
    probe.run()
    return [("step", *{batch_of[key] for key in event[1]}) if event[0] == "step" else event for event in probe.events]


def test_the_next_gather_leaves_before_the_computation() -> None:
    message = "all_to_all_single"
    expected: list[Any] = [message]  # the first gather
    for index in range(4):
        expected += [message] * (index < 3)  # the next gather
        expected += [("compute", index)]
        # The results before are used up, so that theirs and those of this batch are not there together.
        expected += [("step", index - 1)] * (index > 0) + [message]
    expected += [("step", 3)]
    for events in run_ranks(2, _pipeline):
        assert events == expected


@dataclass
class Toy(MatrixRule):
    """A rule of which only a part matters."""

    sources: list[Tensor | None]
    change: Callable[[Tensor], Tensor] = lambda stack: stack + 1
    takes: bool = False
    stacks: list[Tensor] = field(default_factory=list)
    stepped: dict[int, Tensor] = field(default_factory=dict)
    taken: list[str] = field(default_factory=list)
    offered: Sequence[BatchPlan] = ()

    def gather(self, in_place: Collection[int]) -> list[Tensor | None]:
        return self.sources

    def update(self, batch: Batch, tasks: Sequence[MatrixTask], stack: Tensor, spent: bool = False) -> Tensor:
        self.stacks.append(stack)
        return self.change(stack)

    def step(self, batch: Batch, indices: Sequence[int], results: Sequence[Tensor]) -> None:
        assert indices
        self.stepped.update((index, values.clone()) for index, values in zip(indices, results, strict=True))

    def step_in_place(self, matrices: Sequence[BatchPlan]) -> Sequence[BatchPlan]:
        self.offered = matrices
        self.taken += [plan.owned[0].key for plan in matrices if self.takes]
        return () if self.takes else matrices


def _four_parameters() -> tuple[list[Shard], Layout, dict[str, Tensor], MatrixPlan]:
    shapes = {"a.weight": (2, 3), "a.bias": (2,), "b.weight": (2, 3), "b.bias": (2,)}
    shards = [Shard(key, 0, prod(shape), 0, shape=shape, tensor=0) for key, shape in shapes.items()]
    layout = Layout.single(shards)
    return shards, layout, _whole(shapes), plan_matrices(layout, _tasks(shapes), [0.0])[0]


@pytest.mark.parametrize("one_by_one", [False, True])
def test_a_single_process_skips_tasks_without_gradient(one_by_one: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    # Fresh memory may happen to be zero.
    monkeypatch.setattr(torch, "empty", lambda *shape, **kwargs: torch.full(shape, torch.nan, **kwargs))
    shards, layout, whole, plan = _four_parameters()
    exchange = MatrixExchange(layout, plan, CPU, torch.float64, one_by_one=one_by_one)

    def run(missing: set[str]) -> Toy:
        toy = Toy([None if shard.key in missing else whole[shard.key] for shard in shards])
        run_rule(exchange, toy)
        return toy

    toy = run({"a.weight", "a.bias"})
    assert [tuple(stack.shape) for stack in toy.stacks] == [(1, 8)] and set(toy.stepped) == {2, 3}
    # A frozen bias counts as zero: its weight is still updated.
    toy = run({"a.bias"})
    assert torch.equal(toy.stacks[0][0], torch.cat([whole["a.weight"], torch.zeros(2)]))
    assert set(toy.stepped) == {0, 2, 3} and torch.equal(toy.stepped[0], whole["a.weight"] + 1)
    toy = run(set(whole))
    assert not toy.stacks and not toy.stepped


def test_matrices_without_any_gradient_are_not_offered_in_place() -> None:
    shards, layout, whole, plan = _four_parameters()
    exchange = MatrixExchange(layout, plan, CPU, torch.float64)
    for missing in ({"a.weight", "a.bias", "b.bias"}, {"a.weight"}, set(whole), set()):
        toy = Toy([None if shard.key in missing else whole[shard.key] for shard in shards], takes=True)
        run_rule(exchange, toy)
        assert not toy.stacks and not toy.stepped
        assert toy.taken == [task.key for task in exchange.owned() if not missing.issuperset(task.parts)]
        # What a rule plans for a list holds for as long as no shard of it lacks values.
        assert (toy.offered is exchange.in_place) == (not missing)


def test_slices_are_never_taken() -> None:
    """They are computed together with those of other ranks, even one that is whole on its owner."""
    layout = Layout.single([Shard("m", 0, 6, 0, shape=(2, 3), tensor=0)])
    task = MatrixTask("m", ("m",), (2, 3), 1.0, whole="matrix")
    plan = MatrixPlan({"m": 0}, (Batch((2, 3), (task,), partners=(0,)),))
    toy = Toy([torch.ones(6).double()], takes=True)
    assert run_rule(MatrixExchange(layout, plan, CPU, torch.float64, one_by_one=True), toy) == 1
    assert not toy.taken and torch.equal(toy.stepped[0], torch.full((6,), 2.0, dtype=torch.float64))


def test_missing_values_on_several_ranks_are_refused() -> None:
    ranks = (
        (Shard("m.weight", 0, 3, 0, shape=(2, 2), tensor=0),),
        (Shard("m.weight", 3, 4, 0, shape=(2, 2), tensor=0),),
    )
    layout = Layout(ranks, rank=1)
    plan, _ = plan_matrices(layout, [MatrixTask("m.weight", ("m.weight",), (), 1.0)], [0.0, 5.0])
    with pytest.raises(RuntimeError, match="'m.weight' has no values on this rank"):
        run_rule(MatrixExchange(layout, plan, CPU, torch.float64), Toy([None]))


def test_results_have_the_type_of_the_wire_on_every_rank() -> None:
    layout = Layout.single([Shard("m.weight", 0, 4, 0, shape=(2, 2), tensor=0)])
    plan, _ = plan_matrices(layout, [MatrixTask("m.weight", ("m.weight",), (), 1.0)], [0.0])
    values = torch.tensor([1.0, 2.0, 3.0, 1.0 + 2**-30], dtype=torch.float64)
    toy = Toy([values], Tensor.double)
    run_rule(MatrixExchange(layout, plan, CPU, torch.float32), toy)
    assert toy.stepped[0].dtype == torch.float32 and torch.equal(toy.stepped[0], values.float())


def _round_trip(rank: int, world: int) -> list[tuple[bool, Tensor, Tensor]]:
    """Per shard: whether this rank owns it, its values, and what its owner, who changes nothing, gives back."""
    cuts = ((0, 9), (9, 20))
    shapes = {f"m{index}.weight": (4, 5) for index in range(4)}
    ranks = [tuple(Shard(key, *cut, 0, shape=shape, tensor=0) for key, shape in shapes.items()) for cut in cuts]
    layout = Layout(tuple(ranks), rank, dist.group.WORLD)
    plan, _ = plan_matrices(layout, _tasks(shapes), [0.0] * world)
    exchange = MatrixExchange(layout, plan, CPU, torch.float32, WireFormat(torch.bfloat16))
    sources = [
        torch.randn(shard.numel, generator=torch.Generator().manual_seed(i)) for i, shard in enumerate(layout.mine)
    ]
    toy = Toy(list(sources), lambda stack: stack)
    with recorded("all_to_all_single") as calls:
        run_rule(exchange, toy)
    assert calls["all_to_all_single"][0] == exchange.bytes_per_gather
    owners = [plan.owners[shard.key] for shard in layout.mine]
    return [(owners[index] == rank, sources[index], values) for index, values in toy.stepped.items()]


def test_only_what_crosses_ranks_is_rounded() -> None:
    for found in run_ranks(2, _round_trip):
        assert {owned for owned, *_ in found} == {False, True}
        for owned, values, returned in found:
            assert returned.dtype == torch.float32
            assert torch.equal(returned, values if owned else values.bfloat16().float())


def _trace(rank: int, world: int) -> list[dict[str, Any]]:
    """The events of a profiled run of four batches that all travel."""
    shapes = {f"m{index}.weight": (4, 5) for index in range(8)}
    ranks = [
        tuple(Shard(key, *cut, 0, shape=shape, tensor=0) for key, shape in shapes.items()) for cut in ((0, 9), (9, 20))
    ]
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
