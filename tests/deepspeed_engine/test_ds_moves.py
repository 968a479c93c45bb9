"""Moving a checkpoint to another layout: what travels, what load_checkpoint's arguments choose, what is refused."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed
import ds_harness as ds
import numpy as np
import pytest
import torch
from deepspeed.accelerator import get_accelerator
from ds_harness import run_ranks

from deepspeed_plugin.checkpoints import CheckpointError
from deepspeed_plugin.checkpoints import by_name as moving
from deepspeed_plugin.checkpoints.by_name import client_state_of, restore_engine
from deepspeed_plugin.checkpoints.load_plan import Wanted


def _job(name: str, stage: int, **config: Any) -> ds.Job:
    job = next(job for job in ds.jobs() if job.name == name)
    zero = {"stage": stage, **config.pop("zero", {})}
    return replace(job, config={**job.config, "zero_optimization": zero, **config})


def _save(rank: int, world: int, job: ds.Job, steps: int, folder: str) -> dict[str, np.ndarray]:
    engine = ds.engine_of(job, world)
    for step in range(steps):
        ds.train_step(engine, rank, world, step)
    engine.save_checkpoint(folder, tag="tag")
    weights = ds.model_weights(engine)
    engine.destroy()
    return weights


def _load(
    rank: int, world: int, job: ds.Job, folder: str, steps: int = 0, **options: Any
) -> tuple[str, dict[str, Any]]:
    """A digest of all state, and what else there is to look at, after loading and some more steps."""
    engine = ds.engine_of(job, world)
    path, client_state = engine.load_checkpoint(folder, tag="tag", **options)
    assert path is not None
    seen: dict[str, Any] = {"weights": ds.model_weights(engine), "client": client_state, "count": engine.global_steps}
    for step in range(steps):
        ds.train_step(engine, rank, world, 5 + step)
    counts = {int(state["step"]) for state in engine.basic_optimizer.state.values() if "step" in state}
    seen.update(counts=counts, after=ds.model_weights(engine))
    digest = ds.digest(engine.basic_optimizer)
    engine.destroy()
    return digest, seen


# --- saved when there had been no step ------------------------------------------------------------------------------


def _resave(rank: int, world: int, jobs: list[ds.Job], folder: str) -> None:
    """Load and save at once, before any step; of the second, AdamW's, the weights alone."""
    for index, job in enumerate(jobs):
        engine = ds.engine_of(job, world)
        engine.load_checkpoint(f"{folder}/first{index}", tag="tag", load_optimizer_states=index == 0)
        engine.save_checkpoint(f"{folder}/second{index}", tag="tag")
        engine.destroy()


def _continue_both(rank: int, world: int, job: ds.Job, folder: str) -> list[tuple[str, dict[str, Any]]]:
    return [_load(rank, world, job, f"{folder}/{name}", steps=1) for name in ("first0", "second0", "second1")]


@pytest.mark.slow
def test_saved_before_the_first_step(tmp_path: Path) -> None:
    """The layout is part of a checkpoint even if nothing has been stepped since the start, or since loading."""
    job = _job("MKOR", 2)
    run_ranks(2, _save, job, 2, str(tmp_path / "first0"))
    adamw = run_ranks(2, _save, _job("AdamW", 2), 2, str(tmp_path / "first1"))[0]
    run_ranks(2, _resave, [job, job], str(tmp_path))
    (first, _), (second, _), (_, taken_over) = run_ranks(3, _continue_both, _job("MKOR", 3), str(tmp_path))[1]
    assert second == first
    for name, value in adamw.items():
        np.testing.assert_array_equal(taken_over["weights"][name], value, err_msg=name)
    assert taken_over["counts"] == {1}, "MKOR had not stepped when it was saved"


# --- damaged checkpoints --------------------------------------------------------------------------------------------


def _attempts(rank: int, world: int, attempts: list[tuple[ds.Job, str, dict[str, Any]]]) -> list[str]:
    messages = []
    for job, folder, options in attempts:
        engine = ds.engine_of(job, world)
        try:
            engine.load_checkpoint(folder, tag="tag", **options)
            messages.append("loaded")
        except (CheckpointError, RuntimeError) as error:
            messages.append(f"{type(error).__name__}: {error}")
        engine.destroy()
    return messages


@pytest.mark.slow
def test_damaged_checkpoints_are_named(tmp_path: Path) -> None:
    """A missing or cut-off ZeRO file is no other optimizer's checkpoint; all ranks say which file it is."""
    for name in ("missing", "cut", "gone"):
        run_ranks(2, _save, _job("LDAdam", 2), 1, str(tmp_path / name))
    file = "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    (tmp_path / "missing" / "tag" / file).unlink()
    os.truncate(tmp_path / "cut" / "tag" / file, 700)
    for path in (tmp_path / "gone" / "tag").glob("zero_pp*"):
        path.unlink()
    here, elsewhere, other = _job("LDAdam", 2), _job("LDAdam", 1), _job("AdamW", 2)
    attempts = [
        (job, str(tmp_path / name), options)
        for name, job, options in (
            ("missing", here, {}),
            ("missing", elsewhere, {}),
            ("missing", other, {}),
            ("cut", here, {}),
            ("cut", elsewhere, {}),
            ("gone", here, {}),
            ("gone", here, {"load_optimizer_states": False}),
        )
    ]
    results = run_ranks(2, _attempts, attempts)
    assert results[0] == results[1]
    *damaged, weights_only = results[0]
    assert weights_only == "loaded"
    for message in damaged:
        assert message.startswith("CheckpointError") and "not written to the end" in message, message
    assert all(file in message for message in damaged[:5])
    assert "zero_pp_rank_0_mp_rank_00_optim_states.pt (2 of" in damaged[5]
    assert not list(tmp_path.glob("*/tag/.resharding*"))


# --- what travels besides weights and states ------------------------------------------------------------------------


def _scaler(engine: Any) -> dict[str, Any]:
    return {key: value for key, value in vars(engine.optimizer.loss_scaler).items() if key.startswith(("cur", "last"))}


def _scale(rank: int, world: int, job: ds.Job, folder: str, save: bool) -> tuple[dict[str, Any], float]:
    get_accelerator().is_fp16_supported = lambda: True
    engine = ds.engine_of(job, world)
    if save:
        for step in range(3):
            ds.train_step(engine, rank, world, step)
        engine.save_checkpoint(folder, tag="tag")
    else:
        engine.load_checkpoint(folder, tag="tag")
    found = _scaler(engine), float(engine.optimizer.cur_scale)
    engine.destroy()
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [((2, 2), (1, 3)), ((1, 3), (2, 1))], ids=str)
def test_the_loss_scale_travels(tmp_path: Path, before: tuple[int, int], after: tuple[int, int]) -> None:
    fp16 = {"initial_scale_power": 8, "loss_scale_window": 1}
    jobs = [replace(_job("MARS-Lion", stage, fp16=fp16), dtype=torch.float16) for stage in (before[1], after[1])]
    saved, scale = run_ranks(before[0], _scale, jobs[0], str(tmp_path), True)[0]
    assert scale != 2**8, "the scale must have moved for this to mean anything"
    loaded, found = run_ranks(after[0], _scale, jobs[1], str(tmp_path), False)[0]
    assert loaded == saved
    assert found == scale


class _Stateful:
    """Scheduler or sampler that remembers what it was given."""

    loaded: Any = None

    def load_state_dict(self, state: Any) -> None:
        self.loaded = state


def _engine(used: bool) -> Any:
    parts = {name: _Stateful() for name in ("lr_scheduler", "random_ltd_scheduler", "data_sampler")}
    return SimpleNamespace(
        **parts,
        random_ltd_enabled=lambda: used,
        curriculum_learning_enabled=lambda: used,
        training_dataloader=SimpleNamespace(data_sampler=parts["data_sampler"]),
        train_batch_size=lambda: 4,
    )


@pytest.mark.parametrize("used", [True, False])
def test_schedulers_and_samplers_travel(used: bool) -> None:
    content = {
        "global_steps": 7,
        "skipped_steps": 1,
        "dp_world_size": 2,
        "mp_world_size": 1,
        "lr_scheduler": {"last": 1},
        "random_ltd": {"layers": 2},
        "data_sampler": {"position": 3},
    }
    engine = _engine(used)
    restore_engine(engine, content, {}, Wanted())
    assert (engine.global_steps, engine.global_samples, engine.skipped_steps) == (7, 28, 1)
    assert engine.loaded_checkpoint_dp_world_size == 2
    assert engine.lr_scheduler.loaded == {"last": 1}
    assert engine.random_ltd_scheduler.loaded == ({"layers": 2} if used else None)
    assert engine.data_sampler.loaded == ({"position": 3} if used else None)
    module_only = _engine(True)
    restore_engine(module_only, content, {}, Wanted(load_module_only=True))
    assert module_only.random_ltd_scheduler.loaded is None
    assert not hasattr(module_only, "global_steps")


def test_the_client_state_is_the_users() -> None:
    content = {
        "module": {},
        "optimizer": None,
        "lr_scheduler": None,
        "global_steps": 7,
        "note": 1,
        "rankwise": {"added_info": True},
        "universal_checkpoint_info": {},
    }
    assert client_state_of(content, Wanted()) == {"note": 1}
    kept = client_state_of(content, Wanted(load_lr_scheduler_states=False, load_optimizer_states=False))
    assert kept == {"note": 1, "lr_scheduler": None, "optimizer": None}
    own = {**content, "rankwise": {"added_info": False}}
    assert client_state_of(own, Wanted()) == {"note": 1, "universal_checkpoint_info": {}}


# --- arguments of load_checkpoint -----------------------------------------------------------------------------------

SCHEDULER = {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 7}}}


def _halved(src: Mapping[str, torch.Tensor], dst: torch.nn.Module) -> None:
    dst.load_state_dict({name: value / 2 for name, value in src.items()})


def _arguments(rank: int, world: int, stage: int, folder: str) -> dict[str, dict[str, Any]]:
    cases: dict[str, dict[str, Any]] = {
        "all": {},
        "module": {"load_module_only": True},
        "weights": {"load_optimizer_states": False},
        "own": {"custom_load_fn": _halved, "load_module_only": True},
        "own with states": {"custom_load_fn": _halved},
    }
    found = {}
    for name, options in cases.items():
        engine = ds.engine_of(_job("SONew", stage, **SCHEDULER), world)
        try:
            engine.load_checkpoint(folder, tag="tag", load_lr_scheduler_states=name != "weights", **options)
            problem = ""
        except CheckpointError as error:
            problem = str(error)
        loaded = ds.model_weights(engine)
        states = [name for state in engine.basic_optimizer.state.values() for name in state]
        schedule = engine.lr_scheduler.last_batch_iteration
        found[name] = {
            "weights": loaded, "steps": engine.global_steps, "states": states, "schedule": schedule, "problem": problem,
        }  # fmt: skip
        engine.destroy()
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [((2, 2), (1, 1)), ((1, 3), (2, 3))], ids=str)
def test_arguments_are_honoured(tmp_path: Path, before: tuple[int, int], after: tuple[int, int]) -> None:
    saved = run_ranks(before[0], _save, _job("SONew", before[1], **SCHEDULER), 3, str(tmp_path))[0]
    found = run_ranks(after[0], _arguments, after[1], str(tmp_path))[0]
    for case in ("all", "module", "weights"):
        for name, value in saved.items():
            np.testing.assert_array_equal(found[case]["weights"][name], value, err_msg=f"{case} {name}")
    assert [found[case]["steps"] for case in ("all", "module", "weights")] == [3, 0, 3]
    untouched = found["module"]["schedule"]
    assert found["weights"]["schedule"] == untouched != found["all"]["schedule"]
    assert "step" in found["all"]["states"]
    assert "step" not in found["module"]["states"] + found["weights"]["states"]
    if after[1] == 3:
        assert "custom_load_fn cannot be used" in found["own"]["problem"]
    else:
        for name, value in saved.items():
            np.testing.assert_array_equal(found["own"]["weights"][name], value / 2, err_msg=name)
            # As in DeepSpeed, where the optimizer's full-precision weights are loaded after the module's.
            np.testing.assert_array_equal(found["own with states"]["weights"][name], value, err_msg=name)


class _Longer(ds.Net):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.extra = torch.nn.Linear(3, 3)


def _other_model(rank: int, world: int, job: ds.Job, folder: str) -> tuple[Any, ...]:
    messages: list[Any] = []
    for strict in (True, False):
        torch.manual_seed(1)
        model = _Longer()
        before = model.extra.weight.detach().clone()
        engine, *_ = deepspeed.initialize(
            model=model, model_parameters=list(model.parameters()), config=job.ds_config(world)
        )
        try:
            engine.load_checkpoint(folder, tag="tag", load_module_strict=strict)
            messages.append(float((engine.module.extra.weight - before).abs().max()))
        except CheckpointError as error:
            messages.append(str(error))
        engine.destroy()
    return tuple(messages)


@pytest.mark.slow
def test_another_model_is_refused_unless_asked_for(tmp_path: Path) -> None:
    run_ranks(2, _save, _job("SONew", 2), 1, str(tmp_path))
    (message, moved), *_ = results = run_ranks(3, _other_model, _job("SONew", 1), str(tmp_path))
    assert results[0] == results[1] == results[2]
    assert "it lacks ['extra.bias', 'extra.weight']; pass load_module_strict=False" in message
    assert moved == 0.0, "what the checkpoint lacks stays as it was built"


# --- half precision -----------------------------------------------------------------------------------------------


def _masters(rank: int, world: int, job: ds.Job, folder: str, save: bool) -> dict[str, np.ndarray]:
    engine = ds.engine_of(job, world)
    if save:
        ds.train_step(engine, rank, world, 0)
        engine.save_checkpoint(folder, tag="tag")
    else:
        engine.load_checkpoint(folder, tag="tag")
    masters = ds.master_weights(engine)
    engine.destroy()
    return masters


@pytest.mark.slow
@pytest.mark.parametrize(("reader", "dtype"), [("LDAdam", torch.bfloat16), ("SONew", torch.float32)], ids=str)
def test_full_precision_weights_travel(
    tmp_path: Path, reader: str, dtype: torch.dtype, capfd: pytest.CaptureFixture[str]
) -> None:
    """From bf16 to another layout, or to another optimizer of ours in another type: not a bit is lost."""
    writer = replace(_job("LDAdam", 1), dtype=torch.bfloat16)
    saved = run_ranks(2, _masters, writer, str(tmp_path), True)[0]
    assert any((value != torch.from_numpy(value).bfloat16().float().numpy()).any() for value in saved.values())
    capfd.readouterr()
    loaded = run_ranks(1, _masters, replace(_job(reader, 3), dtype=dtype), str(tmp_path), False)[0]
    assert capfd.readouterr().out.count("the state of SONew starts fresh") == (reader == "SONew")
    for name, value in saved.items():
        np.testing.assert_array_equal(loaded[name], value, err_msg=name)


# --- another cut on the same ranks and stage ------------------------------------------------------------------------


def _continue(rank: int, world: int, job: ds.Job, folder: str, steps: int) -> tuple[str, dict[str, Any]]:
    return _load(rank, world, job, folder, steps)


@pytest.mark.slow
def test_another_cut_of_the_same_stage(tmp_path: Path) -> None:
    """round_robin_gradients reorders the flat buffer, which DeepSpeed would load as if it had not."""
    saved = run_ranks(2, _save, _job("MARS-M", 2, zero={"round_robin_gradients": True}), 2, str(tmp_path))[0]
    _, found = run_ranks(2, _continue, _job("MARS-M", 2), str(tmp_path), 1)[0]
    for name, value in saved.items():
        np.testing.assert_array_equal(found["weights"][name], value, err_msg=name)
    assert found["counts"] == {3}


# --- the folder in between ------------------------------------------------------------------------------------------


def _scratch(rank: int, world: int, folder: str, writable: bool, hosts: int) -> list[str]:
    import torch.distributed as dist

    real_mkdtemp, real_uname = tempfile.mkdtemp, os.uname
    if not writable:

        def refuse(prefix: str, dir: Path | None = None) -> str:
            if dir is not None:
                raise PermissionError(13, "Permission denied")
            return real_mkdtemp(prefix=prefix)

        moving.tempfile.mkdtemp = refuse
    if hosts > 1:
        node = type("Node", (), {"nodename": f"host{rank}"})
        moving.os.uname = lambda: node
    seen = []
    try:
        with moving._scratch_folder(Path(folder), dist.group.WORLD) as scratch:
            seen.append(str(scratch))
            assert scratch.is_dir()
            dist.barrier()
            raise ValueError("something failed")
    except (CheckpointError, ValueError) as error:
        seen.append(str(error))
    dist.barrier()
    seen += [str(path) for path in [*Path(folder).glob(".resh*"), *map(Path, seen[:-1])] if path.exists()]
    moving.tempfile.mkdtemp, moving.os.uname = real_mkdtemp, real_uname
    return seen


def test_the_folder_in_between_is_removed_whatever_happens(tmp_path: Path) -> None:
    results = run_ranks(2, _scratch, str(tmp_path), True, 1)
    assert results[0] == results[1]
    folder, message = results[0]
    assert folder.startswith(str(tmp_path)) and message == "something failed"


def test_a_checkpoint_that_cannot_be_written_is_moved_through_a_temporary_folder(tmp_path: Path) -> None:
    results = run_ranks(2, _scratch, str(tmp_path), False, 1)
    assert results[0] == results[1]
    folder, message = results[0]
    assert not folder.startswith(str(tmp_path)) and message == "something failed"
    (message,) = run_ranks(2, _scratch, str(tmp_path), False, 2)[1]
    assert "the ranks run on 2 machines; make it writable or load a copy" in message
