"""save_checkpoint, new processes, load_checkpoint: every bit as if nothing had happened."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import ds_harness as ds
import numpy as np
import pytest
import torch
from deepspeed.accelerator import get_accelerator
from ds_harness import run_ranks

# A factor step of MKOR's, and MKOR-H's switch, come after the fourth.
STEPS, HALF = 7, 4


def _train(
    rank: int, world: int, jobs: list[ds.Job], folder: str, resume: bool
) -> list[tuple[str, dict[str, np.ndarray]]]:
    """Train and save on the way, or load and train the rest."""
    found = []
    for index, job in enumerate(jobs):
        engine = ds.engine_of(job, world)
        if resume:
            path, client = engine.load_checkpoint(f"{folder}/{index}")
            assert path is not None and client["note"] == job.name and engine.global_steps == HALF
        for step in range(HALF if resume else 0, STEPS):
            if step == HALF and not resume:
                engine.save_checkpoint(f"{folder}/{index}", client_state={"note": job.name})
            ds.train_step(engine, rank, world, step)
        found.append((ds.digest(engine.basic_optimizer), ds.model_weights(engine)))
        engine.destroy()
    return found


@pytest.mark.parametrize(
    ("stage", "dtype", "names"),
    [
        *((stage, torch.float32, ds.TYPES if stage == 2 else ds.KINDS) for stage in range(4)),
        *(
            pytest.param(stage, dtype, ds.TYPES, marks=pytest.mark.exhaustive)
            for dtype in (torch.float32, torch.bfloat16)
            for stage in range(4)
        ),
    ],
    ids=str,
)
def test_resume_is_bitwise(tmp_path: Path, stage: int, dtype: torch.dtype, names: Iterable[str]) -> None:
    jobs = [ds.at_stage(job, stage) for job in ds.ours(names, dtype=dtype)]
    _check_bitwise(tmp_path, jobs)


def _check_bitwise(tmp_path: Path, jobs: list[ds.Job]) -> None:
    straight = run_ranks(2, _train, jobs, str(tmp_path), False)
    resumed = run_ranks(2, _train, jobs, str(tmp_path), True)
    for expected_rank, found_rank in zip(straight, resumed, strict=True):
        for job, (digest, weights), (found_digest, found_weights) in zip(jobs, expected_rank, found_rank, strict=True):
            assert all(np.array_equal(found_weights[name], weights[name]) for name in weights), job.name
            assert found_digest == digest, f"{job.name}: the weights agree, the optimizer states do not"


def _in_8_bits(stage: int, error_dtype: str = "int8", **common: Any) -> ds.Job:
    params = {**ds.TYPES["LDAdam"], "error_dtype": error_dtype}
    return ds.Job("LDAdam", params, config={"zero_optimization": {"stage": stage}}, **common)


def _narrow(name: str, stage: int, **common: Any) -> ds.Job:
    """States of all parameters in codes, whatever their size: see :func:`_code_all`."""
    params = {**ds.TYPES[name], "state_dtype": "int8"}
    return ds.Job(name, params, config={"zero_optimization": {"stage": stage}}, **common)


@pytest.fixture
def _code_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rankwise.states.optimizer_spec.FEWEST_CODED", 1)


@pytest.mark.usefixtures("_code_all")
def test_states_in_8_bits_resume_bitwise(tmp_path: Path) -> None:
    jobs = [
        *(_narrow("LDAdam", stage) for stage in range(4)),
        *(_narrow(name, stage) for stage, name in enumerate(("SONew", "MARS-AdamW", "MKOR", "MARS-M"))),
        _narrow("MARS-AdamW", 1, dtype=torch.bfloat16),
    ]
    _check_bitwise(tmp_path, jobs)


def test_buffers_in_8_bits_on_another_layout(tmp_path: Path) -> None:
    """No further from the run that was not interrupted than half of what 8 bits do to it; without buffers it is."""
    (_, whole), (_, full) = run_ranks(3, _train, [_in_8_bits(3), _in_8_bits(3, "float32")], str(tmp_path), False)[0]
    run_ranks(2, _train, [_in_8_bits(2)], str(tmp_path / "two"), False)
    (_, moved) = run_ranks(3, _train, [_in_8_bits(3)], str(tmp_path / "two"), True)[0][0]
    initial = ds.weights_of(ds.model_of(_in_8_bits(3)))
    assert ds.error(moved, whole, initial) <= 0.5 * ds.error(whole, full, initial)


# --- rolled back -----------------------------------------------------------------------------------------------------


def _next_steps(engine: Any, rank: int, world: int) -> tuple[str, dict[str, np.ndarray]]:
    """States and weights after the two steps that follow the checkpoint."""
    for step in range(2, 4):
        ds.train_step(engine, rank, world, step)
    return ds.digest(engine.basic_optimizer), ds.model_weights(engine)


def _check_alike(job: ds.Job, results: list[tuple[str, dict[str, np.ndarray]]]) -> None:
    (digest, weights), *others = results
    for found_digest, found_weights in others:
        assert all(np.array_equal(found_weights[name], weights[name]) for name in weights), job
        assert found_digest == digest, job


def _roll_back(rank: int, world: int, jobs: list[ds.Job], folder: str) -> list[list[tuple[str, dict[str, np.ndarray]]]]:
    """What comes after a checkpoint at first, and once it is loaded while micro-batches wait for their step."""
    get_accelerator().is_fp16_supported = lambda: True
    found = []
    for index, job in enumerate(jobs):
        engine, results = ds.engine_of(job, world), []
        for step in range(2):
            ds.train_step(engine, rank, world, step)
        engine.save_checkpoint(f"{folder}/{index}")
        for waiting in (0, 1, ds.ACCUMULATION):
            if waiting:
                ds.accumulate(engine, rank, world, 8, waiting)
                engine.load_checkpoint(f"{folder}/{index}")
            results.append(_next_steps(engine, rank, world))
        engine.destroy()
        found.append(results)
    return found


def _of_stage(stage: int, dtype: torch.dtype = torch.float32, name: str = "MKOR", **settings: Any) -> ds.Job:
    return ds.Job(name, ds.TYPES[name], config={"zero_optimization": {"stage": stage, **settings}}, dtype=dtype)


OFFLOADED = {"offload_optimizer": {"device": "cpu"}}
ROLLED_BACK = [
    *(_of_stage(stage) for stage in range(4)),
    *(_of_stage(stage, name="LDAdam", **OFFLOADED) for stage in (2, 3)),
    _of_stage(0, torch.bfloat16, "MARS-M"),
    _of_stage(2, torch.float16, "SONew"),
]
EVERYWHERE = [
    _of_stage(stage, dtype, name, **settings)
    for name in ds.TYPES
    for stage in range(4)
    for dtype in (torch.float32, torch.bfloat16)
    for settings in ({}, *((OFFLOADED, {"overlap_comm": True}) if stage else ()))
]


@pytest.mark.parametrize(
    "jobs", [ROLLED_BACK, pytest.param(EVERYWHERE, marks=pytest.mark.exhaustive)], ids=["usual", "everywhere"]
)
def test_a_run_rolls_back_bitwise(tmp_path: Path, jobs: list[ds.Job]) -> None:
    """DeepSpeed itself adds gradients of the weights before to those of the weights that it has loaded."""
    for found in run_ranks(2, _roll_back, jobs, str(tmp_path)):
        for job, results in zip(jobs, found, strict=True):
            _check_alike(job, results)


def _from_elsewhere(rank: int, world: int, jobs: list[ds.Job], folder: str) -> list[list[tuple[str, Any]]]:
    """A checkpoint of ZeRO-1, in a new engine and in one that has trained: it learned which layers are never used."""
    found = []
    for index, job in enumerate(jobs):
        writer = ds.engine_of(ds.at_stage(job, 1), world)
        for step in range(2):
            ds.train_step(writer, rank, world, step)
        writer.save_checkpoint(f"{folder}/{index}")
        writer.destroy()
        results = []
        for trained in (0, 3):
            engine = ds.engine_of(job, world)
            for step in range(trained):
                ds.train_step(engine, rank, world, step)
            engine.load_checkpoint(f"{folder}/{index}")
            results.append(_next_steps(engine, rank, world))
            engine.destroy()
        found.append(results)
    return found


def test_a_run_goes_on_with_a_checkpoint_of_another_stage(tmp_path: Path) -> None:
    """MKOR has left a layer out by then: its plan is that of other matrices."""
    jobs = [_of_stage(3), _of_stage(0, name="LDAdam")]
    for found in run_ranks(2, _from_elsewhere, jobs, str(tmp_path)):
        for job, results in zip(jobs, found, strict=True):
            _check_alike(job, results)
