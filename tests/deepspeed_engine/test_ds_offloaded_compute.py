"""ZeRO-Offload whose matrices a device multiplies: the same bits as on the host's cores, counted, saved and resumed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

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


def _job(name: str, zero: dict[str, Any], wish: str) -> ds.Job:
    # Whatever else large runs switch on: clipping and accumulation are the harness's.
    params = {**ds.TYPES[name], "offload_compute": wish, "skip_nonfinite": name == "LDAdam"}
    return ds.Job(name, params, config={"zero_optimization": {**zero, "offload_optimizer": {"device": "cpu"}}})


def _trained(rank: int, world: int, job: ds.Job, folder: str, other: ds.Job) -> tuple[dict[str, np.ndarray], Any]:
    """Weights and a hash of the states; in the middle the run is saved, and another job goes on with it."""
    engine = ds.engine_of(job, world)
    for step in range(STEPS // 2):
        ds.train_step(engine, rank, world, step)
    engine.save_checkpoint(folder)
    engine.destroy()
    engine = ds.engine_of(other, world)
    engine.load_checkpoint(folder)
    for step in range(STEPS // 2, STEPS - 1):
        ds.train_step(engine, rank, world, step)
    before = _crossed(engine.basic_optimizer)
    ds.train_step(engine, rank, world, STEPS - 1)
    after, own = _crossed(engine.basic_optimizer), estimate(engine.basic_optimizer)[rank]
    due = (STEPS - 1) % own.period == 0
    crossed = after[0] - before[0], after[1] - before[1]
    planned = own.bytes_up + due * own.periodic_up, own.bytes_down + due * own.periodic_down
    found = {**ds.model_weights(engine), "digest": np.array(ds.digest(engine.basic_optimizer))}
    engine.destroy()
    return found, (crossed, planned)


def _crossed(optimizer: Any) -> tuple[int, int]:
    links = [unit.exchange.link for unit in optimizer.planned_units if unit.exchange is not None and unit.exchange.link]
    return sum(link.bytes_up for link in links), sum(link.bytes_down for link in links)


def _all(rank: int, world: int, zero: dict[str, Any], folder: str) -> list[Any]:
    """For each type the run on the host, that on the device, and one that changes over in the middle."""
    found = []
    for name in NAMES:
        host, device = _job(name, zero, "host"), _job(name, zero, "device")
        runs = ((host, host), (device, device), (device, host))
        found.append([_trained(rank, world, *(job, f"{folder}/{name}-{n}", to)) for n, (job, to) in enumerate(runs)])
    return found


@pytest.mark.parametrize(
    "place",
    [pytest.param(name, marks=[] if name in ("stage 2", "sub-groups") else pytest.mark.exhaustive) for name in ZERO],
)
def test_the_bits_are_those_of_the_host_and_the_bytes_those_planned(place: str, tmp_path: Any) -> None:
    for rank in run_ranks(2, _all, ZERO[place], str(tmp_path)):
        for name, ((stayed, at_home), *others) in zip(NAMES, rank, strict=True):
            assert at_home[0] == others[1][1][0] == (0, 0), name
            for found, _ in others:
                assert [key for key, values in stayed.items() if not np.array_equal(values, found[key])] == [], name
            crossed, planned = others[0][1]
            assert crossed == planned, name
            assert max(crossed) > 0, name


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


def test_a_step_that_is_not_finite_leaves_everything_as_it_was() -> None:
    assert run_ranks(2, _broken) == [[True, True]] * 2
