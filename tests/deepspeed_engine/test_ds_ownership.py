"""Matrix states lie on their owners only, the owners carry about equal amounts, and a rank holds what was planned."""

from __future__ import annotations

import json
import re
from importlib.resources import files
from typing import Any

import deepspeed
import ds_harness as ds  # noqa: F401  (registers the types)
import pytest
import torch
from ds_harness import run_ranks

from rankwise.launch.models import build_model
from rankwise.launch.planning.cluster import Cluster
from rankwise.launch.planning.optimizers import Chosen
from rankwise.launch.planning.rank_figures import deepspeed_figures

LARGEST_SHARE = 1.25
LARGEST_WHOLE = 2.0
"""Matrix states of slices on all ranks, over those of matrices with one owner."""


def reference_model() -> torch.nn.Module:
    """The model of the reference launch, with a small vocabulary: embeddings have no matrix states."""
    torch.manual_seed(0)
    return build_model("gpt2", vocab_size=256, layers=4, hidden=192, heads=6, seq_len=32)


def _present(engine: Any, rank: int, stage: int) -> dict[str, int]:
    """Bytes of this rank's tensors after a step."""
    weights = [getattr(parameter, "ds_tensor", parameter) for parameter in engine.module.parameters()]
    masters = {
        1: "single_partition_of_fp32_groups",
        2: "single_partition_of_fp32_groups",
        3: "fp32_partitioned_groups_flat",
    }
    copies = getattr(engine.optimizer, masters[stage]) if stage else []
    return {
        "states": sum(engine.basic_optimizer.state_bytes().values()),
        "weights": sum(tensor.nbytes for tensor in weights),
        "master": sum(tensor.nbytes for tensor in copies),
    }


def _planned(engine: Any, config: dict[str, Any], rank: int, world: int, stage: int) -> dict[str, int]:
    block = config["optimizer"]
    picked = Chosen(block["type"].lower(), block["params"])
    with torch.device("meta"):
        model = reference_model()
    found = deepspeed_figures(picked, model, Cluster(world, stage, precision="fp32"))
    return {"states": found.states()[rank], "weights": found.weights[rank], "master": found.master[rank]}


def _held(rank: int, world: int, stages: list[int]) -> dict[tuple[str, int], tuple[int, int, float, list[str]]]:
    """Per type and stage: bytes of matrix state here, sum of planned loads, the largest load over mean, keys."""
    found = {}
    for stage in stages:
        for name in ("ldadam", "mkor"):
            config: dict[str, Any] = json.loads(
                (files("rankwise.configs") / f"deepspeed/zero{stage}/{name}.json").read_text()
            )
            config.update(train_micro_batch_size_per_gpu=1, steps_per_print=10**9)
            config.pop("train_batch_size", None)
            model = reference_model()
            engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
            tokens = torch.randint(0, 256, (1, 16), generator=torch.Generator().manual_seed(rank))
            engine.backward(engine(input_ids=tokens, labels=tokens).loss)
            engine.step()
            optimizer = engine.basic_optimizer
            loads = optimizer.planner.loads
            balance = max(loads) / (sum(loads) / world)
            keys = sorted(optimizer.matrix_states)
            assert all(optimizer.owners()[key] == rank for key in keys)
            found[optimizer.__class__.__name__, stage] = (
                optimizer.state_bytes()["matrix"],
                len(optimizer.owners()),
                balance,
                keys,
            )
            present, planned = _present(engine, rank, stage), _planned(engine, config, rank, world, stage)
            for what, size in planned.items():
                assert present[what] == pytest.approx(size, rel=0.05), (what, name, stage, rank)
            engine.destroy()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_matrix_states_fall_as_one_over_world(world: int) -> None:
    results = run_ranks(world, _held, [0, 1, 2, 3])
    for cell in results[0]:
        held = [rank[cell][0] for rank in results]
        keys = [key for rank in results for key in rank[cell][3]]
        # Every matrix is somewhere, and nowhere twice. To MKOR the joined projections are one layer. At stage 3 ranks
        # have slices of LDAdam's matrices, each with the basis or the moments whole.
        matrices = {re.sub(r"\[(:,)?\d+:\d+\]$", "", key) for key in keys}
        assert len(keys) == len(set(keys)) == results[0][cell][1], cell
        assert len(matrices) == {"LDAdam": 24, "MKOR": 16}[cell[0]], cell
        assert len(matrices) == len(keys) or cell == ("LDAdam", 3), cell
        assert sum(held) <= LARGEST_WHOLE * sum(rank[cell[0], 2][0] for rank in results), cell
        assert max(held) <= LARGEST_SHARE * sum(held) / world, (cell, held)
