"""From AdamW's checkpoint to one of ours on the same ranks and stage: weights and moments go on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import deepspeed
import ds_harness as ds
import numpy as np
import pytest
import torch
from ranks import run_ranks

from deepspeed_plugin.checkpoints import CheckpointError
from deepspeed_plugin.checkpoints.files import SavedCheckpoint

HALF = 4
TYPES = ("MARS-AdamW", "MARS-M", "SONew", "LDAdam", "MKOR")
MOMENTS = ("exp_avg", "exp_avg_sq")
# What means the same: what takes AdamW's rule in ours, too; the average under an orthogonalised or preconditioned step.
EXPECTED: dict[str, Callable[[set[str]], bool]] = {
    "MARS-AdamW": lambda found: (
        {"up.bias exp_avg", "norm.weight exp_avg_sq"} <= found and "up.weight exp_avg" not in found
    ),
    "MARS-M": lambda found: {"up.weight exp_avg", "embedding.weight exp_avg_sq"} <= found,
    "SONew": lambda found: {"up.bias exp_avg"} <= found,
    "LDAdam": lambda found: "embedding.weight exp_avg_sq" in found and "up.weight exp_avg" not in found,
    "MKOR": lambda found: {"up.weight exp_avg", "embedding.weight exp_avg_sq"} <= found,
}
CELLS: dict[str, dict[str, Any]] = {
    "stage 0": {"stage": 0},
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "stage 3": {"stage": 3},
    "stage 2, bf16": {"stage": 2, "dtype": torch.bfloat16},
    "stage 0, bf16": {"stage": 0, "dtype": torch.bfloat16},
    "BF16_Optimizer": {"stage": 1, "dtype": torch.bfloat16, "config": {"data_types": {"grad_accum_dtype": "fp32"}}},
    "two groups": {"stage": 2, "split": True},
}


def _job(name: str, cell: dict[str, Any]) -> ds.Job:
    given = {**cell}
    stage, config = given.pop("stage"), given.pop("config", {})
    job = next(job for job in ds.jobs(**given) if job.name == name)
    return replace(job, config={**config, "zero_optimization": {"stage": stage}})


def _train(rank: int, world: int, cells: list[str], folder: str) -> dict[str, Any]:
    """AdamW's weights when it was saved."""
    deepspeed.init_distributed("gloo")
    found = {}
    for label in cells:
        engine = ds.engine_of(_job("AdamW", CELLS[label]), world)
        for step in range(HALF):
            ds.train_step(engine, rank, world, step)
        engine.save_checkpoint(f"{folder}/{label}", client_state={"note": label})
        found[label] = ds.master_weights(engine)
        engine.destroy()
    return found


def _take_over(rank: int, world: int, cells: list[str], folder: str) -> dict[tuple[str, str], tuple[Any, ...]]:
    deepspeed.init_distributed("gloo")
    found = {}
    for label in cells:
        for name in TYPES:
            engine = ds.engine_of(replace(_job(name, CELLS[label]), seed=7), world)
            _, client = engine.load_checkpoint(f"{folder}/{label}")
            assert client["note"] == label and engine.global_steps == HALF
            loaded = ds.master_weights(engine)
            engine.save_checkpoint(f"{folder}/{label} {name}")
            rates = {group["lr"] for group in engine.basic_optimizer.param_groups}
            ds.train_step(engine, rank, world, HALF)
            steps = {int(state["step"]) for state in engine.basic_optimizer.state.values() if "step" in state}
            found[label, name] = (loaded, ds.master_weights(engine), rates, steps)
            engine.destroy()
    return found


def _moments_that_went_on(before: Path, after: Path, world: int) -> set[str]:
    """Parameters whose moments are those that AdamW had, at the places where ours has them."""
    theirs, ours = SavedCheckpoint.find(before, None), SavedCheckpoint.find(after, None)
    assert theirs is not None and ours is not None and theirs.author is None and ours.author is not None
    found: set[str] = set()
    for rank in range(world):
        adamw, state_dict = theirs.optimizer(rank)[0], ours.optimizer(rank)[0]
        for index, record in enumerate(state_dict["layout"]):
            for run, (key, _, start, end, offset) in enumerate(record["runs"]):
                for moment in MOMENTS:
                    place = record["states"].get(moment, {run: None})[run]
                    if place is None:
                        continue
                    own = state_dict["state"][index][moment].reshape(-1)[place : place + end - start]
                    if key in state_dict["transition"]["afresh"]:
                        assert not own.any(), (after.name, key, moment)
                        continue
                    past = adamw["state"][index][moment].reshape(-1)[offset : offset + end - start]
                    assert torch.equal(own, past), (after.name, key, moment)
                    found.add(f"{key} {moment}")
    return found


@pytest.mark.slow
def test_moments_go_on(tmp_path: Path) -> None:
    cells, world = list(CELLS), 2
    before = run_ranks(world, _train, cells, str(tmp_path))[0]
    after = run_ranks(world, _take_over, cells, str(tmp_path))[0]
    for (label, name), (loaded, stepped, rates, steps) in after.items():
        assert all(np.array_equal(loaded[key], before[label][key]) for key in loaded), (label, name)
        assert ds.TYPES[name]["lr"] in rates, "rates are this optimizer's own"
        # With half weights at stage 0 DeepSpeed begins by an idle step, which AdamW counts.
        assert steps == {HALF + 1 + (label == "stage 0, bf16")}, (label, name)
        moved = [key for key in stepped if not np.array_equal(stepped[key], loaded[key])]
        assert all(np.isfinite(stepped[key]).all() for key in stepped) and "up.weight" in moved
        went_on = _moments_that_went_on(tmp_path / label, tmp_path / f"{label} {name}", world)
        assert EXPECTED[name](went_on), (label, name, went_on)


def _refused(rank: int, world: int, folder: str) -> str:
    deepspeed.init_distributed("gloo")
    engine = ds.engine_of(_job("LDAdam", CELLS["stage 2"]), world)
    try:
        engine.load_checkpoint(folder)
    except CheckpointError as refusal:
        return str(refusal)
    return ""


def test_ranks_refuse_together_what_one_cannot_take(tmp_path: Path) -> None:
    run_ranks(2, _train, ["stage 2"], str(tmp_path))
    (file,) = (tmp_path / "stage 2").rglob("*rank_1_mp_rank_00_optim_states.pt")
    content = torch.load(file, weights_only=False)
    content["optimizer_state_dict"]["base_optimizer_state"]["state"][0].pop("exp_avg_sq")
    torch.save(content, file)
    for message in run_ranks(2, _refused, str(tmp_path / "stage 2")):
        assert "does not hold both of AdamW's moments" in message and file.name in message
