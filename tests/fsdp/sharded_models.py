"""A small model of several kinds of weights, trained as a setting shards it, or in one process."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from shard_settings import SETTINGS
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from rankwise import MARS, MKOR, LDAdam, SONew

BATCH = 48
Case = tuple[Callable[..., Any], dict[str, Any]]
CLASSES: dict[str, Case] = {
    "mars-adamw": (MARS, {}),
    "mars-lion": (MARS, {"variant": "lion"}),
    "mars-shampoo": (MARS, {"variant": "shampoo", "ns_dtype": "float32"}),
    "mars-m": (MARS, {"variant": "muon", "ns_dtype": "float32"}),
    "sonew": (SONew, {"eps": 1e-3}),
    "sonew-4": (SONew, {"eps": 1e-3, "band": 4, "chain": "tensor"}),
    "ldadam": (LDAdam, {"rank": 3}),
    "ldadam-8bit": (LDAdam, {"rank": 3, "error_dtype": "int8"}),
    "mkor": (MKOR, {"update_interval": 2, "factor_dtype": "float32"}),
    "mkor-sketch": (MKOR, {"rule": "sketch", "factor_dtype": "float32"}),
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
    """A stack of matrices, all of which see all tokens; where ranks have some of it each, the tokens travel."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.stack = nn.Parameter(torch.empty(count, width, 6))

    def forward(self, x: Tensor) -> Tensor:
        stack = self.stack
        if not isinstance(stack, DTensor):
            return x + self._mixed(x, stack)
        tokens = DTensor.from_local(x, stack.device_mesh, [Shard(0)]).redistribute(placements=[Replicate()])
        own = self._mixed(tokens.to_local(grad_placements=[Partial()]), stack.to_local())
        return (
            x + DTensor.from_local(own, stack.device_mesh, [Partial()]).redistribute(placements=[Shard(0)]).to_local()
        )

    @staticmethod
    def _mixed(x: Tensor, stack: Tensor) -> Tensor:
        return 0.1 * torch.einsum("bw,ewk->bk", x, stack).repeat(1, x.shape[1] // 6)


class Network(nn.Module):
    """Embedding, blocks, experts, and a layer that is used at some steps alone."""

    def __init__(self, width: int = 12, inner: int = 20, experts: int = 4, seed: int = 0) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, width)
        self.layers = nn.ModuleList(Layer(width, inner) for _ in range(2))
        self.experts = Experts(experts, width)
        self.sometimes = nn.Linear(width, width, bias=False)
        self.head = nn.Linear(width, 11)
        generator = torch.Generator().manual_seed(seed)
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
def batch(step: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Tokens and classes of all ranks."""
    generator = torch.Generator().manual_seed(step + 1 + 1000 * seed)
    return torch.randint(0, 17, (BATCH,), generator=generator), torch.randint(0, 11, (BATCH,), generator=generator)


class Run:
    """One rank's training; of one process where there is no setting.

    Args:
        case: One of `CLASSES`, or another class and its options.
        setting: One of `SETTINGS`.
        dtype: Type of the weights.
        seed: Seed of the first weights.
        policy: Policy of `fully_shard`, for mixed precision.
        options: Others of the optimizer.
    """

    def __init__(
        self,
        case: str | Case,
        setting: str | None = None,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        policy: MixedPrecisionPolicy | None = None,
        **options: Any,
    ) -> None:
        self.model = Network(seed=seed).to(dtype)
        self.part, self.parts = 0, 1
        if setting is not None:
            chosen = SETTINGS[setting]
            self.part, self.parts = chosen.shard(
                self.model, chosen.world, **({} if policy is None else {"mp_policy": policy})
            )
        kind, own = CLASSES[case] if isinstance(case, str) else case
        given = {"lr": 1e-2, "weight_decay": 0.1, **own, **options}
        if dtype == torch.float64:
            given |= {name: "float64" for name in ("ns_dtype", "factor_dtype") if name in given}
        decayed = [(n, p) for n, p in self.model.named_parameters() if p.dim() > 1]
        others = [(n, p) for n, p in self.model.named_parameters() if p.dim() < 2]
        groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0, "lr": 5e-3}]
        self.optimizer = kind(groups, **given)
        if getattr(self.optimizer, "needs_capture", False):
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
        if getattr(self.optimizer, "needs_loss", False):
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
