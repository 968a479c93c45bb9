"""Ways to shard a model that torch offers: `fully_shard` on its own, below other meshes and beside them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


@dataclass(frozen=True)
class Setting:
    """A way to shard `sharded_models.Network`.

    Attributes:
        world: Number of ranks.
        shard: Shards a model in place, with further arguments of `fully_shard`; returns which part of a batch this
            rank computes, and of how many.
    """

    world: int
    shard: Callable[..., tuple[int, int]]


def _each(model: Any, **how: Any) -> None:
    for module in (model.embed, *model.layers, model.sometimes):
        fully_shard(module, **how)
    fully_shard(model, **how)


def _flat(model: Any, world: int, **how: Any) -> tuple[int, int]:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    _each(model, mesh=mesh, **how)
    return mesh.get_local_rank(), world


def _columns(model: Any, world: int, **how: Any) -> tuple[int, int]:
    def place(parameter: nn.Parameter) -> Shard | None:
        return Shard(1) if parameter.dim() > 1 and parameter.shape[1] % world == 0 else None

    return _flat(model, world, shard_placement_fn=place, **how)


def _hybrid(model: Any, world: int, **how: Any) -> tuple[int, int]:
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("rep", "shard"))
    _each(model, mesh=mesh, **how)
    return torch.distributed.get_rank(), world


def _tensor_parallel(model: Any, world: int, **how: Any) -> tuple[int, int]:
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
    plan = {"up": ColwiseParallel(), "gate": ColwiseParallel(), "down": RowwiseParallel()}
    for layer in model.layers:
        parallelize_module(layer, mesh["tp"], plan)
    if world > 2:
        _each(model, mesh=mesh["dp"], **how)
    return mesh.get_local_rank("dp"), world // 2


def _experts_apart(model: Any, world: int, cut: int = 1, **how: Any) -> tuple[int, int]:
    """Experts on meshes of their own, `fully_shard` on another one where there are ranks for it."""
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    apart = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("efsdp", "ep"))
    stack = nn.Parameter(distribute_tensor(model.experts.stack.detach(), apart["ep"], [Shard(0)]))
    model.experts.stack = stack
    if world > 2:
        experts = fully_shard(model.experts, mesh=apart["efsdp"], shard_placement_fn=lambda _: Shard(cut), **how)
        # Each has the gradients of two ranks' tokens already.
        experts.set_gradient_divide_factor(float(world))
        experts.set_force_sum_reduction_for_comms(True)  # gloo cannot multiply
        _each(model, mesh=mesh, **how)
    else:
        stack.register_hook(lambda gradient: gradient / world)
        _each(model, mesh=mesh, ignored_params={stack}, **how)
    return mesh.get_local_rank(), world


SETTINGS: dict[str, Setting] = {
    "rows-2": Setting(2, _flat),
    "rows-3": Setting(3, _flat),
    "rows-4": Setting(4, _flat),
    "columns-2": Setting(2, _columns),
    "hybrid-4": Setting(4, _hybrid),
    "tensor-2": Setting(2, _tensor_parallel),
    "tensor-4": Setting(4, _tensor_parallel),
    "experts-2": Setting(2, _experts_apart),
    "experts-4": Setting(4, _experts_apart),
    "strided-experts-4": Setting(4, functools.partial(_experts_apart, cut=0)),
    "offload-2": Setting(2, functools.partial(_flat, offload_policy=CPUOffloadPolicy(pin_memory=False))),
    "unsharded-2": Setting(2, functools.partial(_flat, reshard_after_forward=False)),
}
MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
"""bf16 computation on fp32 shards."""
