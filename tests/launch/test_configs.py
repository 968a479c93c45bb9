from __future__ import annotations

import argparse
import json
import re
from importlib.resources import files
from pathlib import Path

import pytest

from rankwise.configs import (
    OPTIMIZERS,
    STAGES,
    deepspeed_config,
    deepspeed_config_path,
    making,
    megatron_config_path,
    trainer_config_path,
)
from rankwise.launch.flags import read_flags
from rankwise.launch.planning.plan_request import answered
from rankwise.launch.planning.question import Question


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


def test_the_files_are_those_that_one_table_gives(tmp_path: Path) -> None:
    """After a change of the table, `python -m rankwise.configs` writes them anew."""
    root = Path(str(files("rankwise.configs")))
    making.write(tmp_path, making.contents())
    made = {path.relative_to(tmp_path): path.read_text() for path in tmp_path.rglob("*.*") if path.is_file()}
    assert len(made) == len(OPTIMIZERS) * (len(STAGES) + 2)
    for path, text in made.items():
        assert (root / path).read_text() == text, path


def test_nothing_but_the_grid_is_packaged() -> None:
    root = files("rankwise.configs") / "deepspeed"
    found = {(folder.name, file.name) for folder in root.iterdir() for file in folder.iterdir()}
    assert found == {(f"zero{stage}", f"{name}.json") for stage in STAGES for name in OPTIMIZERS}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_trainer_is_left_what_it_fills_in(name: str) -> None:
    config, ready = json.loads(trainer_config_path(name).read_text()), deepspeed_config(name)["optimizer"]
    params = config["optimizer"]["params"]
    assert config["optimizer"]["type"] == ready["type"] and params["lr"] == params["weight_decay"] == "auto"
    own = {key: value for key, value in params.items() if value != "auto"}
    assert own == {key: ready["params"][key] for key in own} and not {"betas", "eps"} & set(params)
    if name != "adamw":
        pytest.importorskip("deepspeed")
        from deepspeed_plugin import validate_config

        validate_config(config)


def test_every_optimizer_has_flags_for_megatron() -> None:
    root = files("rankwise.configs") / "megatron"
    assert {file.name for file in root.iterdir()} == {f"{name}.yaml" for name in OPTIMIZERS}
    with pytest.raises(ValueError, match="optimizer is 'adan'"):
        megatron_config_path("adan")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_megatrons_flags_say_what_the_json_says(name: str) -> None:
    pytest.importorskip("megatron.core")
    from megatron_patches.arguments import add_flags, given_options

    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--optimizer", choices=["adam"])
    for flag in ("lr", "weight-decay", "clip-grad", "adam-beta1", "adam-beta2", "adam-eps"):
        parser.add_argument(f"--{flag}", type=float)
    parser.add_argument("--use-distributed-optimizer", action="store_true")
    add_flags(parser)
    args = parser.parse_args(read_flags(megatron_config_path(name)))
    config = deepspeed_config(name)
    params = config["optimizer"]["params"]
    assert (args.lr, args.weight_decay) == (params.pop("lr"), params.pop("weight_decay"))
    assert args.clip_grad == config["gradient_clipping"] and args.use_distributed_optimizer
    if name == "adamw":
        assert [args.adam_beta1, args.adam_beta2] == params["betas"] and args.adam_eps == params["eps"]
    else:
        assert args.rankwise_optimizer == name
        given = given_options(args, name)
        assert {key: list(value) if isinstance(value, tuple) else value for key, value in given.items()} == params


def every_file() -> list[Path]:
    root = Path(str(files("rankwise.configs")))
    return sorted(path for kind in ("*.json", "*.yaml") for path in root.rglob(kind))


def test_every_file_says_for_how_many_gpus_and_where_its_values_are_from() -> None:
    for path in every_file():
        text = path.read_text()
        said = json.loads(text)["_comment"] if path.suffix == ".json" else text.partition("\n")[0].removeprefix("# ")
        assert re.fullmatch(r"(\d+|Any number of) GPUs\. Hyperparameters: .{10,}\.", said), path


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "adamw"])
def test_every_file_without_a_model_is_planned(name: str) -> None:
    """As `rankwise plan --config` does: the optimizer is built with its options, and its states cut over the ranks."""
    pytest.importorskip("megatron.core")
    sizes = {"model": "gpt2", "layers": 1, "hidden": 192, "heads": 6, "vocab_size": 96, "seq_len": 16}
    files = [*(deepspeed_config_path(name, stage) for stage in STAGES), trainer_config_path(name)]
    for path in [*files, megatron_config_path(name)]:
        asked = answered(Question(path, ranks=2, **sizes))
        states = asked.figures().states()
        assert asked.picked.name == name and len(states) == 2 and min(states) > 0, path
        least, most = (max(answered(Question(path, ranks=ranks, **sizes)).figures().states()) for ranks in (4, 1))
        assert least <= max(states) <= most and (least < most or path.parent.name == "zero0"), path


def test_flags_of_every_kind(tmp_path: Path) -> None:
    path = tmp_path / "flags.yaml"
    path.write_text(
        "lr: 1.0e-3\nmkor-betas: [0.9, 0.95]\nbf16: true\nmars-exact: false\nmars-clip: null\ndata-path: x\n"
    )
    assert read_flags(path) == (
        "--lr 0.001 --mkor-betas 0.9 0.95 --bf16 --no-mars-exact --mars-clip none --data-path x".split()
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [("- lr", "no mapping of flags"), ("a: [", "no readable YAML"), ("mkor: {betas: 1}", "'mkor' is .* flat list")],
)
def test_bad_files_of_flags_are_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "flags.yaml").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_flags(tmp_path / "flags.yaml")


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
