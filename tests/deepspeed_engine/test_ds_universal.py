"""DeepSpeed's universal checkpoints: from its own converter and from ours, into any layout, from and to AdamW."""

from __future__ import annotations

import shutil
from argparse import Namespace
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ds_harness as ds
import numpy as np
import pytest
import torch
from deepspeed.checkpoint import ds_to_universal
from ds_harness import run_ranks

from deepspeed_plugin.checkpoints import CheckpointError, convert, loading
from deepspeed_plugin.checkpoints.universal import UniversalCheckpoint, UniversalWeights
from rankwise.layout.chunked_vectors import ChunkedVector

HALF = ds.STEPS // 2


def _convert_with_deepspeed(source: Path, target: Path) -> None:
    """What ``python -m deepspeed.checkpoint.ds_to_universal --input_folder … --output_folder …`` does."""
    ds_to_universal.main(
        Namespace(
            input_folder=str(source),
            output_folder=str(target),
            num_extract_workers=1,
            num_merge_workers=1,
            keep_temp_folder=False,
            strict=True,
            inject_missing_state=False,
        )
    )


def _convert_and_forget(source: Path, target: Path) -> None:
    """Ours; the result must do without the checkpoint it was made of."""
    convert(source, target, workers=1)
    shutil.rmtree(source)


CONVERTERS: dict[str, Callable[[Path, Path], None]] = {"stock": _convert_with_deepspeed, "ours": _convert_and_forget}


def _at(job: ds.Job, stage: int, universal_checkpoint: bool = False) -> ds.Job:
    job = ds.at_stage(job, stage)
    universal = {"checkpoint": {"load_universal": True}} if universal_checkpoint else {}
    return replace(job, config={**job.config, **universal})


def _jobs(*names: str) -> list[ds.Job]:
    return [job for job in ds.jobs() if not names or job.name in names]


def _train(rank: int, world: int, jobs: list[ds.Job], last: int, save: str | None) -> list[dict[str, np.ndarray]]:
    weights = []
    for job in jobs:
        engine = ds.engine_of(job, world)
        for step in range(last):
            ds.train_step(engine, rank, world, step)
        if save is not None:
            engine.save_checkpoint(f"{save}/{job.name}", client_state={"note": job.name})
        weights.append(ds.model_weights(engine))
        engine.destroy()
    return weights


def _resume(rank: int, world: int, jobs: list[ds.Job], folder: str, last: int) -> list[dict[str, Any]]:
    """Load a universal checkpoint into other weights than the saved ones, and train on."""
    found = []
    for job in jobs:
        engine = ds.engine_of(job, world)
        said: list[str] = []
        loading.print_on_first_rank = lambda text, said=said: said.append(text)
        path, client = engine.load_checkpoint(f"{folder}/{job.name}")
        assert path is not None and client["note"] == job.name and "rankwise" not in client
        assert engine.global_steps == HALF
        loaded = ds.model_weights(engine)
        for step in range(HALF, last):
            ds.train_step(engine, rank, world, step)
        steps = {int(state["step"]) for state in engine.basic_optimizer.state.values() if "step" in state}
        found.append({"loaded": loaded, "weights": ds.model_weights(engine), "steps": steps, "said": said})
        engine.destroy()
    return found


def _save_and_convert(
    tmp_path: Path, before: tuple[int, int], jobs: list[ds.Job], convert_one: Callable[[Path, Path], None]
) -> list[dict[str, np.ndarray]]:
    ranks, stage = before
    weights = run_ranks(ranks, _train, [_at(job, stage) for job in jobs], HALF, str(tmp_path))[0]
    for job in jobs:
        convert_one(tmp_path / job.name / f"global_step{HALF}", tmp_path / job.name / "universal")
    return weights


MOVES = [((2, 1), (1, 2)), ((1, 2), (2, 1)), ((2, 2), (3, 2)), ((2, 3), (3, 3)), ((1, 3), (2, 3)), ((3, 3), (2, 1))]
MOVES += [((2, 1), (3, 3)), ((2, 3), (1, 1)), ((2, 2), (2, 0))]


@pytest.mark.parametrize(
    ("before", "after", "converter", "names"),
    [
        ((2, 1), (3, 3), "stock", ds.KINDS),
        ((2, 3), (1, 1), "ours", ds.KINDS),
        *(
            pytest.param(*move, converter, ds.TYPES, marks=pytest.mark.exhaustive)
            for move in MOVES
            for converter in CONVERTERS
        ),
    ],
    ids=str,
)
def test_continues_everywhere(
    tmp_path: Path, before: tuple[int, int], after: tuple[int, int], converter: str, names: Iterable[str]
) -> None:
    """Saved on (ranks, stage) ``before``, converted, and continued on ``after`` as if nothing had happened.

    The measure is that of checkpoints that are not converted.
    """
    jobs = ds.jobs(names)
    _save_and_convert(tmp_path, before, jobs[:-1], CONVERTERS[converter])
    whole = run_ranks(after[0], _train, [_at(job, after[1]) for job in jobs], ds.STEPS, None)[0]
    elsewhere = run_ranks(before[0], _train, [_at(jobs[-1], before[1])], ds.STEPS, None)[0]
    resumed = run_ranks(after[0], _resume, [_at(job, after[1], True) for job in jobs[:-1]], str(tmp_path), ds.STEPS)[0]
    initial = ds.weights_of(ds.model_of(jobs[0]))
    errors = {
        job.name: ds.error(found["weights"], expected, initial)
        for job, found, expected in zip(jobs, resumed, whole, strict=False)
    }
    assert errors.keys() == set(names)
    assert not ds.too_far(errors, ds.error(elsewhere[0], whole[-1], initial)), errors


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [((2, 3), (1, 1)), ((1, 2), (2, 3))], ids=str)
def test_states_left_behind_start_fresh(tmp_path: Path, before: tuple[int, int], after: tuple[int, int]) -> None:
    """DeepSpeed's converter alone, the original gone or written anew: weights kept, and one line that says so."""
    jobs = _jobs("MKOR", "SONew")

    def forget(source: Path, target: Path) -> None:
        _convert_with_deepspeed(source, target)
        (target / "rankwise").mkdir()
        torch.save({"save": "an earlier conversion into the same folder"}, target / "rankwise" / "common.pt")
        if "MKOR" in source.parts:
            shutil.rmtree(source)
        for path in source.glob("*model_states.pt"):
            content = torch.load(path, weights_only=False)
            content["rankwise"]["save"] = "a later save under the same name"
            torch.save(content, path)

    saved = _save_and_convert(tmp_path, before, jobs, forget)
    results = run_ranks(after[0], _resume, [_at(job, after[1], True) for job in jobs], str(tmp_path), HALF + 1)[0]
    for job, weights, found in zip(jobs, saved, results, strict=True):
        for name, value in weights.items():
            np.testing.assert_array_equal(found["loaded"][name], value, err_msg=f"{job.name} {name}")
        assert found["steps"] == {1}
        assert len(found["said"]) == 1
        assert f"the state of {job.name}" in found["said"][0]
        assert "starts fresh" in found["said"][0]
        assert "no longer there" in found["said"][0]


@pytest.mark.slow
@pytest.mark.parametrize(("writer", "reader", "stage"), [("AdamW", "LDAdam", 3), ("MARS-M", "AdamW", 2)])
def test_from_and_to_adamw(tmp_path: Path, writer: str, reader: str, stage: int) -> None:
    """Weights kept, states fresh, one line; ours go to any layout, AdamW, which DeepSpeed loads, to the same stage."""
    (source,), (target,) = _jobs(writer), _jobs(reader)
    saved = _save_and_convert(tmp_path, (2, stage), [source], lambda a, b: convert(a, b, workers=1))[0]
    (tmp_path / writer).rename(tmp_path / reader)
    to = stage if reader == "AdamW" else 1
    (found,) = run_ranks(1, _resume_from_another, _at(target, to, True), str(tmp_path))
    for name, value in saved.items():
        np.testing.assert_array_equal(found["loaded"][name], value, err_msg=name)
    assert found["lr"] == target.params["lr"] != 1e-2, "hyper-parameters are not another optimizer's"
    (line,) = found["said"]
    assert "weights are kept" in line and "starts fresh" in line
    assert found["steps"] == {1}
    if reader == "AdamW":
        # The first step of a fresh AdamW moves a weight by lr at most; with moments of zero and a count of five it
        # would be three times as far.
        assert max(np.abs(found["after"][name] - saved[name]).max() for name in saved) <= 1.1 * target.params["lr"]


def _resume_from_another(rank: int, world: int, job: ds.Job, folder: str) -> dict[str, Any]:
    engine = ds.engine_of(job, world)
    said: list[str] = []
    loading.print_on_first_rank = said.append
    path, _ = engine.load_checkpoint(f"{folder}/{job.name}")
    assert path is not None and engine.global_steps == HALF
    loaded = ds.model_weights(engine)
    ds.train_step(engine, rank, world, HALF)
    lr = float(engine.basic_optimizer.param_groups[0]["lr"])
    steps = {int(state["step"]) for state in engine.basic_optimizer.state.values() if "step" in state}
    found = {"loaded": loaded, "after": ds.model_weights(engine), "lr": lr, "steps": steps, "said": said}
    engine.destroy()
    return found


def test_nothing_to_convert(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="name the folder of a tag"):
        convert(tmp_path, tmp_path / "out")
    torch.save({"optimizer": {}, "dp_world_size": 2}, tmp_path / "mp_rank_00_model_states.pt")
    with pytest.raises(CheckpointError, match="stage 0 and needs no conversion"):
        convert(tmp_path, tmp_path / "out")
    content = {"optimizer": None, "dp_world_size": 2, "ds_config": {"zero_optimization": {"stage": 1}}}
    torch.save(content, tmp_path / "mp_rank_00_model_states.pt")
    with pytest.raises(CheckpointError, match="lacks zero_pp_rank_0_mp_rank_00_optim_states.pt"):
        convert(tmp_path, tmp_path / "out")


def _attempts(rank: int, world: int, job: ds.Job, folders: list[str]) -> list[str]:
    messages = []
    for folder in folders:
        engine = ds.engine_of(job, world)
        try:
            engine.load_checkpoint(folder)
            messages.append("loaded")
        except CheckpointError as error:
            messages.append(str(error))
        engine.destroy()
    return messages


def _damage(path: Path) -> None:
    """Zeros over a tensor's first bytes, which torch reads without a word."""
    values = next(iter(tensor for tensor in torch.load(path).values() if isinstance(tensor, torch.Tensor)))
    start = values.detach().contiguous().numpy().tobytes()[:16]
    content = path.read_bytes()
    assert start in content and any(start)
    path.write_bytes(content.replace(start, bytes(len(start)), 1))


@pytest.mark.slow
def test_what_cannot_be_loaded_is_refused(tmp_path: Path) -> None:
    """On every rank alike: no universal checkpoint, an ordinary one, a parameter's file gone or another's."""
    (job,) = _jobs("SONew")
    _save_and_convert(tmp_path, (1, 1), [job], _convert_with_deepspeed)
    root = tmp_path / "SONew"
    shutil.move(root / f"global_step{HALF}", tmp_path / "ordinary" / "tag")
    (tmp_path / "ordinary" / "latest_universal").write_text("tag")
    for name in ("lacking", "mixed", "damaged"):
        shutil.copytree(root, tmp_path / name)
    (tmp_path / "lacking" / "universal" / "zero" / "down.weight" / "fp32.pt").unlink()
    weights = tmp_path / "mixed" / "universal" / "zero"
    shutil.copy(weights / "up.bias" / "fp32.pt", weights / "norm.bias" / "fp32.pt")
    _damage(tmp_path / "damaged" / "universal" / "zero" / "up.weight" / "fp32.pt")
    folders = [str(tmp_path / name) for name in ("nothing", "ordinary", "lacking", "mixed", "damaged")]
    results = run_ranks(2, _attempts, _at(job, 2, True), folders)
    assert results[0] == results[1]
    nothing, ordinary, lacking, mixed, damaged = results[0]
    assert "has no 'latest_universal'" in nothing
    assert "is not a universal checkpoint" in ordinary
    assert "no parameter 'down.weight'" in lacking and "files are missing" in lacking
    assert "not the weight that universal has in its model file" in mixed
    assert "up.weight/fp32.pt is damaged" in damaged and "must have the checksum" in damaged


@pytest.mark.slow
def test_reordered_weights(tmp_path: Path) -> None:
    """DeepSpeed's converter misplaces weights of round_robin_gradients: ours does not, loading its result refuses."""
    (job,) = _jobs("MARS-M")
    reordered = replace(job, config={"zero_optimization": {"stage": 2, "round_robin_gradients": True}})
    saved = run_ranks(2, _train, [reordered], HALF, str(tmp_path))[0][0]
    root = tmp_path / job.name
    convert(root / f"global_step{HALF}", root / "universal", workers=1)
    for name, value in saved.items():
        found = torch.load(root / "universal" / "zero" / name / "fp32.pt", weights_only=False)["param"]
        np.testing.assert_array_equal(found.numpy(), value, err_msg=name)
    _convert_with_deepspeed(root / f"global_step{HALF}", tmp_path / "stock" / "universal")
    shutil.rmtree(root / f"global_step{HALF}")
    mine, stock = run_ranks(1, _attempts, _at(job, 3, True), [str(root), str(tmp_path / "stock")])[0]
    assert mine == "loaded"
    assert "round_robin_gradients; load the original checkpoint instead" in stock


def test_weights_of_a_stack_are_found_by_matrix(tmp_path: Path) -> None:
    stack = torch.arange(24.0).view(2, 3, 4)
    for name, value in {"experts.up": stack, "norm": torch.ones(4)}.items():
        (tmp_path / "zero" / name).mkdir(parents=True)
        torch.save({"param": value}, tmp_path / "zero" / name / "fp32.pt")
    torch.save({"module": {"experts.up": stack.half()}}, tmp_path / "mp_rank_00_model_states.pt")
    found = UniversalWeights(UniversalCheckpoint(tmp_path, tmp_path / "mp_rank_00_model_states.pt"))
    assert sorted(found) == ["weight/experts.up", "weight/norm"] and len(found) == 2
    assert found["weight/experts.up[1]"][0] == (3, 4) and found["weight/experts.up"][0] == (2, 3, 4)
    assert "weight/head" not in found and "step/0" not in found
    row, rest = torch.zeros(4), torch.zeros(10)
    vectors = {
        "weight/experts.up[1]": ChunkedVector(12, [(4, row)]),
        "weight/experts.up": ChunkedVector(24, [(14, rest)]),
    }
    found.load(vectors, None)
    assert row.tolist() == [16.0, 17.0, 18.0, 19.0] and rest.tolist() == list(map(float, range(14, 24)))
