"""Saving and loading every rank's part, or one rank's of many replicas, resumes bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from saved_files import through_a_file
from simulated import CASES, LAYOUTS, Framework, reference, world_group
from torch import Tensor

# One for each kind of states everywhere; its likes where one rank's dictionary is kept, and where all is cut.
KINDS = ("mars-muon", "sonew-1-row-rmsprop", "ldadam-ef", "mkor-official-adamw")
LIKES = ("mars-lion", "ldadam-plain", "mkor-ema-lamb")
CELLS = [(case, layout) for layout in LAYOUTS for case in KINDS]
CELLS += [(case, layout) for layout in ("replicated", "cut") for case in LIKES]
WORLD, BEFORE, AFTER = 3, 4, 3


def _differences(one: Any, other: Any, path: str = "") -> list[str]:
    if isinstance(one, Tensor):
        same = one.dtype == other.dtype and torch.equal(one, other)
        return [] if same else [path]
    if isinstance(one, dict):
        if one.keys() != other.keys():
            return [f"{path}: {one.keys()} {other.keys()}"]
        return [found for key in one for found in _differences(one[key], other[key], f"{path}.{key}")]
    if isinstance(one, list | tuple):
        if len(one) != len(other):
            return [path]
        pairs = enumerate(zip(one, other, strict=True))
        return [found for index, (a, b) in pairs for found in _differences(a, b, f"{path}.{index}")]
    return [] if one == other else [path]


def _resume(rank: int, world: int) -> dict[tuple[str, str], dict[str, Any]]:
    return {cell: _resume_one(*cell, rank, world) for cell in CELLS}


def _resume_one(case: str, layout: str, rank: int, world: int) -> dict[str, Any]:
    def build() -> Framework:
        return Framework(layout, CASES[case], torch.float32, rank, world, world_group())

    straight = build()
    for _ in range(BEFORE):
        straight.step()
    weights = [tensor.detach().clone() for tensor, _ in straight.shards]
    state = straight.optimizer.state_dict()
    keys = sorted(state["matrix_states"])
    if layout == "replicated" and world > 1:
        # The framework keeps rank 0's dictionary only.
        box = [through_a_file(state) if rank == 0 else None]
        dist.broadcast_object_list(box, src=0)
        state = box[0]
    else:
        state = through_a_file(state)

    resumed = build()
    for (tensor, _), weight in zip(resumed.shards, weights, strict=True):
        tensor.data.copy_(weight)
    resumed.optimizer.load_state_dict(state)
    resumed.count = BEFORE
    again = resumed.optimizer.state_dict()
    saved_at_once = [found for key in ("matrix_states", "layout") for found in _differences(state[key], again[key])]
    for framework in (straight, resumed):
        for _ in range(AFTER):
            framework.step()
    ends = [[tensor.detach() for tensor, _ in framework.shards] for framework in (straight, resumed)]
    return {
        "weights": _differences(*ends),
        "states": _differences(straight.optimizer.state_dict(), resumed.optimizer.state_dict()),
        "saved at once": saved_at_once,
        "keys": keys,
        "owned": sorted(straight.optimizer.matrix_states),
        "owned after": sorted(resumed.optimizer.matrix_states),
        "left over": sorted(resumed.optimizer.matrix_states.loaded),
    }


@pytest.fixture(scope="module")
def outcomes() -> list[dict[tuple[str, str], dict[str, Any]]]:
    reference("mars-adamw", torch.float32)  # the first step of a process imports half of torch: not in every fork
    return run_ranks(WORLD, _resume)


@pytest.mark.parametrize(("case", "layout"), CELLS)
def test_resume_is_bitwise(outcomes: list[dict[tuple[str, str], dict[str, Any]]], case: str, layout: str) -> None:
    ranks = [outcome[case, layout] for outcome in outcomes]
    for rank in ranks:
        assert rank["weights"] == [] and rank["states"] == []
        assert rank["owned after"] == rank["owned"]
        # What another rank owns takes no memory here.
        assert rank["left over"] == []
        assert rank["saved at once"] == []
    everything = sorted(key for rank in ranks for key in rank["owned"])
    if layout == "replicated":
        assert all(rank["keys"] == everything for rank in ranks)
    else:
        assert all(rank["keys"] == rank["owned"] for rank in ranks)


def test_loaded_states_move_to_the_device_of_the_computation() -> None:
    optimizer = Framework("replicated", CASES["ldadam-ef"], torch.float32).optimizer
    optimizer.matrix_states.loaded["a.weight"] = {"basis": torch.ones(2), "step": torch.tensor(3)}

    def fresh() -> dict[str, Tensor]:
        return {"basis": torch.empty(2, device="meta"), "step": torch.tensor(0)}

    state = optimizer.matrix_states.obtain("a.weight", fresh)
    assert state["basis"].device.type == "meta" and state["step"].device.type == "cpu" and int(state["step"]) == 3
