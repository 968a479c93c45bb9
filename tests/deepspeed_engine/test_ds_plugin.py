"""How the plugin enters DeepSpeed: registration, spellings, client optimizers, "auto" values, Hugging Face."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import deepspeed
import ds_harness as ds
import numpy as np
import pytest
import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero import utils as zero_utils
from ds_harness import run_ranks

import deepspeed_plugin
from rankwise import MARS, MKOR, LDAdam, SONew
from rankwise.names import register, unregister

METHODS = ("_configure_optimizer", "_is_supported_optimizer", "load_checkpoint", "save_checkpoint")


def surroundings() -> tuple[Any, ...]:
    """Everything of torch and DeepSpeed that registration may touch."""
    return (
        dict(vars(torch.optim)),
        list(zero_utils.ZERO_SUPPORTED_OPTIMIZERS),
        dict(vars(DeepSpeedEngine)),
        deepspeed.initialize,
    )


def test_registration_is_idempotent_and_reversible() -> None:
    assert deepspeed_plugin.is_registered()
    registered = surroundings()
    deepspeed_plugin.register()
    assert surroundings() == registered
    try:
        deepspeed_plugin.unregister()
        assert not deepspeed_plugin.is_registered()
        original = surroundings()
        deepspeed_plugin.unregister()
        assert surroundings() == original
        for name in deepspeed_plugin.JSON_TYPES:
            assert not hasattr(torch.optim, name) and not hasattr(torch.optim, name.lower())
        assert not {MARS, SONew, LDAdam, MKOR} & set(zero_utils.ZERO_SUPPORTED_OPTIMIZERS)
        assert all(getattr(DeepSpeedEngine, name).__module__.startswith("deepspeed.") for name in METHODS)
    finally:
        deepspeed_plugin.register()
    again = surroundings()
    assert again[1] == registered[1] and again[0].keys() == registered[0].keys()
    assert all(getattr(DeepSpeedEngine, name).__module__.startswith("deepspeed_plugin") for name in METHODS)


def test_an_optimizer_that_is_unregistered_leaves_nothing() -> None:
    before = surroundings()
    register("Passing", type("Passing", (SONew,), {}))
    assert surroundings() != before
    unregister("Passing")
    assert surroundings() == before


def test_a_taken_name_is_not_overwritten() -> None:
    deepspeed_plugin.unregister()
    torch.optim.sonew = taken = object()
    try:
        with pytest.raises(RuntimeError, match=r"torch\.optim\.sonew exists already"):
            deepspeed_plugin.register()
        assert torch.optim.sonew is taken and not hasattr(torch.optim, "MARS")
    finally:
        del torch.optim.sonew
        deepspeed_plugin.register()


def _trained(engine: Any, rank: int, world: int, steps: int = 3) -> dict[str, np.ndarray]:
    for step in range(steps):
        ds.train_step(engine, rank, world, step)
    weights = ds.model_weights(engine)
    engine.destroy()
    return weights


def _same(first: dict[str, np.ndarray], second: dict[str, np.ndarray]) -> bool:
    return all(np.array_equal(first[name], second[name]) for name in first)


CLIENTS = {"MARS-AdamW": MARS, "SONew": SONew, "LDAdam": LDAdam, "MKOR": MKOR}


def _client_engine(job: ds.Job, world: int, kind: str) -> Any:
    """An engine whose optimizer the user brought along."""
    cls, model, config = CLIENTS[job.name], ds.model_of(job), job.ds_config(world)
    del config["optimizer"]
    optimizer: Any = lambda parameters: cls(parameters, **job.params)  # noqa: E731
    if kind != "callable":
        optimizer = optimizer(model.parameters() if kind == "instance" else model.named_parameters())
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), optimizer=optimizer, config=config
    )
    return engine


def _ways_in(rank: int, world: int, stage: int) -> list[str]:
    """Optimizers that came in by another way than the JSON block and trained differently."""
    zero = {"zero_optimization": {"stage": stage}}
    different = []
    for name in CLIENTS:
        job = ds.Job(name, ds.TYPES[name], config=zero)
        expected = _trained(ds.engine_of(job, world), rank, world)
        for kind in ("instance", "named instance", "callable"):
            if not _same(_trained(_client_engine(job, world, kind), rank, world), expected):
                different.append(f"{name} as {kind}")
        lowered = ds.Job(name.lower(), {**job.params, "eps": "auto", "weight_decay": "auto"}, config=zero)
        if not _same(_trained(ds.engine_of(lowered, world), rank, world), expected):
            different.append(f"{name} in lower case, with 'auto' values")
    return different


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_way_in_trains_alike(stage: int) -> None:
    assert run_ranks(2, _ways_in, stage) == [[], []]


class _Samples(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, 64, (16,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def _trainer(rank: int, world: int, config: str, folder: str) -> tuple[str, dict[str, Any], float, float]:
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    arguments = TrainingArguments(
        output_dir=folder,
        deepspeed=config,
        per_device_train_batch_size=4,
        max_steps=4,
        learning_rate=2e-3,
        weight_decay=0.05,
        adam_beta1=0.9,
        adam_beta2=0.95,
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
    )
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=1, n_head=2, bos_token_id=None, eos_token_id=None)
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=_Samples())
    trainer.train()
    engine = trainer.model_wrapped
    optimizer = engine.basic_optimizer
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    group = {key: optimizer.param_groups[0][key] for key in ("betas", "weight_decay", "eps")}
    # The joined projections are three matrices where each has an owner.
    matrices = 6 if optimizer.spec.owns_blocks else 4
    assert sum(len(unit.keys("matrix")) for unit in optimizer.planner.units.values()) == matrices
    return type(optimizer).__name__, group, losses[0], losses[-1]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["LDAdam", "MKOR"])
def test_hugging_face_trainer_fills_auto_values(name: str, tmp_path: Path) -> None:
    config = tmp_path / "ds.json"
    auto = dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")
    config.write_text(
        json.dumps(
            {
                "train_micro_batch_size_per_gpu": "auto",
                "gradient_accumulation_steps": "auto",
                "gradient_clipping": "auto",
                "zero_optimization": {"stage": 2},
                "optimizer": {"type": name, "params": {**auto, **({"rank": 2} if name == "LDAdam" else {})}},
            }
        )
    )
    for kind, group, first, last in run_ranks(2, _trainer, str(config), str(tmp_path / "out"), timeout=100.0):
        assert kind == name
        assert tuple(group["betas"]) == (0.9, 0.95) and group["weight_decay"] == 0.05 and group["eps"] == 1e-8
        assert last < first
