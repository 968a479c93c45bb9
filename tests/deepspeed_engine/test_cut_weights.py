"""Shards as DeepSpeed's maps describe them: the elements a rank holds, and those whose maps cannot be followed."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import pytest
import torch
from deepspeed.checkpoint.affine import (
    ParamAffineMap,
    block_gather_map,
    contiguous_split_map,
    replicated_map,
    segmented_map,
    sub_param_map,
)
from deepspeed.checkpoint.constants import DS_AUTOTP_UC_META
from torch import Tensor, nn

from deepspeed_plugin.affine_maps import tensor_parallel_shard
from deepspeed_plugin.auto_tp import Uncut, _compare
from rankwise.layout.layout import Layout, LayoutError, Shard
from rankwise.layout.tensor_parallel_shards import TensorParallelShard
from rankwise.routing.roles import ParameterInfo

MAPS: dict[str, ParamAffineMap] = {
    "rows": contiguous_split_map((6, 4), [4, 2], 0),
    "columns": contiguous_split_map((6, 5), [3, 2], 1),
    "a bias": contiguous_split_map((7,), [4, 3], 0),
    "rows that one rank has none of": contiguous_split_map((6, 4), [6, 0], 0),
    "columns that one rank has none of": contiguous_split_map((6, 4), [4, 0], 1),
    "three matrices below each other": sub_param_map((12, 4), [6, 4, 2], [[4, 2], [2, 2], [1, 1]], 0),
    "seen with three dimensions": contiguous_split_map((3, 4, 5), [2, 2], 1),
    "blocks in another order": block_gather_map((8, 3), {0: [0, 3], 1: [1, 2]}, 2, 0),
    "on every rank": replicated_map((5, 3), 2),
}


def _shards(found: ParamAffineMap, shape: tuple[int, ...]) -> list[TensorParallelShard]:
    shards = []
    for rank in range(2):
        parameter = nn.Parameter(torch.empty(found.shard_shapes[rank]))
        setattr(parameter, DS_AUTOTP_UC_META, {"conversion": {"affine_map": found.to_dict()}})
        shards.append(tensor_parallel_shard("layer.weight", parameter, shape, rank, 2))
    return shards


def _whole_shape(found: ParamAffineMap) -> tuple[int, ...]:
    first, *rest = found.logical_shape
    return (first * rest[0], *rest[1:]) if len(rest) == 2 else (first, *rest)


@pytest.mark.parametrize("name", MAPS)
def test_slices_are_what_deepspeed_cuts(name: str) -> None:
    """Every partition of the shards over two data-parallel ranks, against the map's own way to take a shard."""
    found = MAPS[name]
    shape = _whole_shape(found)
    full = torch.arange(float(prod(shape))).view(found.logical_shape)
    shards: list[list[Shard]] = []
    for rank, shard in enumerate(_shards(found, shape)):
        held = found.extract(full, rank).flatten()
        for start, end in ((0, held.numel() // 3), (held.numel() // 3, held.numel())):
            pieces = shard.slices("w", start, end, 10) if start < end else []
            shards.append(
                [
                    Shard("w", p.start, p.end, p.offset, p.columns, p.copy, shape=shape, tensor=0)
                    for p in pieces
                    if p.end > p.start
                ]
            )
            for piece in shards[-1]:
                here = held[start + piece.offset - 10 :][: piece.numel]
                there = torch.cat([place.of(full.flatten()).flatten() for place in piece.places])
                assert torch.equal(here, there)
                assert shard.local(piece.start) == start + piece.offset - 10
    Layout(tuple(map(tuple, shards)))  # they tile the parameter


@pytest.mark.parametrize("name", MAPS)
def test_sides_are_shared_among_those_that_hold_any(name: str) -> None:
    shares = [shard.share for shard in _shards(MAPS[name], _whole_shape(MAPS[name]))]
    assert shares == ([(0, 1), (1, 1)] if "none of" in name else [(0, 2), (1, 2)])


@pytest.mark.parametrize(
    ("meta", "words"),
    [
        ({}, "DeepSpeed does not say how"),
        ({"unsupported_reason": "it interleaves blocks"}, "it interleaves blocks"),
        ({"affine_map": segmented_map((6, 4), [(4, False), (2, True)], 0, 2, [[2, 2]]).to_dict()}, "several ranks"),
        ({"affine_map": contiguous_split_map((6, 4), [4, 2], 0).to_dict()}, "have 16 elements"),
    ],
)
def test_what_cannot_be_followed_is_refused_by_name(meta: dict[str, Any], words: str) -> None:
    parameter = nn.Parameter(torch.empty(3, 4))
    if meta:
        setattr(parameter, DS_AUTOTP_UC_META, {"conversion": meta})
    with pytest.raises(LayoutError, match=words) as refusal:
        tensor_parallel_shard("h.0.attn.weight", parameter, (6, 4), 0, 2)
    assert "'h.0.attn.weight'" in str(refusal.value)


@pytest.mark.parametrize(("runs", "columns"), [(((4, 8), (20, 4)), None), (None, (1, 3))])
def test_a_shard_that_is_not_what_its_map_says_is_seen(runs: Any, columns: Any) -> None:
    full = torch.randn(6, 4)
    shard = TensorParallelShard((6, 4), 1, 2, runs, columns, (1, 2))
    right = full[:, 1:3].contiguous() if columns else torch.cat([full.flatten()[4:12], full.flatten()[20:24]])
    before = _seen(full)
    _compare(before, nn.Parameter(right), shard)
    with pytest.raises(LayoutError, match="does not hold the elements"):
        _compare(before, nn.Parameter(right.flip(0)), shard)


def _seen(full: Tensor) -> Uncut:
    positions: Sequence[int] = range(full.numel())
    return Uncut(ParameterInfo("w", tuple(full.shape)), torch.tensor(positions), full.flatten().clone())
