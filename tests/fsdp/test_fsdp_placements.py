"""Weights of all shapes with any placements on any mesh: the same prescribed gradients lead where they do whole."""

from __future__ import annotations

import random
from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple

import pytest
import torch
from ranks import run_ranks
from sharded_models import whole
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

from rankwise import MARS, LDAdam, SONew

STEPS = 5
F64 = torch.float64
KINDS: dict[str, Callable[[Any], Any]] = {
    "mars": lambda given: MARS(given, lr=1e-2, optimize_1d=True),
    "mars-m": lambda given: MARS(given, lr=1e-2, variant="muon", ns_dtype="float64"),
    "sonew": lambda given: SONew(given, lr=1e-2, eps=1e-3, band=2),
    "sonew-tensor": lambda given: SONew(given, lr=1e-2, eps=1e-3, band=4, chain="tensor"),
    "ldadam": lambda given: LDAdam(given, lr=1e-2, rank=2),
}


class Weight(NamedTuple):
    """A parameter and how it lies: on some dimensions of the mesh, or whole on every rank (no dimensions)."""

    name: str
    shape: tuple[int, ...]
    dims: tuple[str, ...] = ()
    placements: tuple[Placement, ...] = ()

    def laid(self, values: Tensor, mesh: DeviceMesh | None) -> Tensor:
        if mesh is None or not self.dims:
            return values
        own = mesh if len(self.dims) == mesh.ndim else mesh[self.dims[0]]
        return distribute_tensor(values, own, self.placements)


def _trained(mesh: DeviceMesh | None, kind: str, weights: list[Weight]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)

    def draw(weight: Weight) -> Tensor:
        return weight.laid(torch.randn(weight.shape, generator=generator, dtype=F64), mesh)

    named = [(weight.name, nn.Parameter(draw(weight))) for weight in weights]
    optimizer = KINDS[kind](named)
    for step in range(STEPS):
        for at, (weight, (_, parameter)) in enumerate(zip(weights, named, strict=True)):
            gradient = draw(weight)
            parameter.grad = None if (step + at) % 4 == 3 else gradient
        optimizer.step()
    return [whole(parameter) for _, parameter in named]


def _on_ranks(rank: int, world: int, mesh_shape: tuple[int, ...], jobs: list[tuple[str, list[Weight]]]) -> list[Any]:
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=tuple("abc"[: len(mesh_shape)]))
    return [_trained(mesh, kind, weights) for kind, weights in jobs]


def _check(mesh_shape: tuple[int, ...], jobs: list[tuple[str, list[Weight]]]) -> None:
    alone = [_trained(None, kind, weights) for kind, weights in jobs]
    for outcomes in run_ranks(prod(mesh_shape), _on_ranks, mesh_shape, jobs):
        for (_, weights), found, expected in zip(jobs, outcomes, alone, strict=True):
            for weight, one, other in zip(weights, found, expected, strict=True):
                torch.testing.assert_close(one, other, rtol=0, atol=1e-10, msg=lambda text, w=weight: f"{w}: {text}")


def test_most_weights_may_lie_on_a_part_of_the_mesh() -> None:
    """Ranks of one row of the mesh know nothing of another row's: LDAdam's slices must be the same for all."""
    weights = [
        Weight("big.weight", (12, 8), ("b",), (Shard(0),)),
        Weight("small.weight", (8, 4), ("a", "b"), (Replicate(), Shard(1))),
        Weight("copy.weight", (6, 6)),
    ]
    _check((2, 2), [("ldadam", weights), ("mars-m", weights)])


SHAPES: list[tuple[int, ...]] = [
    *((7, 5), (1, 9), (9, 1), (2, 6), (1, 1), (5, 5), (8, 12), (21, 7)),
    *((3,), (1,), (13,), (), (0,), (0, 4), (4, 0)),
    *((3, 4, 5), (2, 3, 8), (1, 6, 4), (6, 3, 2, 2), (4, 1, 3, 3)),
]
NAMES = ("fc", "stack", "norm", "qkv_proj", "experts")


def _drawn(seed: int, mesh_dims: int) -> list[Weight]:
    """Eight weights, one of which at least takes a matrix rule."""
    draw = random.Random(seed)
    found = [Weight("first.weight", (8, 12), ("a",), (Shard(draw.randrange(2)),))]
    for at in range(7):
        name, shape = f"layer{at}.{draw.choice(NAMES)}.weight", draw.choice(SHAPES)
        dims = tuple("abc"[:mesh_dims]) if draw.random() < 0.7 else (draw.choice("abc"[:mesh_dims]),)
        kinds = [Replicate(), *(Shard(dim) for dim in range(len(shape)))]
        found.append(Weight(name, shape, dims, tuple(draw.choice(kinds) for _ in dims)))
        if draw.random() < 0.15:
            found[-1] = Weight(name, shape)
    return found


@pytest.mark.exhaustive
@pytest.mark.parametrize("mesh_shape", [(1,), (2,), (3,), (5,), (2, 2), (3, 2), (2, 1, 2), (1, 3)], ids=str)
def test_drawn_placements(mesh_shape: tuple[int, ...]) -> None:
    _check(mesh_shape, [(kind, _drawn(seed, len(mesh_shape))) for kind in KINDS for seed in range(8)])
