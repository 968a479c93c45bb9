"""A model, its gradients, and the shapes in which training frameworks hand its parameters to an optimizer.

Every optimizer is fed prescribed gradients. Those of linear layers come from prescribed inputs and output gradients, so
that they do not depend on the weights and MKOR's statistics can be gathered from any split of the tokens over ranks.
"""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rankwise import MARS, MKOR, LDAdam, SONew
from rankwise.layout.layout_source import LayoutSource, Slice, TensorContents, TensorParallel
from rankwise.step.optimizer import ShardedOptimizer

LAYOUTS = ("replicated", "flat", "cut", "narrowed", "views", "tensor", "tensor_copies")
# How tensor parallelism cuts what it does not replicate: by rows, or by columns.
TENSOR_CUTS = {"a.weight": 0, "a.bias": 0, "b.weight": 1, "b.bias": 0, "c.weight": 1, "d.weight": 1}
STEPS = 10
TOKENS = 24
Named = dict[str, Tensor]


class Conv1D(nn.Module):
    """Shape and call convention of the GPT-2 layer of this name: the weight is (inputs, outputs)."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight = nn.Parameter(torch.randn(nx, nf) / nx**0.5)
        self.bias = nn.Parameter(torch.zeros(nf))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


class Model(nn.Module):
    """Linear layers of all kinds, one that is never used, a stack of matrices and a vector."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.a = nn.Linear(20, 12)
        self.b = Conv1D(30, 7)
        self.c = nn.Linear(20, 12, bias=False)
        self.d = nn.Linear(9, 9)
        self.unused = nn.Linear(5, 6)
        self.experts = nn.Parameter(torch.empty(3, 6, 5))
        self.norm = nn.Parameter(torch.empty(9))
        self.to(dtype)
        generator = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))


# The bias of d is in another group than its weight: it cannot ride along with it.
GROUPS = (
    ("a.weight", "a.bias", "b.weight", "b.bias", "d.bias", "unused.weight", "unused.bias"),
    ("norm", "experts", "c.weight", "d.weight"),
)
GROUP_OPTIONS: tuple[dict[str, Any], ...] = ({}, {"lr": 4e-3, "weight_decay": 0.05})
USED = ("a", "b", "c", "d")


@functools.cache
def tokens(step: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Inputs and output gradients of every used layer, with a part that persists over steps."""
    found = {}
    for index, name in enumerate(USED):
        layer = getattr(Model(torch.float64), name)
        inputs, outputs = (layer.nx, layer.nf) if name == "b" else (layer.in_features, layer.out_features)
        fixed, fresh = (torch.Generator().manual_seed(100 * index + seed) for seed in (99, step))
        x, dy = (
            0.7 * torch.randn(TOKENS, size, dtype=torch.float64, generator=fixed)
            + 0.4 * torch.randn(TOKENS, size, dtype=torch.float64, generator=fresh)
            for size in (inputs, outputs)
        )
        found[name] = (x + 0.3, dy / 5)
    return found


@functools.cache
def gradients(step: int) -> Named:
    """Reduced gradients of all parameters, in float64."""
    generator, fixed = torch.Generator().manual_seed(step + 1), torch.Generator().manual_seed(77)
    found: Named = {}
    for name, parameter in Model(torch.float64).named_parameters():
        layer, _, kind = name.partition(".")
        if layer in USED:
            x, dy = tokens(step)[layer]
            found[name] = dy.sum(0) if kind == "bias" else x.T @ dy if layer == "b" else dy.T @ x
        elif layer == "unused":
            found[name] = torch.zeros_like(parameter.data)
        else:
            noise = (torch.randn(parameter.shape, dtype=torch.float64, generator=g) for g in (generator, fixed))
            found[name] = 0.3 * next(noise) + next(noise)
    return found


def token_share(step: int, layer: str, rank: int, world: int) -> slice:
    """The tokens of a layer that ``rank`` sees: unequal shares, some of them empty."""
    cuts = sorted(random.Random(f"{step} {layer} {world}").choices(range(TOKENS + 1), k=world - 1))
    if layer == "a" and step % 2 == 0 and world > 1:
        cuts[-1] = TOKENS
    bounds = [0, *cuts, TOKENS]
    return slice(bounds[rank], bounds[rank + 1])


def backward(model: Model, step: int, rank: int, world: int) -> None:
    """A rank's forward and backward pass over its micro-batches; frameworks average gradients over ranks."""
    loss = torch.zeros((), dtype=model.norm.dtype)
    for name, (x, dy) in tokens(step).items():
        share = token_share(step, name, rank, world)
        # Two micro-batches.
        for x_part, dy_part in zip(x[share].chunk(2), dy[share].chunk(2), strict=True):
            if len(x_part):
                loss = loss + (getattr(model, name)(x_part.to(loss.dtype)) * (world * dy_part).to(loss.dtype)).sum()
    if loss.requires_grad:
        loss.backward()


@dataclass(frozen=True)
class Case:
    """An optimizer with options. ``element_wise`` rules have the tighter fp32 bound."""

    name: str
    build: Callable[..., ShardedOptimizer]
    options: dict[str, Any]
    element_wise: bool = False

    def optimizer(self, model: Model) -> ShardedOptimizer:
        dtype = str(model.norm.dtype).removeprefix("torch.")
        options = {key: dtype if value == "DTYPE" else value for key, value in self.options.items()}
        named = dict(model.named_parameters())
        groups = [
            {"params": [(name, named[name]) for name in names], **group_options}
            for names, group_options in zip(GROUPS, GROUP_OPTIONS, strict=True)
        ]
        optimizer = self.build(groups, lr=1e-2, weight_decay=0.1, **options)
        optimizer.capture(model)
        return optimizer


def _cases() -> list[Case]:
    cases = [
        Case(f"mars-{variant}", MARS, {"variant": variant, "ns_dtype": "DTYPE"}, variant in ("adamw", "lion"))
        for variant in ("adamw", "lion", "shampoo", "muon")
    ]
    cases += [
        Case("mars-lion-unclipped", MARS, {"variant": "lion", "clip": None}, True),
        Case("mars-muon-unclipped", MARS, {"variant": "muon", "clip": None, "ns_dtype": "DTYPE"}),
    ]
    rates: dict[str, Any] = {"weight_decay_method": "cautious", "lr_scale": {"*.bias": 0.5, "[a-c].weight": 2.0}}
    cases += [
        Case("mars-shampoo-rms", MARS, {"variant": "shampoo", "scale": "rms", "ns_dtype": "DTYPE", **rates}),
        Case("mars-adamw-rates", MARS, {"variant": "adamw", **rates}, True),
        Case("ldadam-rates", LDAdam, {"rank": 3, **rates}),
    ]
    cases += [
        Case(f"sonew-{band}-{chain}-{graft}", SONew, {"band": band, "chain": chain, "graft": graft}, True)
        for band in (0, 1, 4)
        for chain in ("row", "tensor")
        for graft in ("adam", "rmsprop")
    ]
    cases += [
        Case(f"ldadam-{'ef' if feedback else 'plain'}", LDAdam, {"rank": 3, "error_feedback": feedback})
        for feedback in (True, False)
    ]
    mkor: dict[str, Any] = {"update_interval": 3, "factor_dtype": "DTYPE", "factor_decay": 0.9}
    cases += [
        Case(f"mkor-{rule}-{backend}", MKOR, {**mkor, "rule": rule, "backend": backend})
        for rule in ("official", "ema")
        for backend in ("adamw", "lamb", "sgd")
    ]
    cases.append(Case("mkor-sketch", MKOR, {"rule": "sketch", "factor_dtype": "DTYPE"}))
    cases.append(Case("mkor-one-sided", MKOR, {**mkor, "max_factor_dim": 16, "stabilizer": None}))
    return cases


CASES = {case.name: case for case in _cases()}


@functools.cache
def tensor_parallel(rank: int, world: int) -> TensorParallel:
    """Of four ranks, the first two and the last two; else all."""
    ways = world // (2 if world == 4 else 1)
    sets = tuple(tuple(range(first, first + ways)) for first in range(0, world, ways))
    groups = [dist.new_group(list(ranks)) for ranks in sets]
    return TensorParallel(sets, groups[rank // ways])


def whole_key(key: str) -> str:
    """The matrix of which a key names a slice, or which it names."""
    return re.sub(r"\[(:,)?\d+:\d+\]$", "", key)


class Framework(LayoutSource):
    """One rank's side of a simulated training framework; also the optimizer's ``LayoutSource``.

    Args:
        layout: One of `LAYOUTS`. ``replicated``: whole parameters everywhere. ``flat``: one padded partition per param
            group, cut anywhere (ZeRO-1 and 2), its runs named in two parts. ``cut``: every parameter cut over all
            ranks, the pieces padded and joined (ZeRO-3). ``narrowed``: as ``flat``, but one ``step()`` per group, with
            ``param_groups`` narrowed to it. ``views``: a bucket of all parameters cut unevenly into one 1-D tensor per
            parameter; one rank gets nothing (Megatron's distributed optimizer). ``tensor``: parameters cut by tensor
            parallelism or copied, then over two data-parallel ranks if there are four ranks; ``tensor_copies``: the
            data-parallel ranks hold copies.
        case: The optimizer.
        dtype: Type of weights and gradients.
        rank: This rank.
        world: Number of ranks.
        group: Their process group; None for a single process.
    """

    def __init__(
        self, layout: str, case: Case, dtype: torch.dtype, rank: int = 0, world: int = 1, group: Any = None
    ) -> None:
        self.layout, self.rank, self.world, self.group = layout, rank, world, group
        self.replicated = self.saved_by_some = layout == "replicated" and world > 1
        self.tensor_parallel = tensor_parallel(rank, world) if layout.startswith("tensor") and world > 1 else None
        self.model = Model(dtype)
        self.optimizer = case.optimizer(self.model)
        self.count = 0
        named = dict(self.model.named_parameters())
        self._named = {name: parameter.detach() for name, parameter in named.items()}
        self._contents: dict[int, TensorContents] = {}
        self.shards: list[tuple[Tensor, tuple[Slice, ...]]] = []
        for index, group_shards in enumerate(self._cut()):
            tensors = []
            for numel, slices in group_shards:
                if layout == "replicated":
                    tensor: Tensor = named[slices[0].key]
                else:
                    tensor = self._filled(self._named, numel, slices).requires_grad_()
                tensors.append(tensor)
                self._contents[id(tensor)] = TensorContents(index, slices)
                self.shards.append((tensor, slices))
            self.optimizer.param_groups[index]["params"] = tensors
        self.optimizer.attach(self)

    def contents(self, tensor: Tensor) -> TensorContents:
        """See ``LayoutSource``."""
        return self._contents[id(tensor)]

    def step(self) -> None:
        """One optimizer step of the whole framework."""
        if self.optimizer.needs_capture:
            backward(self.model, self.count, self.rank, self.world)
        grads = {name: grad.to(self.model.norm.dtype) for name, grad in gradients(self.count).items()}
        for tensor, slices in self.shards:
            tensor.grad = self._filled(grads, tensor.numel(), slices).view(tensor.shape)
        if self.layout == "narrowed":
            groups = self.optimizer.param_groups
            for group in groups:
                self.optimizer.param_groups = [group]
                self.optimizer.step()
            self.optimizer.param_groups = groups
        else:
            self.optimizer.step()
        for parameter in self.model.parameters():
            parameter.grad = None
        self.count += 1

    def pieces(self) -> list[tuple[Slice, Tensor]]:
        """This rank's runs with their present weights."""
        return [
            (piece, tensor.detach().reshape(-1)[piece.offset : piece.offset + piece.end - piece.start])
            for tensor, slices in self.shards
            for piece in slices
        ]

    def misplaced_states(self) -> list[str]:
        """Element states that have neither the shard's shape nor the size of its shards."""
        wrong = []
        for tensor, slices in self.shards:
            sizes = {piece.end - piece.start for piece in slices} | {sum(piece.end - piece.start for piece in slices)}
            for name, value in self.optimizer.state.get(tensor, {}).items():
                compact = value.dim() == 1 and value.numel() < tensor.numel()
                if name != "step" and value.shape != tensor.shape and not (compact and sizes):
                    wrong.append(f"{name} {tuple(value.shape)} for {tuple(tensor.shape)}")
        return wrong

    @staticmethod
    def _filled(source: Named, numel: int, slices: tuple[Slice, ...]) -> Tensor:
        flat = next(iter(source.values())).new_zeros(numel)
        for piece in slices:
            values = run_of(source[piece.key], piece)
            flat[piece.offset : piece.offset + piece.end - piece.start] = values
        return flat

    def _cut(self) -> list[list[tuple[int, tuple[Slice, ...]]]]:
        """For each param group, size and contents of this rank's tensors."""
        sizes = {name: tensor.numel() for name, tensor in self._named.items()}
        if self.layout == "replicated":
            return [[(sizes[name], (Slice(name, 0, sizes[name], 0),)) for name in names] for names in GROUPS]
        if self.layout == "cut":
            return [[self._cut_each(names, sizes)] for names in GROUPS]
        if self.layout == "views":
            return self._views(sizes)
        if self.layout.startswith("tensor"):
            return [[part for name in names for part in self._tensor_parallel(name)] for names in GROUPS]
        found = []
        for names in GROUPS:
            size = -(-sum(sizes[name] for name in names) // (2 * self.world)) * 2  # alignment: padding at the end
            runs = _runs(names, sizes, self.rank * size, (self.rank + 1) * size)
            if self.layout == "flat":
                runs = [part for run in runs for part in _halves(run)]
            found.append([(size, tuple(runs))])
        return found

    def _cut_each(self, names: tuple[str, ...], sizes: dict[str, int]) -> tuple[int, tuple[Slice, ...]]:
        slices, position = [], 0
        for name in names:
            size = -(-sizes[name] // self.world)
            start, end = min(self.rank * size, sizes[name]), min((self.rank + 1) * size, sizes[name])
            if start < end:
                slices.append(Slice(name, start, end, position))
            position += size
        return position, tuple(slices)

    def _tensor_parallel(self, name: str) -> list[tuple[int, tuple[Slice, ...]]]:
        parts = 2 if self.world == 4 else 1
        ways, (data_rank, tensor_rank) = self.world // parts, divmod(self.rank, self.world // parts)
        shape, cut = self._named[name].shape, TENSOR_CUTS.get(name)
        block, columns, first, copy = self._named[name].numel(), None, 0, tensor_rank if cut is None else 0
        if cut is not None:
            low, high = (shape[cut] * bound // ways for bound in (tensor_rank, tensor_rank + 1))
            row = shape.numel() // shape[0]
            block = (high - low) * (row if cut == 0 else shape[0])
            columns, first = ((low, high), 0) if cut == 1 and ways > 1 else (None, low * row if cut == 0 else 0)
        start, end = 0, block
        if self.layout == "tensor":
            start, end = (block * bound // parts for bound in (data_rank, data_rank + 1))
        else:
            copy += data_rank * ways
        piece = Slice(name, first + start, first + end, 0, columns, copy)
        return [(end - start, (piece,) if start < end else ())]

    def _views(self, sizes: dict[str, int]) -> list[list[tuple[int, tuple[Slice, ...]]]]:
        names = tuple(name for names in GROUPS for name in names)
        total, parts = sum(sizes.values()), max(self.world - 1, 1)
        # The ranks' shares grow; the first rank (two and four ranks) or the last one (three) gets nothing.
        share = self.rank - (self.world % 2 == 0)
        bounds = [total * i * (i + 1) // (parts * (parts + 1)) for i in range(parts + 1)]
        first, last = (bounds[share], bounds[share + 1]) if 0 <= share < parts else (0, 0)
        runs = _runs(names, sizes, first, last)
        return [
            [(run.end - run.start, (Slice(run.key, run.start, run.end, 0),)) for run in runs if run.key in group]
            for group in GROUPS
        ]


def run_of(parameter: Tensor, piece: Slice) -> Tensor:
    """A run of a parameter, 1-D."""
    block = parameter if piece.columns is None else parameter[:, slice(*piece.columns)]
    return block.reshape(-1)[piece.start : piece.end]


def _halves(run: Slice) -> list[Slice]:
    """The run as two neighbouring ones: a layout may name several runs of a parameter on one rank."""
    middle = run.start + (run.end - run.start) // 3
    if middle == run.start:
        return [run]
    return [replace(run, end=middle), replace(run, start=middle, offset=run.offset + middle - run.start)]


def _runs(names: tuple[str, ...], sizes: dict[str, int], first: int, last: int) -> list[Slice]:
    """The part of the joined parameters that lies in [first, last)."""
    runs, position = [], 0
    for name in names:
        start, end = max(position, first), min(position + sizes[name], last)
        if start < end:
            runs.append(Slice(name, start - position, end - position, start - first))
        position += sizes[name]
    return runs


@functools.cache
def reference(case: str, dtype: torch.dtype, steps: int = STEPS) -> tuple[Named, float, frozenset[str]]:
    """Weights after some steps in one process, their largest change, and the names of its matrix states."""
    model = Model(dtype)
    optimizer = CASES[case].optimizer(model)
    for step in range(steps):
        if optimizer.needs_capture:
            backward(model, step, 0, 1)
        for name, parameter in model.named_parameters():
            parameter.grad = gradients(step)[name].to(dtype, copy=True)
        optimizer.step()
        for parameter in model.parameters():
            parameter.grad = None
    start = dict(Model(dtype).named_parameters())
    final = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    change = max(float((final[name] - start[name]).detach().abs().max()) for name in final)
    return final, change, frozenset(optimizer.matrix_states)


def world_group() -> dist.ProcessGroup | None:
    """The process group of a forked rank, None outside."""
    return dist.group.WORLD if dist.is_initialized() else None
