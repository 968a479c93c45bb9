"""``engine.step()`` inside autocast, another default device, and a compiled function: as without."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import deepspeed
import ds_harness as ds
import numpy as np
import pytest
import torch
from ranks import run_ranks

AROUND: dict[str, Callable[[], Any]] = {
    "nothing": contextlib.nullcontext,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "default device": lambda: torch.device("meta"),
}


def _trained(name: str, stage: int, world: int, rank: int, around: Callable[[], Any]) -> dict[str, np.ndarray]:
    engine = ds.engine_of(ds.Job(name, ds.TYPES[name], config={"zero_optimization": {"stage": stage}}), world)
    x, y = ds.batches(ds.STEPS)
    size = ds.GLOBAL_BATCH // world
    share = slice(rank * size, (rank + 1) * size)
    for step in range(3):
        for micro in range(ds.ACCUMULATION):
            engine.backward(engine(x[step, micro, share], y[step, micro, share]))
            with around():
                engine.step()
    found = ds.model_weights(engine)
    engine.destroy()
    return found


def _all(rank: int, world: int, names: list[str], stage: int) -> dict[str, dict[str, dict[str, np.ndarray]]]:
    deepspeed.init_distributed("gloo")
    return {name: {key: _trained(name, stage, world, rank, how) for key, how in AROUND.items()} for name in names}


def _check(names: list[str], stage: int) -> None:
    for found in run_ranks(2, _all, names, stage):
        for name, runs in found.items():
            for around, weights in runs.items():
                for key, value in runs["nothing"].items():
                    assert np.array_equal(weights[key], value), (name, around, key)


def test_steps_of_an_engine_do_not_depend_on_what_surrounds_them() -> None:
    _check(["MARS-M", "LDAdam"], 2)


@pytest.mark.exhaustive
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_nor_those_of_any_type(stage: int) -> None:
    _check(list(ds.TYPES), stage)
