"""Lists of tensors as C sees them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["SUFFIXES", "addresses", "are_runs", "doubles", "integers"]

SUFFIXES = {torch.float32: "float32", torch.float64: "float64"}
"""Suffixes of the native functions' names, by type."""


def are_runs(*lists: Sequence[Tensor]) -> bool:
    """Whether all tensors are contiguous and of one type that there are functions for, position by position as long."""
    first = lists[0]
    dtype = first[0].dtype
    lengths = [tensor.numel() for tensor in first]
    return dtype in SUFFIXES and all(
        tensor.dtype == dtype and tensor.is_contiguous() and tensor.numel() == length
        for tensors in lists
        for tensor, length in zip(tensors, lengths, strict=True)
    )


def addresses(tensors: Sequence[Tensor]) -> ctypes.Array[ctypes.c_void_p]:
    """Where each tensor begins."""
    return (ctypes.c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))


def integers(values: Sequence[int]) -> ctypes.Array[ctypes.c_int64]:
    """As ``int64_t[]``."""
    return (ctypes.c_int64 * len(values))(*values)


def doubles(values: Sequence[float]) -> ctypes.Array[ctypes.c_double]:
    """As ``double[]``."""
    return (ctypes.c_double * len(values))(*values)
