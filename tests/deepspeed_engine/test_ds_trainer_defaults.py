"""The Trainer's ``"auto"`` betas: those a user gave count, the Trainer's own defaults do not."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import deepspeed_plugin
from deepspeed_plugin.optimizer_block import resolve
from deepspeed_plugin.trainer_defaults import stop_watching, watch

MODULE = "transformers.integrations.deepspeed"


@pytest.fixture(params=["imported before", "imported after"])
def integration(request: pytest.FixtureRequest) -> Iterator[Any]:
    """The Trainer's module, whichever of the two packages comes first."""
    stop_watching()
    package = importlib.import_module(MODULE.rpartition(".")[0])
    earlier = importlib.import_module(MODULE)
    if request.param == "imported after":
        del sys.modules[MODULE]
    try:
        watch()
        watch()
        yield importlib.import_module(MODULE)
    finally:
        stop_watching()
        sys.modules[MODULE] = earlier
        package.deepspeed = earlier
        if deepspeed_plugin.is_registered():
            watch()


def filled(integration: Any, folder: Path, name: str, betas: Any, **arguments: Any) -> dict[str, Any]:
    from transformers import TrainingArguments

    auto = dict.fromkeys(("lr", "eps", "weight_decay"), "auto")
    config = integration.HfTrainerDeepSpeedConfig({"optimizer": {"type": name, "params": {**auto, "betas": betas}}})
    config.trainer_config_process(TrainingArguments(output_dir=str(folder), report_to=[], use_cpu=True, **arguments))
    params: dict[str, Any] = config.config["optimizer"]["params"]
    return params


def test_a_types_own_betas_are_kept(integration: Any, tmp_path: Path) -> None:
    for name in ("LDAdam", "mars-m", "MKOR-H"):
        params = filled(integration, tmp_path, name, "auto", learning_rate=2e-3)
        assert "betas" not in params and params["lr"] == 2e-3 and params["eps"] == 1e-8
        resolve(name, params)
    given = filled(integration, tmp_path, "LDAdam", "auto", adam_beta2=0.95)
    assert given["betas"] == [0.9, 0.95]
    assert filled(integration, tmp_path, "LDAdam", [0.9, 0.999])["betas"] == [0.9, 0.999]
    assert filled(integration, tmp_path, "AdamW", "auto")["betas"] == [0.9, 0.999], "not ours to change"


def test_the_watch_is_taken_back() -> None:
    integration = importlib.import_module(MODULE)
    watch()
    assert hasattr(integration.HfTrainerDeepSpeedConfig.trainer_config_process, "_rankwise_original")
    stop_watching()
    assert not hasattr(integration.HfTrainerDeepSpeedConfig.trainer_config_process, "_rankwise_original")
    if deepspeed_plugin.is_registered():
        watch()
