"""Element-wise updates for CPUs run in C++: a pass goes through memory once, and one call takes many runs.

The results are those of :mod:`rankwise.kernels.lists` but for the last bits. Narrow states are opened and encoded again
tile by tile, so that only their codes go through memory. C++ has no form for mixed types, tensors with gaps and steps
counted on a device; :mod:`rankwise.kernels.lists` takes them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rankwise.kernels import lists
from rankwise.kernels.low_precision_runs import BLOCK, LowPrecisionRuns, is_coded
from rankwise.kernels.native.arrays import SUFFIXES, address, addresses, are_runs, doubles, integers
from rankwise.kernels.native.building import EXACT, library
from rankwise.kernels.native.low_precision_arrays import in_c, takes
from rankwise.kernels.opened_passes import norms_with_opened, run_opened
from rankwise.kernels.passes import Field, Pass, Rule, Tensors
from rankwise.kernels.sizes import check_lengths

__all__ = ["is_available", "run", "squared_norms"]

_SOURCE = Path(__file__).with_name("elementwise.cpp")
_TILE = 8192
"""Elements that a thread takes at a time, and over which norms are added up; the source has an upper bound."""
_OPENED = 16 * BLOCK
"""Elements of a tile with narrow states; the source has room to open no more."""

_RULES: dict[Rule, int] = {"momentum": 0, "lion": 1, "adamw": 2, "step": 3, "nesterov": 4}


class _FieldInC(ctypes.Structure):
    """``Field`` of the source."""

    _fields_ = [("runs", ctypes.c_void_p), ("narrow", ctypes.c_void_p)]


class _PassInC(ctypes.Structure):
    """``Pass`` of the source."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("rule", "advance", "cautious", "runs", "tile", "threads")),
        *((name, ctypes.c_void_p) for name in ("length", "factor")),
        *((name, _FieldInC) for name in ("grad", "exp_avg", "param", "exp_avg_sq", "reference")),
        *((name, ctypes.c_double) for name in ("k", "lr", "beta1", "beta2", "eps", "weight_decay")),
        *((name, ctypes.c_double) for name in ("root", "scale", "nesterov")),
    ]


def is_available() -> bool:
    """Whether there is a library, which the first call tries to build."""
    return library(_SOURCE, EXACT) is not None


def run(update: Pass) -> None:
    """Do a pass, in place."""
    # AdamW does not take torch's own kernel, whose bits depend on where runs are cut.
    scalars = update.scalars
    types = None if isinstance(scalars.step, Tensor) or not update.grads else _types(update.fields)
    if types is None and update.is_narrow:
        run_opened(update, run)
        return
    if types is None:
        check_lengths(*map(update.wide, update.fields))
        lists.run(update)
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
        "nesterov": scalars.nesterov,
    }
    if update.rule == "adamw":
        numbers["scale"], numbers["root"] = (float(value) for value in update.corrections())
    numbers["tile"] = _OPENED if update.is_narrow else _TILE
    _call(f"run_{types}", update.fields, update.coefficients, numbers)


def squared_norms(tensors: Tensors, references: Field | None = None, k: float = 0.0) -> Tensor:
    """Compute what :func:`rankwise.kernels.lists.squared_norms` does, summed in a fixed order."""
    fields = {"grad": tensors, **({} if references is None else {"reference": references})}
    types = _types(fields) if tensors else None
    if types is None:
        if isinstance(references, LowPrecisionRuns):
            return norms_with_opened(tensors, references, k, squared_norms)
        check_lengths(tensors, references or tensors)
        return lists.squared_norms(tensors, references, k)
    sums = torch.zeros(len(tensors), dtype=torch.float64, device="cpu")
    _call(f"squared_norms_{types}", fields, None, {"k": k, "tile": _TILE}, ctypes.c_void_p(address(sums)))
    return sums


def _types(fields: Mapping[str, Field]) -> str | None:
    """Return what the names of the functions for these lists end with, or None where there are no functions."""
    wide = [field for field in fields.values() if not isinstance(field, LowPrecisionRuns)]
    if not are_runs(*wide):
        return None
    grads = wide[0]
    narrow = [field for field in fields.values() if isinstance(field, LowPrecisionRuns)]
    if narrow and not all(takes(grads, field) and _begin_with_blocks(field) for field in narrow):
        return None
    return SUFFIXES[grads[0].dtype]


def _begin_with_blocks(runs: LowPrecisionRuns) -> bool:
    """Whether runs begin with blocks, so that tiles do not cut them; runs in bfloat16 have no blocks."""
    return not is_coded(runs.dtype) or not any(first % BLOCK for first in runs.firsts)


def _call(
    name: str, fields: Mapping[str, Field], factors: Tensor | None, numbers: Mapping[str, float], *more: object
) -> None:
    compiled, first = library(_SOURCE, EXACT), fields["grad"]
    assert compiled is not None and not isinstance(first, LowPrecisionRuns)
    # These arrays must live until the call returns, because C sees addresses only.
    arrays: dict[str, ctypes.Array[Any]] = {
        field: addresses(tensors) for field, tensors in fields.items() if not isinstance(tensors, LowPrecisionRuns)
    }
    fields_in_c = {field: _FieldInC(runs=ctypes.addressof(values)) for field, values in arrays.items()}
    narrow = {field: in_c(runs) for field, runs in fields.items() if isinstance(runs, LowPrecisionRuns)}
    fields_in_c |= {field: _FieldInC(narrow=ctypes.addressof(runs)) for field, runs in narrow.items()}
    lengths = integers([tensor.numel() for tensor in first])
    factors_in_c = None if factors is None else doubles(factors.tolist())
    described = _PassInC(runs=len(first), threads=torch.get_num_threads(), **fields_in_c, **numbers)
    described.length = ctypes.addressof(lengths)
    if factors_in_c is not None:
        described.factor = ctypes.addressof(factors_in_c)
    getattr(compiled, name)(ctypes.byref(described), *more)
