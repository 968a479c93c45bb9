"""What ranks will hold under DeepSpeed's AutoTP: slices of rows or columns, cut over data-parallel ranks by ZeRO."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import nn

from rankwise.estimate import cut_by_stage
from rankwise.launch.planning.cluster import Cluster
from rankwise.launch.planning.fsdp import tensor_parallel_dims
from rankwise.launch.planning.megatron import Part, slices_of_part
from rankwise.layout.layout_source import TensorContents

__all__ = ["contents_under_autotp", "parts_under_autotp"]


def parts_under_autotp(model: nn.Module, parameters: Mapping[str, torch.Tensor], tp: int) -> list[Part]:
    """How AutoTP cuts a model of Hugging Face's by its plan.

    An embedding stays whole, unless the output head has the same weight.

    Args:
        model: A model whose layers have the names of Llama's.
        parameters: In the optimizer's order, by name.
        tp: Tensor-parallel ranks.

    Raises:
        ValueError: No layer of the model is known to be cut, or one cannot be cut equally.
    """
    cuts = tensor_parallel_dims(model)
    heads = {id(module.weight) for module in model.modules() if isinstance(module, nn.Linear)}
    for path, module in model.named_modules():
        if isinstance(module, nn.Embedding) and id(module.weight) not in heads:
            cuts.pop(f"{path}.weight", None)
    found = []
    for name, parameter in parameters.items():
        dim, shape = cuts.get(name), tuple(parameter.shape)
        if dim is not None and shape[dim] % tp:
            raise ValueError(f"tp is {tp}: it must divide dimension {dim} of {name}, which is {shape[dim]}")
        found.append(Part(name, shape, dim))
    return found


def contents_under_autotp(parts: list[Part], cluster: Cluster, alignment: int) -> list[list[TensorContents]]:
    """What every rank stores, tensor-parallel ranks next to each other; all parameters in one param group.

    Args:
        parts: See :func:`parts_under_autotp`.
        cluster: With a ZeRO stage.
        alignment: Alignment of partitions at stages 1 and 2, in elements.
    """
    assert cluster.stage is not None
    known = {part.name: part for part in parts}
    shards = {part.name: part.shard(cluster.tp) for part in parts}
    found = []
    for data, runs in enumerate(cut_by_stage(shards, cluster.dp, cluster.stage, alignment)):
        copy = data if cluster.stage == 0 else 0
        for rank in range(cluster.tp):
            slices = [
                replace(piece, offset=run.offset + piece.offset)
                for run in runs
                for piece in slices_of_part(known[run.key], cluster.tp, rank, run.start, run.end, copy)
            ]
            found.append([TensorContents(0, tuple(slices))])
    return found
