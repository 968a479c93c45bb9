"""Pipeline stages follow one process, resume to the bit, and refuse alike on every stage."""

from __future__ import annotations

import contextlib
import io
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import deepspeed
import ds_harness as ds
import ds_pipeline as pipe
import numpy as np
import pytest
import torch
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.pipe.dualpipev import DualPipeVModule
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from ds_harness import run_ranks
from ds_pipeline import PipelineJob
from torch import nn

from deepspeed_plugin.checkpoints import CheckpointError
from rankwise.options.validation import OptionError
from rankwise.step.optimizer import ShardedOptimizer

# In one cell, AdamW's error is that of the other order of summation; ours may be ten times that.
ALLOWED = 10.0
SOME = ("MARS-AdamW", "MARS-M", "SONew", "LDAdam", "MKOR-H", ds.REFERENCE)
FP32_ACCUMULATION = {"data_types": {"grad_accum_dtype": "fp32"}}
RECOMPUTED = {"activation_checkpoint_interval": 1, "use_reentrant": False}
# ranks, job, types
CELLS: dict[str, tuple[int, PipelineJob, tuple[str, ...]]] = {
    "tied": (2, PipelineJob("", tied=True), SOME),
    "replicas": (4, PipelineJob(""), SOME),
    "BF16_Optimizer": (4, PipelineJob("", tied=True, dtype=torch.bfloat16, config=FP32_ACCUMULATION), SOME[3:5]),
    "stage0": (4, PipelineJob("", stage=0, tied=True), SOME[3:]),
    "tied_linear": (2, PipelineJob("", tied_linear=True), SOME[1:]),
    "tied_all": (4, PipelineJob("", tied=True), tuple(pipe.TYPES)),
    "stage0_all": (4, PipelineJob("", stage=0), tuple(pipe.TYPES)),
    "bf16_all": (4, PipelineJob("", dtype=torch.bfloat16), tuple(pipe.TYPES)),
    "fp32_accumulation_all": (4, PipelineJob("", dtype=torch.bfloat16, config=FP32_ACCUMULATION), tuple(pipe.TYPES)),
    "host_memory_all": (
        2,
        PipelineJob("", config={"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}}),
        tuple(pipe.TYPES)[:-1],
    ),
    "recomputed_all": (2, PipelineJob("", config={"pipeline": RECOMPUTED}), tuple(pipe.TYPES)),
}


def _digest(engine: Any) -> str | None:
    optimizer = engine.basic_optimizer
    return ds.digest(optimizer) if isinstance(optimizer, ShardedOptimizer) else None


@dataclass
class Outcome:
    """One rank's view of a run."""

    weights: dict[str, np.ndarray]  # in fp32, of this stage
    record: ds.Record | None
    resumed_alike: bool
    switched: bool


def _train_and_resume(rank: int, world: int, job: PipelineJob, names: tuple[str, ...], folder: str) -> list[Outcome]:
    found = []
    for name in names:
        engine = pipe.engine_of(replace(job, name=name), world)
        optimizer = engine.basic_optimizer
        recorder = ds.Recorder(optimizer) if isinstance(optimizer, ShardedOptimizer) else None
        pipe.train(engine, range(2), recorder)
        engine.save_checkpoint(f"{folder}/{name}")
        pipe.train(engine, range(2, pipe.STEPS), recorder)
        resumed = pipe.engine_of(replace(job, name=name), world)
        resumed.load_checkpoint(f"{folder}/{name}")
        pipe.train(resumed, range(2, pipe.STEPS))
        mine, theirs = ds.weights_of(engine.module), ds.weights_of(resumed.module)
        same = all(np.array_equal(mine[key], theirs[key]) for key in mine) and _digest(engine) == _digest(resumed)
        switched = bool(getattr(optimizer, "switched", False))
        record = None if recorder is None else recorder.record
        found.append(Outcome(ds.master_weights(engine), record, same, switched))
        engine.destroy()
        resumed.destroy()
    return found


@pytest.mark.parametrize(
    "cell",
    [
        pytest.param(name, marks=pytest.mark.slow if len(CELLS[name][2]) <= len(SOME) else pytest.mark.exhaustive)
        for name in CELLS
    ],
)
def test_stages_follow_one_process_and_resume(cell: str, tmp_path: Path) -> None:
    world, job, names = CELLS[cell]
    results = run_ranks(world, _train_and_resume, job, names, str(tmp_path))
    errors = {}
    for name, *ranks in zip(names, *results, strict=True):
        named = replace(job, name=name)
        assert all(rank.resumed_alike for rank in ranks), f"{name}: the resumed run ended elsewhere"
        # With a layer more, the loss does not fall within these steps.
        assert {rank.switched for rank in ranks} == {name == "MKOR-H" and not job.tied_linear}, name
        for key in {key for rank in ranks for key in rank.weights if key.startswith("tied_modules")}:
            copies = [rank.weights[key] for rank in ranks]
            assert all(np.array_equal(copy, copies[0]) for copy in copies), f"{name}: the tied copies drifted apart"
        if name != ds.REFERENCE:
            records = [rank.record for rank in ranks]
            initial, final = (ds.whole(getattr(record, part) for record in records) for part in ("initial", "final"))
            assert ds.error(final, pipe.replay(named, records), initial) <= ds.replay_tolerance(name), name
            for rank in ranks:
                assert all(np.array_equal(value, final[key]) for key, value in rank.weights.items()), name
        if job.dtype is torch.float32:
            initial, expected = pipe.run_whole(named)
            assert {key for rank in ranks for key in rank.weights} == expected.keys(), name
            errors[name] = max(ds.error({**expected, **rank.weights}, expected, initial) for rank in ranks)
    floor = max(errors.pop(ds.REFERENCE, 0.0), 1e-6)
    assert all(error <= ALLOWED * floor for error in errors.values()), (errors, floor)


def _bare(rank: int, world: int, name: str) -> dict[str, np.ndarray]:
    engine = pipe.engine_of(PipelineJob(name, bare_first_stage=True), world)
    pipe.train(engine, range(pipe.STEPS))
    return ds.weights_of(engine.module)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["LDAdam", "MKOR-H"])
def test_a_stage_without_matrices_trains_along(name: str) -> None:
    initial, expected = pipe.run_whole(PipelineJob(name, bare_first_stage=True))
    found = {key: value for weights in run_ranks(2, _bare, name) for key, value in weights.items()}
    assert ds.error(found, expected, initial) <= 1e-5


def _refusal(start: Any) -> str:
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            start()
    except (OptionError, CheckpointError) as refusal:
        return str(refusal)
    return "accepted"


def _start(model: nn.Module, name: str = "LDAdam", **config: Any) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "steps_per_print": 10**9,
        "optimizer": {"type": name, "params": {"rank": 2} if name == "LDAdam" else {}},
        **config,
    }
    return deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]


def _refusals(rank: int, world: int, folder: str) -> list[str]:

    def vectors() -> Any:
        return _start(PipelineModule([nn.Embedding(5, 4), nn.LayerNorm(4)], num_stages=2, loss_fn=pipe.loss_of))

    def stage_zero() -> Any:
        model = PipelineModule(PipelineJob("").layers(), num_stages=2, loss_fn=pipe.loss_of)
        return _start(model, bf16={"enabled": True})

    def cut_weights() -> Any:
        topology = PipeModelDataParallelTopology(num_pp=1, num_mp=2, num_dp=1)
        return _start(PipelineModule([nn.Linear(4, 4)], topology=topology, loss_fn=pipe.loss_of))

    def folded() -> Any:
        return _start(DualPipeVModule([nn.Linear(4, 4) for _ in range(4)], num_stages=2, loss_fn=pipe.loss_of))

    # First: DeepSpeed never forgets the process groups of a pipeline.
    plain = ds.engine_of(ds.Job("LDAdam", ds.TYPES["LDAdam"], config={"zero_optimization": {"stage": 1}}), world)
    plain.save_checkpoint(f"{folder}/plain")
    found = [_refusal(start) for start in (vectors, stage_zero, cut_weights, folded)]
    staged = pipe.engine_of(PipelineJob("LDAdam"), world)
    staged.save_checkpoint(f"{folder}/staged")
    found.append(_refusal(lambda: plain.load_checkpoint(f"{folder}/staged")))
    found.append(_refusal(lambda: staged.load_checkpoint(f"{folder}/plain")))
    unsharded = pipe.engine_of(PipelineJob("LDAdam", stage=0), world)
    found.append(_refusal(lambda: unsharded.load_checkpoint(f"{folder}/staged")))
    return found


@pytest.mark.slow
def test_every_stage_refuses_alike(tmp_path: Path) -> None:
    words = [
        "LDAdam would update none of the",
        "DeepSpeed cannot load the checkpoints",
        "tensor parallelism=2",
        "DualPipeVModule",
        "was written by 2 pipeline stages",
        "was written by 1 pipeline stages",
        "continue a pipeline on the same stages, ranks and ZeRO stage",
    ]
    for messages in run_ranks(2, _refusals, str(tmp_path), timeout=60.0):
        assert len(messages) == len(words)
        for message, word in zip(messages, words, strict=True):
            assert word in message, (word, message)
