"""Nobody reads a wrapper's gradients after the step: optimizers may use their memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from deepspeed.accelerator import get_accelerator
from ds_harness import TYPES, Job, engine_of, master_weights, run_ranks, train_step

STEPS = 4
OFFLOADED = [{"stage": stage, "offload_optimizer": {"device": "cpu"}} for stage in (2, 3)]
LAYOUTS: list[tuple[torch.dtype, dict[str, Any], dict[str, Any]]] = [
    *((torch.float32, {"stage": stage}, {}) for stage in (1, 2, 3)),
    *((torch.float32, zero, {}) for zero in OFFLOADED),
    *((torch.bfloat16, {"stage": stage}, {}) for stage in (0, 1, 2, 3)),
    (torch.bfloat16, {"stage": 1}, {"data_types": {"grad_accum_dtype": "fp32"}}),
    (torch.float16, {"stage": 0}, {"fp16": {"enabled": True, "loss_scale": 1.0}}),
    (torch.float16, {"stage": 2}, {}),
]


def _trained(rank: int, world: int, job: Job, spoilt: bool) -> dict[str, np.ndarray]:
    engine = engine_of(job, world)
    optimizer = engine.basic_optimizer
    step = optimizer.step

    def spoiling() -> None:
        step()
        if not optimizer.planner.source.spends_gradients:
            assert engine.zero_cpu_offload(), "its buffers alone keep what no backward pass has filled"
            return
        found = [tensor for group in optimizer.param_groups for tensor in group["params"] if tensor.grad is not None]
        assert found
        for tensor in found:
            tensor.grad.fill_(torch.nan)

    if spoilt:
        optimizer.step = spoiling
    for index in range(STEPS):
        train_step(engine, rank, world, index)
    found = master_weights(engine)
    engine.destroy()
    return found


def _all(rank: int, world: int) -> list[tuple[dict[str, np.ndarray], dict[str, np.ndarray]]]:
    get_accelerator().is_fp16_supported = lambda: True
    base, found = Job("SONew", TYPES["SONew"]), []
    for dtype, zero, config in LAYOUTS:
        job = replace(base, dtype=dtype, config={"zero_optimization": zero, **config})
        found.append((_trained(rank, world, job, False), _trained(rank, world, job, True)))
    return found


def test_what_becomes_of_gradients_matters_to_nothing() -> None:
    for found in run_ranks(2, _all):
        for case, (kept, spoilt) in zip(LAYOUTS, found, strict=True):
            for name in kept:
                np.testing.assert_array_equal(spoilt[name], kept[name], err_msg=f"{case}: {name}")


def test_a_model_s_own_gradients_stay() -> None:
    def main(rank: int, world: int) -> bool:
        job = Job("SONew", TYPES["SONew"], config={"zero_optimization": {"stage": 0}})
        engine = engine_of(job, world)
        train_step(engine, rank, world, 0)
        return bool(engine.basic_optimizer.planner.source.spends_gradients)

    assert run_ranks(1, main) == [False]
