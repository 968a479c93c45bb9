"""Configurations for models of usual sizes: each is read, says what the table says, and fits the model of its name."""

from __future__ import annotations

import argparse
import json
from importlib.resources import files
from pathlib import Path

import pytest

from rankwise.configs import OPTIMIZERS, model_config_path
from rankwise.configs.for_models import MODELS, contents, recipe
from rankwise.launch.flags import read_flags
from rankwise.launch.planning.model_shapes import KNOWN
from rankwise.launch.planning.plan_request import answered
from rankwise.launch.planning.question import Question

NAMES = [name for name in OPTIMIZERS if name != "mars"]


def test_the_files_are_those_that_the_table_gives() -> None:
    """After a change of the table, `python -m rankwise.configs` writes them anew."""
    root = Path(str(files("rankwise.configs")))
    made = dict(contents())
    assert {path: (root / path).read_text() for path in made} == made
    there = {path.relative_to(root).as_posix() for path in (root / "models").rglob("*") if path.is_file()}
    assert there == set(made)


@pytest.mark.parametrize("model", MODELS)
def test_every_json_is_accepted_and_its_batch_comes_out(model: str) -> None:
    pytest.importorskip("deepspeed")
    from deepspeed_plugin import validate_config

    for name in NAMES:
        config = json.loads(model_config_path(model, name).read_text())
        validate_config(config)
        samples = config["train_micro_batch_size_per_gpu"] * config["gradient_accumulation_steps"] * MODELS[model].gpus
        assert samples == recipe(model, name).batch


def test_the_schedule_is_one_of_deepspeeds() -> None:
    schedules = pytest.importorskip("deepspeed.runtime.lr_schedules")
    import torch

    config = json.loads(model_config_path("gpt2-small", "sonew").read_text())["scheduler"]
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    schedule = getattr(schedules, config["type"])(optimizer, **config["params"])
    schedule.step(config["params"]["total_num_steps"])
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1)


@pytest.mark.parametrize("model", MODELS)
def test_every_yaml_has_our_flags_and_the_models_sizes(model: str) -> None:
    pytest.importorskip("megatron.core")
    from megatron_patches.arguments import add_flags, given_options

    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--optimizer", choices=["adam"])
    parser.add_argument("--lr", type=float)
    add_flags(parser)
    for name in NAMES:
        words = read_flags(model_config_path(model, name, "megatron"))
        args, theirs = parser.parse_known_args(words)
        found = recipe(model, name)
        assert args.lr == found.params["lr"] and not [word for word in theirs if word.startswith(("--mkor", "--mars"))]
        if name != "adamw":
            given = given_options(args, name)
            expected = {key: value for key, value in found.params.items() if key not in ("lr", "weight_decay")}
            assert {key: list(value) if isinstance(value, tuple) else value for key, value in given.items()} == expected
    shape, known = MODELS[model].shape, KNOWN.get(model)
    if known is not None:
        sizes = [shape[f"{key}-size" if "hidden" in key else key] for key in ("num-layers", "hidden", "ffn-hidden")]
        assert sizes == [known.layers, known.hidden, known.ffn] and shape["num-attention-heads"] == known.heads
        assert shape.get("num-query-groups", known.heads) == known.kv_heads
        assert ("untie-embeddings-and-output-weights" not in shape) == known.tied
        assert shape.get("num-experts", 0) == known.experts and shape["vocab-size"] == known.vocab
    ways = 1
    for size in MODELS[model].parallel.values():
        ways *= size
    assert MODELS[model].gpus % ways == 0


def test_the_plan_takes_both_files_as_they_are() -> None:
    pytest.importorskip("megatron.core")
    path = model_config_path("gpt2-small", "sonew", "megatron")
    from_json = answered(Question(model_config_path("gpt2-small", "sonew"), model="gpt2-small", ranks=8)).figures()
    from_yaml = answered(Question(path, ranks=8)).figures()
    # Megatron rounds the vocabulary up.
    assert from_yaml.parameters == pytest.approx(from_json.parameters, rel=2e-3)
    assert max(from_yaml.states()) == pytest.approx(max(from_json.states()), rel=0.02)
    with pytest.raises(ValueError, match="leave --model out"):
        answered(Question(path, model="gpt2-small", ranks=8))


def test_what_there_is_no_file_for_is_refused() -> None:
    for given, message in (
        (("gpt5", "mkor"), "model is 'gpt5'"),
        (("gpt2-xl", "mkor", "jax"), "framework is 'jax'"),
        (("gpt2-xl", "mars"), "must be one of mars-adamw"),
        (("gpt2-xl", "adan"), "optimizer is 'adan'"),
    ):
        with pytest.raises(ValueError, match=message):
            model_config_path(*given)
