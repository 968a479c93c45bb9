"""Under DeepSpeed a network with fused weights follows its twin with a weight for each matrix, which torch trains."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepspeed
import ds_harness as ds
import numpy as np
import pytest
import torch
from ds_harness import run_ranks
from fused_networks import LAYERS, TOKENS, Network, as_fused, with_a_row_moved
from ranks import once

import deepspeed_plugin  # noqa: F401
from rankwise import MARS, MKOR, LDAdam, annotate
from rankwise.routing.fused_shape import FusedShape

STEPS = 4
F64, F32 = torch.float64, torch.float32
# As a JSON has them: DeepSpeed hands over parameters whose modules say nothing of what is fused in them.
BLOCKS: dict[str, Any] = {
    "qkv.weight": {"q": 12, "k": 8, "v": 6},
    "conv.weight": "qkv",
    "groups.weight": {"q": 12, "k": 3, "v": 3, "groups": 2},
    "gate_up.weight": [16, 16],
    "alternating.weight": {"gate": 1, "up": 1, "groups": 8},
    "down.weight": {"kv": 10, "k_rope": 6},
    "stack.weight": {"gate": 7, "up": 7},
    "grouped_heads.weight": {"q": 12, "k": 6, "v": 6, "groups": 2, "heads": [2, 1, 1]},
    "column_heads.weight": {"q": 12, "k": 12, "v": 12, "heads": [2, 2, 2]},
    "latent_heads.weight": {"k": 7, "v": 6, "groups": 2, "heads": [1, 1]},
    "lone_heads.weight": {"q": 18, "heads": 3},
}


def _as_option(fused: FusedShape) -> dict[str, Any]:
    heads = {"heads": list(fused.heads)} if fused.heads else {}
    return {**dict(fused.parts), "groups": fused.groups, **heads}


# A row of each, or of each head, given to another part.
MOVED = {f"{name}.weight": _as_option(with_a_row_moved(name)) for name in LAYERS}
SHARED = {"lr": 1e-2, "weight_decay": 0.1}
TYPES: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "MARS-M": (MARS, {"ns_dtype": "DTYPE", **SHARED}, {"variant": "muon"}),
    "MARS-Shampoo": (MARS, {"ns_dtype": "DTYPE", **SHARED}, {"variant": "shampoo"}),
    "LDAdam": (LDAdam, {"rank": 2, **SHARED}, {}),
    "MKOR": (MKOR, {"update_interval": 2, "factor_dtype": "DTYPE", "backend": "sgd", **SHARED}, {}),
}


def _params(name: str, dtype: torch.dtype) -> dict[str, Any]:
    own = str(dtype).removeprefix("torch.")
    return {key: own if value == "DTYPE" else value for key, value in TYPES[name][1].items()}


@dataclass(frozen=True)
class Run:
    """Some steps of every type on one stage of ZeRO, from a checkpoint or to one."""

    stage: int
    dtype: torch.dtype = F32
    steps: range = range(STEPS)
    moved: bool = False
    load: str | None = None
    save: str | None = None


def _engines(rank: int, world: int, *runs: Run) -> list[dict[str, tuple[dict[str, np.ndarray], set[str]]]]:
    return [{name: _engine(rank, world, name, run) for name in TYPES} for run in runs]


def _engine(rank: int, world: int, name: str, run: Run) -> tuple[dict[str, np.ndarray], set[str]]:
    network = Network(run.dtype, True)
    blocks = MOVED if run.moved else BLOCKS
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": name, "params": {**_params(name, run.dtype), "blocks": blocks}},
        "zero_optimization": {
            "stage": run.stage,
            "stage3_param_persistence_threshold": 0,
            "reduce_scatter": run.dtype is F32,
        },
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
    }
    with ds.in_float64() if run.dtype is F64 else nullcontext():
        engine, *_ = deepspeed.initialize(model=network, model_parameters=network.named_parameters(), config=config)
        share = slice(rank * TOKENS // world, (rank + 1) * TOKENS // world)
        if run.load is not None:
            with torch.no_grad():
                for parameter in network.parameters():
                    parameter.data.zero_()  # nothing but the checkpoint can make the runs agree
            engine.load_checkpoint(f"{run.load}/{name}")
        for step in run.steps:
            engine.backward(engine(step, share, float(world)))
            engine.step()
        if run.save is not None:
            engine.save_checkpoint(f"{run.save}/{name}")
        # Of float64 its accessor would tell float32; a model that is not in half has the same weights itself.
        weights = ds.model_weights(engine) if run.dtype is F64 else ds.master_weights(engine)
        found = weights, {line.name for line in engine.basic_optimizer.explain()}
        engine.destroy()
    return found


@once
def _twin(name: str, dtype: torch.dtype = F32) -> tuple[dict[str, np.ndarray], float]:
    kind, _, more = TYPES[name]
    network = Network(dtype, False)
    annotate(network)  # as the plugin does: which weights are (inputs, outputs)
    optimizer = kind(network.named_parameters(), **_params(name, dtype), **more)
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
    dtypes = (F64, F32) if stage else (F32,)  # DeepSpeed alone does not reduce float64
    for name in TYPES:
        for dtype in dtypes:
            _twin(name, dtype)
    runs = [*(Run(stage, dtype) for dtype in dtypes), Run(stage, moved=True)]
    for *followed, left in run_ranks(2, _engines, *runs):
        for name in TYPES:
            for dtype, found in zip(dtypes, followed, strict=True):
                _assert_followed(name, found[name][0], dtype)
                parts = {f"{layer}.weight[{part}]" for layer in ("qkv", "groups") for part in LAYERS[layer].rows}
                assert {"grouped_heads.weight[q.3]", *parts} <= found[name][1]
            errors = _errors(name, left[name][0])
            divided = [layer for layer in LAYERS if not (LAYERS[layer].experts and name == "MKOR")]
            assert min(errors[f"{layer}.weight"] for layer in divided) > 1e-3, (name, errors)
            assert errors["plain.weight"] <= 1e-5


def _errors(name: str, weights: dict[str, np.ndarray], dtype: torch.dtype = F32) -> dict[str, float]:
    final, change = _twin(name, dtype)
    assert weights.keys() == final.keys()
    return {key: float(np.abs(weights[key] - final[key]).max()) / change for key in final}


def _assert_followed(name: str, weights: dict[str, np.ndarray], dtype: torch.dtype = F32) -> None:
    errors = _errors(name, weights, dtype)
    assert max(errors.values()) <= (1e-10 if dtype is F64 else 1e-6), (name, errors)


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [((2, 2), (3, 3)), ((3, 3), (1, 0))])
def test_blocks_go_on_in_another_layout(before: tuple[int, int], after: tuple[int, int], tmp_path: Path) -> None:
    """Ranks and stage before and after: the states of every block are found, whoever owns it now."""
    for name in TYPES:
        _twin(name)
    (ranks, stage), (others, other) = before, after
    run_ranks(ranks, _engines, Run(stage, steps=range(STEPS // 2), save=str(tmp_path)))
    for (found,) in run_ranks(others, _engines, Run(other, steps=range(STEPS // 2, STEPS), load=str(tmp_path))):
        for name in TYPES:
            _assert_followed(name, found[name][0])
