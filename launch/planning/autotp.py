"""Under DeepSpeed's AutoTP ranks hold slices of rows or columns, which ZeRO cuts over data-parallel ranks."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from rankwise.estimate import cut_by_stage
from rankwise.launch.planning.cluster import Cluster
from rankwise.launch.planning.fsdp import tensor_parallel_dims
from rankwise.launch.planning.megatron import Part
from rankwise.layout.layout_source import TensorContents

__all__ = ["contents_under_autotp", "parts_under_autotp"]


def parts_under_autotp(model: nn.Module, parameters: Mapping[str, torch.Tensor], tp: int) -> list[Part]:
    """Return how AutoTP cuts a model of Hugging Face's by its plan.

    An embedding stays whole, unless the output head shares its weight.

    Args:
        model: Model whose layers have the names of Llama's.
        parameters: Parameters by name, in the optimizer's order.
        tp: Number of tensor-parallel ranks.

    Raises:
        ValueError: No layer of the model is known to be cut, or one cannot be cut equally.
    """
    cuts = tensor_parallel_dims(model)
    heads = {id(module.weight) for module in model.modules() if isinstance(module, nn.Linear)}
    for path, module in model.named_modules():
        if isinstance(module, nn.Embedding) and id(module.weight) not in heads:
            cuts.pop(f"{path}.weight", None)
    parts = []
    for name, parameter in parameters.items():
        dim, shape = cuts.get(name), tuple(parameter.shape)
        if dim is not None and shape[dim] % tp:
            raise ValueError(f"tp is {tp}: it must divide dimension {dim} of {name}, which is {shape[dim]}")
        parts.append(Part(name, shape, dim))
    return parts


def contents_under_autotp(parts: list[Part], cluster: Cluster, alignment: int) -> list[list[TensorContents]]:
    """Return what every rank stores, tensor-parallel ranks next to each other, with all parameters in one group.

    Args:
        parts: Parts from :func:`parts_under_autotp`.
        cluster: Ranks, with a ZeRO stage.
        alignment: Alignment of partitions at stages 1 and 2, in elements.
    """
    assert cluster.stage is not None
    parts_by_name = {part.name: part for part in parts}
    shards = {part.name: part.shard(cluster.tp) for part in parts}
    contents_of_ranks = []
    for data, runs in enumerate(cut_by_stage(shards, cluster.dp, cluster.stage, alignment)):
        copy = data if cluster.stage == 0 else 0
        for rank in range(cluster.tp):
            slices = [
                piece
                for run in runs
                for piece in parts_by_name[run.key].slices(cluster.tp, rank, (run.start, run.end), run.offset, copy)
            ]
            contents_of_ranks.append([TensorContents(0, tuple(slices))])
    return contents_of_ranks
