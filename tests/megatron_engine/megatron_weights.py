"""Weights of a Megatron model by the names and shapes of the unsharded model, cut for a rank and put together again."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformer_engine_names import cut_by_name, is_of_transformer_engine, local_name

EXPERT = re.compile(r"(?<=local_experts\.)\d+")
LAYER = re.compile(r"(?<=decoder\.layers\.)\d+")
TIED_COPY, TIED = "output_layer.weight", "embedding.word_embeddings.weight"


@dataclass(frozen=True)
class Cut:
    """The part of one unsharded weight that a rank holds.

    Attributes:
        name: Its name in the unsharded model.
        shape: The unsharded shape.
        dim: Dimension cut by tensor parallelism; None if the rank holds the whole weight.
        index: Positions along ``dim`` that the rank holds, in its order.
        rows: Rows [first, last) of that which the rank holds, where they are cut once more, and how many it stores:
            what is missing are zeros; None if it holds all.
    """

    name: str
    shape: tuple[int, ...]
    dim: int | None
    index: Tensor | None
    rows: tuple[int, int, int] | None = None

    def of(self, full: Tensor) -> Tensor:
        part = full if self.dim is None else full.index_select(self.dim, self.index)
        if self.rows is None:
            return part
        first, last, stored = self.rows
        return torch.cat([part[first:last], part.new_zeros(stored - (last - first), *part.shape[1:])])

    def into(self, full: Tensor, part: Tensor) -> None:
        if self.rows is not None:
            first, last, _ = self.rows
            whole = full.clone() if self.dim is None else full.index_select(self.dim, self.index)
            whole[first:last] = part[: last - first]
            part = whole
        full.copy_(part) if self.dim is None else full.index_copy_(self.dim, self.index, part)


def bare(module: nn.Module) -> nn.Module:
    """The GPTModel inside Megatron's wrappers."""
    while hasattr(module, "module"):
        module = module.module
    return module


def cuts(model: nn.Module, tied: bool) -> Iterator[tuple[nn.Parameter, Cut]]:
    """Every parameter of a model chunk, in its order, and what it is of the unsharded model."""
    model = bare(model)
    for name, parameter in model.named_parameters():
        expert = not getattr(parameter, "allreduce", True)
        rank, size = tensor_rank(expert)
        shape, dim, index, rows = list(parameter.shape), None, None, None
        if getattr(parameter, "is_gtp_weight_remat", False):
            ranks, stored = parameter.group.size(), shape[0]
            first, shape[0] = parameter.group.rank() * stored, stored * ranks - parameter.pad_length
            rows = (min(first, shape[0]), min(first + stored, shape[0]), stored)
        dim, strips = _dimension(model, name, parameter) if size > 1 else (None, 1)
        if dim is not None:
            shape[dim] *= size
            index = _positions(shape[dim], strips, rank, size)
        yield parameter, Cut(unsharded_name(model, name, tied), tuple(shape), dim, index, rows)


def _dimension(model: nn.Module, name: str, parameter: nn.Parameter) -> tuple[int | None, int]:
    if is_of_transformer_engine(model, name):
        return cut_by_name(model, name)
    if not getattr(parameter, "tensor_model_parallel", False):
        return None, 1
    return parameter.partition_dim, parameter.partition_stride


def tensor_rank(expert: bool) -> tuple[int, int]:
    """This rank among those that share an expert's, or another, weight by tensor parallelism, and their number."""
    if expert:
        return mpu.get_expert_tensor_parallel_rank(), mpu.get_expert_tensor_parallel_world_size()
    return mpu.get_tensor_model_parallel_rank(), mpu.get_tensor_model_parallel_world_size()


def _positions(length: int, stride: int, rank: int, size: int) -> Tensor:
    """The rank's share of each of ``stride`` stacked blocks: gate and up of a gated linear unit are two."""
    return torch.arange(length).view(stride, size, -1)[:, rank].flatten()


def unsharded_name(model: nn.Module, name: str, tied: bool) -> str:
    """What a parameter of this rank's model is called in the unsharded one."""
    name = local_name(name)
    if tied and name == TIED_COPY:
        return TIED
    if found := LAYER.search(name):
        layer = model.decoder.layers[int(found.group())].layer_number - 1
        name = LAYER.sub(str(layer), name)
    if found := EXPERT.search(name):
        per_rank = model.config.num_moe_experts // mpu.get_expert_model_parallel_world_size()
        name = EXPERT.sub(str(int(found.group()) + per_rank * mpu.get_expert_model_parallel_rank()), name)
    return name


def initial(name: str, shape: tuple[int, ...]) -> Tensor:
    """Initial value of an unsharded weight: a function of its name and shape alone."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big")
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    if len(shape) == 1:
        return 0.02 * noise + (1.0 if name.endswith("norm.weight") else 0.0)
    return noise * (0.1 if "embedding" in name else shape[1] ** -0.5)


@torch.no_grad()
def main_weight(parameter: nn.Parameter, optimizers: list[MegatronOptimizer]) -> Tensor:
    """The fp32 weight an optimizer keeps for a parameter, in the parameter's shape; the parameter if it keeps none."""
    if is_of_megatrons_fsdp(parameter):
        return whole_of_megatrons_fsdp(parameter)
    if owner := distributed(parameter, optimizers):

        def shard(span: slice) -> Tensor:
            group, order = owner.model_param_group_index_map[parameter]
            return owner.optimizer.param_groups[group]["params"][order]

        return assembled(parameter, owner, shard)
    if parameter.dtype in (torch.float32, torch.float64):
        return model_weight(parameter, optimizers)
    return _main_copy(parameter)


def _main_copy(parameter: nn.Parameter) -> Tensor:
    """The fp32 copy of a half-precision weight: this rank's own, or that of the one rank that has any (layer-wise)."""
    main = getattr(parameter, "main_param", None)
    expert = not getattr(parameter, "allreduce", True)
    group = mpu.get_expert_data_parallel_group() if expert else mpu.get_data_parallel_group(with_context_parallel=True)
    if isinstance(main, DTensor):
        return main.detach().full_tensor()
    holders = torch.tensor(float(main is not None))
    dist.all_reduce(holders, group=group)
    if holders == dist.get_world_size(group):
        return main.detach().clone()
    assert holders == 1, f"{holders:.0f} data-parallel ranks hold main weights of one parameter"
    only = torch.zeros_like(parameter, dtype=torch.float32) if main is None else main.detach().clone()
    dist.all_reduce(only, group=group)
    return only


@torch.no_grad()
def model_weight(parameter: Tensor, optimizers: list[MegatronOptimizer]) -> Tensor:
    """The weight of the model itself, in fp32 or wider."""
    if is_of_megatrons_fsdp(parameter):
        return whole_of_megatrons_fsdp(parameter)
    return _wide(_whole(parameter.detach())).clone()


@torch.no_grad()
def reduced_gradient(parameter: nn.Parameter, optimizers: list[MegatronOptimizer]) -> Tensor:
    """The gradient after data-parallel reduction, without the loss scale, before clipping."""
    scale = 1.0 / optimizers[0].get_loss_scale()
    if owner := distributed(parameter, optimizers):
        return scale * assembled(parameter, owner, lambda span: parameter.main_grad.view(-1)[span])
    return scale * _wide(_whole(parameter.grad) if isinstance(parameter, DTensor) else parameter.main_grad)


def _whole(values: Tensor) -> Tensor:
    """All ranks' rows under FSDP2."""
    return values.full_tensor() if isinstance(values, DTensor) else values


def is_of_megatrons_fsdp(parameter: Any) -> bool:
    """Whether Megatron's own FSDP, of either version, has cut a parameter."""
    return hasattr(parameter, "orig_param") or hasattr(parameter, "_mfsdp_parameter_group")


def whole_of_megatrons_fsdp(parameter: Any) -> Tensor:
    """A parameter of Megatron's own FSDP, put together from its ranks' rows in their order."""
    local, shape = parameter._local_tensor.detach(), getattr(parameter, "orig_param", parameter).shape
    if not any(placement.is_shard() for placement in parameter.placements):
        return _wide(local).clone().view(shape)
    inner = mpu.get_data_parallel_rank(with_context_parallel=True, partial_data_parallel=True)
    everyone = mpu.get_data_parallel_group(with_context_parallel=True)
    ranks = dist.get_world_size(mpu.get_data_parallel_group(with_context_parallel=True, partial_data_parallel=True))
    outer = dist.get_rank(everyone) // ranks
    parts: list[tuple[int, int, Tensor]] = [(0, 0, local)] * dist.get_world_size(everyone)
    dist.all_gather_object(parts, (inner, outer, local), group=everyone)
    if sum(part.numel() for _, _, part in parts) > shape.numel():  # outer ranks have copies
        parts = [part for part in parts if part[1] == outer]
    # Inner ranks are cut first.
    rows = [part.flatten() for _, _, part in sorted(parts, key=lambda part: part[:2])]
    assert sum(map(torch.numel, rows)) == shape.numel(), (shape, [(i, o, part.shape) for i, o, part in parts])
    return _wide(torch.cat(rows)).view(shape)


def _wide(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))


def distributed(parameter: nn.Parameter, optimizers: list[MegatronOptimizer]) -> DistributedOptimizer | None:
    """The distributed optimizer that updates a parameter."""
    for optimizer in optimizers:
        if isinstance(optimizer, DistributedOptimizer) and any(
            parameter in b.param_to_bucket for b in optimizer.buffers
        ):
            return optimizer
    return None


def assembled(parameter: nn.Parameter, owner: DistributedOptimizer, shard: Callable[[slice], Tensor]) -> Tensor:
    """A whole tensor from the data-parallel ranks' shards of it, which do not overlap."""
    flat = torch.zeros(parameter.numel(), dtype=torch.promote_types(parameter.dtype, torch.float32))
    if parameter in owner.model_param_group_index_map:
        local = owner._get_model_param_range_map(parameter)["param"]
        span = slice(local.start, local.end)
        flat[span] = shard(span)
    dist.all_reduce(flat, group=owner.data_parallel_group)
    return flat.view(parameter.shape)


def gathered(parts: list[tuple[Cut, Tensor]]) -> tuple[dict[str, Tensor], float]:
    """Unsharded weights on rank 0, put together from every rank's parts; empty on the others.

    Returns:
        The weights by name, and the largest difference between two ranks' values of the same element.
    """
    everyone: list[list[tuple[Cut, Any]]] | None = [[]] * dist.get_world_size() if dist.get_rank() == 0 else None
    # numpy is pickled in a fraction of the time.
    dist.gather_object([(cut, part.detach().numpy()) for cut, part in parts], everyone)
    weights: dict[str, Tensor] = {}
    gap = 0.0
    for cut, values in (item for rank in everyone or [] for item in rank):
        part = torch.from_numpy(values)
        full = weights.setdefault(cut.name, torch.full(cut.shape, torch.nan, dtype=part.dtype))
        assert full.shape == cut.shape, (cut.name, full.shape, cut.shape)
        difference = (cut.of(full) - part).abs().nan_to_num(0.0)
        gap = max(gap, difference.max().item())
        cut.into(full, part)
    for name, full in weights.items():
        assert not full.isnan().any(), f"no rank holds all of {name}, or training diverged"
    return weights, gap
