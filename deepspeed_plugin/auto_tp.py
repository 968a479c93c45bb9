"""This module describes a model before DeepSpeed's AutoTP cuts its weights, and what each rank holds afterwards.

DeepSpeed cuts the model while an engine is built, and changes what modules say of their heads: names, roles, shapes and
the matrices of fused weights are read before. How each weight was cut follows from DeepSpeed's map for its universal
checkpoints (:mod:`deepspeed_plugin.affine_maps`); some elements of every weight are compared with what they
were before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from deepspeed.checkpoint.constants import DS_AUTOTP_UC_META
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.utils import groups
from torch import Tensor, nn
from torch.nn import Parameter

from deepspeed_plugin.affine_maps import expert_shard, is_stack, tensor_parallel_shard
from rankwise.layout.agreement import together
from rankwise.layout.layout import LayoutError
from rankwise.layout.layout_source import TensorParallel
from rankwise.layout.tensor_parallel_shards import TensorParallelShard
from rankwise.routing.roles import ParameterInfo, Role, attach_info, describe, info_of
from rankwise.statistics.linear_views import LinearShape, LinearView, SummedPart, views_of

__all__ = ["Uncut", "is_cut", "linear_views", "recall", "shards", "tensor_parallel", "tensor_ranks", "uncut"]

_SAMPLES = 64
"""Number of elements of a weight that are compared once it is cut."""
_KNOWN = "_rankwise_uncut"
"""Attribute of a model that AutoTP has cut, with the description of its parameters from before."""


class Uncut(NamedTuple):
    """A parameter before AutoTP cuts it.

    Attributes:
        info: Description of the parameter.
        positions: Positions of some elements in the flattened parameter; None where it had no values.
        values: Values of these elements.
        cut: Whether a layer of DeepSpeed's, of which the model was built, had cut it already.
    """

    info: ParameterInfo
    positions: Tensor | None
    values: Tensor | None
    cut: bool = False


def is_cut(engine: DeepSpeedEngine) -> bool:
    """Whether AutoTP cuts the weights of an engine's model."""
    return tensor_ranks(engine) > 1


def tensor_ranks(engine: DeepSpeedEngine) -> int:
    """Return over how many ranks AutoTP cuts every weight; 1 without it."""
    return max(int(engine.autotp_size()), 1)


def uncut(model: nn.Module, shape_of: Callable[[Tensor], Any]) -> None:
    """Record the parameters of a model that AutoTP is about to cut, unless they were recorded before.

    Args:
        model: The model.
        shape_of: Returns the logical shape of a parameter.
    """
    if getattr(model, "ds_autotp_parsed", False):
        return
    infos = describe(model, shape_of)
    uncut_by_name = {
        name: _looked_at(replace(infos[parameter], name=name), parameter)
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }
    setattr(model, _KNOWN, uncut_by_name)


@torch.no_grad()
def _looked_at(info: ParameterInfo, parameter: Parameter) -> Uncut:
    if getattr(parameter, DS_AUTOTP_UC_META, None):
        return Uncut(info, None, None, cut=True)
    if parameter.is_meta or hasattr(parameter, "ds_id") or not parameter.numel() or is_stack(parameter):
        return Uncut(info, None, None)
    # The positions are not evenly spaced, because a stride that the width divides would see one column only.
    generator = torch.Generator().manual_seed(parameter.numel())
    size = (min(_SAMPLES, parameter.numel()),)
    drawn = torch.randint(parameter.numel(), size, generator=generator, dtype=torch.int64, device="cpu")
    positions = drawn.to(parameter.device)
    return Uncut(info, positions, parameter.detach().reshape(-1)[positions].clone())


def recall(model: nn.Module) -> None:
    """Attach to a cut model's parameters their descriptions from before.

    Raises:
        LayoutError: There is none, because the model was cut before this package was imported.
    """
    saved: Mapping[str, Uncut] = getattr(model, _KNOWN, {})
    for name, parameter in model.named_parameters():
        if name in saved and saved[name].cut:
            raise LayoutError(
                f"'{name}', of shape {saved[name].info.shape} here, was cut before deepspeed.initialize, by a layer of "
                "deepspeed.module_inject that the model was built with: what it is a part of is unknown. Build the "
                "model of torch's own layers, and let deepspeed.initialize cut them (tensor_parallel.autotp_size)."
            )
        if name not in saved:
            raise LayoutError(
                f"AutoTP has cut the model before deepspeed_plugin was imported, or renamed '{name}': its logical "
                "shapes are unknown. Import deepspeed_plugin before the first deepspeed.initialize of the model."
            )
        attach_info(parameter, saved[name].info)


def shards(model: nn.Module) -> dict[int, TensorParallelShard]:
    """Return what this rank holds of every parameter, by identity; a collective of the tensor-parallel ranks.

    Raises:
        LayoutError: On all these ranks: a weight is cut in a way that cannot be followed, a rank holds other elements
            than the map of cuts says, or weights that all ranks should hold differ.
    """
    saved: Mapping[str, Uncut] = getattr(model, _KNOWN, {})
    group: dist.ProcessGroup = groups.get_tensor_model_parallel_group()
    rank, ways = dist.get_rank(group), dist.get_world_size(group)

    def look() -> dict[int, TensorParallelShard]:
        shards_by_id = {}
        for name, parameter in model.named_parameters():
            shape = info_of(parameter, name, "").shape
            experts = expert_shard(name, parameter)
            shard = tensor_parallel_shard(name, parameter, shape, rank, ways) if experts is None else experts
            shards_by_id[id(parameter)] = shard
            _compare(saved[name], parameter, shard)
        return shards_by_id

    shards_by_id = together(look, group)
    _refuse_differing(model, shards_by_id, group)
    # Values are dropped, because another engine may be built around the model after it has been trained.
    setattr(model, _KNOWN, {name: Uncut(before.info, None, None) for name, before in saved.items()})
    return shards_by_id


@torch.no_grad()
def _compare(before: Uncut, parameter: Parameter, shard: TensorParallelShard) -> None:
    """Refuse a map by which the shard does not have the values of the weight before it was cut."""
    if before.positions is None or before.values is None or hasattr(parameter, "ds_id"):
        return
    flat, positions = parameter.detach().reshape(-1), before.positions.to(parameter.device)
    runs = [(0, 0, flat.numel())] if shard.is_whole else list(shard.positions())
    if not runs:
        return
    table = torch.tensor(sorted(runs), dtype=torch.int64, device=positions.device)
    starts, places, lengths = table.t().contiguous()
    at = (torch.searchsorted(starts, positions, right=True) - 1).clamp(min=0)
    inside = (positions >= starts[at]) & (positions < starts[at] + lengths[at])
    here = (places[at] + positions - starts[at])[inside]
    expected = before.values.to(flat)[inside]
    if not torch.allclose(flat[here], expected, rtol=0.0, atol=0.0, equal_nan=True):
        raise LayoutError(
            f"AutoTP's shard of '{before.info.name}' does not hold the elements that DeepSpeed's map of it names: the "
            "layer was cut in another way than it says, or its weights were changed while it was cut. Leave the layer "
            "whole (tensor_parallel.partition_config), or train the model without tensor_parallel."
        )


def _refuse_differing(model: nn.Module, found: Mapping[int, TensorParallelShard], group: dist.ProcessGroup) -> None:
    """Refuse whole weights that differ between tensor-parallel ranks, as DeepSpeed does not broadcast them there."""
    sums = {
        name: float(parameter.detach().double().sum())
        for name, parameter in model.named_parameters()
        if found[id(parameter)].is_whole and not hasattr(parameter, "ds_id")
    }
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, {name: repr(value) for name, value in sums.items()}, group=group)
    for name, value in everyone[0].items():
        if any(other.get(name) != value for other in everyone):
            raise LayoutError(
                f"'{name}' differs between tensor-parallel ranks, which all hold it whole: they must begin with the "
                "same weights, and DeepSpeed does not ensure this. Seed all ranks alike before the model is built, or "
                "load the same checkpoint on all."
            )


def tensor_parallel(everyone: dist.ProcessGroup) -> TensorParallel:
    """Return the tensor-parallel groups; a collective.

    Args:
        everyone: All ranks of the run.
    """
    return TensorParallel.among(everyone, groups.get_tensor_model_parallel_group())


# --- statistics ------------------------------------------------------------------------------------------------------


def linear_views(found: Mapping[int, TensorParallelShard]) -> Callable[[nn.Module], list[LinearView]]:
    """Return the function by which :class:`rankwise.statistics.hooks.Capture` describes every module.

    A rank sums the features that it holds over all tokens. If tensor-parallel ranks hold the same features, it sums its
    share of the tokens. The sums over all ranks are then those of one process.

    Args:
        found: What this rank holds of every parameter, from :func:`shards`.
    """

    def views(module: nn.Module) -> list[LinearView]:
        weight = getattr(module, "weight", None)
        if not isinstance(weight, Parameter) or id(weight) not in found:
            return []
        info, shard = info_of(weight, None, ""), found[id(weight)]
        if info.role is not Role.LINEAR or len(info.shape) != 2:
            return []
        outputs, inputs = info.logical_matrix_shape
        bias = getattr(module, "bias", None)
        described = views_of(module, LinearShape(inputs, outputs, info.transposed))
        given, made = _sides(weight, info, shard)
        return [replace(view, bias=bias, inputs=given, outputs=made) for view in described]

    return views


def _sides(weight: Parameter, info: ParameterInfo, shard: TensorParallelShard) -> tuple[SummedPart, SummedPart]:
    """Return the parts of a layer's input and of its output's gradient that this rank sums up."""
    if getattr(weight, "_ds_grad_allreduce_registered", False):
        # The weight is whole but applied to this rank's heads, so that no other rank sees these rows.
        return SummedPart(), SummedPart()
    by_rows = SummedPart(shard.rows, shard.share)
    by_columns = SummedPart(None if shard.columns is None else (shard.columns,), shard.share)
    return (by_rows, by_columns) if info.transposed else (by_columns, by_rows)
