"""One network with fused weights and its twin with a weight for each matrix, under simulated frameworks.

Which rows of a fused weight are whose is written down here row by row, apart from the table of blocks under test.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from simulated import Conv1D, run_of
from torch import Tensor, nn

from rankwise import MARS, MKOR, LDAdam
from rankwise.layout.layout_source import LayoutSource, Slice, TensorContents, TensorParallel
from rankwise.routing.fused_shape import FusedShape
from rankwise.routing.roles import ParameterInfo, Role, attach_info
from rankwise.step.optimizer import ShardedOptimizer

INPUTS, TOKENS = 14, 24
Named = dict[str, Tensor]


@dataclass(frozen=True)
class Layer:
    """A fused layer: the rows of each part, its table, whether it is a Conv1D, and what tensor parallelism cuts.

    A stack of experts has the rows of one below those of the other.
    """

    rows: Mapping[str, list[int]]
    fused: FusedShape
    transposed: bool = False
    bias: bool = True
    experts: int = 0
    # Of two tensor-parallel ranks: the runs of rows each of them holds.
    shards: tuple[tuple[tuple[int, int], ...], ...] = ()

    @property
    def outputs(self) -> int:
        return sum(map(len, self.rows.values()))


LAYERS = {
    # Contiguous rows of three sizes.
    "qkv": Layer(
        {"q": [*range(12)], "k": [*range(12, 20)], "v": [*range(20, 26)]},
        FusedShape((("q", 12), ("k", 8), ("v", 6))),
        shards=(((0, 6), (12, 16), (20, 23)), ((6, 12), (16, 20), (23, 26))),
    ),
    # GPT-2's: columns of a weight that is (inputs, outputs).
    "conv": Layer(
        {"q": [*range(8)], "k": [*range(8, 16)], "v": [*range(16, 24)]},
        FusedShape((("q", 8), ("k", 8), ("v", 8)), -1),
        transposed=True,
        shards=(((0, 12),), ((12, 24),)),
    ),
    # Megatron's: for each of two key-value heads four queries, a key and a value of three rows.
    "groups": Layer(
        {
            "q": [*range(12), *range(18, 30)],
            "k": [12, 13, 14, 30, 31, 32],
            "v": [15, 16, 17, 33, 34, 35],
        },
        FusedShape((("q", 12), ("k", 3), ("v", 3)), -2, 2, (4, 1, 1)),
        bias=False,
        shards=(((0, 18),), ((18, 36),)),
    ),
    # Megatron's gated linear_fc1: every tensor-parallel rank has some of the gate over some of the other projection.
    "gate_up": Layer(
        {"gate": [*range(16)], "up": [*range(16, 32)]},
        FusedShape((("gate", 16), ("up", 16))),
        shards=(((0, 8), (16, 24)), ((8, 16), (24, 32))),
    ),
    # Rows that alternate.
    "alternating": Layer(
        {"gate": [0, 2, 4, 6, 8, 10, 12, 14], "up": [1, 3, 5, 7, 9, 11, 13, 15]},
        FusedShape((("gate", 1), ("up", 1)), -2, 8),
        bias=False,
        shards=(((0, 8),), ((8, 16),)),
    ),
    # Latent attention's: what keys and values are made of, and the keys' part that has positions.
    "down": Layer(
        {"kv": [*range(10)], "rope": [*range(10, 16)]},
        FusedShape((("kv", 10), ("rope", 6))),
        bias=False,
        shards=(((0, 8),), ((8, 16),)),
    ),
    # Two experts, a gate over the other projection in each.
    "stack": Layer(
        {"gate0": [*range(7)], "up0": [*range(7, 14)], "gate1": [*range(14, 21)], "up1": [*range(21, 28)]},
        FusedShape((("gate", 7), ("up", 7))),
        bias=False,
        experts=2,
        shards=(((0, 7), (14, 21)), ((7, 14), (21, 28))),
    ),
    # One matrix for each head: of two key-value heads two queries, a key and a value of six rows.
    "grouped_heads": Layer(
        {
            **{f"q{head}": [*range(start, start + 6)] for head, start in enumerate((0, 6, 24, 30))},
            **{f"k{head}": [*range(start, start + 6)] for head, start in enumerate((12, 36))},
            **{f"v{head}": [*range(start, start + 6)] for head, start in enumerate((18, 42))},
        },
        FusedShape((("q", 12), ("k", 6), ("v", 6)), -2, 2, (2, 1, 1)),
        bias=False,
        shards=(((0, 24),), ((24, 48),)),
    ),
    # The same of columns, two heads of six.
    "column_heads": Layer(
        {
            f"{part}{head}": [*range(12 * at + 6 * head, 12 * at + 6 * head + 6)]
            for at, part in enumerate("qkv")
            for head in range(2)
        },
        FusedShape((("q", 12), ("k", 12), ("v", 12)), -1, 1, (2, 2, 2)),
        transposed=True,
        shards=(((0, 18),), ((18, 36),)),
    ),
    # Latent attention's other: for each of two heads a key of seven rows and a value of six.
    "latent_heads": Layer(
        {
            **{f"k{head}": [*range(13 * head, 13 * head + 7)] for head in range(2)},
            **{f"v{head}": [*range(13 * head + 7, 13 * head + 13)] for head in range(2)},
        },
        FusedShape((("k", 7), ("v", 6)), -2, 2, (1, 1)),
        bias=False,
        shards=(((0, 13),), ((13, 26),)),
    ),
    # A layer of queries alone: three heads of six rows, of which tensor parallelism cuts the second.
    "lone_heads": Layer(
        {f"q{head}": [*range(6 * head, 6 * head + 6)] for head in range(3)},
        FusedShape((("q", 18),), heads=(3,)),
        shards=(((0, 9),), ((9, 18),)),
    ),
}
# Those of which each head is a matrix.
HEADS = {"*_heads.weight": "heads"}
CASES: dict[str, tuple[Callable[..., ShardedOptimizer], dict[str, Any]]] = {
    "mars-shampoo": (MARS, {"variant": "shampoo", "ns_dtype": "DTYPE", "clip": 0.5}),
    "mars-shampoo-rms": (MARS, {"variant": "shampoo", "scale": "rms", "ns_dtype": "DTYPE", "clip": 0.5}),
    "mars-m": (MARS, {"variant": "muon", "ns_dtype": "DTYPE", "clip": 0.5}),
    "ldadam": (LDAdam, {"rank": 2}),
    "ldadam-plain": (LDAdam, {"rank": 2, "error_feedback": False}),
    "mkor": (MKOR, {"update_interval": 2, "factor_dtype": "DTYPE", "factor_decay": 0.9}),
    "mkor-sgd": (MKOR, {"update_interval": 2, "factor_dtype": "DTYPE", "factor_decay": 0.9, "backend": "sgd"}),
}


def with_a_row_moved(name: str) -> FusedShape:
    """A layer's table, but that a row (of each head) of its second part is given to the first."""
    known = LAYERS[name].fused
    if len(known.parts) == 1:  # or two heads instead of three
        return FusedShape(known.parts, known.dim, heads=(known.heads[0] - 1,))
    (first, one), (second, other), *rest = known.parts
    if other == 1:
        return FusedShape(((first, known.groups + 1), (second, known.groups - 1)), known.dim)
    heads = known.heads if name.endswith("_heads") else ()
    moved = heads[0] if heads else 1
    return FusedShape(((first, one + moved), (second, other - moved), *rest), known.dim, known.groups, heads)


class Stack(nn.Module):
    """Weights of experts as one parameter (experts, outputs, inputs), or those of one expert (outputs, inputs)."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.flatten(0, -2).T


class Network(nn.Module):
    """All layers, fused or apart, and a plain one between them; the same function of the same weights."""

    def __init__(self, dtype: torch.dtype, fused: bool, tables: Mapping[str, FusedShape] | None = None) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.fused = fused
        tables = tables or {name: layer.fused for name, layer in LAYERS.items()}
        for name, layer in LAYERS.items():
            # Small, so that in float32 a step is not lost in the rounding of the weights.
            weight = 0.005 * torch.randn(layer.outputs, INPUTS, dtype=torch.float64, generator=generator)
            bias = 0.005 * torch.randn(layer.outputs, dtype=torch.float64, generator=generator)
            rows = {name: [*range(layer.outputs)]} if fused else {f"{name}_{p}": r for p, r in layer.rows.items()}
            for own, chosen in rows.items():
                self._add(own, layer, weight[chosen], bias[chosen], tables[name] if fused else None)
        self._add(
            "plain",
            replace(LAYERS["qkv"], bias=False),
            0.005 * torch.randn(9, INPUTS, generator=generator).double(),
            None,
        )
        self.to(dtype)

    def _add(
        self, name: str, layer: Layer, weight: Tensor, bias: Tensor | None, fused: FusedShape | None = None
    ) -> None:
        outputs = len(weight)
        if layer.experts:
            module: Any = Stack(*((layer.experts, outputs // layer.experts) if fused else (outputs,)), INPUTS)
        elif layer.transposed:
            module = Conv1D(outputs, INPUTS)
        else:
            module = nn.Linear(INPUTS, outputs, bias=layer.bias, dtype=torch.float64)
        values = (weight.T if layer.transposed else weight).reshape(module.weight.shape)
        module.double().weight.data.copy_(values)
        if layer.bias and bias is not None:
            module.bias.data.copy_(bias)
        self.add_module(name, module)
        bias_name = f"{name}.bias" if layer.bias else None
        shape = tuple(module.weight.shape)
        self.annotations = {**getattr(self, "annotations", {})}
        self.annotations[f"{name}.weight"] = ParameterInfo(
            f"{name}.weight", shape, Role.LINEAR, layer.transposed, bias_name, fused
        )

    def annotate(self) -> None:
        """Tell the optimizer to be built what is known of the weights."""
        named = dict(self.named_parameters())
        for name, info in self.annotations.items():
            attach_info(named[name], info)

    def forward(self, step: int, share: slice = slice(None), scale: float = 1.0) -> Tensor:
        """The loss of some of a step's tokens."""
        dtype = next(self.parameters()).dtype
        loss = torch.zeros((), dtype=dtype)
        for name in (*LAYERS, "plain"):
            x, dy = (value[share].to(dtype) for value in tokens(step, name))
            if len(x):
                loss = loss + (self.outputs(name, x) * (scale * dy)).sum()
        return loss

    def outputs(self, name: str, x: Tensor) -> Tensor:
        """Of a layer, in the order of the fused one."""
        if self.fused or name == "plain":
            return self.get_submodule(name)(x)  # type: ignore[no-any-return]
        rows = LAYERS[name].rows
        found = torch.cat([self.get_submodule(f"{name}_{part}")(x) for part in rows], dim=1)
        order = torch.tensor([row for part in rows.values() for row in part])
        return torch.empty_like(found).index_copy(1, order, found)


@functools.cache
def tokens(step: int, name: str) -> tuple[Tensor, Tensor]:
    """Inputs and output gradients of a layer, with a part that persists over steps.

    In few digits, so that sums over tokens are exact in float32: the gradients are the same to the bit, whatever share
    of the tokens a rank has and in whatever order they are added.
    """
    outputs = 9 if name == "plain" else LAYERS[name].outputs
    fixed, fresh = (torch.Generator().manual_seed(100 * len(name) + seed) for seed in (99, step))
    x, dy = (
        0.7 * torch.randn(TOKENS, size, dtype=torch.float64, generator=fixed)
        + 0.4 * torch.randn(TOKENS, size, dtype=torch.float64, generator=fresh)
        for size in (INPUTS, outputs)
    )
    return _in_digits(x + 0.3), _in_digits(dy / 5)


def _in_digits(values: Tensor) -> Tensor:
    return (values * 128).round() / 128


def backward(network: Network, step: int, share: slice = slice(None), scale: float = 1.0) -> None:
    """A forward and backward pass over some of the tokens."""
    loss = network(step, share, scale)
    if loss.requires_grad:
        loss.backward()


@functools.cache
def gradients(step: int, dtype: torch.dtype) -> Named:
    """Of the fused network, over all tokens."""
    network = Network(torch.float64, True)
    backward(network, step)
    return {name: p.grad.to(dtype) for name, p in network.named_parameters() if p.grad is not None}


def give_gradients(network: Network, step: int) -> None:
    """The same to the bit, however layers compute theirs."""
    grads = gradients(step, network.plain.weight.dtype)  # type: ignore[union-attr, arg-type]
    for name, parameter in network.named_parameters():
        own, _, kind = name.partition(".")
        layer, _, part = (own, "", "") if own in (*LAYERS, "plain") else own.rpartition("_")
        whole = grads[f"{layer}.{kind}"]
        whole = whole.flatten(0, 1) if part and whole.ndim == 3 else whole
        turned = bool(part) and LAYERS[layer].transposed and kind == "weight"
        rows = LAYERS[layer].rows[part] if part else slice(None)
        parameter.grad = (whole[:, rows] if turned else whole[rows]).clone()


def build(case: str, network: Network, **options: Any) -> ShardedOptimizer:
    """An optimizer of all weights."""
    dtype = str(network.plain.weight.dtype).removeprefix("torch.")  # type: ignore[union-attr]
    kind, own = CASES[case]
    network.annotate()
    own = {key: dtype if value == "DTYPE" else value for key, value in own.items()}
    own = {"blocks": HEADS if network.fused else None, **own, **options}
    optimizer = kind(network.named_parameters(), lr=1e-2, weight_decay=0.1, **own)
    optimizer.capture(network)
    return optimizer


def as_fused(network: Network) -> Named:
    """The present weights, by the names and in the shapes of the fused network."""
    found: Named = {}
    values = {name: value.detach() for name, value in network.named_parameters()}
    if network.fused:
        return {name: value.clone() for name, value in values.items()}
    found["plain.weight"] = values["plain.weight"].clone()
    for name, layer in LAYERS.items():
        for kind in ("weight", "bias") if layer.bias else ("weight",):
            turned = layer.transposed and kind == "weight"
            parts = {p: values[f"{name}_{p}.{kind}"] for p in layer.rows}
            whole = torch.empty(layer.outputs, *(INPUTS,) * (kind == "weight"), dtype=values["plain.weight"].dtype)
            for part, rows in layer.rows.items():
                whole[rows] = parts[part].T if turned else parts[part]
            whole = whole.T.contiguous() if turned else whole
            found[f"{name}.{kind}"] = whole.unflatten(0, (layer.experts, -1)) if layer.experts else whole
    return found


def train(network: Network, optimizer: ShardedOptimizer, steps: int) -> Named:
    """Train in one process; the weights after it."""
    for step in range(steps):
        optimizer.zero_grad()
        backward(network, step)
        give_gradients(network, step)
        optimizer.step()
    return as_fused(network)


@functools.cache
def apart(case: str, dtype: torch.dtype, steps: int) -> tuple[Named, float]:
    """The twin with a weight for each matrix: its weights after some steps in one process, and their largest change."""
    network = Network(dtype, False)
    final = train(network, build(case, network), steps)
    start = as_fused(Network(dtype, False))
    return final, max(float((final[name] - start[name]).abs().max()) for name in final)


def distance(found: Named, case: str, dtype: torch.dtype, steps: int) -> dict[str, float]:
    """Of every weight from the twin's, in its largest change."""
    expected, change = apart(case, dtype, steps)
    assert found.keys() == expected.keys()
    return {
        name: float((found[name] - expected[name]).abs().max().nan_to_num(nan=torch.inf)) / change for name in found
    }


class Framework(LayoutSource):
    """One rank of a simulated framework that trains the fused network.

    Args:
        layout: "flat": all parameters joined and cut anywhere. "each": every parameter over the ranks. "replicated".
            "tensor": cut by tensor parallelism over two ranks, and over data-parallel ranks if there are four.
        case: The optimizer.
        dtype: Type of the weights.
        rank: This rank.
        world: Number of ranks.
    """

    def __init__(self, layout: str, case: str, dtype: torch.dtype, rank: int, world: int) -> None:
        self.group = dist.group.WORLD if dist.is_initialized() else None
        self.layout, self.rank, self.world, self.dtype = layout, rank, world, dtype
        self.replicated = self.saved_by_some = layout == "replicated"
        self.tensor_parallel = _tensor_parallel(rank, world) if layout == "tensor" else None
        self.network = Network(dtype, True)
        self.optimizer = build(case, self.network)
        named = dict(self.network.named_parameters())
        self._contents: dict[int, TensorContents] = {}
        self.shards: list[tuple[Tensor, tuple[Slice, ...]]] = []
        for slices, numel in self._cut({name: value.numel() for name, value in named.items()}):
            tensor = torch.zeros(numel, dtype=dtype)
            for piece in slices:
                values = run_of(named[piece.key].detach(), piece)
                tensor[piece.offset : piece.offset + piece.end - piece.start] = values
            tensor.requires_grad_()
            self._contents[id(tensor)] = TensorContents(0, slices)
            self.shards.append((tensor, slices))
        self.optimizer.param_groups[0]["params"] = [tensor for tensor, _ in self.shards]
        self.optimizer.attach(self)
        self.count = 0

    def contents(self, tensor: Tensor) -> TensorContents:
        """See ``LayoutSource``."""
        return self._contents[id(tensor)]

    def step(self) -> None:
        """One step of the whole framework."""
        if self.optimizer.needs_capture:
            share = slice(self.rank * TOKENS // self.world, (self.rank + 1) * TOKENS // self.world)
            backward(self.network, self.count, share, float(self.world))
        grads = gradients(self.count, self.dtype)
        for tensor, slices in self.shards:
            tensor.grad = torch.zeros_like(tensor)
            for piece in slices:
                place = slice(piece.offset, piece.offset + piece.end - piece.start)
                tensor.grad[place] = run_of(grads[piece.key], piece)
        self.optimizer.step()
        for parameter in self.network.parameters():
            parameter.grad = None
        self.count += 1

    def errors(self, case: str, steps: int) -> dict[str, float]:
        """Distances of this rank's runs from the twin."""
        expected, change = apart(case, self.dtype, steps)
        found: dict[str, float] = {}
        for tensor, slices in self.shards:
            for piece in slices:
                own = tensor.detach()[piece.offset : piece.offset + piece.end - piece.start]
                error = float((own - run_of(expected[piece.key], piece)).abs().max().nan_to_num(nan=torch.inf))
                found[piece.key] = max(found.get(piece.key, 0.0), error / change)
        return found

    def _cut(self, sizes: Mapping[str, int]) -> list[tuple[tuple[Slice, ...], int]]:
        if self.layout == "tensor":
            return [part for name in sizes for part in self._sharded(name, sizes[name])]
        if self.layout == "replicated":
            return [((Slice(name, 0, size, 0),), size) for name, size in sizes.items()]
        if self.layout == "each":
            slices, position = [], 0
            for name, size in sizes.items():
                share = -(-size // self.world)
                start, end = min(self.rank * share, size), min((self.rank + 1) * share, size)
                if start < end:
                    slices.append(Slice(name, start, end, position))
                position += share
            return [(tuple(slices), position)]
        total, slices, position = sum(sizes.values()), [], 0
        parts = self.world * (self.world + 1) // 2  # shares that grow
        first, last = (total * rank * (rank + 1) // 2 // parts for rank in (self.rank, self.rank + 1))
        for name, size in sizes.items():
            start, end = max(position, first), min(position + size, last)
            if start < end:
                slices.append(Slice(name, start - position, end - position, start - first))
            position += size
        return [(tuple(slices), last - first)]

    def _sharded(self, name: str, numel: int) -> list[tuple[tuple[Slice, ...], int]]:
        tensor_rank, data_rank, ways = self.rank % 2, self.rank // 2, self.world // 2
        layer = LAYERS.get(name.partition(".")[0])
        if layer is None:
            copy = tensor_rank
            start, end = numel * data_rank // ways, numel * (data_rank + 1) // ways
            return [((Slice(name, start, end, 0, None, copy),), end - start)]
        runs = layer.shards[tensor_rank]
        if layer.transposed and name.endswith("weight"):
            (columns,) = runs
            size = (columns[1] - columns[0]) * INPUTS
            start, end = size * data_rank // ways, size * (data_rank + 1) // ways
            return [((Slice(name, start, end, 0, columns),), end - start)]
        row = INPUTS if name.endswith("weight") else 1
        size = sum(last - first for first, last in runs) * row
        start, end = size * data_rank // ways, size * (data_rank + 1) // ways
        slices, position = [], 0
        for first, last in runs:
            low, high = max(start, position), min(end, position + (last - first) * row)
            if low < high:
                shift = first * row - position
                slices.append(Slice(name, low + shift, high + shift, low - start))
            position += (last - first) * row
        return [(tuple(slices), end - start)]


@functools.cache
def _tensor_parallel(rank: int, world: int) -> TensorParallel:
    sets = tuple((first, first + 1) for first in range(0, world, 2))
    groups = [dist.new_group(list(ranks)) for ranks in sets]
    return TensorParallel(sets, groups[rank // 2])
