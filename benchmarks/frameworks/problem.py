"""The model, the samples and the optimizers of every cell, and what one process of plain PyTorch makes of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from rankwise.names import BY_SPELLING

__all__ = [
    "CONTROL",
    "FIRST_KINDS",
    "GLOBAL_BATCH",
    "KINDS",
    "MICRO_BATCHES",
    "SECOND_KINDS",
    "STEPS",
    "Kind",
    "Weights",
    "batch",
    "build",
    "corrected",
    "network",
    "one_process",
    "perturbed_",
    "weights_of",
]

Weights = dict[str, np.ndarray]
STEPS = 6
MICRO_BATCHES = 2
GLOBAL_BATCH = 24  # A micro-batch of 12 samples divides by one to four ranks.
CONTROL = "AdamW"
_VOCABULARY, _WIDTH, _INNER, _LENGTH = 311, 72, 218, 16
_FP32 = {"factor_dtype": "float32", "product_dtype": "float32"}
# Megatron decays no vectors: neither may MARS's own rule for them, beside which the cells stand.
_MARS = {"weight_decay_1d": 0.0}
# A gradient that vanishes is rounding, which a first step of Adam would make a whole step: this damps it.
_EPS = 1e-5


class Kind(NamedTuple):
    """An optimizer of the cells.

    Attributes:
        spelling: Its name in a DeepSpeed JSON; Megatron's is in lower case.
        options: Its options.
    """

    spelling: str
    options: Mapping[str, Any]

    @property
    def rounds(self) -> bool:
        """Whether its states are kept in 8 bits."""
        return self.options.get("state_dtype") == "int8"


KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        CONTROL: Kind(CONTROL, {"lr": 2e-3, "eps": _EPS, "weight_decay": 0.0}),
        "MARS-AdamW": Kind("MARS-AdamW", {"lr": 3e-3, "eps": _EPS, **_MARS}),
        "MARS-M": Kind("MARS-M", {"lr": 3e-3, "ns_dtype": "float32"}),
        "SONew": Kind("SONew", {"lr": 1e-3, "eps": 1e-4}),
        "LDAdam": Kind("LDAdam", {"lr": 2e-3, "rank": 12, "eps": _EPS}),
        "MKOR": Kind("MKOR", {"lr": 1e-3, "update_interval": 2, "eps": _EPS, **_FP32}),
        "LDAdam, int8": Kind("LDAdam", {"lr": 2e-3, "rank": 12, "eps": _EPS, "state_dtype": "int8"}),
        "MARS-AdamW, int8": Kind("MARS-AdamW", {"lr": 3e-3, "eps": _EPS, "state_dtype": "int8", **_MARS}),
        "MARS-Lion": Kind("MARS-Lion", {"lr": 4e-4, **_MARS}),
        "MARS-Shampoo": Kind("MARS-Shampoo", {"lr": 3e-3, "ns_dtype": "float32", **_MARS}),
        "SONew, band 3": Kind("SONew", {"lr": 1e-3, "eps": 1e-4, "band": 3, "chain": "tensor"}),
        "MKOR, sketch": Kind("MKOR", {"lr": 1e-3, "rule": "sketch", "eps": _EPS, **_FP32}),
        "MKOR-H": Kind("MKOR-H", {"lr": 1e-3, "backend": "lamb", "update_interval": 1, **_FP32}),
        "SONew, int8": Kind("SONew", {"lr": 1e-3, "eps": 1e-4, "state_dtype": "int8"}),
    }
)
"""By the names of the tables; AdamW is torch's own, the control."""

FIRST_KINDS = tuple(KINDS)[:7]
"""One of each kind of states and messages, which run before the others."""
SECOND_KINDS = (CONTROL, *tuple(KINDS)[7:])


class _Block(nn.Module):
    """A feed-forward block, whose rows do not divide by three or four."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(_WIDTH)
        self.up = nn.Linear(_WIDTH, _INNER)
        self.down = nn.Linear(_INNER, _WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Network(nn.Module):
    """Embedding, blocks, head; its output is the mean loss of guessing the tokens that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(_VOCABULARY, _WIDTH)
        self.blocks = nn.ModuleList(_Block() for _ in range(3))
        self.lm_head = nn.Linear(_WIDTH, _VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.lm_head(x).float().flatten(0, 1), ids.flatten())


def network(noise: float = 0.0) -> Network:
    """The model with its first weights, the same in every process.

    Args:
        noise: Relative size of a random change of every weight, to learn how a run answers to rounding.
    """
    torch.manual_seed(0)
    model = Network()
    perturbed_(model.parameters(), noise)
    return model


@torch.no_grad()
def perturbed_(parameters: Iterable[Tensor], noise: float) -> None:
    """Multiply every element by one plus a random number of a size, the same on all ranks that have equal shapes."""
    generator = torch.Generator().manual_seed(1)
    for parameter in parameters if noise else ():
        parameter.mul_((1 + noise * torch.randn(parameter.shape, generator=generator)).to(parameter))


def corrected(weights: Weights, changed: Weights, first: Weights) -> Weights:
    """Weights after a run without what its first weights were changed by: what the change has led to is left.

    Args:
        weights: Whole weights after the run.
        changed: Its first weights.
        first: Those of the run without the change.
    """
    return {name: value - (changed[name] - first[name]) for name, value in weights.items()}


def batch(step: int, micro: int, rank: int = 0, ranks: int = 1) -> Tensor:
    """A rank's samples of a micro-batch."""
    generator = torch.Generator().manual_seed(7919 * step + micro)
    samples = torch.randint(0, _VOCABULARY, (GLOBAL_BATCH // MICRO_BATCHES, _LENGTH), generator=generator)
    return samples.chunk(ranks)[rank]


def build(kind: str, model: nn.Module, capturable: bool = False) -> torch.optim.Optimizer:
    """The optimizer of a kind for a model, as plain PyTorch and FSDP2 have it.

    Args:
        kind: Key of :data:`KINDS`.
        model: The model.
        capturable: Whether its steps are to be captured in a graph.
    """
    spelling, options = KINDS[kind]
    if capturable:
        rate = torch.tensor(options["lr"], device=next(model.parameters()).device)
        options = {**options, "capturable": True, "lr": rate}
    if kind == CONTROL:
        return torch.optim.AdamW(model.parameters(), **options)
    named = BY_SPELLING[spelling]
    optimizer = named.optimizer(list(model.named_parameters()), **{**named.preset, **options})
    if optimizer.needs_capture:
        optimizer.capture(model)
    return optimizer


def weights_of(model: nn.Module) -> Weights:
    """Whole weights by name, in float32 on the host; a collective where the model is sharded."""
    whole = {name: p.full_tensor() if hasattr(p, "full_tensor") else p for name, p in model.named_parameters()}
    # What compiles or wraps a module puts its own name before the parameters'.
    return {name.replace("_orig_mod.", ""): as_array(value) for name, value in whole.items()}


def as_array(value: Tensor) -> np.ndarray:
    """A copy on the host, in float32."""
    return value.detach().float().cpu().numpy().copy()


def one_process(
    kind: str | None, device: torch.device, dtype: torch.dtype = torch.float32, rounded: torch.dtype = torch.float32
) -> Weights:
    """What one process of plain PyTorch makes of the model.

    Args:
        kind: Key of :data:`KINDS`; None for the first weights.
        device: Where it runs.
        dtype: Type of the copies of float32 weights that forward and backward passes use.
        rounded: Type that the first weights are rounded to, as those of an engine that gets its float32 copies from a
            narrow model.
    """
    model = network().to(device).to(rounded).float()
    if kind is None:
        return weights_of(model)
    optimizer = build(kind, model)
    for step in range(STEPS):
        for micro in range(MICRO_BATCHES):
            loss = _narrow(model, dtype)(batch(step, micro).to(device)) / MICRO_BATCHES
            loss.backward()
        if getattr(optimizer, "needs_loss", False):
            optimizer.record_loss(loss.detach() * MICRO_BATCHES)  # type: ignore[attr-defined]
        optimizer.step()
        optimizer.zero_grad()
    return weights_of(model)


def _narrow(model: nn.Module, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """A forward pass on copies of the weights, whose gradients return in the copies' type."""
    if dtype == torch.float32:
        return model
    copies = {name: value.to(dtype) for name, value in model.named_parameters()}
    return lambda ids: torch.func.functional_call(model, copies, (ids,))
