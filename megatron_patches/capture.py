"""This module describes Megatron's linear modules to MKOR, under any tensor and sequence parallelism.

A rank sums the features that it holds over all tokens. If tensor-parallel ranks hold the same features, it sums its
share of the tokens. The sums over a pipeline stage are then those of one process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import Parameter

from megatron_patches.parameters import ModelParameter
from rankwise.routing.roles import Role
from rankwise.statistics.linear_views import LinearShape, LinearView, SummedPart

__all__ = ["linear_views"]


def linear_views(parameters: Mapping[Parameter, ModelParameter]) -> Callable[[nn.Module], list[LinearView]]:
    """Return the function by which :class:`rankwise.statistics.hooks.Capture` describes every module.

    Args:
        parameters: The model's parameters.

    Returns:
        A function of a module that returns a view of each of its linear weights.
    """
    return lambda module: [
        _view(module, weight, index, parameters[weight]) for weight, index in _weights(module, parameters)
    ]


def _weights(
    module: nn.Module, parameters: Mapping[Parameter, ModelParameter]
) -> Iterator[tuple[Parameter, int | None]]:
    """Yield the linear weights of a module, numbered where it has several."""
    for name, parameter in module.named_parameters(recurse=False):
        index = name.removeprefix("weight")
        facts = parameters.get(parameter)
        if facts is None or facts.info.role is not Role.LINEAR or len(facts.local_shape) != 2:
            continue
        if name == "weight":
            yield parameter, None
        elif name.startswith("weight") and index.isdigit() and not _filled_up(module):
            yield parameter, int(index)


def _filled_up(module: nn.Module) -> bool:
    """Whether Megatron adds rows of zeros to every expert's tokens, as products in few bits need.

    The rows would count as tokens, and their number depends on the rank. MKOR leaves such experts to its backend.
    """
    config = getattr(module, "config", None)
    return bool(getattr(config, "fp8", None) or getattr(config, "fp4", None))


def _view(module: nn.Module, weight: Parameter, index: int | None, known: ModelParameter) -> LinearView:
    outputs, inputs = known.info.shape
    bias = getattr(module, "bias" if index is None else f"bias{index}", None)
    same_tokens, ours = (known.rank, known.ways), (0, 1)
    cut_tokens = _tokens_are_cut(module, weight, known)
    whole = SummedPart(None, ours if cut_tokens else same_tokens)
    # A side that is cut by features has all tokens: they were gathered before the multiplication, or come out of it.
    rows, columns = _held(known)
    return LinearView(
        weight=weight,
        bias=bias if isinstance(bias, Parameter) and bias.numel() else None,
        shape=LinearShape(inputs, outputs),
        inputs=whole if columns is None else SummedPart(columns, same_tokens),
        outputs=whole if rows is None else SummedPart(rows, same_tokens),
        rows=None if index is None else partial(_rows_of_expert, index),
        prepare=partial(_normalized, module) if hasattr(module, "layer_norm_weight") else None,
    )


def _held(known: ModelParameter) -> tuple[tuple[tuple[int, int], ...] | None, tuple[tuple[int, int], ...] | None]:
    """Return the rows and the columns of the logical weight that this rank holds; None for all."""
    if known.dim is None or known.ways == 1:
        return None, None
    # Rows that are cut once more are gathered before the multiplication.
    slices = replace(known, run=None).slices(0, known.local_shape[0] * known.local_shape[1], 0)
    if known.dim == 0:
        width = known.local_shape[1]
        return tuple((part.start // width, part.end // width) for part in slices), None
    return None, tuple(part.columns for part in slices if part.columns is not None)


def _tokens_are_cut(module: nn.Module, weight: Parameter, known: ModelParameter) -> bool:
    """Whether this rank alone sees the tokens on the side of the module that is not cut by features."""
    if known.dim is None:
        # Megatron sums the gradients of such weights over tensor-parallel ranks exactly if they have this mark.
        return bool(getattr(weight, "sequence_parallel", False))
    # Each tensor-parallel rank of an expert gets all tokens that are sent to the expert.
    inside_experts = known.expert or bool(getattr(module, "explicit_expert_comm", False))
    return bool(getattr(module, "sequence_parallel", False)) and not inside_experts


def _rows_of_expert(index: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> slice:
    """Return the tokens of one expert in a grouped layer, which gets all tokens and their numbers by expert."""
    splits = args[1] if len(args) > 1 else kwargs["m_splits"]
    counts = [int(count) for count in splits]
    start = sum(counts[:index])
    return slice(start, start + counts[index])


def _normalized(module: nn.Module, rows: Tensor) -> Tensor:
    """Return what a layer multiplies: the norm of its input, if it is Transformer Engine's with a norm inside."""
    module_any: Any = module
    gain = module_any.layer_norm_weight.detach().float()
    if getattr(module, "zero_centered_gamma", False):
        gain = gain + 1.0
    if getattr(module, "normalization", "LayerNorm") == "RMSNorm":
        return F.rms_norm(rows.float(), gain.shape, gain, module_any.eps)
    shift = getattr(module, "layer_norm_bias", None)
    return F.layer_norm(
        rows.float(), gain.shape, gain, None if shift is None else shift.detach().float(), module_any.eps
    )
