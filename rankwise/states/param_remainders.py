"""bf16 weights that are stepped as fp32 ones: the 16 bits that each lacks are an element state beside it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from rankwise.layout.dtensors import local_view, sharded_like
from rankwise.options.validation import OptionError

__all__ = [
    "NARROW",
    "REMAINDER",
    "fit_to_travel",
    "refuse_other_types",
    "refuse_unless_narrow",
    "refuse_wide_copies",
]

NARROW = torch.bfloat16
"""Type of the weights that have remainders."""
REMAINDER = "remainder"
"""Name of the state; its type is int16."""

_WIDE = (torch.float32, torch.float64, torch.complex64, torch.complex128)
"""Types of weights that need no remainder."""


def _fail(owner: str, rule: str, fix: str) -> None:
    raise OptionError(f"{owner}: store_param_remainders=True is invalid: {rule}; {fix}")


def refuse_other_types(owner: str, names: Iterable[str], parameters: Iterable[Tensor]) -> None:
    """Refuse narrow weights whose missing bits do not fit into 16.

    Raises:
        OptionError: A parameter is neither in bf16 nor wide.
    """
    for name, parameter in zip(names, parameters, strict=True):
        if parameter.dtype not in (NARROW, *_WIDE):
            _fail(
                owner,
                f"weights must be in bfloat16 (those in float32 need no remainder), but '{name}' is in "
                f"{_word(parameter.dtype)}",
                "bring the model to bfloat16, or leave it out",
            )


def refuse_unless_narrow(owner: str, parameters: Iterable[Tensor]) -> None:
    """Refuse a model that has no weights in bf16.

    Raises:
        OptionError: No parameter is in bf16.
    """
    types = sorted({_word(parameter.dtype) for parameter in parameters})
    if types and _word(NARROW) not in types:
        _fail(
            owner,
            f"some weights must be in bfloat16, but all are in {' and '.join(types)}, and lack nothing",
            "leave it out, or bring the model to bfloat16 before the optimizer is built: model.to(torch.bfloat16)",
        )


def refuse_wide_copies(owner: str, stored: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> None:
    """Refuse a framework that steps wide copies of narrow weights.

    Args:
        owner: Name of the optimizer, for the message.
        stored: Tensors that a step changes in the place of parameters, by parameter.
        parameters: The model's own parameters.

    Raises:
        OptionError: A tensor is wider than its parameter.
    """
    for name, tensor in stored.items():
        if parameters[name].dtype is NARROW and tensor.dtype is not NARROW:
            _fail(
                owner,
                f"the framework steps a copy of '{name}' in {_word(tensor.dtype)}, to which nothing can be added",
                "leave it out, or let the framework step weights in bfloat16",
            )


def fit_to_travel(remainder: Tensor) -> Tensor:
    """Convert a remainder for a dictionary that torch may broadcast or gather: gloo and NCCL know no int16."""
    return sharded_like(remainder, local_view(remainder).int())


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
