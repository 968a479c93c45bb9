"""MKOR's vectors travel while backward runs: same numbers, planned messages, nothing lost and nobody stuck."""

from __future__ import annotations

import json
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from rankwise import MKOR
from rankwise.statistics import backward_reduction as backward_reduction

STEPS, MICRO_BATCHES, TOKENS, WORLD = 6, 2, 4, 3
INTERVAL = 2
SMALL_BUCKETS = 12
SCHEDULES = ("no_sync", "every micro-batch", "skipped", "uneven", "growing", "longer")


class Net(nn.Module):
    """Layers used once, twice, sometimes, and never."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(5, 7)
        self.twice = nn.Linear(7, 7, bias=False)
        self.sometimes = nn.Linear(7, 7)
        self.never = nn.Linear(4, 4)
        self.last = nn.Linear(7, 3)
        self.scale = nn.Parameter(torch.ones(()))
        self.double()

    def forward(self, x: Tensor, branch: bool = False, idle: bool = False) -> Tensor:
        if idle:
            return self.scale * x
        h = torch.tanh(self.twice(torch.tanh(self.twice(torch.tanh(self.first(x))))))
        if branch:
            h = h + torch.tanh(self.sometimes(h))
        return self.last(h)


def _data(step: int, micro: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    inputs, targets = (torch.randn(TOKENS, size, dtype=torch.float64, generator=generator) for size in (5, 3))
    return inputs + 0.3, targets


def _branches(schedule: str, step: int, rank: int) -> bool:
    if schedule == "growing":  # a layer that no earlier window has used, on one rank only
        return step >= INTERVAL and rank == 0
    return schedule == "uneven" and (rank + step) % 2 == 0


def _micro_batches(schedule: str, step: int) -> int:
    return 1 if schedule == "longer" and step == 0 else MICRO_BATCHES


def _loss(model: nn.Module, schedule: str, step: int, micro: int, rank: int) -> Tensor:
    inputs, targets = _data(step, micro, rank)
    outputs: Tensor = model(inputs, _branches(schedule, step, rank))
    return (outputs - targets).square().mean() / MICRO_BATCHES


def _optimizer(model: nn.Module) -> MKOR:
    return MKOR(model.named_parameters(), lr=1e-2, update_interval=INTERVAL, factor_dtype="float64")


def _one_process(schedule: str, world: int) -> list[Tensor]:
    model = Net()
    optimizer = _optimizer(model)
    optimizer.capture(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(_micro_batches(schedule, step)):
            (sum(_loss(model, schedule, step, micro, rank) for rank in range(world)) / world).backward()  # type: ignore[union-attr]
        if schedule == "uneven":
            for parameter in model.sometimes.parameters():
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


class Messages:
    """The sizes of the statistics' all-reduces, and which of them left inside ``step()``."""

    def __init__(self, optimizer: MKOR) -> None:
        self.sent: list[tuple[int, bool]] = []
        self._in_step = False
        optimizer.register_step_pre_hook(lambda *_: setattr(self, "_in_step", True))
        optimizer.register_step_post_hook(lambda *_: setattr(self, "_in_step", False))
        reduction = optimizer.statistics.early
        assert reduction is not None
        send = reduction._all_reduce

        def counted(sent: Tensor) -> Any:
            self.sent.append((sent.nbytes, self._in_step))
            return send(sent)

        reduction._all_reduce = counted  # type: ignore[method-assign]


def _train(rank: int, world: int, schedule: str) -> dict[str, Any]:
    backward_reduction.BUCKET_ELEMENTS = SMALL_BUCKETS
    model = DistributedDataParallel(Net(), find_unused_parameters=True)
    optimizer = _optimizer(model.module)
    optimizer.capture(model)
    messages = Messages(optimizer)
    assert optimizer.statistics.early is not None and optimizer.statistics.early.group is not model.process_group
    by_step: list[list[tuple[int, bool]]] = []
    for step in range(STEPS):
        if schedule == "skipped" and step % 2 == 0:
            # As after an overflow: a whole backward pass whose step never comes.
            _loss(model, "uneven", step + 50, 0, rank).backward()
        optimizer.zero_grad()
        dropped, messages.sent = messages.sent, []
        for micro in range(_micro_batches(schedule, step)):
            accumulate = schedule != "every micro-batch" and micro < _micro_batches(schedule, step) - 1
            with model.no_sync() if accumulate else nullcontext():
                _loss(model, schedule, step, micro, rank).backward()
        optimizer.step()
        by_step.append(dropped + messages.sent)
        messages.sent = []
    health = optimizer.read_health()
    return {
        "weights": [parameter.detach() for parameter in model.module.parameters()],
        "messages": by_step,
        "planned": list(optimizer.statistics.early.message_bytes),
        "traffic": optimizer.statistics.early.traffic,
        "health": health,
    }


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_ddp_follows_one_process(schedule: str) -> None:
    ranks = run_ranks(WORLD, _train, schedule)
    expected = _one_process(schedule, WORLD)
    start = [parameter.detach() for parameter in Net().parameters()]
    change = max(float((a - b).abs().max()) for a, b in zip(expected, start, strict=True))
    early = 0
    for rank in ranks:
        assert change > 1e-3
        error = max(float((a - b).abs().max()) for a, b in zip(rank["weights"], expected, strict=True))
        assert error <= 1e-10 * change
        planned = rank["planned"]
        # last, never, sometimes, twice, first: 11, 9, 15, 15, 13 values; two stamps and a count per layer in the end.
        assert planned == [8 * (11 + 9), 8 * 15, 8 * 15, 8 * (13 + 2 + 5)]
        for step, messages in enumerate(rank["messages"]):
            sizes = [size for size, _ in messages]
            if step % INTERVAL:
                assert sizes == []
                continue
            # What a layer got after its bucket had left, because no window before had used it; and all sums, where
            # those that had left were of a backward pass that was thrown away.
            changed = (schedule == "growing" and step == INTERVAL) or (schedule == "skipped" and step > 0)
            assert sizes == planned + [8 * (11 + 9 + 15 + 15 + 13)] * changed
            assert messages[-1][1], "the last message tells what has changed"
            early += sum(not inside for _, inside in messages)
            if schedule in ("no_sync", "skipped", "longer") and step > 0:
                # From the second factor step on all but the last message leave before step().
                assert [inside for _, inside in messages] == [False, False, False, True, *[True] * changed]
    assert early > 0
    sizes_of = [[[size for size, _ in messages] for messages in rank["messages"]] for rank in ranks]
    assert all(sizes == sizes_of[0] for sizes in sizes_of)
    assert ranks[0]["health"]["collectives"] >= sum(rank["traffic"].collectives for rank in ranks) / STEPS


def _trace(rank: int, world: int) -> list[tuple[str, float]]:
    backward_reduction.BUCKET_ELEMENTS = SMALL_BUCKETS
    model = DistributedDataParallel(Net(), find_unused_parameters=True)
    optimizer = _optimizer(model.module)
    optimizer.capture(model)
    for step in range(INTERVAL + 1):
        optimizer.zero_grad()
        with profile(activities=[ProfilerActivity.CPU]) if step == INTERVAL else nullcontext() as recorder:
            _loss(model, "no_sync", step, 0, rank).backward()
            optimizer.step()
    with tempfile.TemporaryDirectory() as folder:
        recorder.export_chrome_trace(f"{folder}/trace.json")  # type: ignore[union-attr]
        events = json.loads(Path(f"{folder}/trace.json").read_text())["traceEvents"]
    names = ("rankwise: statistics", "Optimizer.step#MKOR.step", "MulBackward0", "MmBackward0", "AddmmBackward0")
    found = [(event["name"], event["ts"]) for event in events if event.get("ph") == "X"]
    return sorted((pair for pair in found if pair[0].startswith(names)), key=lambda pair: pair[1])


def test_the_reduction_starts_before_the_step() -> None:
    for events in run_ranks(2, _trace):
        names = [name for name, _ in events]
        step = names.index("Optimizer.step#MKOR.step")
        statistics = [index for index, name in enumerate(names) if name == "rankwise: statistics"]
        assert [index < step for index in statistics] == [True, True, True, False]
        # The first one leaves while layers have still to be differentiated.
        assert any(name.startswith("AddmmBackward0") for name in names[statistics[0] : step])


def _idle_rank(rank: int, world: int) -> tuple[list[Tensor], int]:
    """A window is skipped in which one rank's backward pass reached no captured layer."""
    backward_reduction.BUCKET_ELEMENTS = SMALL_BUCKETS
    model = DistributedDataParallel(Net(), find_unused_parameters=True)
    optimizer = _optimizer(model.module)
    window = {"id": 0}
    optimizer.capture(model, window=lambda: window["id"])
    messages = Messages(optimizer)
    for step in range(STEPS):
        if step % INTERVAL == 0:
            inputs, _ = _data(step + 50, 0, rank)
            model(inputs, idle=rank == 1).square().sum().backward()
            for parameter in model.parameters():
                parameter.grad = None
            window["id"] += 1
        _loss(model, "no_sync", step, 0, rank).backward()
        optimizer.step()
        for parameter in model.parameters():
            parameter.grad = None
        window["id"] += 1
    return [parameter.detach() for parameter in model.module.parameters()], len(messages.sent)


def test_a_window_is_dropped_of_which_one_rank_has_no_statistics() -> None:
    ranks = run_ranks(2, _idle_rank)
    model = Net()
    optimizer = _optimizer(model)
    optimizer.capture(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        (sum(_loss(model, "no_sync", step, 0, rank) for rank in range(2)) / 2).backward()  # type: ignore[union-attr]
        model.scale.grad = torch.zeros_like(model.scale)
        optimizer.step()
    for weights, messages in ranks:
        # Three factor steps of four messages, and all sums anew where some of a window had left that was dropped.
        assert messages == 3 * 4 + 2
        for one, other in zip(weights, model.parameters(), strict=True):
            assert float((one - other.detach()).abs().max()) <= 1e-12


def _misaligned(rank: int, world: int) -> str:
    backward_reduction.BUCKET_ELEMENTS = 1 << 16
    model = DistributedDataParallel(Net(), find_unused_parameters=True)
    optimizer = _optimizer(model.module)
    optimizer.capture(model)
    assert optimizer.statistics.early is not None
    optimizer.statistics.early._taken += rank
    _loss(model, "no_sync", 0, 0, rank).backward()
    try:
        optimizer.step()
    except RuntimeError as error:
        return str(error)
    return ""


def test_ranks_at_different_windows_are_told() -> None:
    assert all("at different steps of their statistics" in message for message in run_ranks(2, _misaligned))


def test_the_groups_timeout_is_kept() -> None:
    assert run_ranks(2, _timeouts) == [33.0, 33.0]


def _timeouts(rank: int, world: int) -> float:
    from datetime import timedelta

    group = dist.new_group([0, 1], timeout=timedelta(seconds=33))
    assert isinstance(group, dist.ProcessGroup)
    twin = backward_reduction.twin_group(group)
    return float(twin._get_backend(torch.device("cpu")).options._timeout.total_seconds())


class Mixed(Net):
    """A layer whose weight is used without calling it, and two that ranks use in turns."""

    def __init__(self) -> None:
        super().__init__()
        self.silent = nn.Linear(7, 7).double()
        self.turns = nn.ModuleList(nn.Linear(7, 7) for _ in range(2)).double()

    def run(self, x: Tensor, which: int) -> Tensor:
        h = torch.tanh(torch.nn.functional.linear(self.first(x), self.silent.weight, self.silent.bias))
        return self.last(torch.tanh(self.turns[which](h)))

    def forward(self, x: Tensor, branch: bool = False, idle: bool = False) -> Tensor:
        return self.run(x, int(branch))


def _mixed(rank: int, world: int, by: str) -> tuple[list[Tensor], list[str], dict[str, float]]:
    backward_reduction.BUCKET_ELEMENTS = SMALL_BUCKETS
    model = DistributedDataParallel(Mixed(), find_unused_parameters=True)
    optimizer = _optimizer(model.module)
    optimizer.capture(model)
    for step in range(8):
        optimizer.zero_grad()
        # In turns over steps, on all ranks; or over ranks, so that no step is without either.
        model(_data(step, 0, rank)[0], bool((step if by == "steps" else rank) % 2)).square().mean().backward()
        optimizer.step()
    weights = [parameter.detach() for parameter in model.module.parameters()]
    return weights, sorted(optimizer.matrix_states.everything()), optimizer.read_health()


@pytest.mark.parametrize("by", ["steps", "ranks"])
def test_ranks_agree_on_which_layers_report(by: str) -> None:
    ranks = run_ranks(2, _mixed, by)
    model = Mixed()
    optimizer = _optimizer(model)
    optimizer.capture(model)
    for step in range(8):
        optimizer.zero_grad()
        inputs = [_data(step, 0, rank)[0] for rank in range(2)]
        (
            sum(model.run(x, (step if by == "steps" else r) % 2).square().mean() for r, x in enumerate(inputs)) / 2
        ).backward()
        optimizer.step()
    for weights, _, health in ranks:
        assert all(torch.equal(*pair) for pair in zip(weights, ranks[0][0], strict=True))
        for one, other in zip(weights, model.parameters(), strict=True):
            assert float((one - other.detach()).abs().max()) <= 1e-11
        assert health["layers_never_seen"] == optimizer.read_health()["layers_never_seen"]
    held = [key for _, keys, _ in ranks for key in keys]
    assert sorted(held) == sorted(optimizer.matrix_states) and "silent.weight" not in held
    assert {"turns.0.weight", "turns.1.weight"} <= set(held)
