"""MKOR-H's switch follows the losses that are trained on; an engine that is gone leaves nothing on the model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import deepspeed
import ds_harness as ds
import pytest
import torch
import torch.distributed as dist
from ds_harness import run_ranks
from torch import Tensor, nn

STEPS = 3


class Logits(ds.Net):
    """Leaves the loss to others, as a model does whose labels somebody has taken out."""

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        h = self.block(self.embedding(x))
        logits = self.head(h)
        return logits if y is None else nn.functional.cross_entropy(logits.flatten(0, 1).float(), y.flatten())


def _smoothed(logits: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), y.flatten(), label_smoothing=0.1)


def _inside(engine: Any, x: Tensor, y: Tensor) -> Tensor:
    loss = engine(x, y)
    engine.backward(loss)
    return loss


def _outside(engine: Any, x: Tensor, y: Tensor) -> Tensor:
    loss = _smoothed(engine(x), y)
    engine.backward(loss)
    return loss


def _more_than_the_model_says(engine: Any, x: Tensor, y: Tensor) -> Tensor:
    loss = 1.5 * engine(x, y) + 0.25
    engine.backward(loss)
    return loss


def _divided_by_the_caller(engine: Any, x: Tensor, y: Tensor) -> Tensor:
    """As Hugging Face's Trainer does."""
    loss = _smoothed(engine(x), y)
    engine.backward(loss / ds.ACCUMULATION, scale_wrt_gas=False)
    return loss


def _by_torch(engine: Any, x: Tensor, y: Tensor) -> Tensor:
    loss = engine(x, y)
    loss.backward()
    return loss


def _beside_evaluation(engine: Any, x: Tensor, y: Tensor) -> Tensor:
    """Forwards that are not trained on, some of them with a graph."""
    engine(x.flip(0), y)
    engine.module(x, y.flip(0))
    with torch.no_grad():
        engine(x.flip(1), y)
    return _inside(engine, x, y)


LOOPS: list[Callable[[Any, Tensor, Tensor], Tensor]] = [
    _inside,
    _outside,
    _more_than_the_model_says,
    _divided_by_the_caller,
    _by_torch,
    _beside_evaluation,
]


def _engine(job: ds.Job, model: nn.Module, world: int) -> Any:
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=job.ds_config(world))
    return engine


def _note(fed: list[float], loss: float) -> bool:
    fed.append(loss)
    return False


def _losses(rank: int, world: int) -> list[tuple[str, list[float], list[float]]]:
    """By loop: the losses that the detector was fed, and the mean over micro-batches and ranks of those trained on."""
    found = []
    x, y = ds.batches(ds.STEPS)
    size = ds.GLOBAL_BATCH // world
    share = slice(rank * size, (rank + 1) * size)
    for number, loop in enumerate(LOOPS):
        job = ds.Job("MKOR-H", ds.TYPES["MKOR-H"], config={"zero_optimization": {"stage": (2, 3, 1)[number % 3]}})
        torch.manual_seed(0)
        engine = _engine(job, Logits(), world)
        fed: list[float] = []
        engine.basic_optimizer.switch.detector.update = partial(_note, fed)
        trained = []
        for step in range(STEPS):
            losses = []
            for micro in range(ds.ACCUMULATION):
                losses.append(loop(engine, x[step, micro, share], y[step, micro, share]).detach())
                engine.step()
            mean = torch.stack(losses).mean()
            dist.all_reduce(mean)
            trained.append(float(mean) / world)
        found.append((loop.__name__, fed, trained))
        engine.destroy()
    return found


@pytest.mark.slow
def test_the_loss_is_what_the_backward_pass_runs_on() -> None:
    for rank in run_ranks(2, _losses):
        for name, fed, trained in rank:
            assert fed == pytest.approx(trained, rel=1e-6), name


def _hooks(model: nn.Module) -> int:
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return sum(len(getattr(module, kind)) for module in model.modules() for kind in kinds)


def _one_after_the_other(rank: int, world: int) -> dict[str, list[int]]:
    """Several engines on one model: hooks on it once each of them is gone."""
    found: dict[str, list[int]] = {}
    kept = []
    for stage in (0, 1):
        model, hooks = Logits(), found.setdefault(f"stage {stage}", [])
        for name in (ds.REFERENCE, "MKOR-H", ds.REFERENCE, "MARS-M", "MKOR", ds.REFERENCE):
            params = ds.REFERENCE_PARAMS if name == ds.REFERENCE else ds.TYPES[name]
            job = ds.Job(name, params, config={"zero_optimization": {"stage": stage}})
            engine = _engine(job, model, world)
            ds.train_step(engine, rank, world, 0)
            engine.destroy()
            hooks.append(_hooks(model))
            kept.append(engine)
        model = Logits()
        for name in ("LDAdam", ds.REFERENCE, "MKOR"):  # nobody has to destroy what is no longer used
            params = ds.REFERENCE_PARAMS if name == ds.REFERENCE else ds.TYPES[name]
            kept.append(_engine(ds.Job(name, params, config={"zero_optimization": {"stage": stage}}), model, world))
        ds.train_step(kept[-1], rank, world, 0)
    return found


@pytest.mark.slow
def test_a_destroyed_engine_leaves_the_model_to_others() -> None:
    for rank in run_ranks(2, _one_after_the_other):
        for stage, hooks in rank.items():
            per_engine = hooks[0]  # DeepSpeed's own
            assert hooks == [per_engine * (number + 1) for number in range(len(hooks))], stage
