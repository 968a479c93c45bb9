"""Element-wise updates for CPUs in C++: every pass one way through memory, many runs per call.

The results are those of :mod:`rankwise.kernels.lists` but for the last bits. What C++ has no form for (mixed types,
tensors with gaps) goes to :mod:`rankwise.kernels.blocked`, and so does AdamW alone, which torch has in one kernel.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rankwise.kernels import blocked
from rankwise.kernels.native.arrays import SUFFIXES, addresses, are_runs, doubles, integers
from rankwise.kernels.native.building import EXACT, library
from rankwise.kernels.passes import Pass, Rule, Tensors

__all__ = ["is_available", "run", "squared_norms"]

_SOURCE = Path(__file__).with_name("elementwise.cpp")
_TILE = 8192
"""Elements of a tile: what a thread takes at a time, and what norms are added up over."""

_RULES: dict[Rule, int] = {"momentum": 0, "lion": 1, "adamw": 2, "step": 3}


class _PassInC(ctypes.Structure):
    """As in the source."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("rule", "advance", "cautious", "runs", "tile", "threads")),
        *((name, ctypes.c_void_p) for name in ("length", "factor")),
        *((name, ctypes.c_void_p) for name in ("grad", "exp_avg", "param", "exp_avg_sq", "reference")),
        *((name, ctypes.c_double) for name in ("k", "lr", "beta1", "beta2", "eps", "weight_decay")),
        *((name, ctypes.c_double) for name in ("root", "scale")),
    ]


def is_available() -> bool:
    """Whether the library is there or can be built, which the first call tries."""
    return library(_SOURCE, EXACT) is not None


def run(update: Pass) -> None:
    """Do a pass, in place; arguments as for :func:`rankwise.kernels.blocked.run`."""
    scalars = update.scalars
    alone = update.rule == "adamw" and update.factors is None and update.references is None and not update.is_cautious
    left = alone or isinstance(scalars.step, Tensor) or not update.grads
    types = None if left else _types(update.fields)
    if types is None:
        blocked.run(update)
        return
    numbers = {
        "rule": _RULES[update.rule],
        "advance": scalars.advance,
        "cautious": update.is_cautious,
        "k": scalars.k,
        "lr": float(scalars.lr),
        "beta1": scalars.betas[0],
        "beta2": scalars.betas[1],
        "eps": scalars.eps,
        "weight_decay": scalars.weight_decay,
    }
    if update.rule == "adamw":
        numbers["scale"], numbers["root"] = (float(value) for value in update.corrections())
    _call(f"run_{types}", update.fields, update.factors, numbers)


def squared_norms(tensors: Tensors, references: Tensors | None = None, k: float = 0.0) -> Tensor:
    """As :func:`rankwise.kernels.lists.squared_norms`, summed in a fixed order."""
    fields = {"grad": tensors, **({} if references is None else {"reference": references})}
    types = _types(fields) if tensors else None
    if types is None:
        return blocked.squared_norms(tensors, references, k)
    sums = torch.zeros(len(tensors), dtype=torch.float64)
    _call(f"squared_norms_{types}", fields, None, {"k": k}, ctypes.c_void_p(sums.data_ptr()))
    return sums


def _types(fields: Mapping[str, Tensors]) -> str | None:
    """What the functions for these lists end with, or None where there are none."""
    own = [tensors for name, tensors in fields.items() if name != "reference"]
    grads, references = fields["grad"], fields.get("reference")
    if not are_runs(*own):
        return None
    suffix = SUFFIXES[grads[0].dtype]
    if references is None or are_runs(grads, references):
        return suffix
    narrow = all(
        reference.dtype == torch.bfloat16 and reference.is_contiguous() and reference.numel() == grad.numel()
        for reference, grad in zip(references, grads, strict=True)
    )
    return f"{suffix}_bfloat16" if narrow and suffix == "float32" else None


def _call(
    name: str, fields: Mapping[str, Tensors], factors: Tensor | None, numbers: Mapping[str, float], *more: object
) -> None:
    own, first = library(_SOURCE, EXACT), fields["grad"]
    assert own is not None
    # Kept until the call returns: C sees addresses only.
    arrays: dict[str, ctypes.Array[Any]] = {field: addresses(tensors) for field, tensors in fields.items()}
    arrays["length"] = integers([tensor.numel() for tensor in first])
    if factors is not None:
        arrays["factor"] = doubles(factors.tolist())
    places = {array: ctypes.addressof(values) for array, values in arrays.items()}
    described = _PassInC(runs=len(first), tile=_TILE, threads=torch.get_num_threads(), **places, **numbers)
    getattr(own, name)(ctypes.byref(described), *more)
