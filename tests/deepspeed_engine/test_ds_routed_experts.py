"""MKOR of experts in a ModuleList under ZeRO: all their tokens, and no others, as explicit inverses have it."""

from __future__ import annotations

import deepspeed
import ds_harness as ds
import numpy as np
import pytest
import torch
from ds_harness import run_ranks
from routed_experts import INTERVAL, LR, MOMENTUM, STEPS, TOKENS, by_hand, data, make

import deepspeed_plugin  # noqa: F401

PARAMS = {"lr": LR, "weight_decay": 0.0, "momentum": MOMENTUM, "backend": "sgd", "update_interval": INTERVAL}


def _engine(rank: int, world: int, stage: int) -> dict[str, np.ndarray]:
    # What no token is routed to is called all the same, as DeepSpeed needs it of every rank.
    model = make(calls_idle=True)
    config = {
        "train_micro_batch_size_per_gpu": TOKENS // world,
        "optimizer": {"type": "MKOR", "params": {**PARAMS, "factor_dtype": "float64"}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, "reduce_scatter": False},
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
    }
    mine = slice(rank * TOKENS // world, (rank + 1) * TOKENS // world)
    with ds.in_float64():
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.named_parameters(), config=config)
        for step in range(STEPS):
            x, chosen, y = data(step)
            engine.backward((engine(x[mine], chosen[mine]) - y[mine]).square().mean() * 4)
            engine.step()
        weights = ds.model_weights(engine)
        engine.destroy()
    return weights


def _engines(rank: int, world: int, stages: tuple[int, ...]) -> list[dict[str, np.ndarray]]:
    return [_engine(rank, world, stage) for stage in stages]


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.exhaustive)])
def test_experts_follow_all_their_tokens(world: int) -> None:
    expected, moves = by_hand(calls_idle=True)
    start = {name: value.detach() for name, value in make(True).named_parameters()}
    assert moves["experts.3.up"] > 0 == moves["experts.4.up"] and moves["mix"] > moves["experts.3.up"]
    for found in run_ranks(world, _engines, (1, 2, 3)):
        for weights in found:
            assert weights.keys() == expected.keys()
            for name, weight in expected.items():
                moved = float((weight - start[name]).norm())
                error = float((torch.from_numpy(weights[name]) - weight).norm())
                assert error <= 1e-12 * moved, name
                assert (moved > 0.01) == ("experts.4" not in name)
