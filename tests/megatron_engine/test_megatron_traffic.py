"""On Megatron's layouts, what ``step()`` sends is what the plan predicts, counted where PyTorch hands it over.

Everything that reaches a process group inside the whole ``optimizer.step()`` is recorded, Megatron's own messages too:
beyond them, which the stock optimizer sends alike, there is nothing but what the plan predicts.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from collectives import Message, Wire
from megatron.core import parallel_state as mpu
from megatron_cells import DISTRIBUTED, Cell
from megatron_harness import opened
from megatron_types import maker
from ranks import once, run_ranks

from megatron_patches.cpu import cpu_megatron
from rankwise.comm.message_format import WireFormat
from rankwise.comm.owner_plan import MatrixPlan
from rankwise.comm.volume import matrix_volume
from rankwise.estimate import estimate

# The first step plans, for which ranks exchange what they hold; it is left out.
STEPS, INTERVAL = 2, 2
BLOCK: dict[str, Any] = {"rankwise_tp_mode": "block"}
# Buckets cut matrices: without them, the halves of a model of two equal layers hold whole ones alone.
CUT: dict[str, Any] = {**DISTRIBUTED, "overlap_grad_reduce": True, "bucket_size": 5000}

LAYOUTS: dict[str, tuple[int, Cell]] = {
    "DP2 distributed": (2, Cell(**CUT)),
    "DP2 distributed, no matrix cut": (2, Cell(**DISTRIBUTED)),
    "DP2 layer-wise": (2, Cell(optimizer={"rankwise_layer_wise": True})),
    "TP2": (2, Cell(tp=2)),
    "TP2 block": (2, Cell(tp=2, optimizer=BLOCK)),
    "TP2 DP2 distributed": (4, Cell(tp=2, sp=True, **CUT)),
    "TP2 DP2 distributed, block": (4, Cell(tp=2, **CUT, optimizer=BLOCK)),
}
MATRIX = ("mars-m", "ldadam", "mkor")
ALL = ("mars-adamw", "sonew", *MATRIX)
USUAL_FOUR = ("sonew", "ldadam", "mkor")
GRID = {(name, label) for label, (ranks, _) in LAYOUTS.items() for name in (ALL if ranks == 2 else USUAL_FOUR)}


class Sent(NamedTuple):
    """What one rank has sent.

    Attributes:
        inner: By step, inside our optimizer's ``step()``.
        outer: By step, inside Megatron's ``step()`` and outside ours.
        predicted: Bytes and collectives of every step, and those of a factor step beyond them.
        data: The ranks that share this rank's tensor-parallel shard.
        matrices: Number of matrices that lie whole on their owner, and of those that do not.
    """

    inner: list[list[Message]]
    outer: list[list[Message]]
    predicted: tuple[int, int, int, int]
    data: tuple[int, ...]
    matrices: tuple[int, int]


def _options(name: str) -> dict[str, Any]:
    return {"update_interval": INTERVAL} if name == "mkor" else {}


def _sent(rank: int, name: str, cell: Cell) -> Sent:
    with opened(cell, maker(name, **_options(name))) as trainer:
        (wrapper,) = trainer.optimizer.chained_optimizers
        inner, everything, ours = wrapper.optimizer, [], []
        wrapper.optimizer.step = functools.partial(_recorded, inner.step, ours)
        trainer.optimizer.step = functools.partial(_recorded, trainer.optimizer.step, everything)
        for _ in range(1 + STEPS):
            trainer.train_step()
        data = tuple(dist.get_process_group_ranks(mpu.get_data_parallel_group()))
        outer = [_without(all_, own) for all_, own in zip(everything, ours, strict=True)][1:]
        if name == "adam":
            return Sent(ours[1:], outer, (0, 0, 0, 0), data, (0, 0))
        (unit,) = inner.planner.units.values()
        mine = estimate(inner)[unit.layout.rank]
        predicted = (mine.bytes_sent, mine.collectives, mine.periodic_bytes, mine.periodic_collectives)
        return Sent(ours[1:], outer, predicted, data, _at_home(inner, unit))


def _recorded(step: Any, log: list[list[Message]], *args: Any, **kwargs: Any) -> Any:
    with Wire() as wire:
        result = step(*args, **kwargs)
    log.append(wire.messages)
    return result


def _without(messages: list[Message], part: list[Message]) -> list[Message]:
    """A list without a run of it."""
    if not part:
        return messages
    first = next(i for i in range(len(messages)) if messages[i : i + len(part)] == part)
    return messages[:first] + messages[first + len(part) :]


def _at_home(inner: Any, unit: Any) -> tuple[int, int]:
    """How many matrices lie whole on their owner, of which the plan must send nothing, and how many do not."""
    if unit.exchange is None:
        return 0, 0
    layout, plan = unit.exchange.layout, unit.exchange.plan
    staying = []
    for batch in plan.batches:
        homes = {task: {h for part in task.parts for h in layout.holders[part]} for task in batch.tasks}
        staying.append(replace(batch, tasks=tuple(t for t in batch.tasks if homes[t] == {plan.owners[t.key]})))
    volume = matrix_volume(
        layout, MatrixPlan(plan.owners, tuple(staying)), WireFormat(torch.float32), inner.step_costs(unit).reply
    )
    assert not any(traffic.bytes or traffic.collectives for traffic in volume)
    count = sum(len(batch.tasks) for batch in staying)
    return count, sum(len(batch.tasks) for batch in plan.batches) - count


def _all(rank: int, world: int, jobs: list[tuple[str, Cell]]) -> list[Sent]:
    with cpu_megatron():
        return [_sent(rank, name, cell) for name, cell in jobs]


@once
def _measured(world: int) -> dict[tuple[str, str], list[Sent]]:
    names = ("adam", *(ALL if world == 2 else USUAL_FOUR))
    jobs = [(name, label) for label, (ranks, _) in LAYOUTS.items() if ranks == world for name in names]
    ranks = run_ranks(world, _all, [(name, LAYOUTS[label][1]) for name, label in jobs])
    return dict(zip(jobs, map(list, zip(*ranks, strict=True)), strict=True))


@pytest.mark.parametrize(("name", "label"), sorted(GRID))
def test_bytes_and_collectives_are_those_of_the_plan(name: str, label: str) -> None:
    for sent in _measured(LAYOUTS[label][0])[name, label]:
        size, collectives, periodic_size, periodic_collectives = sent.predicted
        for step, messages in enumerate(sent.inner):
            due = (1 + step) % INTERVAL == 0
            assert sum(message.bytes for message in messages) == size + due * periodic_size, step
            assert len(messages) == collectives + due * periodic_collectives, step


@pytest.mark.parametrize(("name", "label"), sorted(GRID))
def test_megatron_sends_what_it_sends_for_its_own_optimizer(name: str, label: str) -> None:
    measured = _measured(LAYOUTS[label][0])
    for sent, stock in zip(measured[name, label], measured["adam", label], strict=True):
        assert all(sum(m.bytes for m in step) > 0 for step in sent.outer)
        if label != "DP2 layer-wise":  # The stock factory builds no layer-wise Adam.
            assert sent.outer == stock.outer and not any(stock.inner)


@pytest.mark.parametrize("name", MATRIX)
def test_whole_matrices_stay(name: str) -> None:
    measured = _measured(2)
    for sent in measured[name, "DP2 distributed, no matrix cut"]:
        assert sent.matrices[0] > 0 and sent.matrices[1] == 0
        assert not [m for step in sent.inner for m in step if m.operation.startswith("alltoall")]
    for label in ("DP2 distributed", "TP2"):
        if name == "ldadam" and label == "TP2":
            continue  # See test_slices_stay.
        ranks = measured[name, label]
        assert all(sent.matrices[1] > 0 for sent in ranks)
        assert any(m.bytes > 0 for sent in ranks for m in sent.inner[-1] if m.operation.startswith("alltoall"))
    # Dealt out whole, and moved only to balance the work.
    at_home, moved = measured[name, "DP2 layer-wise"][0].matrices
    assert at_home > moved


@pytest.mark.parametrize(("name", "label"), sorted(job for job in GRID if job[1].endswith("block")))
def test_blocks_send_nothing_over_tensor_parallel_ranks(name: str, label: str) -> None:
    for sent in _measured(LAYOUTS[label][0])[name, label]:
        messages = [message for step in sent.inner for message in step]
        assert all(message.ranks == sent.data for message in messages if message.bytes)
        assert (len(sent.data) > 1) == any(message.bytes for message in messages)


def test_slices_stay() -> None:
    """Under tensor parallelism LDAdam's matrices are computed where they lie; only sums travel."""
    for sent in _measured(2)["ldadam", "TP2"]:
        operations = {message.operation for step in sent.inner for message in step if message.bytes}
        assert sent.matrices[0] > 0 and sent.matrices[1] == 0
        assert operations == {"allgather_", "allreduce_"}
    # Whether data-parallel ranks have cut them further or not, an owner is found in each tensor-parallel group.
    for sent in _measured(4)["ldadam", "TP2 DP2 distributed"]:
        sums = {m.ranks for step in sent.inner for m in step if m.bytes and m.operation == "allgather_"}
        (partners,) = sums
        assert len(partners) == 2 and len(set(partners) & set(sent.data)) == 1


def _volumes(rank: int, world: int, name: str, widths: tuple[int, ...]) -> list[tuple[int, int]]:
    """Bytes of an ordinary step and, beyond it, of one that updates factors, by the model's width."""
    with cpu_megatron():
        sent = [_sent(rank, name, Cell(tp=2, layers=1, microbatches=1, hidden=width)) for width in widths]
    found = []
    for one in sent:
        usual, updating = sorted(sum(message.bytes for message in step) for step in one.inner[:2])
        found.append((usual, updating - usual))
    return found


@pytest.mark.parametrize(("name", "kind"), [("ldadam", 0), ("mkor", 1)])
def test_the_exact_exchange_is_linear_in_the_width(name: str, kind: int) -> None:
    """All that LDAdam sends, and MKOR's statistics; its preconditioned gradients cross once a step and are not."""
    for volumes in run_ranks(2, _volumes, name, (128, 256, 384)):
        narrow, wider, widest = (volume[kind] for volume in volumes)
        assert 0 < narrow < wider
        assert widest - wider == wider - narrow


def test_exact_mode_does_send_over_them() -> None:
    for name in MATRIX:
        for sent in _measured(2)[name, "TP2"]:
            assert {message.ranks for step in sent.inner for message in step} == {(0, 1)} and len(sent.data) == 1
