"""ZeRO-Offload whose matrices a device multiplies: the same bits as on the host's cores, counted, saved and resumed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import ds_harness as ds
import numpy as np
import pytest
from ds_harness import run_ranks

from rankwise.estimate import estimate

STEPS = 4
NAMES = ("MARS-M", "MARS-Shampoo", "LDAdam", "MKOR")
ZERO: dict[str, dict[str, Any]] = {
    "stage 2": {"stage": 2},
    "sub-groups": {"stage": 3, "sub_group_size": 150},
    "stage 1": {"stage": 1},
    "stage 3": {"stage": 3},
}


class Outcome(NamedTuple):
    """What a run ended with, the bytes that its last step sent up and down, and those that were planned."""

    weights: dict[str, np.ndarray]
    crossed: tuple[int, int]
    planned: tuple[int, int]


def _job(name: str, zero: dict[str, Any], wish: str) -> ds.Job:
    # Whatever else large runs switch on: clipping and accumulation are the harness's.
    params = {**ds.TYPES[name], "offload_compute": wish, "skip_nonfinite": name == "LDAdam"}
    return ds.Job(name, params, config={"zero_optimization": {**zero, "offload_optimizer": {"device": "cpu"}}})


def _trained(rank: int, world: int, job: ds.Job, folder: str, other: ds.Job | None = None) -> Outcome:
    """Weights and a hash of the states; if there is another job, it goes on in the middle with what the first saved."""
    engine = ds.engine_of(job, world)
    for step in range(STEPS - 1):
        if other is not None and step == STEPS // 2:
            engine.save_checkpoint(folder)
            engine.destroy()
            engine = ds.engine_of(other, world)
            engine.load_checkpoint(folder)
        ds.train_step(engine, rank, world, step)
    before = _crossed(engine.basic_optimizer)
    ds.train_step(engine, rank, world, STEPS - 1)
    after, own = _crossed(engine.basic_optimizer), estimate(engine.basic_optimizer)[rank]
    due = (STEPS - 1) % own.period == 0
    planned = own.bytes_up + due * own.periodic_up, own.bytes_down + due * own.periodic_down
    weights = {**ds.model_weights(engine), "digest": np.array(ds.digest(engine.basic_optimizer))}
    engine.destroy()
    return Outcome(weights, (after[0] - before[0], after[1] - before[1]), planned)


def _crossed(optimizer: Any) -> tuple[int, int]:
    links = [unit.exchange.link for unit in optimizer.planned_units if unit.exchange is not None and unit.exchange.link]
    return sum(link.bytes_up for link in links), sum(link.bytes_down for link in links)


def _all(rank: int, world: int, names: tuple[str, ...], zero: dict[str, Any], folder: str) -> list[list[Outcome]]:
    """For each type the run on the host, that on the device, and one that changes over in the middle."""
    found = []
    for name in names:
        host, device = _job(name, zero, "host"), _job(name, zero, "device")
        runs: tuple[tuple[Any, ...], ...] = ((host,), (device,), (device, host), (host, device))
        some = runs if len(names) > 2 else runs[:3]
        found.append([_trained(rank, world, job, f"{folder}/{name}-{n}", *to) for n, (job, *to) in enumerate(some)])
    return found


CELLS = [("stage 2", ("MARS-M", "MKOR")), ("sub-groups", ("LDAdam",))]
# At stages 1 and 2 a matrix lies in the host's flat gradient at any address, and where it is not aligned a CPU's
# library rounds LDAdam's products otherwise than those of the aligned copy.
WHOLE = [
    ("stage 1", ("MARS-M", "MARS-Shampoo", "MKOR")),
    ("stage 2", ("MARS-M", "MARS-Shampoo", "MKOR")),
    ("sub-groups", NAMES),
    ("stage 3", NAMES),
]


@pytest.mark.parametrize(
    ("place", "names"),
    [
        *(pytest.param(*cell, id=cell[0], marks=pytest.mark.slow) for cell in CELLS),
        *(pytest.param(*cell, id=f"{cell[0]}, all", marks=pytest.mark.exhaustive) for cell in WHOLE),
    ],
)
def test_the_bits_are_those_of_the_host_and_the_bytes_those_planned(
    place: str, names: tuple[str, ...], tmp_path: Any
) -> None:
    sent = 0
    for rank in run_ranks(2, _all, names, ZERO[place], str(tmp_path)):
        for name, (stayed, *others) in zip(names, rank, strict=True):
            assert stayed.crossed == others[1].crossed == (0, 0), name
            for other in others:
                differ = [key for key, own in stayed.weights.items() if not np.array_equal(own, other.weights[key])]
                assert differ == [], name
            assert others[0].crossed == others[0].planned, name
            sent += sum(others[0].crossed)
    assert sent


def _broken(rank: int, world: int) -> list[bool]:
    """Whether weights and states are as before a step whose gradients are not finite, and move in the next one."""
    job = _job("MARS-M", {"stage": 2}, "device")
    engine = ds.engine_of(replace(job, params={**job.params, "skip_nonfinite": True}), world)
    optimizer, found = engine.basic_optimizer, []
    ds.train_step(engine, rank, world, 0)
    before = ds.digest(optimizer)
    ds.train_step(engine, rank, world, 1, factor=float("nan"))
    optimizer.settle()
    found.append(ds.digest(optimizer) == before)
    ds.train_step(engine, rank, world, 2)
    found.append(ds.digest(optimizer) != before)
    engine.destroy()
    return found


@pytest.mark.slow
def test_a_step_that_is_not_finite_leaves_everything_as_it_was() -> None:
    assert run_ranks(2, _broken) == [[True, True]] * 2


def _ends(rank: int, world: int, stages: tuple[int, ...]) -> list[list[dict[str, np.ndarray]]]:
    """Weights by stage of MKOR whose states a device has, and whose states the host has."""
    found = []
    for stage in stages:
        ends = []
        for more in ({}, {"offload_optimizer": {"device": "cpu"}}):
            job = ds.Job("MKOR", ds.TYPES["MKOR"], config={"zero_optimization": {"stage": stage, **more}})
            engine = ds.engine_of(job, world)
            for step in range(STEPS):
                ds.train_step(engine, rank, world, step)
            ends.append(ds.model_weights(engine))
            engine.destroy()
        found.append(ends)
    return found


@pytest.mark.parametrize(
    ("world", "stages"),
    [pytest.param(2, (2,), marks=pytest.mark.slow), pytest.param(3, (1, 2, 3), marks=pytest.mark.exhaustive)],
)
def test_statistics_of_all_micro_batches_count(world: int, stages: tuple[int, ...]) -> None:
    """At stages 1 and 2 DeepSpeed notes on the rank that steps a weight alone that the host has its gradient."""
    for ends in run_ranks(world, _ends, stages):
        for there, offloaded in ends:
            assert all(np.array_equal(there[name], offloaded[name]) for name in there)
