"""At ZeRO-3 ranks that hold whole rows compute a matrix together; checkpoints have its states once, and whole."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import deepspeed
import ds_harness as ds
import numpy as np
import pytest
import torch
from collectives import Wire
from ds_harness import run_ranks
from torch import Tensor, nn

from deepspeed_plugin.checkpoints.converting import convert
from rankwise.estimate import estimate
from rankwise.step.optimizer import ShardedOptimizer

STEPS, HALF = 6, 3
PARAMS: dict[str, dict[str, Any]] = {
    "LDAdam": {"lr": 5e-3, "rank": 3},
    "MKOR": {"lr": 5e-3, "update_interval": 2, "factor_dtype": "float32", "factor_decay": 0.25},
}
PARAMS["MKOR in codes"] = {**PARAMS["MKOR"], "comm_dtype": "int8"}


class Net(nn.Module):
    """Two matrices of whole rows on two and on four ranks, and one whose rows are cut inside."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(ds.VOCABULARY, 112)
        self.up, self.down = nn.Linear(112, 128, bias=False), nn.Linear(128, 112, bias=False)
        self.odd = nn.Linear(112, 37, bias=False)
        self.head = nn.Linear(37, ds.VOCABULARY, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.embedding(x)
        h = torch.tanh(self.odd(h + self.down(torch.tanh(self.up(h)))))
        return nn.functional.cross_entropy(self.head(h).flatten(0, 1), y.flatten())


class Run(NamedTuple):
    """What is to be done: as much of it as the numbers say."""

    name: str
    stage: int = 3
    first: int = 0
    last: int = STEPS
    load: str | None = None
    save: str | None = None  # after HALF steps, or as soon as it is loaded
    alone: bool = False  # each matrix has an owner, as in older versions
    universal: bool = False


class Outcome(NamedTuple):
    weights: dict[str, np.ndarray]
    digest: str
    slices: list[str]
    sent: list[int]
    planned: tuple[int, int, bool]


def _engine(run: Run, world: int) -> Any:
    config = {"zero_optimization": {"stage": run.stage}, "checkpoint": {"load_universal": run.universal}}
    job = ds.Job(run.name.partition(" ")[0], PARAMS[run.name], config)
    model = Net(0 if run.load is None else 1)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=job.ds_config(world))
    if run.alone:
        engine.basic_optimizer.planner.source.tensor_parallel = None
        engine.basic_optimizer.planner.owner_of.clear()
        engine.basic_optimizer.planner.forget()
    return engine


def _sent_in(optimizer: ShardedOptimizer, train: Any) -> int:
    step, sent = optimizer.step, []

    def counted(*args: Any, **kwargs: Any) -> Any:
        with Wire() as wire:
            result = step(*args, **kwargs)
        sent.extend(message.bytes for message in wire.messages)
        return result

    optimizer.step = counted  # type: ignore[method-assign]
    train()
    optimizer.step = step  # type: ignore[method-assign]
    return sum(sent)


def _train(rank: int, world: int, runs: list[Run]) -> list[Outcome]:
    outcomes = []
    for run in runs:
        engine = _engine(run, world)
        optimizer: ShardedOptimizer = engine.basic_optimizer
        if run.load is not None:
            path, _ = engine.load_checkpoint(run.load)
            assert path is not None
            if run.save is not None:  # before any step has handed the states out
                engine.save_checkpoint(run.save)
        sent = []
        for step in range(run.first, run.last):
            sent.append(_sent_in(optimizer, partial(ds.train_step, engine, rank, world, step)))
            if step + 1 == HALF and run.load is None and run.save is not None:
                engine.save_checkpoint(run.save)
        optimizer.plan_ahead(optimizer.planner.source.units())
        ranks = estimate(optimizer)
        mine = ranks[rank]
        alike = run.stage != 3 or run.alone or "MKOR" in run.name or estimate(optimizer, world, 3) == ranks
        slices = [key for key in optimizer.matrix_states if ":" in key]
        planned = mine.bytes_sent, mine.periodic_bytes, alike
        outcomes.append(Outcome(ds.model_weights(engine), ds.digest(optimizer), slices, sent, planned))
        engine.destroy()
    return outcomes


def _error(found: Outcome, expected: Outcome) -> float:
    return ds.error(found.weights, expected.weights, ds.weights_of(Net(0)))


def _saved_matrices(folder: str, ranks: int) -> list[str]:
    paths = [f"{folder}/global_step{HALF}/zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(ranks)]
    states = [torch.load(path, weights_only=False)["optimizer_state_dict"]["optimizer_state_dict"] for path in paths]
    return sorted(key for state in states for key in state["matrix_states"])


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_ranks_with_whole_rows_compute_together(tmp_path: Path, world: int) -> None:
    """As one process does, in the messages of the plan, and on from a checkpoint to the bit."""
    folders = {name: str(tmp_path / name) for name in PARAMS}
    alone = run_ranks(1, _train, [Run(name) for name in PARAMS])[0]
    straight = run_ranks(world, _train, [Run(name, save=folder) for name, folder in folders.items()])
    with_owners = run_ranks(world, _train, [Run(name, alone=True) for name in PARAMS])[0]
    near = {run: 3 * _error(*pair) for run, *pair in zip(PARAMS, with_owners, alone, strict=True)}
    resumed = run_ranks(world, _train, [Run(name, first=HALF, load=folder) for name, folder in folders.items()])
    for rank, again in zip(straight, resumed, strict=True):
        for name, found, continued, expected in zip(PARAMS, rank, again, alone, strict=True):
            assert [key.partition(".")[0] for key in found.slices] == ["down", "up"], name
            assert _error(found, expected) <= near[name], name
            assert found.digest == continued.digest, name
            assert all(np.array_equal(found.weights[key], continued.weights[key]) for key in found.weights), name
            sent, periodic, alike = found.planned
            assert alike, name
            # LDAdam's first step is another one.
            for step in range(1, STEPS):
                assert found.sent[step] == sent + periodic * ("MKOR" in name and step % 2 == 0), (name, step)
    for folder in folders.values():
        assert _saved_matrices(folder, world) == ["down.weight", "odd.weight", "up.weight"]


@pytest.mark.parametrize("name", ["LDAdam", "MKOR"])
def test_checkpoints_move_between_owners_and_slices(tmp_path: Path, name: str) -> None:
    """From files of older versions, to other stages and numbers of ranks and back, and through a universal one."""
    old, new, there, universal = (str(tmp_path / folder) for folder in ("old", "new", "there", "universal"))
    straight = run_ranks(2, _train, [Run(name, save=new), Run(name, alone=True, save=old)])[0]
    near = 3 * _error(*straight)
    assert near < 5e-3
    convert(f"{new}/global_step{HALF}", f"{universal}/global_step{HALF}")
    (tmp_path / "universal" / "latest_universal").write_text(f"global_step{HALF}")
    rest = {"first": HALF, "load": new}
    moves = [
        Run(name, first=HALF, load=old),
        Run(name, alone=True, **rest),
        Run(name, stage=2, **rest),
        Run(name, first=HALF, load=universal, universal=True),
        Run(name, first=HALF, load=old, save=there),
        Run(name, first=HALF, load=there),
    ]
    for found, move in zip(run_ranks(2, _train, moves)[0], moves, strict=True):
        assert _error(found, straight[0]) <= near, move
    (alone,) = run_ranks(1, _train, [Run(name, **rest)])[0]
    assert _error(alone, straight[0]) <= near
