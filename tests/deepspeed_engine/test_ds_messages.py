"""What users do around an engine's steps: works as with AdamW, or is refused by the name that stands in the JSON."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.checkpoint.constants import DS_AUTOTP_UC_META
from deepspeed.utils import safe_set_full_fp32_param, safe_set_local_fp32_param
from ds_harness import run_ranks
from torch import nn

import deepspeed_plugin
from deepspeed_plugin import auto_tp
from deepspeed_plugin.trainer_defaults import _warn_of_cpu
from rankwise.layout.layout import LayoutError
from rankwise.options.validation import OptionError


def _engine(kind: str, stage: int, model: nn.Module, **config: Any) -> Any:
    params: dict[str, Any] = {"lr": 1e-3, **({"torch_adam": True} if kind == "AdamW" else {})}
    params |= {"rank": 2} if kind == "LDAdam" else {}
    block = {"type": kind, "params": params}
    config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": stage}, "optimizer": block, **config}
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def _set_first(rank: int, world: int) -> dict[str, float]:
    """A weight's mean after a step, where it was set to 0.5 before the first one."""
    found = {}
    for kind in ("AdamW", "LDAdam"):
        for stage in (1, 2, 3):
            model = _net()
            engine = _engine(kind, stage, model)
            if stage == 3 and world == 1:
                piece = torch.full_like(model[0].weight.ds_tensor, 0.5, dtype=torch.float32)
                safe_set_local_fp32_param(model[0].weight, piece)
            else:
                safe_set_full_fp32_param(model[0].weight, torch.full((16, 8), 0.5))
            for _ in range(2):
                torch.manual_seed(rank)
                engine.backward(engine(torch.randn(4, 8)).square().mean())
                engine.step()
            with deepspeed.zero.GatheredParameters(model[0].weight, enabled=stage == 3):
                found[f"{kind} {stage}"] = float(model[0].weight.mean())
            engine.destroy()
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_a_weight_that_deepspeed_s_own_function_sets_before_the_first_step(world: int) -> None:
    for found in run_ranks(world, _set_first):
        assert len(found) == 6 and all(abs(mean - 0.5) < 5e-3 for mean in found.values()), found


def _saved_nowhere(rank: int, world: int) -> list[tuple[str, str]]:
    found = []
    for kind in ("AdamW", "MARS-M"):
        engine = _engine(kind, 1, _net())
        for folder in (None, "", 3):
            with pytest.raises(Exception) as refused:  # noqa: PT011 - whatever DeepSpeed raises
                engine.save_checkpoint(save_dir=folder)
            found.append((type(refused.value).__name__, str(refused.value)))
        engine.destroy()
    return found


def test_a_folder_that_is_none_ends_in_deepspeed_s_own_words() -> None:
    (found,) = run_ranks(1, _saved_nowhere)
    assert found[:3] == found[3:] and found[0][0] == "ValueError"


def _refusals(rank: int, world: int) -> list[str]:
    """Of one type, from wherever a run can be refused."""
    said = []
    bad: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"lr": -1.0}, {}),
        ({"momentum": 0.5}, {}),
        ({"exact": True}, {}),
        ({"exclude": ["nothing*"]}, {}),
        ({}, {"zero_optimization": {"stage": 1, "elastic_checkpoint": True}}),
        ({"store_param_remainders": True}, {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}),
    ]
    for params, config in bad:
        block = {"optimizer": {"type": "mars-m", "params": {"lr": 1e-3, **params}}}
        with pytest.raises(OptionError) as refused:
            deepspeed.initialize(model=_net(), config={"train_micro_batch_size_per_gpu": 4, **block, **config})
        said.append(str(refused.value))
    return said


def test_all_refusals_of_a_run_have_one_name() -> None:
    (found,) = run_ranks(1, _refusals)
    for message in found:
        name = message.removeprefix("optimizer type '").removeprefix("rankwise ")
        assert name.startswith("MARS-M"), message


def test_layers_cut_by_hand_are_said_to_be_so() -> None:
    model = _net()
    setattr(model[2].weight, DS_AUTOTP_UC_META, {"conversion": {}})
    auto_tp.uncut(model, lambda parameter: parameter.shape)
    with pytest.raises(LayoutError, match="'2.weight', .* was cut before deepspeed.initialize, .* Build the model of"):
        auto_tp.recall(model)


def test_a_json_that_accelerate_will_not_read(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert deepspeed_plugin.is_registered()
    with caplog.at_level(logging.WARNING):
        _warn_of_cpu({"optimizer": {"type": "MARS-M"}})
        monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
        _warn_of_cpu({"optimizer": {"type": "AdamW"}})
        _warn_of_cpu({"optimizer": "auto"})
        assert not caplog.records
        _warn_of_cpu({"optimizer": {"type": "MARS-M"}})
    assert "optimizer.type='MARS-M' has no effect with ACCELERATE_USE_CPU=true" in caplog.text
    assert "remove the variable" in caplog.text


def test_pages_name_the_variable() -> None:
    page = Path(__file__).resolve().parents[2] / "docs/frameworks/huggingface.md"
    assert "ACCELERATE_USE_CPU" in page.read_text()
