"""This module describes runs of codes to C."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rankwise.kernels.low_precision_runs import BFLOAT16, ROOT, SIGNED, LowPrecisionRuns
from rankwise.kernels.native.arrays import addresses, are_runs, integers

__all__ = ["LowPrecisionInC", "in_c", "takes"]

_KINDS = {BFLOAT16: 0, SIGNED: 1, ROOT: 2}


class LowPrecisionInC(ctypes.Structure):
    """``NarrowRuns`` of ``narrow.h``."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("kind", "is_random", "step")),
        *((name, ctypes.c_void_p) for name in ("codes", "exponents", "firsts", "keys")),
    ]


def takes(values: Sequence[Tensor], runs: LowPrecisionRuns) -> bool:
    """Whether C++ reads and writes these runs as float32 values.

    Raises:
        ValueError: Values and runs do not fit together.
    """
    runs.check(values)
    kept = [*runs.codes, *runs.exponents]
    return (
        bool(values)
        and values[0].dtype == torch.float32
        and are_runs(values)
        and not isinstance(runs.step, Tensor)
        and len({codes.dtype for codes in runs.codes}) == 1
        and {exponents.dtype for exponents in runs.exponents} <= {torch.int8}
        and all(map(Tensor.is_contiguous, kept))
    )


def in_c(runs: LowPrecisionRuns) -> LowPrecisionInC:
    """Describe runs to C; the arrays live as long as the result itself, not as its copy in another structure."""
    assert not isinstance(runs.step, Tensor)
    arrays: dict[str, Any] = {
        "codes": addresses(runs.codes),
        "exponents": addresses(runs.exponents),
        "firsts": integers(runs.firsts),
        "keys": integers(runs.keys),
    }
    places = {name: ctypes.addressof(array) for name, array in arrays.items()}
    described = LowPrecisionInC(_KINDS[runs.dtype], runs.step is not None, (runs.step or 0) & 0xFFFFFFFF, **places)
    described.arrays = arrays
    return described
