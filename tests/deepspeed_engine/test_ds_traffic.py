"""Under real engines, what step() sends is what the plan predicts, at every stage; health reports the same."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import ds_harness as ds
import pytest
import torch
from collectives import recorded
from ds_harness import run_ranks

from rankwise.comm.message_format import WireFormat
from rankwise.comm.owner_plan import MatrixPlan
from rankwise.comm.volume import matrix_volume
from rankwise.estimate import estimate

STAGES = (0, 1, 2, 3)
# MKOR leaves a layer that no input reaches to its backend after the first step, and plans anew without it.
USED = {"exclude": ["unused.weight"]}
PARAMS: dict[str, dict[str, Any]] = {
    "MARS-AdamW": {},
    "MARS-M": {"comm_dtype": "int8"},
    "MARS-Shampoo": {"comm_dtype": "bfloat16"},
    "SONew": {"graft": "rmsprop"},
    "LDAdam": {},
    "MKOR": {"backend": "lamb", "update_interval": 2, **USED},
    "MKOR-H": {"update_interval": 2, **USED},
}
STEPS = 3


class Cell(NamedTuple):
    sent: list[list[int]]  # bytes of every message, by step
    predicted: tuple[int, int, int, int]  # bytes and collectives; those of a factor step beyond them
    health: dict[str, float]
    limit: int  # collectives allowed by the design
    at_home: int  # matrices that lie whole on their owner
    matrix_collectives: int


def _cell(name: str, stage: int, rank: int, world: int) -> Cell:
    job = ds.Job(name, {**ds.TYPES[name], **PARAMS[name]}, {"zero_optimization": {"stage": stage}})
    engine = ds.engine_of(replace(job, steps=STEPS), world)
    optimizer = engine.basic_optimizer
    sent: list[list[int]] = []
    step = optimizer.step

    def counted(*args: Any, **kwargs: Any) -> Any:
        with recorded("all_to_all_single", "all_reduce") as calls:
            result = step(*args, **kwargs)
        sent[-1] += calls["all_to_all_single"] + calls["all_reduce"]
        return result

    optimizer.step = counted
    for index in range(STEPS):
        sent.append([])
        ds.train_step(engine, rank, world, index)
    ranks = estimate(optimizer)
    mine = ranks[rank]
    if not name.startswith("MKOR"):
        # What is imagined is what is there. (MKOR's early messages are the engine's business.)
        assert estimate(optimizer, world, stage, alignment=2) == ranks
    limit, at_home, matrix_collectives = 0, 0, 0
    for unit in optimizer.planner.units.values():
        limit += 1 + (unit.halo is not None) + len(optimizer.step_costs(unit).scalars)
        if unit.exchange is None:
            continue
        plan, reply = unit.exchange.plan, optimizer.step_costs(unit).reply
        limit += 2 * len(plan.batches)
        volume = matrix_volume(unit.layout, plan, WireFormat(torch.float32), reply)
        matrix_collectives += volume[rank].collectives
        staying = MatrixPlan(plan.owners, tuple(_at_home(batch, plan, unit.layout) for batch in plan.batches))
        at_home += sum(len(batch.tasks) for batch in staying.batches)
        stays = matrix_volume(unit.layout, staying, WireFormat(torch.float32))
        assert not any(traffic.bytes or traffic.collectives for traffic in stays)
    predicted = (mine.bytes_sent, mine.collectives, mine.periodic_bytes, mine.periodic_collectives)
    cell = Cell(sent, predicted, optimizer.read_health(), limit, at_home, matrix_collectives)
    engine.destroy()
    return cell


def _at_home(batch: Any, plan: MatrixPlan, layout: Any) -> Any:
    """The tasks of a batch that no other rank than the owner holds anything of."""
    homes = {task.key: {holder for part in task.parts for holder in layout.holders[part]} for task in batch.tasks}
    return replace(batch, tasks=tuple(task for task in batch.tasks if homes[task.key] == {plan.owners[task.key]}))


def _all(rank: int, world: int) -> dict[tuple[str, int], Cell]:
    return {(name, stage): _cell(name, stage, rank, world) for name in PARAMS for stage in STAGES}


@pytest.mark.slow
@pytest.mark.parametrize("world", [3, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_bytes_and_collectives_are_those_of_the_plan(world: int) -> None:
    ranks = run_ranks(world, _all)
    for name, stage in ranks[0]:
        cells = [rank[name, stage] for rank in ranks]
        for cell in cells:
            size, collectives, periodic_size, periodic_collectives = cell.predicted
            # Steps 1 and 3 are factor steps of MKOR, which has nothing periodic once it has switched.
            for index, messages in enumerate(cell.sent):
                due = index % 2 == 0
                assert sum(messages) == size + due * periodic_size, (name, stage, index)
                assert len(messages) == collectives + due * periodic_collectives, (name, stage, index)
            # SONew's "rmsprop" graft needs the gradient's norm before it has anything to take the graft's of.
            assert collectives <= cell.limit + (name == "SONew"), (name, stage)
            # Contiguous cuts leave some matrices whole; the equality above shows that they send nothing.
            assert (cell.at_home > 0) == (stage in (1, 2) and cell.matrix_collectives > 0), (name, stage)
        total = sum(sum(messages) for cell in cells for messages in cell.sent)
        count = sum(len(messages) for cell in cells for messages in cell.sent)
        assert cells[0].health["bytes_sent"] == pytest.approx(total / STEPS)
        assert cells[0].health["collectives"] == pytest.approx(count / STEPS)
        # The comparison is not between zeros: something of every matrix rule travels.
        if name in ("MARS-M", "MARS-Shampoo", "LDAdam", "MKOR", "MKOR-H"):
            assert total > 0 and cells[0].matrix_collectives > 0, (name, stage)
