from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rankwise.configs import OPTIMIZERS, deepspeed_config
from rankwise.launch.loop import learning_rate_factor, optimizer_state_bytes
from rankwise.launch.models import build_model
from rankwise.launch.run_configs import check_framework, planned_configs, read_config, split_names
from rankwise.launch.settings import Settings
from rankwise.launch.spawn import choose_device


def test_names_may_be_separated_in_any_usual_way() -> None:
    assert split_names(["adamw", "MKOR,mars-m  sonew", "adamw"]) == ["adamw", "mkor", "mars-m", "sonew"]
    assert split_names(["mkor", "all"])[0] == "mkor"
    assert sorted(split_names(["all"])) == sorted(OPTIMIZERS)
    assert split_names([]) == []
    with pytest.raises(ValueError, match="optimizer is 'adan'"):
        split_names(["adamw,adan"])


def test_runs_differ_only_in_the_optimizer_block() -> None:
    plans = planned_configs(None, ["adamw", "mkor"], Settings(stage=1, micro_batch=4, accumulation=3))
    assert list(plans) == ["adamw", "mkor"]
    blocks = [plan.pop("optimizer") for plan in plans.values()]
    assert plans["adamw"] == plans["mkor"] and blocks[0] != blocks[1]
    assert plans["adamw"]["zero_optimization"] == {"stage": 1}
    assert plans["adamw"]["train_micro_batch_size_per_gpu"] == 4
    assert plans["adamw"]["gradient_accumulation_steps"] == 3
    assert blocks[1] == deepspeed_config("mkor")["optimizer"]


def test_own_config_is_kept_but_for_the_overrides() -> None:
    own = {
        "train_batch_size": 12,
        "optimizer": {"type": "SONew", "params": {"lr": 1.0, "band": 4}},
        "scheduler": {"type": "WarmupLR"},
        "bf16": {"enabled": False},
    }
    (plan,) = planned_configs(own, [], Settings(lr=0.5)).values()
    assert plan["optimizer"] == {"type": "SONew", "params": {"lr": 0.5, "band": 4}}
    assert plan["train_batch_size"] == 12 and plan["bf16"] == {"enabled": False} and "scheduler" not in plan
    assert own["optimizer"]["params"]["lr"] == 1.0, "the caller's configuration must not change"
    (other,) = planned_configs(own, ["ldadam"], Settings(micro_batch=2)).values()
    assert other["optimizer"]["type"] == "LDAdam" and "train_batch_size" not in other
    both = planned_configs(own, ["adamw", "sonew"], Settings())
    assert both["sonew"]["optimizer"] == own["optimizer"], "named as well, its options are still the file's"


MEGATRON: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1}


@pytest.mark.parametrize(
    ("ranks", "tensor_parallel", "config", "message"),
    [
        (2, 3, MEGATRON, "tp is 3 and ranks is 2: it must divide"),
        (2, 2, {**MEGATRON, "zero_optimization": {"stage": 3}}, "stage is 3 .* use --stage 2"),
        (2, 1, {"train_batch_size": 4}, "no 'train_micro_batch_size_per_gpu'.* pass --micro-batch"),
        (2, 1, {**MEGATRON, "bf16": {"enabled": True}}, "config enables bf16"),
    ],
)
def test_what_megatron_cannot_run_is_refused(
    ranks: int, tensor_parallel: int, config: dict[str, Any], message: str
) -> None:
    pytest.importorskip("megatron.core")
    check_framework("megatron", 2, 2, {"mkor": {**MEGATRON, "bf16": {"enabled": False}}})
    with pytest.raises(ValueError, match=message):
        check_framework("megatron", ranks, tensor_parallel, {"mkor": config})


def test_tensor_parallelism_needs_megatron() -> None:
    pytest.importorskip("deepspeed")
    check_framework("deepspeed", 2, 1, {})
    with pytest.raises(ValueError, match="tp is 2 .* needs --framework megatron"):
        check_framework("deepspeed", 2, 2, {})


def test_a_framework_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"megatron.core is not installed: pip install 'rankwise\[megatron\]'"):
        check_framework("megatron", 2, 1, {})


def test_config_without_an_optimizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match='no "optimizer" block'):
        planned_configs({"train_batch_size": 1}, [], Settings())
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(ValueError, match="no JSON object"):
        read_config(tmp_path / "list.json")
    with pytest.raises(ValueError, match="no readable JSON"):
        read_config(tmp_path / "broken.json")
    (tmp_path / "twice.json").write_text('{"train_batch_size": 4, "train_batch_size": 8}')
    with pytest.raises(ValueError, match="'train_batch_size' stands twice"):
        read_config(tmp_path / "twice.json")


def test_configs_may_hold_comments_as_deepspeed_allows(tmp_path: Path) -> None:
    pytest.importorskip("hjson")
    (tmp_path / "ds.json").write_text(
        '{\n  "optimizer": {"type": "LDAdam", "params": {"lr": 1e-3,}},  // half\n  # "bf16": {},\n}'
    )
    assert read_config(tmp_path / "ds.json") == {"optimizer": {"type": "LDAdam", "params": {"lr": 1e-3}}}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": 0}, "steps is 0"),
        ({"hidden": 10}, "multiple of heads"),
        ({"warmup": 1.5}, "warmup is 1.5"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_settings_are_checked(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Settings(**change)


def test_settings_survive_the_file(tmp_path: Path) -> None:
    settings = Settings(label="x", output=tmp_path / "x", deepspeed=deepspeed_config("mkor"), steps=7)
    assert Settings.read(settings.write()) == settings


def test_learning_rate_rises_then_falls_to_the_final_share() -> None:
    factors = [learning_rate_factor(step, 100, 0.1, 0.1) for step in range(100)]
    assert factors[0] == pytest.approx(0.1) and factors[9] == factors[10] == 1.0
    assert all(a >= b for a, b in zip(factors[10:], factors[11:], strict=False))
    assert factors[55] == pytest.approx(0.55, abs=0.02) and factors[-1] == pytest.approx(0.1)
    assert learning_rate_factor(0, 1, 0.0, 0.1) == 1.0


def test_state_bytes_counts_every_state_tensor() -> None:
    weights = [torch.nn.Parameter(torch.ones(3, 5)), torch.nn.Parameter(torch.ones(7))]
    optimizer = torch.optim.AdamW(weights)
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert optimizer_state_bytes(optimizer) == 22 * 2 * 4 + 2 * 4  # two moments, and a step counter each


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_models_have_the_shape_asked_for(family: str) -> None:
    pytest.importorskip("transformers")
    model = build_model(family, vocab_size=257, layers=2, hidden=32, heads=4, seq_len=16)
    assert model(input_ids=torch.zeros(3, 16, dtype=torch.int64)).logits.shape == (3, 16, 320)
    with pytest.raises(ValueError, match="multiple of heads"):
        build_model(family, vocab_size=257, layers=2, hidden=33, heads=4, seq_len=16)


def test_ranks_follow_the_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert choose_device("auto", None) == (False, 4)
    assert choose_device("auto", 2) == (False, 2)
    assert choose_device("cpu", None) == (True, 2)
    with pytest.raises(ValueError, match="ranks is 5 and there are 4"):
        choose_device("auto", 5)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert choose_device("auto", 3) == (True, 3)
    for device, ranks, message in (("cuda", None, "no GPU"), ("tpu", None, "'tpu'"), ("cpu", 0, "ranks is 0")):
        with pytest.raises(ValueError, match=message):
            choose_device(device, ranks)
