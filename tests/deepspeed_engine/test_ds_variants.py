"""Settings of ZeRO and of training that change where things are, and must not change what is computed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import deepspeed
import ds_harness as ds
import numpy as np
import pytest
import torch
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from deepspeed.runtime.sequence_parallel.parallel_state_sp import initialize_sequence_parallel
from ds_harness import run_ranks
from torch import nn

STEPS = 4
WARMUP = {
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": 0.0, "warmup_max_lr": 5e-3, "warmup_num_steps": 4},
    }
}

ZERO: dict[str, tuple[dict[str, Any], bool]] = {
    # Settings (those of one line are independent of each other), and whether CI runs them.
    "reordered": (
        {"stage": 2, "round_robin_gradients": True, "overlap_comm": True, "reduce_bucket_size": 100},
        True,
    ),
    "plain_reduction": ({"stage": 2, "contiguous_gradients": False, "reduce_scatter": False}, True),
    "small_sub_groups": ({"stage": 3, "sub_group_size": 150, "overlap_comm": True}, True),
    "host_memory": ({"stage": 2, "offload_optimizer": {"device": "cpu"}}, True),
    "round_robin_stage1": ({"stage": 1, "round_robin_gradients": True}, False),
    "small_buckets": ({"stage": 2, "reduce_bucket_size": 100, "allgather_bucket_size": 100}, False),
    "plain_reduction_stage3": ({"stage": 3, "contiguous_gradients": False, "reduce_scatter": False}, False),
    "released_weights": ({"stage": 3, "stage3_param_persistence_threshold": 0}, False),
    "secondary_copies": ({"stage": 3, "zero_hpz_partition_size": 2}, False),
    "host_memory_stage3": ({"stage": 3, "offload_optimizer": {"device": "cpu"}}, False),
}


def marked(cases: dict[Any, bool]) -> list[Any]:
    """Parameters of a test: those that are true run in CI."""
    return [pytest.param(case, marks=pytest.mark.slow if ci else pytest.mark.exhaustive) for case, ci in cases.items()]


def check_replay(job: ds.Job, ranks: list[ds.Record]) -> None:
    """The run follows its own reduced gradients, and the model has the weights it ended with."""
    assert ds.replay_error(job, ranks) <= ds.replay_tolerance(job.name), job.name
    final = ds.whole(record.final for record in ranks)
    for name, values in final.items():
        assert all(np.array_equal(record.model[name], values) for record in ranks), (job.name, name)


@pytest.mark.parametrize("variant", marked({name: ci for name, (_, ci) in ZERO.items()}))
def test_zero_settings(variant: str) -> None:
    small = variant == "small_sub_groups"
    cell = ds.ours(ds.KINDS, steps=STEPS)
    for job, *ranks in zip(cell, *run_ranks(2, ds.run_all, cell, ZERO[variant][0]), strict=True):
        check_replay(job, ranks)
        calls = {count for record in ranks for count in record.calls}
        assert min(calls) > 3 if small else calls == {1}
        assert ranks[0].matrices == expected_matrices(job)


RATES: dict[str, Any] = {"weight_decay": 0.1, "lr_scale": {"*embed*": 0.1, "*.bias": 2.0}}


@pytest.mark.parametrize("stage", marked({0: False, 2: True, 3: True}))
def test_rates_and_decay(stage: int) -> None:
    """Multipliers by name, kept by the engine's schedule; cautious and independent decay; AdamW's length of updates."""
    more = {
        "MARS-Shampoo": {"scale": "rms", "weight_decay_method": "cautious"},
        "MARS-AdamW": {"weight_decay_method": "independent"},
        "LDAdam": {"weight_decay_method": "cautious"},
    }
    cell = [
        ds.Job(name, {**ds.TYPES[name], **RATES, **options}, config=WARMUP, steps=STEPS)
        for name, options in more.items()
    ]
    for job, *ranks in zip(cell, *run_ranks(2, ds.run_all, cell, {"stage": stage}), strict=True):
        check_replay(job, ranks)
        # The oracle reads the option as well: without it the run must be another one.
        unscaled = replace(job, params={key: value for key, value in job.params.items() if key != "lr_scale"})
        assert ds.replay_error(unscaled, ranks) > 1e-3


@pytest.mark.parametrize("stage", marked({0: True, 1: False, 2: True, 3: True}))
def test_sketches(stage: int) -> None:
    """MKOR whose factors follow the gradient: it hooks nothing, sends no vectors, and follows its own gradients."""
    cell = [
        ds.Job("MKOR", {"rule": "sketch", "factor_dtype": "float32", "lr": 5e-3, **more}, steps=STEPS)
        for more in ({}, {"update_interval": 2, "backend": "lamb"})
    ]
    for job, *ranks in zip(cell, *run_ranks(2, ds.run_all, cell, {"stage": stage}), strict=True):
        check_replay(job, ranks)
        assert not any(record.statistics[step] for record in ranks for step in range(STEPS))
        other = replace(job, params={**job.params, "sketch_gain": 0.3})
        assert ds.replay_error(other, ranks) > 1e-3


@pytest.mark.parametrize("stage", marked({0: False, 1: True, 3: False}))
def test_autocast(stage: int) -> None:
    config = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
    cell = ds.ours(ds.KINDS, steps=STEPS, config=config)
    for job, *ranks in zip(cell, *run_ranks(2, ds.run_all, cell, {"stage": stage}), strict=True):
        check_replay(job, ranks)


def _sequence_parallel(rank: int, world: int, stage: int) -> tuple[list[Any], list[Any]]:
    """What :func:`_observed` finds in a step on a sequence shared by two ranks."""
    initialize_sequence_parallel(world)
    sizes = {"sequence_parallel_size": world, "train_micro_batch_size_per_gpu": ds.GLOBAL_BATCH}
    share = slice(rank * ds.LENGTH // world, (rank + 1) * ds.LENGTH // world)
    return _observed(world, stage, (slice(None), share), sizes, mpu=parallel_state_sp)


def _summed(rank: int, world: int, stage: int) -> tuple[list[Any], list[Any]]:
    """What :func:`_observed` finds where gradients are summed over the ranks, not averaged."""
    size = ds.GLOBAL_BATCH // world
    share = slice(rank * size, (rank + 1) * size)
    return _observed(world, stage, (share, slice(None)), {"gradient_allreduce_op": "sum"})


def _observed(
    world: int, stage: int, share: tuple[slice, slice], config: dict[str, Any], **keywords: Any
) -> tuple[list[Any], list[Any]]:
    """MKOR's mean output gradients, and the pieces of the gradients, of one step."""
    config = {**config, "gradient_clipping": 0.0, "zero_optimization": {"stage": stage}}
    engine = ds.engine_of(ds.Job("MKOR", ds.TYPES["MKOR"], config=config), world, **keywords)
    recorder = ds.Recorder(engine.basic_optimizer)
    recorder.begin_step()
    x, y = ds.batches(ds.STEPS)
    for micro in range(ds.ACCUMULATION):
        engine.backward(engine(x[0, micro][share], y[0, micro][share]))
        engine.step()
    found = recorder.record
    return [(key, values[1]) for key, values in found.statistics[0].items()], found.grads[0]


def _check_bias_gradients(results: list[tuple[list[Any], list[Any]]]) -> None:
    """The gradient of a bias is what the statistics of its layer must be."""
    grads = ds.whole(pieces for _, pieces in results)
    for statistics, _ in results:
        means = dict(statistics)
        for layer in ("up", "mix", "back"):
            expected = grads[f"{layer}.bias"]
            assert np.abs(means[f"{layer}.weight"] - expected).max() <= 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize("stage", marked({2: True, 3: False}))
def test_sequence_parallel_statistics_are_bias_gradients(stage: int) -> None:
    _check_bias_gradients(run_ranks(2, _sequence_parallel, stage))


@pytest.mark.parametrize("stage", marked({0: False, 1: False, 2: True}))
def test_statistics_of_summed_gradients_are_bias_gradients(stage: int) -> None:
    _check_bias_gradients(run_ranks(2, _summed, stage))


def expected_matrices(job: ds.Job) -> int:
    """Matrices that one process of plain PyTorch updates by the rule."""
    model = ds.model_of(job)
    ds.annotate(model)
    optimizer = ds.build(job.name, ds.groups_of(model, job), **job.params)
    if optimizer.needs_capture:
        optimizer.capture(model)
        del optimizer.table.routes["unused.weight"]  # no input ever reaches it, which MKOR notices
    return sum(chosen.rule == "matrix" for chosen in optimizer.table.routes.values())


@pytest.mark.parametrize("split", marked({False: True, True: False}))
def test_zero_init_routes_by_logical_shape(split: bool) -> None:
    # Under zero.Init every parameter is an empty placeholder when the optimizer is built.
    cell = ds.ours(ds.KINDS, steps=STEPS, zero_init=True, split=split)
    for job, *ranks in zip(cell, *run_ranks(2, ds.run_all, cell, {"stage": 3}), strict=True):
        assert ranks[0].matrices == expected_matrices(job), job.name
        check_replay(job, ranks)


@pytest.mark.parametrize("stage", marked({0: True, 1: True, 3: False}))
def test_two_param_groups(stage: int) -> None:
    cell = ds.ours(ds.KINDS, steps=STEPS, split=True)
    for job, *ranks in zip(cell, *run_ranks(2, ds.run_all, cell, {"stage": stage}), strict=True):
        check_replay(job, ranks)
        lrs = ranks[0].lrs[0]
        assert lrs["up.weight"] == job.params["lr"] and lrs["norm.bias"] == 2e-3
        assert ranks[0].matrices == expected_matrices(job)


def _with_empty_group(rank: int, world: int, stage: int) -> list[bool]:
    """Whether a param group without parameters, in front of two others, changes nothing."""
    same = []
    for name in ("MARS-M", "LDAdam", "MKOR"):
        job = ds.Job(name, ds.TYPES[name], config={"zero_optimization": {"stage": stage}}, split=True)
        found = []
        for empty in ([], [{"params": [], "lr": 1.0}]):
            model = ds.model_of(job)
            groups = [*empty, *ds.groups_of(model, job)]
            engine, *_ = deepspeed.initialize(model=model, model_parameters=groups, config=job.ds_config(world))
            for step in range(2):
                ds.train_step(engine, rank, world, step)
            found.append(ds.model_weights(engine))
            engine.destroy()
        same.append(all(np.array_equal(found[0][key], found[1][key]) for key in found[0]))
    return same


@pytest.mark.parametrize("stage", marked({0: True, 1: False, 3: False}))
def test_an_empty_param_group_counts_for_nothing(stage: int) -> None:
    assert run_ranks(2, _with_empty_group, stage) == [[True] * 3] * 2


@pytest.mark.parametrize("stage", marked({0: False, 2: True, 3: False}))
def test_mkor_with_recomputed_activations(stage: int) -> None:
    # Recomputation runs every forward hook twice; the statistics must be those of one pass.
    plain = [job for job in ds.ours() if "MKOR" in job.name]
    cell = [replace(job, steps=STEPS, checkpointing=flag) for job in plain for flag in (False, True)]
    results = run_ranks(2, ds.run_all, cell, {"stage": stage})
    for index in range(0, len(cell), 2):
        for rank in results:
            once, twice = rank[index], rank[index + 1]
            for found, expected in zip(twice.statistics, once.statistics, strict=True):
                assert found.keys() == expected.keys()
                for key in expected:
                    assert all(np.array_equal(a, b) for a, b in zip(found[key], expected[key], strict=True)), key
            assert all(np.array_equal(twice.model[name], once.model[name]) for name in once.model)
        assert once.statistics[0] and not once.statistics[1]


@pytest.mark.parametrize("stage", marked({0: True, 1: False, 2: True, 3: False}))
def test_warmup_from_zero(stage: int) -> None:
    # DeepSpeed's warm-up starts at lr 0: the first step must move the states and not the weights.
    cell = ds.ours(ds.KINDS, steps=STEPS, config=WARMUP)
    for job, *ranks in zip(cell, *run_ranks(2, ds.run_all, cell, {"stage": stage}), strict=True):
        rates = [step["up.weight"] for step in ranks[0].lrs]
        assert rates[0] == 0.0 and 0.0 < rates[-2] < rates[-1]
        check_replay(job, ranks)


def _lonely_matrix(rank: int, world: int) -> list[float]:
    """Train a model one of whose param groups is a matrix too small for every rank to hold a part of it."""
    losses = []
    for name, params in ds.TYPES.items():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 2), nn.Linear(2, 1, bias=False))
        tiny = model[3].weight
        rest = [parameter for parameter in model.parameters() if parameter is not tiny]
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "steps_per_print": 10**9,
            "zero_optimization": {"stage": 1},
            "optimizer": {"type": name, "params": {**params, **({"rank": 1} if name == "LDAdam" else {})}},
        }
        groups = [{"params": rest}, {"params": [tiny]}]
        engine, *_ = deepspeed.initialize(model=model, model_parameters=groups, config=config)
        inputs = torch.randn(6, 6, generator=torch.Generator().manual_seed(1))[2 * rank : 2 * rank + 2]
        for _ in range(8):
            loss = (engine(inputs) - inputs.sum(1, keepdim=True)).square().mean()
            engine.backward(loss)
            engine.step()
        losses.append(float(loss.detach()))
        engine.destroy()
    return losses


@pytest.mark.slow
def test_ranks_that_hold_nothing_of_a_group() -> None:
    # Such a rank has no step count of its own, yet must enter every collective of the others.
    for losses in run_ranks(3, _lonely_matrix, timeout=60.0):
        assert np.isfinite(losses).all()
