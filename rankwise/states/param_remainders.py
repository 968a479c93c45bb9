"""bf16 weights that are stepped as fp32 ones: the 16 bits that each lacks are kept beside it, as a state by element."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from rankwise.layout.dtensors import local_view, sharded_like
from rankwise.options.validation import OptionError

__all__ = [
    "NARROW",
    "REMAINDER",
    "fit_to_travel",
    "forget_remainders",
    "refuse_other_types",
    "refuse_unless_narrow",
    "refuse_wide_copies",
]

NARROW = torch.bfloat16
"""Type of the weights that lack them."""
REMAINDER = "remainder"
"""Name of the state, of int16."""

_WIDE = (torch.float32, torch.float64, torch.complex64, torch.complex128)
"""Types of weights that lack nothing."""


def _fail(owner: str, rule: str, fix: str) -> None:
    raise OptionError(f"{owner}: store_param_remainders=True is invalid: {rule}; {fix}")


def refuse_other_types(owner: str, names: Iterable[str], parameters: Iterable[Tensor]) -> None:
    """Refuse narrow weights whose rest does not fit into 16 bits.

    Args:
        owner: Owner of the message: the optimizer.
        names: Names of the parameters.
        parameters: Parameters of one param group.

    Raises:
        OptionError: One is neither in bf16 nor wide.
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
    """Refuse a model without anything to keep remainders of.

    Args:
        owner: Owner of the message: the optimizer.
        parameters: All of them.

    Raises:
        OptionError: None is in bf16.
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
        owner: Owner of the message: the optimizer.
        stored: By parameter, the tensor that a step changes in its place.
        parameters: The model's own.

    Raises:
        OptionError: One of the tensors is wider than its parameter.
    """
    for name, tensor in stored.items():
        if parameters[name].dtype is NARROW and tensor.dtype is not NARROW:
            _fail(
                owner,
                f"the framework steps a copy of '{name}' in {_word(tensor.dtype)}, to which nothing can be added",
                "leave it out, or let the framework step weights in bfloat16",
            )


def fit_to_travel(remainder: Tensor) -> Tensor:
    """A remainder as it lies in a dictionary that torch may broadcast or gather: gloo and NCCL know no int16."""
    return sharded_like(remainder, local_view(remainder).int())


def forget_remainders(states: Iterable[Mapping[str, Any]]) -> None:
    """Take weights for what they are, after others have replaced them.

    Args:
        states: States of every tensor.
    """
    for state in states:
        if REMAINDER in state:
            local_view(state[REMAINDER]).zero_()


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
