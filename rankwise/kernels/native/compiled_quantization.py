""":mod:`rankwise.kernels.quantization` in C++, many runs per call, with the same bits."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from rankwise.kernels import quantization
from rankwise.kernels.native.arrays import addresses, are_runs, integers
from rankwise.kernels.native.building import EXACT, library

__all__ = ["add_dequantized", "quantize_"]

_SOURCE = Path(__file__).with_name("quantization.cpp")
_TILE = 256 * quantization.BLOCK


def quantize_(values: Sequence[Tensor], quantized: Sequence[Tensor]) -> None:
    """As :func:`rankwise.kernels.quantization.quantize_`."""
    if _takes(values, quantized):
        _call("quantize_runs", values, quantized)
    else:
        quantization.quantize_(values, quantized)


def add_dequantized(values: Sequence[Tensor], quantized: Sequence[Tensor], sums: Sequence[Tensor]) -> None:
    """As :func:`rankwise.kernels.quantization.add_dequantized`."""
    if _takes(values, quantized, sums):
        _call("add_dequantized_runs", values, quantized, sums)
    else:
        quantization.add_dequantized(values, quantized, sums)


def _takes(values: Sequence[Tensor], quantized: Sequence[Tensor], *more: Sequence[Tensor]) -> bool:
    quantization.check_quantized(values, quantized)
    known = bool(values) and values[0].dtype == torch.float32 and are_runs(values, *more)
    return known and all(map(Tensor.is_contiguous, quantized)) and library(_SOURCE, EXACT) is not None


def _call(name: str, *lists: Sequence[Tensor]) -> None:
    own, lengths = library(_SOURCE, EXACT), integers([tensor.numel() for tensor in lists[0]])
    sizes = (ctypes.c_int64(len(lists[0])), lengths, ctypes.c_int64(_TILE), torch.get_num_threads())
    getattr(own, name)(*sizes, *map(addresses, lists))
