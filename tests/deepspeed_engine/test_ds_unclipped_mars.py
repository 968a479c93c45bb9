"""MARS without the clip under ZeRO: the steps of the form with a previous gradient."""

from __future__ import annotations

from typing import Any

import deepspeed
import ds_harness as ds
import numpy as np
from ranks import run_ranks

from rankwise.mars.spec import MARSSpec

STEPS = 6
TYPES = {
    "MARS-Lion": {"lr": 1e-3, "clip": None},
    "MARS-M": {"lr": 1e-2, "ns_dtype": "float32", "weight_decay": 0.1, "clip": None},
}
Weights = dict[str, np.ndarray]


def _run(rank: int, world: int, stages: list[int], folds: bool) -> list[tuple[Weights, set[str]]]:
    """Weights, and the names of states, of both types at every stage, or of the form that keeps a reference."""
    if not folds:
        MARSSpec.folds = lambda *given: False  # type: ignore[method-assign, assignment]
    deepspeed.init_distributed("gloo")
    found = []
    for stage in stages:
        for name, params in TYPES.items():
            engine = ds.engine_of(ds.Job(name, params, config={"zero_optimization": {"stage": stage}}), world)
            for step in range(STEPS):
                ds.train_step(engine, rank, world, step)
            states: Any = engine.basic_optimizer.state
            found.append((ds.model_weights(engine), {name for own in states.values() for name in own}))
            engine.destroy()
    return found


def _assert_close(found: list[tuple[Weights, set[str]]], expected: list[tuple[Weights, set[str]]]) -> None:
    for (weights, _), (others, _) in zip(found, expected * (len(found) // len(expected)), strict=True):
        for name, value in others.items():
            np.testing.assert_allclose(weights[name], value, rtol=0, atol=2e-5, err_msg=name)


def test_every_stage_takes_the_steps_of_the_form_with_a_reference() -> None:
    stages = [1, 2, 3]
    (earlier, *_), (found, *_) = (run_ranks(2, _run, stages, folds, timeout=300) for folds in (False, True))
    _assert_close(found, earlier)
    assert all("reference" in states for _, states in earlier)
    assert all("reference" not in states and "grad_avg" in states for _, states in found)
