"""Megatron's own Muon on CPUs: its wiring is Megatron's, the package that it needs for the step is stood in for."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import fields
from types import ModuleType
from typing import Any, Literal

import megatron.core.optimizer as stock
import torch
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer.optimizer import MegatronOptimizer
from torch import Tensor, nn

_PACKAGE = "emerging_optimizers"


class _Orthogonalized(torch.optim.Optimizer):
    """The states and settings of the package's class, with a step that only has to move the weights."""

    coefficient = "momentum"
    """What its groups call the momentum's."""

    def __init__(self, params: Any, lr: float, momentum: float, **settings: Any) -> None:
        self.scaled_orthogonalize_fn: Callable[..., Tensor] = settings.pop("scaled_orthogonalize_fn")
        self.nesterov = settings.pop("nesterov", settings.pop("use_nesterov", None))
        plain = {key: value for key, value in settings.items() if not callable(value)}
        super().__init__(params, {"lr": lr, self.coefficient: momentum, **plain})

    def _init_group(self, group: dict[str, Any], skip_non_grad_params: bool = True) -> None:
        for weight in group["params"]:
            if weight.grad is not None or not skip_non_grad_params:
                self.state[weight].setdefault("momentum_buffer", torch.zeros_like(weight))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            self._init_group(group)
            for weight in group["params"]:
                average = self.state[weight]["momentum_buffer"]
                average.lerp_(weight.grad, 1 - group[self.coefficient])
                weight.sub_(group["lr"] * average / (average.norm() + 1e-8))


class _Unused(torch.optim.Optimizer):
    """Only has to be there."""


_CONTENTS: dict[str, dict[str, Any]] = {
    "": {},
    ".registry": {"get_optimizer_name_list": list},
    ".orthogonalized_optimizers": {
        "OrthogonalizedOptimizer": _Orthogonalized,
        "AdaptiveMuon": _Unused,
        "get_muon_scale_factor": lambda rows, columns, mode: 1.0,
    },
    ".orthogonalized_optimizers.muon_utils": {
        "NSCoeffT": Literal["quintic"],
        "newton_schulz_tp": lambda gradient, **_: gradient,
    },
    ".scalar_optimizers": {"Lion": _Unused},
    ".soap": {"SOAP": _Unused},
}


def _stand_in() -> None:
    for suffix, contents in _CONTENTS.items():
        module = ModuleType(_PACKAGE + suffix)
        vars(module).update(contents)
        sys.modules[module.__name__] = module
        parent, _, name = module.__name__.rpartition(".")
        if parent:
            setattr(sys.modules[parent], name, module)


def _imported_anew() -> Any:
    """Megatron's module of Muon, as if the package had been there when it was imported."""
    _stand_in()
    if hasattr(stock, "HAVE_EO_V02"):  # 0.17 looks for the package in its parent alone.
        stock.HAVE_EMERGING_OPTIMIZERS = stock.HAVE_EO_V02 = True
    if importlib.util.find_spec("megatron.core.optimizer.emerging_optimizers"):  # From 0.18 on.
        registry = importlib.reload(importlib.import_module("megatron.core.optimizer.emerging_optimizers"))
        for name in ("HAVE_EMERGING_OPTIMIZERS", "_EMERGING_OPTIMIZERS", "_create_emerging_optimizer"):
            setattr(stock, name, getattr(registry, name))
    else:
        _Orthogonalized.coefficient = "momentum_beta"
    muon = importlib.import_module("megatron.core.optimizer.muon")
    return muon if getattr(muon, "HAVE_EMERGING_OPTIMIZERS", False) else importlib.reload(muon)


def megatron_muon(config: dict[str, Any], chunks: list[nn.Module]) -> MegatronOptimizer:
    """What ``--optimizer muon`` builds: Muon for the matrices, Adam for the rest."""
    muon = _imported_anew()
    known = {field.name for field in fields(OptimizerConfig)}
    given = {key: value for key, value in config.items() if key in known}
    built: MegatronOptimizer = muon.get_megatron_muon_optimizer(
        OptimizerConfig(**given | {"optimizer": "muon"}), chunks
    )
    return built
