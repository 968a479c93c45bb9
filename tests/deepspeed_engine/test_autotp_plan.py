"""``rankwise plan`` knows what AutoTP's ranks hold and own: those of real engines."""

from __future__ import annotations

import json
from typing import Any

import autotp_runs as tp
import pytest
import torch
from autotp_runs import Cell
from ds_harness import run_ranks
from typer.testing import CliRunner

from rankwise.launch.cli import app
from rankwise.launch.planning.cluster import Cluster
from rankwise.launch.planning.optimizers import Chosen
from rankwise.launch.planning.rank_figures import deepspeed_figures

OPTIONS: dict[str, dict[str, Any]] = {
    "MARS-AdamW": {},
    "MARS-M": {"ns_dtype": "float32"},
    "SONew": {"band": 2},
    "LDAdam": {"rank": 3},
    "MKOR": {"factor_dtype": "float32"},
}


def _real(rank: int, world: int, stage: int, model: str) -> dict[str, Any]:
    found = {}
    for name in OPTIONS:
        engine = tp.engine_of(Cell(name, model, stage, params=OPTIONS[name]), world)
        tp.train(engine, 0, 1)
        optimizer = engine.basic_optimizer
        rules = {row.name: row.rule for row in optimizer.explain()}
        found[name] = (optimizer.owners(), optimizer.state_bytes(), rules)
        engine.destroy()
    return found


@pytest.mark.exhaustive
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(("model", "world"), [("llama", 2), ("llama", 4), ("llama tied", 2)])
def test_real_ranks_hold_and_own_what_is_planned(model: str, world: int, stage: int) -> None:
    answers = run_ranks(world, _real, stage, model)
    for name, options in OPTIONS.items():
        with torch.device("meta"):
            built = tp.MODELS[model]()
        planned = deepspeed_figures(
            Chosen(name.lower(), {**tp.TYPES[name], **options}), built, Cluster(world, stage, tp=2, precision="fp32")
        )
        for rank, answer in enumerate(answers):
            owners, states, rules = answer[name]
            assert owners == planned.owners, name
            expected = {
                "element": planned.ranks[rank].element_state_bytes,
                "matrix": planned.ranks[rank].matrix_state_bytes,
            }
            assert {key: states[key] for key in expected} == expected, (name, rank)
            assert rules["model.layers.0.mlp.up_proj.weight"] == "matrix"


@pytest.mark.parametrize("stage", ["1", "3"])
def test_the_command_plans_cut_weights(stage: str) -> None:
    words = ["plan", "--optimizer", "sonew", "--model", "llama-1b", "--engine", "deepspeed", "--stage", stage, "--json"]
    result = CliRunner().invoke(app, [*words, "--ranks", "8", "--tp", "4"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.output)
    assert found["layout"] == f"8 ranks, ZeRO-{stage}, AutoTP over 4, bf16"
    assert len(found["per_rank"]) == 8
    cut = CliRunner().invoke(app, [*words, "--ranks", "8"])
    whole = json.loads(cut.output)
    assert whole["layout"] == f"8 ranks, ZeRO-{stage}, bf16"
    # Norms, and embeddings without a head of the same weight, are on every one of four; all else once.
    assert found["per_rank"][0]["adamw_bytes"] >= whole["per_rank"][0]["adamw_bytes"]
