"""Under DeepSpeed the same matrices are found in fused weights as in plain PyTorch, in placeholders, too."""

from __future__ import annotations

from typing import Any

import deepspeed
from ranks import run_ranks

import deepspeed_plugin
from benchmarks.architectures import ARCHITECTURES
from rankwise.routing.roles import ParameterInfo, describe, info_of

TITLES = ("GPT-2", "Falcon 40B, 180B", "DBRX")
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "MARS-M", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}


def _found(rank: int, world: int) -> list[dict[str, ParameterInfo]]:
    deepspeed.init_distributed("gloo")
    deepspeed_plugin.register()
    found = []
    for title in TITLES:
        with deepspeed.zero.Init(config_dict_or_path=CONFIG):
            model = ARCHITECTURES[title].build()
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=CONFIG)
        found.append({name: info_of(weight, None, "") for name, weight in engine.module.named_parameters()})
        assert not any(weight.numel() for weight in engine.module.parameters())
        engine.destroy()
    return found


def test_placeholders_are_described_like_weights() -> None:
    plain = [{info.name: info for info in describe(ARCHITECTURES[title].build()).values()} for title in TITLES]
    assert all(any(info.fused is not None for info in infos.values()) for infos in plain)
    assert run_ranks(2, _found) == [plain, plain]
