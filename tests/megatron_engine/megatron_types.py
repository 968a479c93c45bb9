"""The optimizers of the Megatron tests, by name, with options under which rounding alone moves them little."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any

from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer
from torch import nn

from megatron_patches.registry import RankwiseConfig
from megatron_patches.registry import get_megatron_optimizer as get_ours

# The eps of the stock optimizer's cells: it damps gradients that vanish, whose rounding would become a whole step.
EPS = 1e-5
TYPES: dict[str, dict[str, Any]] = {
    "mars-adamw": {},
    "mars-lion": {},
    "mars-shampoo": {"ns_dtype": "float32"},
    "mars-m": {"ns_dtype": "float32"},
    "sonew": {"band": 2, "gamma": 0.1},
    "ldadam": {"rank": 16},
    "mkor": {"update_interval": 3, "factor_dtype": "float32"},
    "mkor-h": {"update_interval": 3, "factor_dtype": "float32"},
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "ldadam-int8": ("ldadam", {"error_dtype": "int8"}),
    "ldadam-narrow": ("ldadam", {"state_dtype": "int8"}),
    "sonew-narrow": ("sonew", {"state_dtype": "bfloat16"}),
    "ldadam-no-feedback": ("ldadam", {"error_feedback": False}),
    "mkor-sketch": ("mkor", {"rule": "sketch"}),
    "mars-m-unclipped": ("mars-m", {"clip": None}),
}
ELEMENT_WISE = ("mars-adamw", "mars-lion", "sonew")
# Their statistics come from the cell's own backward pass: prescribed gradients alone do not determine the step.
CAPTURING = ("mkor", "mkor-h")


def _make(name: str, options: dict[str, Any], config: dict[str, Any], chunks: list[nn.Module]) -> MegatronOptimizer:
    if name == "adam":
        known = {field.name for field in fields(OptimizerConfig)}
        given = {key: value for key, value in {**config, **options}.items() if key in known}
        return get_megatron_optimizer(OptimizerConfig(**given), chunks)
    ours = {**config, "optimizer": name}
    return get_ours(RankwiseConfig(**ours, rankwise={"eps": EPS, **TYPES.get(name, {}), **options}), chunks)


def maker(name: str, **options: Any) -> Callable[[dict[str, Any], list[nn.Module]], MegatronOptimizer]:
    """What a cell builds its optimizer with.

    Args:
        name: One of ours or of their variants, or ``adam`` for the stock optimizer.
        options: Further options of it.
    """
    name, further = VARIANTS.get(name, (name, {}))
    return partial(_make, name, {**further, **options})
