"""These functions do what :mod:`rankwise.kernels.quantization` does, to the bit, in C++ with many runs per call."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from rankwise.kernels import quantization
from rankwise.kernels.low_precision_runs import BLOCK, LowPrecisionRuns, blocks_of, is_coded
from rankwise.kernels.native.arrays import address, addresses, are_runs, integers
from rankwise.kernels.native.building import EXACT, library
from rankwise.kernels.native.low_precision_arrays import LowPrecisionInC, in_c, takes

__all__ = ["add_decoded", "decode_", "encode_", "exponents_of"]

_SOURCE = Path(__file__).with_name("quantization.cpp")
_TILE = 256 * BLOCK


class _RunsInC(ctypes.Structure):
    """``Runs`` of the source."""

    _fields_ = [
        ("kept", LowPrecisionInC),
        *((name, ctypes.c_int64) for name in ("count", "tile", "threads")),
        *((name, ctypes.c_void_p) for name in ("lengths", "bases")),
    ]


def decode_(values: Sequence[Tensor], kept: LowPrecisionRuns) -> None:
    """Overwrite values with what codes stand for."""
    if _takes(values, kept):
        _call("decode_runs", kept, addresses(values))
    else:
        quantization.decode_(values, kept)


def add_decoded(values: Sequence[Tensor], kept: LowPrecisionRuns, sums: Sequence[Tensor]) -> None:
    """Add what codes stand for to other values."""
    if _takes(values, kept, sums):
        _call("add_decoded_runs", kept, addresses(values), addresses(sums))
    else:
        quantization.add_decoded(values, kept, sums)


def exponents_of(values: Sequence[Tensor], kept: LowPrecisionRuns) -> Tensor:
    """Return the exponents that runs of codes would have by these values alone."""
    if not _takes(values, kept) or not is_coded(kept.dtype):
        return quantization.exponents_of(values, kept)
    exponents = torch.empty(sum(_blocks(kept)), dtype=torch.int8, device="cpu")
    _call("exponents_of_runs", kept, addresses(values), ctypes.c_void_p(address(exponents)))
    return exponents


def encode_(values: Sequence[Tensor], kept: LowPrecisionRuns, exponents: Tensor | None = None) -> None:
    """Overwrite codes and their exponents with what is kept of values."""
    given = None if exponents is None else exponents.to(torch.int8).contiguous()
    fit = given is None or given.shape == (sum(_blocks(kept)),)
    if fit and _takes(values, kept):
        _call("encode_runs", kept, addresses(values), None if given is None else ctypes.c_void_p(address(given)))
    else:
        quantization.encode_(values, kept, exponents)


def _takes(values: Sequence[Tensor], kept: LowPrecisionRuns, *more: Sequence[Tensor]) -> bool:
    return takes(values, kept) and are_runs(values, *more) and library(_SOURCE, EXACT) is not None


def _blocks(kept: LowPrecisionRuns) -> list[int]:
    return [blocks_of(first, codes.numel()) for first, codes in zip(kept.firsts, kept.codes, strict=True)]


def _call(name: str, kept: LowPrecisionRuns, *pointers: object) -> None:
    # These arrays must live until the call returns, because C sees addresses only.
    lengths = integers([codes.numel() for codes in kept.codes])
    bases = integers(list(accumulate(_blocks(kept), initial=0)))
    narrow = in_c(kept)
    places = {"lengths": ctypes.addressof(lengths), "bases": ctypes.addressof(bases)}
    described = _RunsInC(narrow, len(kept), _TILE, torch.get_num_threads(), **places)
    getattr(library(_SOURCE, EXACT), name)(ctypes.byref(described), *pointers)
