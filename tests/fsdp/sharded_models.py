"""A small model of several kinds of weights, sharded in all ways that torch offers, beside the same in one process."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from rankwise import MARS, MKOR, LDAdam, SONew

BATCH = 48
CLASSES: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "mars-adamw": (MARS, {}),
    "mars-lion": (MARS, {"variant": "lion"}),
    "mars-shampoo": (MARS, {"variant": "shampoo", "ns_dtype": "float32"}),
    "mars-m": (MARS, {"variant": "muon", "ns_dtype": "float32"}),
    "sonew": (SONew, {"eps": 1e-3}),
    "sonew-4": (SONew, {"eps": 1e-3, "band": 4, "chain": "tensor"}),
    "ldadam": (LDAdam, {"rank": 3}),
    "ldadam-8bit": (LDAdam, {"rank": 3, "error_dtype": "int8"}),
    "mkor": (MKOR, {"update_interval": 2, "factor_dtype": "float32"}),
    "mkor-h": (MKOR, {"update_interval": 2, "factor_dtype": "float32", "hybrid": True, "backend": "lamb"}),
}


class Layer(nn.Module):
    """A gated block, whose rows do not divide by three."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, inner)
        self.gate = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.down(torch.tanh(self.gate(y)) * self.up(y))


class Experts(nn.Module):
    """A stack of matrices, all of which see all tokens."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.stack = nn.Parameter(torch.empty(count, width, 6))

    def forward(self, x: Tensor) -> Tensor:
        stack = self.stack.to_local() if isinstance(self.stack, DTensor) else self.stack
        return x + 0.1 * torch.einsum("bw,ewk->bk", x, stack).repeat(1, x.shape[1] // 6)


class Network(nn.Module):
    """Embedding, blocks, experts, and a layer that is used at some steps alone."""

    def __init__(self, width: int = 12, inner: int = 20, experts: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, width)
        self.layers = nn.ModuleList(Layer(width, inner) for _ in range(2))
        self.experts = Experts(experts, width)
        self.sometimes = nn.Linear(width, width, bias=False)
        self.head = nn.Linear(width, 11)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5)

    def forward(self, tokens: Tensor, rare: bool = False) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        x = self.experts(x)
        if rare:
            x = x + self.sometimes(x)
        return self.head(x)


@functools.cache
def batch(step: int) -> tuple[Tensor, Tensor]:
    """Tokens and classes of all ranks."""
    generator = torch.Generator().manual_seed(step + 1)
    return torch.randint(0, 17, (BATCH,), generator=generator), torch.randint(0, 11, (BATCH,), generator=generator)


@dataclass(frozen=True)
class Setting:
    """A way to shard :class:`Network`.

    Attributes:
        world: Number of ranks.
        shard: Shards a model in place; returns which part of a batch this rank computes, and of how many.
    """

    world: int
    shard: Callable[[Network, int], tuple[int, int]]
    options: dict[str, Any] = field(default_factory=dict)


def _each(model: Network, **how: Any) -> None:
    for module in (model.embed, *model.layers, model.sometimes):
        fully_shard(module, **how)
    fully_shard(model, **how)


def _flat(model: Network, world: int, **how: Any) -> tuple[int, int]:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    _each(model, mesh=mesh, **how)
    return mesh.get_local_rank(), world


def _columns(model: Network, world: int) -> tuple[int, int]:
    def place(parameter: nn.Parameter) -> Shard | None:
        return Shard(1) if parameter.dim() > 1 and parameter.shape[1] % world == 0 else None

    return _flat(model, world, shard_placement_fn=place)


def _hybrid(model: Network, world: int) -> tuple[int, int]:
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("rep", "shard"))
    _each(model, mesh=mesh)
    return torch.distributed.get_rank(), world


def _tensor_parallel(model: Network, world: int) -> tuple[int, int]:
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
    plan = {"up": ColwiseParallel(), "gate": ColwiseParallel(), "down": RowwiseParallel()}
    for layer in model.layers:
        parallelize_module(layer, mesh["tp"], plan)
    if world > 2:
        _each(model, mesh=mesh["dp"])
    return mesh.get_local_rank("dp"), world // 2


def _experts_apart(model: Network, world: int) -> tuple[int, int]:
    """Experts on a mesh of their own, as expert parallelism leaves them once it has sent the tokens."""
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    apart = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("efsdp", "ep"))
    stack = distribute_tensor(model.experts.stack.detach(), apart["ep"], [Shard(0)])
    model.experts.stack = nn.Parameter(stack)
    fully_shard(model.experts, mesh=apart["efsdp"], shard_placement_fn=lambda _: Shard(1))
    _each(model, mesh=mesh)
    return mesh.get_local_rank(), world


SETTINGS: dict[str, Setting] = {
    "rows-2": Setting(2, _flat),
    "rows-3": Setting(3, _flat),
    "rows-4": Setting(4, _flat),
    "columns-2": Setting(2, _columns),
    "hybrid-4": Setting(4, _hybrid),
    "tensor-2": Setting(2, _tensor_parallel),
    "tensor-4": Setting(4, _tensor_parallel),
    "offload-2": Setting(2, functools.partial(_flat, offload_policy=CPUOffloadPolicy(pin_memory=False))),
    "unsharded-2": Setting(2, functools.partial(_flat, reshard_after_forward=False)),
}


class Run:
    """One rank's training; of one process where there is no setting.

    Args:
        case: One of `CLASSES`.
        setting: One of `SETTINGS`.
        dtype: Of the weights.
        options: Others of the optimizer.
    """

    def __init__(
        self, case: str, setting: str | None = None, dtype: torch.dtype = torch.float32, **options: Any
    ) -> None:
        self.model = Network().to(dtype)
        self.part, self.parts = 0, 1
        if setting is not None:
            chosen = SETTINGS[setting]
            self.part, self.parts = chosen.shard(self.model, chosen.world)
        kind, own = CLASSES[case]
        given = {**own, **options}
        if dtype == torch.float64:
            given |= {name: "float64" for name in ("ns_dtype", "factor_dtype") if name in given}
        decayed = [(n, p) for n, p in self.model.named_parameters() if p.dim() > 1]
        others = [(n, p) for n, p in self.model.named_parameters() if p.dim() < 2]
        groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0, "lr": 5e-3}]
        self.optimizer = kind(groups, lr=1e-2, weight_decay=0.1, **given)
        if self.optimizer.needs_capture:
            self.optimizer.capture(self.model)
        self.count = 0

    def backward(self) -> Tensor:
        """Gradients of the next batch's mean loss."""
        tokens, classes = batch(self.count)
        share = BATCH // self.parts
        mine = slice(self.part * share, (self.part + 1) * share)
        loss = nn.functional.cross_entropy(self.model(tokens[mine], rare=self.count % 3 == 2), classes[mine])
        loss.backward()
        return loss.detach()

    def step(self) -> Tensor:
        """One training step."""
        loss = self.backward()
        if self.optimizer.needs_loss:
            self.optimizer.record_loss(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.count += 1
        return loss

    def train(self, steps: int) -> Run:
        """So many steps."""
        for _ in range(steps):
            self.step()
        return self

    def weights(self) -> dict[str, Tensor]:
        """The whole weights, on every rank."""
        return {name: whole(value) for name, value in self.model.named_parameters()}


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, a copy."""
    found = tensor.detach()
    return (found.full_tensor() if isinstance(found, DTensor) else found).clone()


def mixed(reduce: torch.dtype = torch.float32) -> MixedPrecisionPolicy:
    """bf16 computation on fp32 shards."""
    return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce)
