"""This module computes Megatron's names, cuts and buffers from a model's sizes, and so what its ranks will hold.

The parameters of a pipeline stage are those of GPTModel with its local layers, in the order in which its modules are
made; buffers are filled from the last one, as ``_ParamAndGradBuffer`` does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn

from megatron_patches.fused_weights import fused_parts
from rankwise.launch.planning.cluster import Cluster
from rankwise.launch.planning.model_shapes import Sizes
from rankwise.layout.layout_source import LayoutSource, Slice, TensorContents, TensorParallel
from rankwise.layout.tensor_parallel_shards import TensorParallelShard
from rankwise.routing.fused_shape import FusedShape

__all__ = [
    "Part",
    "StageSource",
    "Wrapped",
    "rank_contents",
    "stage_model",
    "stage_parts",
    "vocabulary",
    "wrapped",
]

_ALIGNED = 64  # elements, at the start of a parameter in a buffer
_BUCKET_END = 128
_BUCKET, _BUCKET_PER_RANK = 40_000_000, 1_000_000


class Part(NamedTuple):
    """One parameter of a stage.

    Attributes:
        name: Megatron's name, numbered through all stages.
        shape: Shape before tensor parallelism.
        dim: Dimension that tensor parallelism cuts; None where every rank has the whole.
        strips: Number of equal sections, of each of which a rank has a piece.
        apart: Whether it has a bucket of its own, as the embedding has that the last stage shares.
        fused: Its logical matrices, if it holds several.
        chunk: Model chunk of the stage that holds it.
        expert: Number of the expert in its layer, over all ranks; None if it is no expert's.
    """

    name: str
    shape: tuple[int, ...]
    dim: int | None = None
    strips: int = 1
    apart: bool = False
    fused: FusedShape | None = None
    chunk: int = 0
    expert: int | None = None

    def shard(self, tp: int) -> int:
        """Return the number of elements on one tensor-parallel rank."""
        return math.prod(self.shape) // (1 if self.dim is None else tp)

    def slices(self, tp: int, rank: int, run: tuple[int, int], offset: int, copy: int) -> list[Slice]:
        """Return a run of elements of a tensor-parallel rank's shard in terms of the parameter."""
        local = tuple(size // tp if axis == self.dim else size for axis, size in enumerate(self.shape))
        sections = (local[0] // self.strips,) * self.strips
        return TensorParallelShard.cut(local, self.dim, rank, tp, sections).slices(self.name, *run, offset, copy)


def vocabulary(sizes: Sizes, tp: int) -> int:
    """Return the number of token ids as Megatron pads it."""
    unit = 128 * tp
    return -(-sizes.vocab // unit) * unit


def stage_parts(sizes: Sizes, cluster: Cluster, stage: int, vocab: int | None = None) -> list[Part]:
    """Return the parameters of a pipeline stage, in the order of its modules.

    Args:
        sizes: Sizes of the model.
        cluster: Ranks over which the model is cut.
        stage: Number of the stage.
        vocab: Number of token ids; None: padded as Megatron does.

    Raises:
        ValueError: The sizes cannot be cut so.
    """
    for name, size, ways in (
        ("layers", sizes.layers, cluster.pp * cluster.vpp),
        ("heads", sizes.heads, cluster.tp),
        ("kv_heads", sizes.kv_heads, cluster.tp),
        ("ffn", sizes.ffn, cluster.tp),
        ("experts", sizes.experts, cluster.ep),
        ("expert_ffn", sizes.expert_ffn, cluster.expert_tp),
    ):
        if size % ways:
            raise ValueError(f"{name} is {size}: {ways} ranks, stages or chunks must divide it")
    if cluster.ep > 1 and not sizes.experts:
        raise ValueError(f"ep is {cluster.ep} and the model has no experts: leave it out, or say how many")
    last = cluster.pp * cluster.vpp - 1
    count = sizes.layers // (last + 1)
    all_parts: list[Part] = []
    for chunk in range(cluster.vpp):
        position = chunk * cluster.pp + stage  # among all chunks of the model
        layers = range(position * count, (position + 1) * count)
        parts = _chunk(sizes, cluster, layers, (position == 0, position == last), vocab)
        all_parts += [part._replace(chunk=chunk) for part in parts]
    return all_parts


def _chunk(sizes: Sizes, cluster: Cluster, layers: range, ends: tuple[bool, bool], vocab: int | None) -> Iterator[Part]:
    tied = sizes.tied and cluster.pp > 1
    words = Part("embedding.word_embeddings.weight", (vocab or vocabulary(sizes, cluster.tp), sizes.hidden), 0, 1, tied)
    first, last = ends
    if first:
        yield words
        if sizes.family == "gpt2":
            yield Part("embedding.position_embeddings.weight", (sizes.positions, sizes.hidden))
    for layer in layers:
        yield from _layer(sizes, cluster, f"decoder.layers.{layer}.")
    if last:
        yield from _norm(sizes, "decoder.final_layernorm")
        if not sizes.tied:
            yield Part("output_layer.weight", words.shape, 0)
        elif not first:
            yield words  # its copy


def _norm(sizes: Sizes, name: str) -> list[Part]:
    names = ("weight", "bias") if sizes.family == "gpt2" else ("weight",)
    return [Part(f"{name}.{end}", (sizes.hidden,)) for end in names]


def _linear(
    sizes: Sizes, name: str, shape: tuple[int, int], dim: int, strips: int = 1, fused: FusedShape | None = None
) -> list[Part]:
    weight = Part(f"{name}.weight", shape, dim, strips, fused=fused)
    if sizes.family != "gpt2":
        return [weight]
    return [weight, Part(f"{name}.bias", shape[:1], 0 if dim == 0 else None)]


def _layer(sizes: Sizes, cluster: Cluster, prefix: str) -> list[Part]:
    hidden, size = sizes.hidden, sizes.hidden // sizes.heads
    gated = 2 if sizes.family == "llama" else 1
    config = SimpleNamespace(
        num_attention_heads=sizes.heads,
        num_query_groups=sizes.kv_heads,
        kv_channels=size,
        ffn_hidden_size=sizes.ffn,
        moe_ffn_hidden_size=sizes.expert_ffn,
        gated_linear_unit=gated == 2,
    )
    owner: Any = SimpleNamespace(config=config)

    def joined(path: str, rows: int, strips: int = 1, tp: int = cluster.tp) -> list[Part]:
        shape = (rows, hidden)
        return _linear(sizes, path, shape, 0, strips, fused_parts(path.rpartition(".")[2], owner, shape, tp, strips))

    def mlp(path: str, ffn: int, tp: int = cluster.tp) -> list[Part]:
        second = _linear(sizes, f"{path}.linear_fc2", (hidden, ffn), 1)
        return [*joined(f"{path}.linear_fc1", gated * ffn, gated, tp), *second]

    attention, inner = f"{prefix}self_attention.linear_", f"{prefix}mlp"
    layer_parts = [
        *_norm(sizes, f"{prefix}input_layernorm"),
        *_linear(sizes, f"{attention}proj", (hidden, sizes.heads * size), 1),
        *joined(f"{attention}qkv", (sizes.heads + 2 * sizes.kv_heads) * size),
        *_norm(sizes, f"{prefix}pre_mlp_layernorm"),
    ]
    if not sizes.experts:
        return layer_parts + mlp(inner, sizes.ffn)
    layer_parts.append(Part(f"{inner}.router.weight", (sizes.experts, hidden)))
    for expert in range(sizes.experts):
        parts = mlp(f"{inner}.experts.local_experts.{expert}", sizes.expert_ffn, cluster.expert_tp)
        layer_parts += [part._replace(expert=expert) for part in parts]
    return layer_parts


def stage_model(parts: Sequence[Part]) -> nn.Module:
    """Return modules on the meta device with these parameters, whole, under these names."""
    root = nn.Module()
    with torch.device("meta"):
        for part in parts:
            *path, leaf, kind = part.name.split(".")
            parent = root
            for name in path:
                if name not in dict(parent.named_children()):
                    parent.add_module(name, nn.Module())
                parent = parent.get_submodule(name)
            if kind == "weight":
                parent.add_module(leaf, _module(leaf, part.shape))
            else:
                parent.get_submodule(leaf).register_parameter(kind, nn.Parameter(torch.empty(part.shape)))
    return root


def _module(name: str, shape: tuple[int, ...]) -> nn.Module:
    if len(shape) == 1:
        return nn.RMSNorm(shape)
    rows, columns = shape
    if name == "router":
        module = nn.Module()
        module.register_parameter("weight", nn.Parameter(torch.empty(shape)))
        return module
    return nn.Embedding(rows, columns) if name.endswith("embeddings") else nn.Linear(columns, rows, bias=False)


class Wrapped(NamedTuple):
    """What one of Megatron's optimizers holds on the ranks that share it.

    Attributes:
        parts: Parameters of the optimizer.
        cluster: Ranks over which they are cut.
        places: Places of these ranks in the stage.
    """

    parts: list[Part]
    cluster: Cluster
    places: Sequence[int]


def wrapped(parts: Sequence[Part], cluster: Cluster) -> Iterator[Wrapped]:
    """Yield a stage's parameters by optimizer: one for all, or one per share of the experts and one for the others.

    Args:
        parts: Parameters of the stage.
        cluster: Ranks over which the stage is cut.
    """
    shared = cluster.ep > 1
    others = [part for part in parts if part.expert is None or not shared]
    yield Wrapped(others, cluster, range(cluster.tp * cluster.dp))
    experts = [part for part in parts if part.expert is not None]
    count = 1 + max((part.expert or 0 for part in experts), default=0)
    for share in range(cluster.ep if shared and experts else 0):
        owned = [part for part in experts if (part.expert or 0) * cluster.ep // count == share]
        yield Wrapped(owned, cluster.of_experts, cluster.expert_places(share))


class StageSource(LayoutSource):
    """The source of an imagined rank of a stage, with tensor-parallel groups and the use of gradients.

    Args:
        cluster: Ranks of the stage.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.group = None
        self.spends_gradients = cluster.distributed or cluster.precision != "fp32"
        if cluster.tp > 1:
            sets = (tuple(range(first * cluster.tp, (first + 1) * cluster.tp)) for first in range(cluster.dp))
            self.tensor_parallel = TensorParallel(tuple(sets), None)

    def contents(self, tensor: torch.Tensor) -> TensorContents:
        """No rank has tensors here."""
        raise NotImplementedError("an imagined rank has no tensors")


def rank_contents(
    parts: Sequence[Part], groups: Mapping[str, int], cluster: Cluster, stage: int, bucket: int | None = None
) -> list[list[TensorContents]]:
    """Return what the tensors of every rank of a stage store, tensor-parallel ranks next to each other.

    Args:
        parts: Parameters of the stage.
        groups: Param group of each parameter, by name.
        cluster: Ranks over which the stage is cut.
        stage: Number of the stage. The first stage's first chunk has several buckets, every other chunk has one.
        bucket: Elements of a bucket; None: Megatron's default.
    """
    contents_of_ranks = []
    buckets = list(_all_buckets(parts, cluster, stage, bucket)) if cluster.distributed else []
    for data in range(cluster.dp):
        held = dict(_shard(buckets, cluster.dp, data)) if cluster.distributed else {}
        for rank in range(cluster.tp):
            contents = []
            for part in parts:
                start, end = held.get(part.name, (0, 0)) if cluster.distributed else (0, part.shard(cluster.tp))
                if start < end:
                    copy = 0 if cluster.distributed else data
                    slices = part.slices(cluster.tp, rank, (start, end), 0, copy)
                    contents.append(TensorContents(groups[part.name], tuple(slices)))
            contents_of_ranks.append(contents)
    return contents_of_ranks


class _Range(NamedTuple):
    start: int
    end: int
    places: dict[str, tuple[int, int]]  # ranges of parameters in the buffer


def _all_buckets(parts: Sequence[Part], cluster: Cluster, stage: int, bucket: int | None) -> Iterator[_Range]:
    """Yield the buckets of every chunk's buffer."""
    most = bucket or max(_BUCKET, _BUCKET_PER_RANK * cluster.dp)
    for chunk in sorted({part.chunk for part in parts}):
        several = cluster.overlap and stage == 0 and chunk == 0
        yield from _buckets([part for part in parts if part.chunk == chunk], cluster, most if several else None)


def _buckets(parts: Sequence[Part], cluster: Cluster, limit: int | None) -> list[_Range]:
    divisor = math.lcm(cluster.dp, _BUCKET_END)
    ranges: list[_Range] = []
    begin = position = 0
    places: dict[str, tuple[int, int]] = {}

    def close(end: int) -> int:
        nonlocal begin, places
        ranges.append(_Range(begin, -(-end // divisor) * divisor, places))
        begin, places = ranges[-1].end, {}
        return begin

    for part in reversed(parts):
        position = -(-position // _ALIGNED) * _ALIGNED
        if part.apart and places:
            position = close(position)
        places[part.name] = (position, position + part.shard(cluster.tp))
        position += part.shard(cluster.tp)
        if part.apart or (limit is not None and position - begin >= limit):
            position = close(position)
    if places:
        close(position)
    return ranges


def _shard(buckets: Sequence[_Range], ways: int, rank: int) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield, for each parameter, its elements in a data-parallel rank's part of its bucket."""
    for bucket in buckets:
        size = (bucket.end - bucket.start) // ways
        first = bucket.start + rank * size
        for name, (start, end) in bucket.places.items():
            low, high = max(start, first), min(end, first + size)
            if low < high:
                yield name, (low - start, high - start)
