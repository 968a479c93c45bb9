"""Equal cuts that list no shards, against the same cuts listed; owners against the rule written out."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import pytest
import torch
from torch import nn

from rankwise import MARS, MKOR, LDAdam, SONew
from rankwise.comm.message_format import WireFormat
from rankwise.comm.owner_plan import IMBALANCE_TOLERANCE, MatrixTask, assign_owners
from rankwise.comm.volume import halo_volume, matrix_volume, sums_volume
from rankwise.layout.even_cuts import EvenCuts, EvenLayout
from rankwise.layout.layout import Layout
from rankwise.step.optimizer import ShardedOptimizer

WORLDS = (1, 2, 3, 7, 64)


class Model(nn.Module):
    """Shapes that are cut inside rows, a stack of matrices, and vectors shorter than there are ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(17, 12 + i % 3) for i in range(5))
        self.experts = nn.Parameter(torch.empty(3, 6, 5))
        self.norm = nn.Parameter(torch.empty(9))


def optimizers() -> dict[str, ShardedOptimizer]:
    with torch.device("meta"):
        model = Model()
        mkor = MKOR(model.named_parameters(), backend="lamb")
        mkor.capture(model)
        return {
            "mkor": mkor,
            "mars-m": MARS(model.named_parameters(), variant="muon"),
            "sonew": SONew(model.named_parameters(), band=2),
            "ldadam": LDAdam(model.named_parameters(), rank=2),
        }


@pytest.mark.parametrize("world", WORLDS)
def test_equal_cuts_are_what_their_list_is(world: int) -> None:
    for name, optimizer in optimizers().items():
        sizes = {key: parameter.numel() for key, parameter in optimizer.table.parameters.items()}
        cuts = EvenCuts(0, sizes, world)
        (unit,) = optimizer.imagine([cuts])
        (listed,) = optimizer.imagine([[[cuts.contents(rank)] for rank in range(world)]])
        even, plain = unit.layout, listed.layout
        assert isinstance(even, EvenLayout) and type(plain) is Layout
        assert tuple(even.ranks) == plain.ranks and even.mine == plain.mine
        assert (even.shapes, even.straddlers, even.all_hold) == (plain.shapes, plain.straddlers, plain.all_hold)
        assert dict(even.holders) == plain.holders and dict(even.copies) == plain.copies
        for key in even.shapes:
            assert even.elements(key) == plain.elements(key) and even.first_copy(key) == plain.first_copy(key)
            assert even.gathered(key, world - 1) == plain.gathered(key, world - 1)
        works = [optimizer.step_costs(one) for one in (unit, listed)]
        assert works[0].scalars == works[1].scalars and works[0].periodic == works[1].periodic
        keys = unit.keys("matrix")
        assert sums_volume(even, keys, (1, 2)) == sums_volume(plain, keys, (1, 2))
        assert halo_volume(even, keys, 2, 3, 4, True) == halo_volume(plain, keys, 2, 3, 4, True)
        if name != "sonew":
            assert unit.exchange is not None and listed.exchange is not None
            assert unit.exchange.plan == listed.exchange.plan
            volumes = [
                matrix_volume(one.layout, one.exchange.plan, WireFormat(torch.float32), work.reply)
                for one, work in zip((unit, listed), works, strict=True)
                if one.exchange is not None
            ]
            assert volumes[0] == volumes[1]
        with pytest.raises(KeyError):
            even.holders["nothing"]


def written_out(
    tasks: Sequence[MatrixTask], held: Mapping[str, Mapping[int, int]], loads: Sequence[float]
) -> tuple[dict[str, int], list[float]]:
    loads, owners = list(loads), {}
    limit = IMBALANCE_TOLERANCE * (sum(loads) + sum(task.cost for task in tasks)) / len(loads)
    for task in sorted(tasks, key=lambda task: (-task.cost, task.key)):
        shares = held[task.key]
        lightest = min(range(len(loads)), key=lambda rank: (loads[rank], rank))
        candidates = sorted(shares, key=lambda rank: (-shares[rank], loads[rank], rank))
        owner = next((rank for rank in candidates if loads[rank] + task.cost <= limit), lightest)
        owners[task.key] = owner
        loads[owner] += task.cost
    return owners, loads


def test_owners_are_those_of_the_rule_written_out() -> None:
    generator = random.Random(0)
    for _ in range(300):
        world, count = generator.randint(1, 9), generator.randint(1, 20)
        tasks = [MatrixTask(f"m{i}", (f"m{i}",), None, float(generator.randint(1, 6))) for i in range(count)]
        held = {
            task.key: {
                rank: generator.randint(1, 3) for rank in generator.sample(range(world), generator.randint(1, world))
            }
            for task in tasks
        }
        loads = [float(generator.randint(0, 5)) for _ in range(world)]
        assert assign_owners(tasks, held, loads) == written_out(tasks, held, loads)
