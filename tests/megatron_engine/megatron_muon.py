"""Megatron's own Muon on CPUs: its wiring is Megatron's, the package that it needs for the step is stood in for."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import fields
from types import ModuleType
from typing import Any

import torch
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer.optimizer import MegatronOptimizer
from torch import Tensor, nn

_PACKAGE = "emerging_optimizers"
_RULES = f"{_PACKAGE}.orthogonalized_optimizers"


class _Orthogonalized(torch.optim.Optimizer):
    """The states and settings of the package's class, with a step that only has to move the weights."""

    def __init__(self, params: Any, lr: float, momentum_beta: float, **settings: Any) -> None:
        self.scaled_orthogonalize_fn: Callable[..., Tensor] = settings.pop("scaled_orthogonalize_fn")
        plain = {key: value for key, value in settings.items() if not callable(value)}
        super().__init__(params, {"lr": lr, "momentum_beta": momentum_beta, **plain})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                average = self.state[weight].setdefault("momentum_buffer", torch.zeros_like(weight))
                average.lerp_(weight.grad, 1 - group["momentum_beta"])
                weight.sub_(group["lr"] * average / (average.norm() + 1e-8))


def _stand_in() -> None:
    package, rules, utils = (
        ModuleType(name)
        for name in (
            _PACKAGE,
            f"{_PACKAGE}.orthogonalized_optimizers",
            f"{_PACKAGE}.orthogonalized_optimizers.muon_utils",
        )
    )
    rules.OrthogonalizedOptimizer = _Orthogonalized  # type: ignore[attr-defined]
    rules.get_muon_scale_factor = lambda rows, columns, mode: 1.0  # type: ignore[attr-defined]
    utils.newton_schulz_tp = lambda gradient, **_: gradient  # type: ignore[attr-defined]
    sys.modules.update({module.__name__: module for module in (package, rules, utils)})


def megatron_muon(config: dict[str, Any], chunks: list[nn.Module]) -> MegatronOptimizer:
    """What ``--optimizer muon`` builds: Muon for the matrices, Adam for the rest."""
    _stand_in()
    muon = importlib.import_module("megatron.core.optimizer.muon")
    if not muon.HAVE_EMERGING_OPTIMIZERS:
        muon = importlib.reload(muon)
    known = {field.name for field in fields(OptimizerConfig)}
    built: MegatronOptimizer = muon.get_megatron_muon_optimizer(
        OptimizerConfig(**{key: value for key, value in config.items() if key in known}), chunks
    )
    return built
