"""FSDP2: heads of layers of their own are matrices of their own, as one process makes them, wherever rows are cut."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hugging_face import batch, built, difference, optimizer_of, weights_of
from ranks import run_ranks
from torch import nn
from torch.distributed.fsdp import fully_shard

STEPS = 3
CASES = ("mars-m", "ldadam", "mkor")


def _trained(case: str, model: nn.Module, split: bool = True) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Weights, and the lines said at the start."""
    own = {"rank": 1} if case == "ldadam" else {}
    optimizer, said = optimizer_of(case, model, split_heads=split, **own), []
    optimizer.reports.announce = said.append
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    for step in range(STEPS):
        for part in range(2) if world == 1 else (rank,):
            tokens = batch(step, part, 2, 4)
            (model(input_ids=tokens, labels=tokens).loss / (2 // world)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights_of(model), said


def _sharded(rank: int, world: int) -> dict[str, tuple[float, float, list[str]]]:
    found = {}
    for case in CASES:
        torch.manual_seed(0)
        model = built("llama", torch.float64)
        for layer in model.model.layers:  # type: ignore[union-attr]
            fully_shard(layer)
        ours, said = _trained(case, fully_shard(model))
        found[case] = ours, said
    dist.barrier()
    return found


@pytest.mark.slow
def test_heads_of_layers_of_their_own() -> None:
    ranks = run_ranks(2, _sharded)
    for case in CASES:
        sharded, said = ranks[0][case]
        alone, same = _trained(case, built("llama", torch.float64))
        apart = difference(sharded, alone, "llama")
        assert apart <= 1e-10, (case, apart)
        (line,) = (text for text in said if "split_heads" in text)
        assert "2 q_proj (4 of 4x16), 2 k_proj (2 of 4x16), 2 v_proj (2 of 4x16)" in line
        assert line in same
        whole, _ = _trained(case, built("llama", torch.float64), split=False)
        assert difference(whole, alone, "llama") > 1e-3, case
