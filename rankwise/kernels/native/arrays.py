"""This module makes C arrays of tensors' addresses and of numbers, and refuses tensors that are not on the CPU."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["SUFFIXES", "address", "addresses", "are_runs", "doubles", "integers"]

SUFFIXES = {torch.float32: "float32", torch.float64: "float64"}
"""Suffixes of the native functions' names, by type."""


def are_runs(*lists: Sequence[Tensor]) -> bool:
    """Whether all tensors are contiguous, of one type in :data:`SUFFIXES`, and of one length at each position."""
    first = lists[0]
    dtype = first[0].dtype
    lengths = [tensor.numel() for tensor in first]
    return dtype in SUFFIXES and all(
        tensor.dtype == dtype and tensor.is_contiguous() and tensor.numel() == length
        for tensors in lists
        for tensor, length in zip(tensors, lengths, strict=True)
    )


def addresses(tensors: Sequence[Tensor]) -> ctypes.Array[ctypes.c_void_p]:
    """Return the address of each tensor.

    Raises:
        ValueError: A tensor is not in the host's memory.
    """
    if not all(tensor.is_cpu for tensor in tensors):
        _refuse(next(tensor for tensor in tensors if not tensor.is_cpu))
    return (ctypes.c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))


def address(tensor: Tensor) -> int:
    """Return the address of a tensor.

    Raises:
        ValueError: The tensor is not in the host's memory.
    """
    if not tensor.is_cpu:
        _refuse(tensor)
    return tensor.data_ptr()


def _refuse(tensor: Tensor) -> None:
    raise ValueError(
        f"compiled functions take tensors of the CPU, but one of shape {tuple(tensor.shape)} is on {tensor.device}; "
        "keep weights, gradients and states on one device"
    )


def integers(values: Sequence[int]) -> ctypes.Array[ctypes.c_int64]:
    """Return the values as ``int64_t[]``."""
    return (ctypes.c_int64 * len(values))(*values)


def doubles(values: Sequence[float]) -> ctypes.Array[ctypes.c_double]:
    """Return the values as ``double[]``."""
    return (ctypes.c_double * len(values))(*values)
