"""``CPUOffloadPolicy``, with a device that multiplies the matrices: the bits of a step on the host."""

from __future__ import annotations

import pytest
import torch
from ranks import run_ranks
from sharded_models import Run
from torch import Tensor

from rankwise.estimate import estimate

STEPS = 6  # in the last one every weight has a gradient
CASES = ("mars-m", "mars-shampoo", "ldadam", "ldadam-8bit", "mkor", "mkor-sketch", "mkor-h")
Outcome = tuple[dict[str, Tensor], list[int], tuple[int, int]]


def _train(case: str, setting: str, wish: str) -> Outcome:
    """The weights and matrix states as lists, the bytes that the last step sent and those that were planned."""
    run = Run(case, setting, offload_compute=wish)
    run.train(STEPS - 1)
    optimizer = run.optimizer
    (unit,) = optimizer.planned_units
    assert unit.is_offloaded == (wish == "device")
    link = unit.exchange.link
    before = (link.bytes_up, link.bytes_down) if link else (0, 0)
    run.train(1)
    assert optimizer.planned_units == [unit]
    crossed = [link.bytes_up - before[0], link.bytes_down - before[1]] if link else [0, 0]
    own = estimate(optimizer)[torch.distributed.get_rank()]
    due = (STEPS - 1) % own.period == 0
    planned = own.bytes_up + due * own.periodic_up, own.bytes_down + due * own.periodic_down
    states = {
        f"{key} {name}": value
        for key, state in optimizer.matrix_states.everything().items()
        for name, value in state.items()
    }
    return {name: value.tolist() for name, value in {**run.weights(), **states}.items()}, crossed, planned


def _both(rank: int, world: int, setting: str) -> dict[str, tuple[Outcome, Outcome]]:
    return {case: (_train(case, setting, "host"), _train(case, setting, "device")) for case in CASES}


@pytest.mark.parametrize("setting", ["offload-2", pytest.param("rows-3", marks=pytest.mark.exhaustive)])
def test_the_bits_are_those_of_the_host_and_the_bytes_those_planned(setting: str) -> None:
    for rank in run_ranks(int(setting[-1]), _both, setting):
        for case, ((stayed, none, _), (went, crossed, planned)) in rank.items():
            assert stayed == went, case
            assert none == [0, 0] and crossed == list(planned) and min(crossed) > 0, case
