from __future__ import annotations

import json
from importlib.resources import files

import pytest

from rankwise.configs import OPTIMIZERS, STAGES, deepspeed_config, deepspeed_config_path


def without(config: dict, key: str) -> str:
    return json.dumps({name: value for name, value in config.items() if name != key})


@pytest.mark.parametrize("stage", STAGES)
def test_files_of_a_stage_differ_only_in_the_optimizer(stage: int) -> None:
    assert len({without(deepspeed_config(name, stage), "optimizer") for name in OPTIMIZERS}) == 1
    assert deepspeed_config("adamw", stage)["zero_optimization"] == {"stage": stage}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_files_of_an_optimizer_differ_only_in_the_stage(name: str) -> None:
    assert len({without(deepspeed_config(name, stage), "zero_optimization") for stage in STAGES}) == 1
    assert deepspeed_config(name)["optimizer"]["type"] == OPTIMIZERS[name]


def test_nothing_but_the_grid_is_packaged() -> None:
    root = files("rankwise.configs") / "deepspeed"
    found = {(folder.name, file.name) for folder in root.iterdir() for file in folder.iterdir()}
    assert found == {(f"zero{stage}", f"{name}.json") for stage in STAGES for name in OPTIMIZERS}


def test_clipping_is_explicit_and_batch_sizes_are_numbers() -> None:
    config = deepspeed_config("mkor")
    assert config["gradient_clipping"] == 1.0
    assert isinstance(config["train_micro_batch_size_per_gpu"], int)


def test_names_are_taken_in_any_case() -> None:
    assert deepspeed_config_path("MARS-M", 3).name == "mars-m.json"


def test_unknown_names_and_stages_are_refused() -> None:
    with pytest.raises(ValueError, match="optimizer is 'adan': it must be one of adamw, mars"):
        deepspeed_config("adan")
    with pytest.raises(ValueError, match="stage is 4"):
        deepspeed_config("mkor", 4)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_plugin_accepts_every_file(name: str) -> None:
    pytest.importorskip("deepspeed")
    import deepspeed_plugin

    deepspeed_plugin.validate_config(deepspeed_config(name))
    wrong = deepspeed_config(name)
    wrong["optimizer"]["type"] += "x"
    with pytest.raises(ValueError, match="optimizer"):
        deepspeed_plugin.validate_config(wrong)
