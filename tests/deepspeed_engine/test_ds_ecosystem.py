"""What surrounds an optimizer under DeepSpeed works as it does with AdamW: schedulers, accessors, accelerate."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import deepspeed
import ds_harness as ds
import numpy as np
import pytest
import torch
from deepspeed.runtime.lr_schedules import WarmupDecayLR
from ds_harness import run_ranks
from torch import nn

STEPS = 6
NAMES = ("MARS-AdamW", "MARS-M", "SONew", "LDAdam", "MKOR", ds.REFERENCE)
SCHEDULERS: dict[str, dict[str, Any]] = {
    "WarmupLR": {"warmup_min_lr": 0.0, "warmup_max_lr": 5e-3, "warmup_num_steps": 4, "warmup_type": "linear"},
    "WarmupDecayLR": {"warmup_max_lr": 5e-3, "warmup_num_steps": 2, "total_num_steps": 6, "warmup_type": "linear"},
    "WarmupCosineLR": {"warmup_num_steps": 2, "total_num_steps": 6},
    "OneCycle": {
        "cycle_min_lr": 1e-3,
        "cycle_max_lr": 5e-3,
        "cycle_first_step_size": 3,
        "cycle_momentum": True,
        "cycle_min_mom": 0.5,
        "cycle_max_mom": 0.9,
    },
}


def job_of(name: str, **config: Any) -> ds.Job:
    params = ds.REFERENCE_PARAMS if name == ds.REFERENCE else ds.TYPES[name]
    return ds.Job(name, {**params, "lr": 5e-3, "betas": [0.9, 0.99]}, config=config, steps=STEPS)


def _settings(engine: Any) -> tuple[tuple[float, tuple[float, ...]], ...]:
    """Learning rate and betas of the group, as the optimizer and as the engine tell them."""
    group = engine.basic_optimizer.param_groups[0]
    told = (float(engine.get_lr()[0]), tuple(map(float, engine.get_mom()[0])))
    return (float(group["lr"]), tuple(map(float, group["betas"]))), told


Trace = tuple[list[Any], dict[str, np.ndarray]]


def _scheduled(rank: int, world: int, stage: int, kinds: tuple[str, ...]) -> dict[str, dict[str, Trace]]:
    """By scheduler and type: settings before each step, and final weights."""
    table: dict[str, dict[str, Trace]] = {}
    for kind in kinds:
        scheduler = {"type": kind, "params": SCHEDULERS[kind]}
        for name in NAMES:
            job = job_of(name, scheduler=scheduler, zero_optimization={"stage": stage})
            engine = ds.engine_of(job, world)
            trace = []
            for step in range(STEPS):
                trace.append(_settings(engine))
                ds.train_step(engine, rank, world, step)
            table.setdefault(kind, {})[name] = (trace, ds.model_weights(engine))
            engine.destroy()
    return table


def _by_hand(job: ds.Job, trace: list[Any]) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Initial and final weights of one process whose group is set by hand before each step."""
    model = ds.model_of(job)
    ds.annotate(model)
    params = {**job.params, "betas": tuple(job.params["betas"])}
    if job.is_reference:
        optimizer: Any = torch.optim.AdamW(model.parameters(), betas=params["betas"])
    else:
        optimizer = ds.build(job.name, list(model.parameters()), **params)
    if getattr(optimizer, "needs_capture", False):
        optimizer.capture(model)
    initial = ds.weights_of(model)
    x, y = ds.batches(ds.STEPS)
    for step, ((lr, betas), _) in enumerate(trace):
        model.zero_grad()
        for micro in range(ds.ACCUMULATION):
            (model(x[step, micro], y[step, micro]) / ds.ACCUMULATION).backward()
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"], group["betas"] = lr, betas
        optimizer.step()
    return initial, ds.weights_of(model)


@pytest.mark.parametrize(
    ("stage", "kinds"),
    [
        pytest.param(2, ("OneCycle",), marks=pytest.mark.slow),
        pytest.param(0, tuple(SCHEDULERS), marks=pytest.mark.exhaustive),
        pytest.param(1, tuple(SCHEDULERS), marks=pytest.mark.exhaustive),
        pytest.param(3, tuple(SCHEDULERS), marks=pytest.mark.exhaustive),
    ],
)
def test_deepspeed_schedulers_steer_rate_and_momentum(stage: int, kinds: tuple[str, ...]) -> None:
    table = run_ranks(2, _scheduled, stage, kinds)[0]
    for kind, runs in table.items():
        expected, _ = runs[ds.REFERENCE]
        rates = {settings[0][0] for settings in expected}
        assert len(rates) > 2
        assert kind != "OneCycle" or len({settings[0][1] for settings in expected}) > 2
        errors = {}
        for name, (trace, weights) in runs.items():
            assert trace == expected, (kind, name)
            initial, final = _by_hand(job_of(name), trace)
            errors[name] = ds.error(weights, final, initial)
        floor = max(errors.pop(ds.REFERENCE), 1e-6)
        assert all(error <= 10 * floor for error in errors.values()), (kind, errors, floor)


def _torch_scheduler(optimizer: Any) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)


def _own_scheduler(rank: int, world: int) -> dict[str, list[list[float]]]:
    """Learning rates under a scheduler of the user, made by a function or around the user's own optimizer."""
    found: dict[str, list[list[float]]] = {}
    for name in ("LDAdam", "MKOR"):
        cls, preset = ds.deepspeed_plugin.JSON_TYPES[name]
        for stage in (0, 2):
            job = job_of(name, zero_optimization={"stage": stage})
            from_function = ds.engine_of(job, world, lr_scheduler=_torch_scheduler)
            model, config = ds.model_of(job), job.ds_config(world)
            del config["optimizer"]
            mine = cls(list(model.parameters()), **preset, **{**job.params, "betas": (0.9, 0.99)})
            from_object, *_ = deepspeed.initialize(
                model=model, optimizer=mine, lr_scheduler=_torch_scheduler(mine), config=config
            )
            for engine in (from_function, from_object):
                rates = []
                for step in range(4):
                    ds.train_step(engine, rank, world, step)
                    rates.append(engine.basic_optimizer.param_groups[0]["lr"] / job.params["lr"])
                found.setdefault(name, []).append(rates)
                engine.destroy()
    return found


@pytest.mark.slow
def test_schedulers_of_the_user() -> None:
    for found in run_ranks(2, _own_scheduler):
        for name, runs in found.items():
            assert len(runs) == 4
            for rates in runs:
                assert rates == pytest.approx([1.0, 0.5, 0.5, 0.25]), name


def _accessors(rank: int, world: int, stage: int) -> dict[str, Any]:
    """Gradient norms of two steps, and the rate told and used after it was set to zero."""
    found: dict[str, Any] = {}
    for name in NAMES:
        profiler = {"enabled": True, "profile_step": 1, "output_file": os.devnull}
        job = job_of(name, zero_optimization={"stage": stage}, flops_profiler=profiler, gradient_clipping=0.5)
        engine = ds.engine_of(job, world)
        ds.train_step(engine, rank, world, 0)
        norm = engine.get_global_grad_norm()
        for group in engine.optimizer.param_groups:
            group["lr"] = 0.0
        before = ds.model_weights(engine)
        ds.train_step(engine, rank, world, 1)
        after = ds.model_weights(engine)
        still = all(np.array_equal(before[key], after[key]) for key in before)
        found[name] = (None if norm is None else float(norm), engine.get_lr(), still)
        engine.destroy()
    return found


@pytest.mark.parametrize(
    "stage",
    [pytest.param(2, marks=pytest.mark.slow), *(pytest.param(s, marks=pytest.mark.exhaustive) for s in (0, 1, 3))],
)
def test_engine_accessors(stage: int) -> None:
    for found in run_ranks(2, _accessors, stage):
        norm, rates, still = found[ds.REFERENCE]
        assert rates == [0.0] and still
        assert norm or stage == 0  # nobody keeps it there
        for name in NAMES:
            assert found[name] == (norm, [0.0], True), name


def _unsynchronised(rank: int, world: int, stage: int) -> dict[str, bool]:
    """Whether micro-batches added up under ``no_sync`` train as DeepSpeed's own accumulation does."""
    found = {}
    x, y = ds.batches(ds.STEPS)
    size = ds.GLOBAL_BATCH // world
    share = slice(rank * size, (rank + 1) * size)
    for name in NAMES[:-1]:
        job = job_of(name, zero_optimization={"stage": stage})
        usual = ds.engine_of(job, world)
        by_hand = ds.engine_of(replace(job, config={**job.config, "gradient_accumulation_steps": 1}), world)
        for step in range(4):
            ds.train_step(usual, rank, world, step)
            with by_hand.no_sync():
                by_hand.backward(by_hand(x[step, 0, share], y[step, 0, share]) / 2)
            by_hand.backward(by_hand(x[step, 1, share], y[step, 1, share]) / 2)
            by_hand.step()
        mine, theirs = ds.model_weights(by_hand), ds.model_weights(usual)
        change = ds.largest_change(ds.weights_of(ds.model_of(job)), theirs)
        found[name] = max(float(np.abs(mine[key] - theirs[key]).max()) for key in mine) <= 1e-4 * change
        usual.destroy()
        by_hand.destroy()
    return found


@pytest.mark.slow
def test_no_sync_accumulates() -> None:
    for found in run_ranks(2, _unsynchronised, 0):
        assert all(found.values()), found


def _accelerated(rank: int, world: int, name: str) -> tuple[str, float, tuple[float, float], list[float]]:
    """A loop as accelerate's users write it, with a DeepSpeed file full of "auto"."""
    os.environ.update(ACCELERATE_USE_DEEPSPEED="true", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    from accelerate import Accelerator, DeepSpeedPlugin
    from accelerate.utils import DummyOptim

    # accelerate knows no more than these two; on CPU it computes train_batch_size for one rank.
    values = {"lr": "auto", "weight_decay": "auto", "betas": [0.9, 0.95]}
    config = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "steps_per_print": 10**9,
        "zero_optimization": {"stage": 2},
        "optimizer": {"type": name, "params": {**values, **({"rank": 2} if name == "LDAdam" else {})}},
    }
    plugin = DeepSpeedPlugin(hf_ds_config=config, gradient_clipping=1.0, gradient_accumulation_steps=2)
    accelerator = Accelerator(deepspeed_plugin=plugin, gradient_accumulation_steps=2)
    torch.manual_seed(0)
    model = ds.Net()
    x, y = ds.batches(ds.STEPS)
    samples = list(zip(x.flatten(0, 2)[:96], y.flatten(0, 2)[:96], strict=True))
    loader = torch.utils.data.DataLoader(samples, batch_size=6)
    optimizer = DummyOptim(list(model.parameters()), lr=2e-3, weight_decay=0.05)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for _ in range(2):
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                loss = model(inputs, targets)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(float(loss))
    inner = model.basic_optimizer
    group = inner.param_groups[0]
    # On CPU accelerate takes every rank for the only one, and gives it all the samples.
    assert group["weight_decay"] == 0.05 and model.global_steps == 16
    return type(inner).__name__, group["lr"], tuple(group["betas"]), losses


@pytest.mark.slow
@pytest.mark.parametrize("name", ["LDAdam", "MKOR"])
def test_accelerate_fills_auto_values(name: str) -> None:
    for kind, lr, betas, losses in run_ranks(2, _accelerated, name, timeout=100.0):
        assert kind == name and lr == 2e-3 and betas == (0.9, 0.95)
        assert len(losses) == 32 and np.mean(losses[16:]) < np.mean(losses[:16])


@pytest.mark.parametrize("method", ["decoupled", "independent"])
@pytest.mark.parametrize("name", ["MARS-AdamW", "MARS-M", "LDAdam"])
def test_a_warmup_and_decay_keeps_multipliers(name: str, method: str) -> None:
    """DeepSpeed's schedule writes one rate over all groups; the twin's rates and decay are multiplied by hand."""
    cls, preset = ds.deepspeed_plugin.JSON_TYPES[name]
    peak, decay, scales = 5e-3, 0.2, {"0.*": 0.25, "2.*": 2.0}
    models = [_two_layers() for _ in range(2)]
    options = {**preset, "lr": peak, "weight_decay": decay, **({"rank": 2} if name == "LDAdam" else {"lr_1d": peak})}
    if name != "LDAdam":
        options["weight_decay_1d"] = decay
    ours = cls(models[0].named_parameters(), **options, weight_decay_method=method, lr_scale=scales)
    shares = {layer: 1.0 if method == "decoupled" else 1 / (peak * scale) for layer, scale in scales.items()}
    groups = [
        {
            "params": [pair for pair in models[1].named_parameters() if pair[0].startswith(layer[0])],
            **{key: decay * shares[layer] for key in options if key.startswith("weight_decay")},
        }
        for layer in scales
    ]
    twin = cls(groups, **options)
    start = {key: value.clone() for key, value in models[0].state_dict().items()}
    schedule = WarmupDecayLR(ours, total_num_steps=8, warmup_max_lr=peak, warmup_num_steps=3, warmup_type="linear")
    rates = set()
    for step in range(8):
        (rate,) = {group["lr"] for group in ours.param_groups}
        rates.add(rate)
        for group, scale in zip(twin.param_groups, scales.values(), strict=True):
            group["lr"] = rate * scale
        for model, optimizer in zip(models, (ours, twin), strict=True):
            optimizer.zero_grad()
            x = torch.randn(16, 9, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
            model(x).square().mean().backward()
            optimizer.step()
        schedule.step()
    assert len(rates) > 5
    expected = models[1].state_dict()
    for key, value in models[0].state_dict().items():
        assert (value - expected[key]).norm() <= 1e-10 * (expected[key] - start[key]).norm(), key


def _two_layers() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(9, 12), torch.nn.Tanh(), torch.nn.Linear(12, 9)).double()
