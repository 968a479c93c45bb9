"""examples/llama_torchtitan.py, with a model of two layers, by torchtitan's own trainer on two CPU ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cpu_titan import NoTokenizer, Rows
from example_files import example
from ranks import run_ranks
from titan_runs import WIDTH, _smaller
from torchtitan.models import llama3
from torchtitan.models.common import ComplexRoPE


def train(rank: int, world: int, name: str, folder: str) -> float:
    module = example("llama_torchtitan")
    words = ["--type", name, "--save", folder, "--steps", "2", "--length", "32", "--micro-batch", "2", "--batch", "4"]
    config = module.configuration(module.arguments(words))
    sizes = {"n_layers": 2, "dim": WIDTH, "n_heads": 4, "n_kv_heads": 2, "hidden_dim": 96}
    rope = ComplexRoPE.Config(dim=16, max_seq_len=512)
    layers = llama3._build_llama3_layers(**sizes, rope=rope, attn_backend="flex", fuse_qkv=True)
    _smaller(config, layers)
    config.dataloader, config.tokenizer = Rows.Config(), NoTokenizer.Config()
    config.training.mixed_precision_param, config.training.disable_cuda_graphs = "float32", True
    config.debug.seed, config.checkpoint.interval = 1, 10
    kept = {}
    build = type(config).build

    def built(self: object) -> object:
        kept["trainer"] = build(self)
        return kept["trainer"]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(config), "build", built)
        module.main(config)
    assert kept["trainer"].step == 2
    parameters = [p for part in kept["trainer"].model_parts for p in part.parameters()]
    assert all(torch.isfinite(p.full_tensor() if hasattr(p, "full_tensor") else p).all() for p in parameters)
    return float(sum(p.numel() for p in parameters))


@pytest.mark.slow
def test_the_example_trains_on_two_ranks(tmp_path: Path) -> None:
    assert len(set(run_ranks(2, train, "MARS-M", str(tmp_path)))) == 1
    assert list(tmp_path.glob("checkpoint/step-2/*.distcp"))


@pytest.mark.parametrize("name", ["MARS-M", "MKOR-Sketch", "AdamW"])
def test_its_configuration(name: str) -> None:
    module = example("llama_torchtitan")
    config = module.configuration(module.arguments(["--type", name]))
    (group,) = config.optimizer.param_groups
    assert group.optimizer_name == name and group.optimizer_kwargs["lr"] == module.RATES[name]
    assert config.training.steps * config.training.global_batch_size * config.training.seq_len == pytest.approx(
        2.1e10, rel=0.01
    )
    assert config.loss.loss_fn.global_vocab_size == 128256 and config.model_spec.flavor == "1B"
