"""What ranks will hold under DeepSpeed's AutoTP: slices of rows or columns, cut over data-parallel ranks by ZeRO."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import nn

from rankwise.launch.planning.cluster import Cluster
from rankwise.launch.planning.fsdp import tensor_parallel_dims
from rankwise.launch.planning.megatron import Part, slices_of_part
from rankwise.sharding.layout_source import Slice, TensorContents

__all__ = ["contents_under_autotp", "parts_under_autotp"]


def parts_under_autotp(model: nn.Module, parameters: Mapping[str, torch.Tensor], tp: int) -> list[Part]:
    """How AutoTP cuts a model of Hugging Face's by its plan.

    An embedding stays whole, unless the output head has the same weight.

    Args:
        model: Whose layers have the names of Llama's.
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
    found = []
    for data in range(cluster.dp):
        runs = list(_runs(parts, cluster, data, alignment))
        for rank in range(cluster.tp):
            slices: list[Slice] = []
            position = 0
            for part, start, end in runs:
                copy = data if cluster.stage == 0 else 0
                for piece in slices_of_part(part, cluster.tp, rank, start, end, copy):
                    slices.append(replace(piece, offset=position + piece.offset))
                position += end - start
            found.append([TensorContents(0, tuple(slices))])
    return found


def _runs(parts: list[Part], cluster: Cluster, data: int, alignment: int) -> Iterator[tuple[Part, int, int]]:
    """The elements of every flattened shard that a data-parallel rank has."""
    sizes = [part.shard(cluster.tp) for part in parts]
    share = -(-sum(sizes) // (cluster.dp * alignment)) * alignment
    position = 0
    for part, size in zip(parts, sizes, strict=True):
        if cluster.stage == 0:
            start, end = 0, size
        elif cluster.stage == 3:
            piece = -(-size // cluster.dp)
            start, end = min(data * piece, size), min((data + 1) * piece, size)
        else:
            start, end = max(data * share - position, 0), min((data + 1) * share - position, size)
        if start < end:
            yield part, start, end
        position += size
