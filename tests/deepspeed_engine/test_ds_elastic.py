"""Resuming on another number of ranks, another ZeRO stage, or with another optimizer."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ds_harness as ds
import numpy as np
import pytest
import torch
from ds_harness import run_ranks

from deepspeed_plugin.checkpoints import CheckpointError
from deepspeed_plugin.checkpoints.files import SavedCheckpoint

HALF = ds.STEPS // 2


def _run(
    rank: int, world: int, jobs: list[ds.Job], first: int, last: int, load: str | None, save: str | None
) -> list[dict[str, np.ndarray]]:
    """Train steps [first, last) of several jobs, loading or saving a checkpoint around them."""
    weights = []
    for index, job in enumerate(jobs):
        engine = ds.engine_of(job, world)
        if load is not None:
            # Other weights than the ones saved, so that nothing but the checkpoint can make the runs agree.
            path, client = engine.load_checkpoint(f"{load}/{index}")
            assert path is not None
            assert client["note"] == job.name
            assert engine.global_steps == first
        for step in range(first, last):
            ds.train_step(engine, rank, world, step)
        if save is not None:
            engine.save_checkpoint(f"{save}/{index}", client_state={"note": job.name})
        weights.append(ds.model_weights(engine))
        engine.destroy()
    return weights


MOVES = [((2, 2), (3, 2)), ((3, 2), (2, 2)), ((4, 1), (1, 1)), ((2, 1), (2, 3)), ((2, 3), (2, 2)), ((3, 3), (2, 0))]
MOVES += [((2, 2), (3, 3)), ((2, 0), (3, 1))]


@pytest.mark.parametrize(
    ("before", "after", "names"),
    [
        ((2, 2), (3, 3), ds.KINDS),
        *(pytest.param(before, after, ds.TYPES, marks=pytest.mark.exhaustive) for before, after in MOVES),
    ],
    ids=str,
)
def test_resume_on_another_layout(
    tmp_path: Path, before: tuple[int, int], after: tuple[int, int], names: Iterable[str]
) -> None:
    """Saved on (ranks, stage) ``before`` and continued on ``after``: the run that was never interrupted on ``after``.

    Until the save the two runs differ in the order their gradients are summed in: what that does to AdamW between the
    same layouts, and to the type itself in one process, is the measure (ten times, as everywhere).
    """
    jobs = ds.jobs(names)
    first, second = ([ds.at_stage(job, stage) for job in jobs] for _, stage in (before, after))
    whole = run_ranks(after[0], _run, second, 0, ds.STEPS, None, None)[0]
    elsewhere = run_ranks(before[0], _run, first[-1:], 0, ds.STEPS, None, None)[0]
    run_ranks(before[0], _run, first[:-1], 0, HALF, None, str(tmp_path))
    resumed = run_ranks(after[0], _run, second[:-1], HALF, ds.STEPS, str(tmp_path), None)[0]
    initial = ds.weights_of(ds.model_of(jobs[0]))
    errors = {
        job.name: ds.error(got, expected, initial) for job, got, expected in zip(jobs, resumed, whole, strict=False)
    }
    assert errors.keys() == set(names)
    assert not ds.too_far(errors, ds.error(elsewhere[0], whole[-1], initial)), errors


def _continue_with(rank: int, world: int, job: ds.Job, folder: str) -> tuple[dict[str, Any], dict[str, Any], list[int]]:
    torch.manual_seed(3)
    engine = ds.engine_of(job, world)
    engine.load_checkpoint(f"{folder}/0")
    loaded = ds.model_weights(engine)
    ds.train_step(engine, rank, world, HALF)
    steps = [int(state["step"]) for state in engine.basic_optimizer.state.values() if "step" in state]
    after = ds.model_weights(engine)
    engine.destroy()
    return loaded, after, steps


@pytest.mark.slow
@pytest.mark.parametrize(("writer", "reader"), [("AdamW", "LDAdam"), ("MARS-Lion", "AdamW"), ("SONew", "MKOR")])
@pytest.mark.parametrize("stage", [2, 3])
def test_another_optimizer_keeps_the_weights(tmp_path: Path, writer: str, reader: str, stage: int) -> None:
    by_name = {job.name: ds.at_stage(job, stage) for job in ds.jobs()}
    saved = run_ranks(2, _run, [by_name[writer]], 0, HALF, None, str(tmp_path))[0][0]
    loaded, after, steps = run_ranks(2, _continue_with, by_name[reader], str(tmp_path))[0]
    for name, value in saved.items():
        np.testing.assert_array_equal(loaded[name], value, err_msg=name)
    # Moments of AdamW's go on on the same ranks; whatever else another optimizer had starts fresh.
    assert steps and set(steps) == {HALF + 1 if writer == "AdamW" else 1}
    assert any(not np.array_equal(after[name], saved[name]) for name in saved)


@pytest.mark.parametrize(
    "content",
    [
        {"optimizer_state_dict": {"base_optimizer_state": [{"exp_avg": torch.zeros(2)}], "zero_stage": 1}},
        {"optimizer_state_dict": None},
        {"something": "else"},
    ],
    ids=["elastic list", "nothing", "foreign"],
)
def test_foreign_files_have_no_author(tmp_path: Path, content: dict[str, Any]) -> None:
    """Whatever another optimizer's checkpoint looks like, it is left to DeepSpeed."""
    folder = tmp_path / "global_step1"
    folder.mkdir()
    torch.save({"module": {}}, folder / "mp_rank_00_model_states.pt")
    torch.save(content, folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    (tmp_path / "latest").write_text("global_step1")
    saved = SavedCheckpoint.find(tmp_path, None)
    assert saved is not None
    assert saved.world_size == 1
    assert saved.author is None


def test_a_tag_written_again_is_not_mixed_up(tmp_path: Path) -> None:
    """Files of an earlier run of another size or stage in the same folder do not belong to the checkpoint."""
    folder = tmp_path / "last"
    folder.mkdir()
    for rank in range(3):
        torch.save({}, folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    torch.save({"optimizer": None, "dp_world_size": 3}, folder / "zero_pp_rank_0_mp_rank_00_model_states.pt")
    os.utime(folder / "zero_pp_rank_0_mp_rank_00_model_states.pt", (1, 1))
    found = {}
    for name, content in {"two ranks": (None, 2), "stage 0": ({}, 4)}.items():
        torch.save({"optimizer": content[0], "dp_world_size": content[1]}, folder / "mp_rank_00_model_states.pt")
        saved = SavedCheckpoint.find(tmp_path, "last")
        assert saved is not None
        found[name] = saved.world_size
    assert found == {"two ranks": 2, "stage 0": None}


def test_files_in_the_old_format_can_be_read(tmp_path: Path) -> None:
    folder = tmp_path / "old"
    folder.mkdir()
    legacy = {"_use_new_zipfile_serialization": False}
    torch.save({"optimizer": None, "dp_world_size": 1}, folder / "mp_rank_00_model_states.pt", **legacy)
    state = {"rankwise": "SONew", "layout": []}
    content = {"optimizer_state_dict": {"base_optimizer_state": state, "single_partition_of_fp32_groups": []}}
    torch.save(content, folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt", **legacy)
    saved = SavedCheckpoint.find(tmp_path, "old")
    assert saved is not None
    assert saved.author == "SONew"


def _continue_unfused(
    rank: int, world: int, writer: ds.Job, reader: ds.Job, folder: str
) -> list[dict[str, np.ndarray]]:
    first = ds.engine_of(writer, world)
    ds.train_step(first, rank, world, 0)
    first.save_checkpoint(folder)
    saved = ds.model_weights(first)
    first.destroy()
    second = ds.engine_of(reader, world)
    with torch.no_grad():
        for clones in second.optimizer.fp32_groups:
            for clone in clones:
                clone.add_(1.0)  # as if it had been initialised otherwise
    second.load_checkpoint(folder)
    masters = [clone.detach().numpy().copy() for clones in second.optimizer.fp32_groups for clone in clones]
    names = [name for name, _ in second.module.named_parameters()]
    second.destroy()
    return [saved, dict(zip(names, masters, strict=True))]


@pytest.mark.slow
def test_masters_follow_the_weights_at_stage_0(tmp_path: Path) -> None:
    """Where DeepSpeed loads the weights, for there is nothing that goes on."""
    reader = next(job for job in ds.jobs(dtype=torch.bfloat16) if job.name == "LDAdam")
    reader = ds.at_stage(reader, 0)
    writer = replace(reader, name="SGD", params={"lr": 0.1})
    saved, masters = run_ranks(2, _continue_unfused, writer, reader, str(tmp_path))[0]
    for name, value in saved.items():
        rounded = torch.from_numpy(masters[name]).bfloat16().float().numpy()
        np.testing.assert_array_equal(rounded, value, err_msg=name)


def _change_optimizer(
    rank: int, world: int, writer: ds.Job, readers: list[ds.Job], folder: str
) -> tuple[dict[str, np.ndarray], list[str | dict[str, np.ndarray]]]:
    engine = ds.engine_of(writer, world)
    old = {}
    for step, tag in enumerate(("old", "new")):
        ds.train_step(engine, rank, world, step)
        engine.save_checkpoint(folder, tag=tag)
        old = old or ds.model_weights(engine)
    engine.destroy()
    results: list[str | dict[str, np.ndarray]] = []
    for reader in readers:
        engine = ds.engine_of(reader, world)
        try:
            engine.load_checkpoint(folder, tag="old")
            results.append(ds.model_weights(engine))
        except CheckpointError as error:
            results.append(str(error))
        engine.destroy()
    return old, results


@pytest.mark.slow
def test_wrong_weights_are_refused(tmp_path: Path) -> None:
    """Without optimizer states DeepSpeed would take another tag's weights at ZeRO-3, or fail without a word.

    Between optimizers of ours it is not asked.
    """
    by_name = {job.name: job for job in ds.jobs()}
    readers = [ds.at_stage(by_name[name], stage) for name, stage in (("AdamW", 3), ("AdamW", 2), ("LDAdam", 2))]
    writer = ds.at_stage(by_name["MARS-AdamW"], 3)
    old, (same_stage, other_stage, loaded) = run_ranks(2, _change_optimizer, writer, readers, str(tmp_path))[0]
    assert "write old into it first" in same_stage
    assert "to or from ZeRO-3 at once" in other_stage
    for name, value in old.items():
        np.testing.assert_array_equal(loaded[name], value, err_msg=name)
