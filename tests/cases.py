"""The configurations every optimizer test runs over, and the small problem they are run on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rankwise import MARS, MKOR, LDAdam, SONew
from rankwise.step.optimizer import ShardedOptimizer

F64 = {"ns_dtype": "float64"}


@dataclass(frozen=True)
class Case:
    """An optimizer class with the options of one configuration."""

    name: str
    cls: type[ShardedOptimizer]
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_mkor(self) -> bool:
        return self.cls is MKOR

    @property
    def narrow_states(self) -> set[torch.dtype]:
        """Types of states that are narrower than float32; 8 bits lie in bytes."""
        found = {self.options.get("error_dtype"), self.options.get("reference_dtype")}
        return {dtype for name, dtype in (("bfloat16", torch.bfloat16), ("int8", torch.int8)) if name in found}

    def build(self, params: Iterable[Any], model: nn.Module | None = None, **overrides: Any) -> Any:
        """The optimizer, its statistics hooked to ``model`` where it takes any."""
        optimizer = self.cls(params, **{**self.options, **overrides})
        if self.is_mkor and model is not None:
            optimizer.capture(model)
        return optimizer


CASES = [
    Case("mars-adamw", MARS, {"lr": 1e-2, "weight_decay": 0.1}),
    Case("mars-adamw-1d", MARS, {"lr": 1e-2, "optimize_1d": True, "gamma": 0.1, "clip": 0.05}),
    Case("mars-adamw-exact", MARS, {"lr": 1e-2, "exact": True, "weight_decay": 0.1, "gamma": 0.3}),
    Case("mars-bf16-reference", MARS, {"lr": 1e-2, "weight_decay": 0.1, "reference_dtype": "bfloat16"}),
    Case("mars-lion", MARS, {"lr": 1e-3, "variant": "lion", "clip": None}),
    Case("mars-shampoo", MARS, {"lr": 1e-2, "variant": "shampoo", "weight_decay": 0.1, **F64}),
    Case("mars-m", MARS, {"lr": 1e-2, "variant": "muon", "weight_decay": 0.1, "lr_1d": 3e-3, **F64}),
    Case("sonew-diagonal", SONew, {"band": 0, "graft": "none", "lr": 1e-4, "eps": 1e-2}),
    Case("sonew-tridiagonal", SONew, {"lr": 1e-2, "weight_decay": 0.1}),
    Case("sonew-tensor-chain", SONew, {"lr": 1e-2, "chain": "tensor", "graft": "adam_official"}),
    Case("sonew-band4", SONew, {"lr": 1e-2, "band": 4, "graft": "rmsprop", "eps": 1e-2}),
    Case("sonew-momentum", SONew, {"lr": 1e-2, "band": 2, "graft": "momentum"}),
    Case("sonew-sgd", SONew, {"lr": 1e-2, "band": 1, "graft": "sgd"}),
    Case("ldadam", LDAdam, {"lr": 1e-2, "rank": 2, "weight_decay": 0.1}),
    Case("ldadam-no-feedback", LDAdam, {"lr": 1e-2, "rank": 2, "error_feedback": False}),
    Case("ldadam-bf16-error", LDAdam, {"lr": 1e-2, "rank": 2, "error_dtype": "bfloat16"}),
    Case("ldadam-int8-error", LDAdam, {"lr": 1e-2, "rank": 2, "error_dtype": "int8"}),
    Case("mkor-adamw", MKOR, {"lr": 1e-2, "update_interval": 3, "factor_dtype": "float64", "weight_decay": 0.1}),
    Case("mkor-lamb", MKOR, {"lr": 1e-2, "update_interval": 3, "backend": "lamb", "factor_dtype": "float64"}),
    Case(
        "mkor-sgd",
        MKOR,
        {
            "lr": 1e-2,
            "update_interval": 2,
            "backend": "sgd",
            "nesterov": True,
            "rule": "ema",
            "factor_dtype": "float64",
        },
    ),
    Case("mkor-sketch", MKOR, {"lr": 1e-2, "rule": "sketch", "factor_dtype": "float64", "weight_decay": 0.1}),
    Case("mkor-hybrid", MKOR, {"lr": 1e-2, "update_interval": 2, "hybrid": True, "hybrid_min_steps": 4}),
]
BY_NAME = {case.name: case for case in CASES}


def cases(*, mkor: bool = True, exact: bool = True, names: Iterable[str] | None = None) -> Any:
    """A parametrisation over the table, or over part of it."""
    chosen = [BY_NAME[name] for name in names] if names is not None else CASES
    chosen = [c for c in chosen if (mkor or not c.is_mkor) and (exact or not c.options.get("exact"))]
    return pytest.mark.parametrize("case", chosen, ids=lambda case: case.name)


def net(seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """Matrices of three shapes, with and without bias, a norm, and one that is too small for a low rank."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 10, bias=False), nn.Tanh(), nn.LayerNorm(10), nn.Linear(10, 4)
    ).to(dtype)


def setup(case: Case, dtype: torch.dtype = torch.float64, **overrides: Any) -> tuple[nn.Sequential, Any]:
    """A fresh network with an optimizer for all of it."""
    model = net(dtype=dtype)
    return model, case.build(model.named_parameters(), model, **overrides)


def batch(index: int, dtype: torch.dtype = torch.float64, samples: int = 8) -> tuple[Tensor, Tensor]:
    """Inputs (samples, tokens, 6) and targets (samples, tokens, 4) of a step."""
    generator = torch.Generator().manual_seed(1000 + index)
    inputs = torch.randn(samples, 3, 6, generator=generator, dtype=torch.float64)
    targets = torch.randn(samples, 3, 4, generator=generator, dtype=torch.float64) + 1.0
    return inputs.to(dtype), targets.to(dtype)


def loss_of(model: nn.Module, index: int, part: slice = slice(None)) -> Tensor:
    inputs, targets = batch(index, next(model.parameters()).dtype)
    return (model(inputs[part]) - targets[part]).square().mean() * 3.0


def is_exact(optimizer: Any) -> bool:
    return bool(getattr(optimizer.options, "exact", False))


def advance(
    model: nn.Module, optimizer: Any, steps: Iterable[int], set_to_none: bool = True, micro_batches: int = 1
) -> None:
    """Train for the given steps; in exact mode with the look-ahead gradient it needs."""

    def gradient(index: int) -> None:
        size = 8 // micro_batches
        for first in range(0, 8, size):
            (loss_of(model, index, slice(first, first + size)) / micro_batches).backward()

    for index in steps:
        if is_exact(optimizer):
            model.zero_grad(set_to_none=set_to_none)
            gradient(index + 1)
            optimizer.record_reference()
        optimizer.zero_grad(set_to_none=set_to_none)
        gradient(index)
        if hasattr(optimizer, "record_loss"):
            optimizer.record_loss(loss_of(model, index).detach())
        optimizer.step()


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def assert_same(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Bit for bit."""
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(actual[name], value), f"{name}: {(actual[name] - value).abs().max():.1e}"


def deviation(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], start: Mapping[str, Tensor]) -> float:
    """Largest difference relative to the largest change of any parameter."""
    change = max(float((expected[name] - start[name]).abs().max()) for name in expected)
    assert change > 1e-4, "the trajectory does not move"
    return max(float((actual[name] - expected[name]).abs().max()) for name in expected) / change
