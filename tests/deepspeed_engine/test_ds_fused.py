"""Under DeepSpeed a network with fused weights follows its twin with a weight for each matrix, which torch trains."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import deepspeed
import ds_harness as ds
import numpy as np
import pytest
import torch
from fused_networks import LAYERS, TOKENS, Network, as_fused
from ranks import run_ranks

import deepspeed_plugin  # noqa: F401
from rankwise import MARS, MKOR, LDAdam, annotate

STEPS = 4
# As a JSON has them: DeepSpeed hands over parameters whose modules say nothing of what is fused in them.
BLOCKS: dict[str, Any] = {
    "qkv.weight": {"q": 12, "k": 8, "v": 6},
    "conv.weight": "qkv",
    "groups.weight": {"q": 12, "k": 3, "v": 3, "groups": 2},
    "gate_up.weight": [16, 16],
    "alternating.weight": {"gate": 1, "up": 1, "groups": 8},
}
SHARED = {"lr": 1e-2, "weight_decay": 0.1}
TYPES: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "MARS-M": (MARS, {"ns_dtype": "float32", **SHARED}, {"variant": "muon"}),
    "MARS-Shampoo": (MARS, {"ns_dtype": "float32", **SHARED}, {"variant": "shampoo"}),
    "LDAdam": (LDAdam, {"rank": 2, **SHARED}, {}),
    "MKOR": (MKOR, {"update_interval": 2, "factor_dtype": "float32", "backend": "sgd", **SHARED}, {}),
}


def _engines(
    rank: int, world: int, stage: int, steps: range = range(STEPS), load: str | None = None, save: str | None = None
) -> dict[str, tuple[dict[str, np.ndarray], set[str]]]:
    deepspeed.init_distributed("gloo")
    found = {}
    for name, (_, params, _) in TYPES.items():
        network = Network(torch.float32, True)
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": name, "params": {**params, "blocks": BLOCKS}},
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
            "gradient_clipping": 0.0,
            "steps_per_print": 10**9,
        }
        engine, *_ = deepspeed.initialize(model=network, model_parameters=network.named_parameters(), config=config)
        share = slice(rank * TOKENS // world, (rank + 1) * TOKENS // world)
        if load is not None:
            with torch.no_grad():
                for parameter in network.parameters():
                    parameter.data.zero_()  # nothing but the checkpoint can make the runs agree
            engine.load_checkpoint(f"{load}/{name}")
        for step in steps:
            engine.backward(engine(step, share, float(world)))
            engine.step()
        if save is not None:
            engine.save_checkpoint(f"{save}/{name}")
        found[name] = ds.master_weights(engine), {line.name for line in engine.basic_optimizer.explain()}
        engine.destroy()
    return found


@functools.cache
def _twin(name: str) -> tuple[dict[str, np.ndarray], float]:
    kind, params, more = TYPES[name]
    network = Network(torch.float32, False)
    annotate(network)  # as the plugin does: which weights are (inputs, outputs)
    optimizer = kind(network.named_parameters(), **params, **more)
    optimizer.capture(network)
    start = as_fused(network)
    for step in range(STEPS):
        optimizer.zero_grad()
        network(step).backward()
        optimizer.step()
    final = {key: value.numpy() for key, value in as_fused(network).items()}
    return final, max(float(np.abs(final[key] - start[key].numpy()).max()) for key in final)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3, *(pytest.param(other, marks=pytest.mark.exhaustive) for other in (0, 1))])
def test_engines_follow_the_twin(stage: int) -> None:
    for name in TYPES:
        _twin(name)
    ranks = run_ranks(2, _engines, stage)
    for name in TYPES:
        for found in ranks:
            weights, lines = found[name]
            _assert_followed(name, weights)
            assert {f"{layer}.weight[{part}]" for layer in ("qkv", "groups") for part in LAYERS[layer].rows} <= lines


def _assert_followed(name: str, weights: dict[str, np.ndarray]) -> None:
    final, change = _twin(name)
    errors = {key: float(np.abs(weights[key] - final[key]).max()) / change for key in final}
    assert max(errors.values()) <= 1e-5, (name, errors)


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [((2, 2), (3, 3)), ((3, 3), (1, 0))])
def test_blocks_go_on_in_another_layout(before: tuple[int, int], after: tuple[int, int], tmp_path: Path) -> None:
    """Ranks and stage before and after: the states of every block are found, whoever owns it now."""
    for name in TYPES:
        _twin(name)
    (ranks, stage), (others, other) = before, after
    run_ranks(ranks, _engines, stage, range(STEPS // 2), None, str(tmp_path))
    for found in run_ranks(others, _engines, other, range(STEPS // 2, STEPS), str(tmp_path)):
        for name in TYPES:
            _assert_followed(name, found[name][0])
