"""This module checks what this package relies on of Transformer Engine's layers and of Megatron's wrappers."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

__all__ = ["broken_contract"]


class _Layer(NamedTuple):
    """A class of Transformer Engine: how a small layer is made, its parameters, attributes, first call arguments."""

    given: dict[str, Any]
    parameters: frozenset[str]
    attributes: tuple[str, ...]
    called_with: tuple[str, ...]


_SIZES: dict[str, Any] = {"in_features": 8, "out_features": 16, "params_dtype": torch.float32}
_ALWAYS = ("parallel_mode", "sequence_parallel", "tp_size")
_LAYERS = {
    "Linear": _Layer(_SIZES, frozenset({"weight", "bias"}), _ALWAYS, ("inp",)),
    "LayerNormLinear": _Layer(
        {**_SIZES, "normalization": "LayerNorm"},
        frozenset({"weight", "bias", "layer_norm_weight", "layer_norm_bias"}),
        (*_ALWAYS, "eps", "normalization", "zero_centered_gamma"),
        ("inp",),
    ),
    "GroupedLinear": _Layer(
        {**_SIZES, "num_gemms": 2},
        frozenset({"weight0", "weight1", "bias0", "bias1"}),
        (*_ALWAYS, "num_gemms"),
        ("inp", "m_splits"),
    ),
}
# Megatron's wrappers, with their base classes and the first arguments of a call.
_WRAPPERS = {
    "TELinear": ("Linear", ("x",)),
    "TEColumnParallelLinear": ("Linear", ("x",)),
    "TERowParallelLinear": ("Linear", ("x",)),
    "TELayerNormColumnParallelLinear": ("LayerNormLinear", ("x",)),
    "TEGroupedLinear": ("GroupedLinear", ("x", "m_splits")),
    "TEColumnParallelGroupedLinear": ("GroupedLinear", ("x", "m_splits")),
    "TERowParallelGroupedLinear": ("GroupedLinear", ("x", "m_splits")),
}


def broken_contract() -> list[str]:
    """Check the installed Transformer Engine and megatron-core, both of which must be importable.

    Returns:
        A sentence for each thing that our layouts or MKOR's hooks expect otherwise; empty if there is none.
    """
    engine = importlib.import_module("transformer_engine.pytorch")
    megatron = importlib.import_module("megatron.core.extensions.transformer_engine")
    faults: list[str] = []
    for name, layer in _LAYERS.items():
        faults += _faults_of_layer(engine, name, layer)
    for name, (base, called_with) in _WRAPPERS.items():
        faults += _faults_of_wrapper(getattr(megatron, name, None), name, getattr(engine, base, None), called_with)
    return faults


def _faults_of_layer(engine: Any, name: str, layer: _Layer) -> Iterator[str]:
    cls = getattr(engine, name, None)
    if cls is None:
        yield f"there is no transformer_engine.pytorch.{name}"
        return
    module: nn.Module = cls(**layer.given, device="cuda" if torch.cuda.is_available() else "cpu")
    parameters = {key for key, _ in module.named_parameters(recurse=False)}
    if parameters != layer.parameters:
        yield f"{name} has the parameters {sorted(parameters)}, and not {sorted(layer.parameters)}"
    missing = [attribute for attribute in layer.attributes if not hasattr(module, attribute)]
    if missing:
        yield f"{name} has no attribute {', '.join(missing)}"
    shapes = {tuple(p.shape) for key, p in module.named_parameters() if key.rstrip("0123456789") == "weight"}
    if shapes != {(16, 8)}:
        yield f"{name}'s weights have the shapes {sorted(shapes)}, and not outputs times inputs"
    yield from _faults_of_call(cls, name, layer.called_with)


def _faults_of_wrapper(cls: Any, name: str, base: Any, called_with: tuple[str, ...]) -> Iterator[str]:
    if cls is None or base is None:
        yield f"megatron.core.extensions.transformer_engine has no {name} with this version of Transformer Engine"
    elif not issubclass(cls, base):
        yield f"{name} is no {base.__name__} of Transformer Engine's"
    else:
        yield from _faults_of_call(cls, name, called_with)


def _faults_of_call(cls: Any, name: str, called_with: tuple[str, ...]) -> Iterator[str]:
    names = tuple(inspect.signature(cls.forward).parameters)[1 : 1 + len(called_with)]
    if names != called_with:
        yield f"{name} is called with {names}, and not with {called_with}"
