"""Expert layers: experts follow one process, whatever ranks share them; runs resume to the bit; the rest is refused."""

from __future__ import annotations

import contextlib
import io
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import deepspeed
import ds_harness as ds
import numpy as np
import pytest
import torch
from deepspeed.moe.layer import MoE
from ds_harness import run_ranks
from torch import Tensor, nn

from deepspeed_plugin.checkpoints import CheckpointError
from deepspeed_plugin.checkpoints.files import newest_model_file
from deepspeed_plugin.registry import build
from rankwise.options.validation import OptionError
from rankwise.routing.roles import Role, annotate, assign_role
from rankwise.step.optimizer import ShardedOptimizer

WIDTH, EXPERTS, STEPS = 10, 4, 4
# In one cell, AdamW's error is that of the other order of summation; ours may be ten times that.
ALLOWED = 10.0
PREFIX = "moe.deepspeed_moe.experts.deepspeed_experts."
# One expert gets two different tokens in a step: a third direction of its gradient would be rounding alone.
TYPES = {**ds.TYPES, "LDAdam": {**ds.TYPES["LDAdam"], "rank": 2}, ds.REFERENCE: ds.REFERENCE_PARAMS}
# The head's edges, which no expert touches, are near the tolerance of 0.1, where rounding grows twentyfold.
TYPES["SONew"] = {**TYPES["SONew"], "gamma": 0.3}
# Experts are matrices to it; to MKOR's other rules they are not.
TYPES["MKOR, sketch"] = {"rule": "sketch", "lr": 5e-3, "factor_dtype": "float32"}
SOME = ("MARS-AdamW", "MARS-M", "SONew", "LDAdam", "MKOR-H", "MKOR, sketch", ds.REFERENCE)


class Expert(nn.Module):
    """A two-layer perceptron."""

    def __init__(self, number: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(100 + number)
            self.up = nn.Linear(WIDTH, 13)
            self.down = nn.Linear(13, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """A dense layer, then experts, each token going to the best of them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(ds.VOCABULARY, WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, ds.VOCABULARY, bias=False)
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)

    def experts(self, h: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.embedding(x)
        h = h + torch.tanh(self.mix(h))
        h = h + self.experts(h)
        return nn.functional.cross_entropy(self.head(h).flatten(0, 1).float(), y.flatten())


class Sharded(Net):
    """The experts of DeepSpeed; this rank builds its own."""

    def __init__(self, rank: int, ep_size: int) -> None:
        super().__init__()
        gate = self.gate
        del self.gate
        with contextlib.redirect_stdout(io.StringIO()):
            self.moe = MoE(WIDTH, Expert(), EXPERTS, ep_size, k=1, drop_tokens=False, use_rts=False)
        self.moe.deepspeed_moe.gate.wg.load_state_dict(gate.state_dict())
        for local, expert in enumerate(self.moe.deepspeed_moe.experts.deepspeed_experts):
            expert.load_state_dict(Expert(global_number(rank, ep_size, local)).state_dict())

    def experts(self, h: Tensor) -> Tensor:
        return self.moe(h)[0]


class Whole(Net):
    """All experts in one process, in plain PyTorch."""

    def __init__(self) -> None:
        super().__init__()
        self.all = nn.ModuleList(Expert(number) for number in range(EXPERTS))

    def experts(self, h: Tensor) -> Tensor:
        weights = torch.softmax(nn.functional.linear(h, self.gate.weight), -1)
        best = weights.argmax(-1, keepdim=True)
        results = torch.stack([expert(h) for expert in self.all], -2)
        chosen = results.gather(-2, best.unsqueeze(-1).expand(*best.shape, WIDTH)).squeeze(-2)
        return weights.gather(-1, best) * chosen


def global_number(rank: int, ep_size: int, local: int) -> int:
    """Which of all experts a rank's local one is: neighbouring ranks share them out."""
    return rank % ep_size * (EXPERTS // ep_size) + local


def global_name(name: str, rank: int, ep_size: int) -> str:
    """A parameter's name in :class:`Whole`."""
    if name.startswith(PREFIX):
        local, _, rest = name.removeprefix(PREFIX).partition(".")
        return f"all.{global_number(rank, ep_size, int(local))}.{rest}"
    return name.replace("moe.deepspeed_moe.gate.wg", "gate")


@dataclass(frozen=True)
class ExpertJob:
    """One training run."""

    name: str = ""
    stage: int = 2
    ep_size: int = 1
    config: dict[str, Any] = field(default_factory=dict)


def _type(name: str) -> str:
    return name.partition(",")[0]


def engine_of(job: ExpertJob, rank: int, world: int) -> Any:
    model = Sharded(rank, job.ep_size)
    config = {
        "train_micro_batch_size_per_gpu": ds.GLOBAL_BATCH // world,
        "gradient_accumulation_steps": ds.ACCUMULATION,
        # DeepSpeed's norm over experts is an average over the ranks that share them out: not that of one process.
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
        "zero_optimization": {"stage": job.stage},
        "optimizer": {"type": _type(job.name), "params": dict(TYPES[job.name])},
        **job.config,
    }
    return deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]


def _train_and_resume(
    rank: int, world: int, job: ExpertJob, names: tuple[str, ...], folder: str
) -> list[tuple[dict[str, np.ndarray], bool]]:
    """Final weights under their global names, and whether a resumed run ended on the same bytes."""
    found = []
    for name in names:
        engine = engine_of(replace(job, name=name), rank, world)
        for step in range(2):
            ds.train_step(engine, rank, world, step)
        engine.save_checkpoint(f"{folder}/{name}")
        resumed = engine_of(replace(job, name=name), rank, world)
        resumed.load_checkpoint(f"{folder}/{name}")
        for run in (engine, resumed):
            for step in range(2, STEPS):
                ds.train_step(run, rank, world, step)
        mine, theirs = ds.weights_of(engine.module), ds.weights_of(resumed.module)
        same = all(np.array_equal(mine[key], theirs[key]) for key in mine)
        if isinstance(engine.basic_optimizer, ShardedOptimizer):
            same = same and ds.digest(engine.basic_optimizer) == ds.digest(resumed.basic_optimizer)
        found.append(({global_name(key, rank, job.ep_size): value for key, value in mine.items()}, same))
        engine.destroy()
        resumed.destroy()
    return found


def run_whole(name: str) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Initial and final weights of one process of plain PyTorch."""
    model = Whole()
    initial = ds.weights_of(model)
    annotate(model)
    assign_role([weight for weight in model.all.parameters() if weight.ndim == 2], Role.EXPERT)
    if name == ds.REFERENCE:
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=TYPES[name]["lr"])
    else:
        optimizer = build(_type(name), list(model.parameters()), **TYPES[name])
    if getattr(optimizer, "needs_capture", False):
        optimizer.capture(model)
    x, y = ds.batches(ds.STEPS)
    for step in range(STEPS):
        model.zero_grad()
        for micro in range(ds.ACCUMULATION):
            loss = model(x[step, micro], y[step, micro])
            if getattr(optimizer, "needs_capture", False):
                optimizer.record_loss(loss)
            (loss / ds.ACCUMULATION).backward()
        optimizer.step()
    return initial, ds.weights_of(model)


CELLS: dict[str, tuple[int, ExpertJob, tuple[str, ...]]] = {
    "shared_out": (2, ExpertJob(stage=2, ep_size=2), SOME),
    "cut_and_shared_out": (4, ExpertJob(stage=1, ep_size=2), SOME),
    "replicated": (2, ExpertJob(stage=1), SOME[2:]),
    "replicated_all": (2, ExpertJob(stage=2), tuple(TYPES)),
    "cut_and_shared_out_all": (4, ExpertJob(stage=2, ep_size=2), tuple(TYPES)),
}


@pytest.mark.parametrize(
    "cell",
    [
        pytest.param(name, marks=pytest.mark.slow if len(CELLS[name][2]) <= len(SOME) else pytest.mark.exhaustive)
        for name in CELLS
    ],
)
def test_experts_follow_one_process_and_resume(cell: str, tmp_path: Path) -> None:
    world, job, names = CELLS[cell]
    results = run_ranks(world, _train_and_resume, job, names, str(tmp_path))
    errors = {}
    for name, *ranks in zip(names, *results, strict=True):
        assert all(same for _, same in ranks), f"{name}: the resumed run ended elsewhere"
        initial, expected = run_whole(name)
        found: dict[str, np.ndarray] = {}
        for weights, _ in ranks:
            assert all(np.array_equal(found.setdefault(key, value), value) for key, value in weights.items()), name
        errors[name] = ds.error(found, expected, initial)
    floor = max(errors.pop(ds.REFERENCE), 1e-6)
    assert all(error <= ALLOWED * floor for error in errors.values()), (errors, floor)


def test_expert_files_do_not_stand_for_the_checkpoint(tmp_path: Path) -> None:
    for age, name in enumerate(("layer_0_expert_1_mp_rank_00_model_states.pt", "mp_rank_00_model_states.pt")):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (1000 - age, 1000 - age))
    assert newest_model_file(tmp_path) == tmp_path / "mp_rank_00_model_states.pt"


def _refusals(rank: int, world: int, folder: str) -> list[str]:
    found = []
    half = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
    for job in (ExpertJob("LDAdam", stage=0), ExpertJob("LDAdam", stage=1, config=half)):
        try:
            engine_of(job, rank, world)
            found.append("accepted")
        except OptionError as refusal:
            found.append(str(refusal))
    engine_of(ExpertJob("LDAdam", stage=1), rank, world).save_checkpoint(folder)
    try:
        engine_of(ExpertJob("LDAdam", stage=2), rank, world).load_checkpoint(folder)
        found.append("accepted")
    except CheckpointError as refusal:
        found.append(str(refusal))
    return found


@pytest.mark.slow
def test_what_experts_cannot_do_is_refused_alike(tmp_path: Path) -> None:
    words = ("expert layers under='LDAdam'", "expert layers under='BF16_Optimizer'", "on the same stage and ranks only")
    for messages in run_ranks(2, _refusals, str(tmp_path)):
        for message, word in zip(messages, words, strict=True):
            assert word in message, message
