"""Frozen parameters at ZeRO-3: DeepSpeed keeps them by rank, so that a checkpoint is loaded where it was written."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import deepspeed
import ds_harness as ds
import numpy as np
import pytest
from ds_harness import run_ranks

from deepspeed_plugin.checkpoints import CheckpointError

FROZEN = ("embedding.weight", "up.bias")


def _job(name: str, seed: int, stage: int) -> ds.Job:
    job = next(job for job in ds.jobs() if job.name == name)
    return replace(job, seed=seed, config={"zero_optimization": {"stage": stage}})


def _engine(job: ds.Job, world: int) -> Any:
    model = ds.model_of(job)
    for name in FROZEN:
        model.get_parameter(name).requires_grad_(False)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine, *_ = deepspeed.initialize(model=model, model_parameters=trained, config=job.ds_config(world))
    return engine


def _save(rank: int, world: int, stage: int, folder: str) -> dict[str, np.ndarray]:
    engine = _engine(_job("MARS-M", 0, stage), world)
    for step, tag in enumerate(("earlier", "newest")):
        ds.train_step(engine, rank, world, step)
        engine.save_checkpoint(folder, tag=tag)
    weights = ds.model_weights(engine)
    engine.destroy()
    return weights


CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "states": ("MARS-M", "newest", {}),
    "weights": ("MARS-M", "newest", {"load_optimizer_states": False}),
    "module": ("MARS-M", "newest", {"load_module_only": True}),
    "another": ("LDAdam", "newest", {}),
    "earlier": ("MARS-M", "earlier", {"load_optimizer_states": False}),
}


def _load(rank: int, world: int, stage: int, folder: str) -> dict[str, dict[str, Any]]:
    found = {}
    for case, (name, tag, options) in CASES.items():
        engine = _engine(_job(name, 1, stage), world)
        try:
            engine.load_checkpoint(folder, tag=tag, **options)
            problem = ""
        except CheckpointError as error:
            problem = str(error)
        states = [key for state in engine.basic_optimizer.state.values() for key in state]
        seen = {"weights": ds.model_weights(engine), "steps": engine.global_steps, "states": states}
        found[case] = {**seen, "problem": problem}
        if not problem:
            ds.train_step(engine, rank, world, 2)  # the optimizer compares its weights with the model's
        engine.destroy()
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("world", "stage"), [(2, 3), pytest.param(1, 3, marks=pytest.mark.exhaustive)], ids=str)
def test_weights_are_loaded_where_they_were_saved(tmp_path: Path, world: int, stage: int) -> None:
    """With states and without, into another optimizer too; a tag DeepSpeed would not take them from is refused."""
    saved = run_ranks(world, _save, stage, str(tmp_path))[0]
    found = run_ranks(world, _load, stage, str(tmp_path))[0]
    refused = found.pop("earlier")["problem"]
    assert "frozen parameters (embedding.weight, …) cannot be moved" in refused
    for case, seen in found.items():
        assert seen["problem"] == "", case
        for name, value in saved.items():
            np.testing.assert_array_equal(seen["weights"][name], value, err_msg=f"{case} {name}")
    assert [found[case]["steps"] for case in ("states", "weights", "module", "another")] == [2, 2, 0, 2]
    assert "step" in found["states"]["states"]
    assert "step" not in found["weights"]["states"] + found["module"]["states"] + found["another"]["states"]


@pytest.mark.slow
def test_other_ranks_are_refused(tmp_path: Path) -> None:
    run_ranks(2, _save, 3, str(tmp_path))
    found = run_ranks(1, _load, 3, str(tmp_path))[0]
    for case, seen in found.items():
        assert "cannot be moved to, from or within ZeRO-3" in seen["problem"], case
