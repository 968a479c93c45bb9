"""SONew's pass over runs in C++ has the states and directions of :mod:`rankwise.sonew.rule`, bit for bit.

A run is a contiguous piece of a parameter in row-major order. The pass takes it where it lies, whatever its chains: an
edge that would leave its chain has the statistic zero, and a zero edge joins nothing. If a run is cut inside a chain,
its margins hold the neighbours' gradients and statistics of before the step.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rankwise.kernels.low_precision_runs import LowPrecisionRuns
from rankwise.kernels.native import low_precision_arrays
from rankwise.kernels.native.arrays import SUFFIXES, address, addresses, are_runs, doubles, integers
from rankwise.kernels.native.building import EXACT, library
from rankwise.kernels.passes import Field
from rankwise.kernels.sizes import check_shapes
from rankwise.sonew.chain_runs import ChainRun, Margins
from rankwise.updates.adamw import bias_corrections

__all__ = ["sonew_directions", "takes"]

_SOURCE = Path(__file__).with_name("sonew.cpp")
_TILE = 32768
"""Elements that a thread takes at a time, whole blocks, and over which norms are added up."""
_GRAFTS = {"none": 0, "adam": 1, "adam_official": 2, "momentum": 3, "sgd": 4}


def takes(dtype: torch.dtype, band: int) -> bool:
    """Whether there is a compiled pass for a type and a band."""
    return dtype in SUFFIXES and _library(band) is not None


def _library(band: int) -> ctypes.CDLL | None:
    # Each band has a library of its own, so that compilers unroll the loops over neighbours.
    return library(_SOURCE, (*EXACT, f"-DBAND={band}"))


def sonew_directions(
    runs: Sequence[ChainRun],
    grads: list[Tensor],
    exp_avgs: Field,
    exp_avg_sqs: Field,
    covariances: Sequence[Field],
    margins: Sequence[Margins | None],
    *,
    betas: tuple[float, float],
    eps: float,
    gamma: float,
    step: int,
    graft: str,
    graft_eps: float,
    out: list[Tensor],
) -> Tensor:
    """Advance the statistics of runs, write their directions, and sum the norms for the graft, in one pass.

    Args:
        runs: Place of every run in its chains.
        grads: Gradients, read only.
        exp_avgs: Momenta, updated in place; they and the other statistics may be narrow.
        exp_avg_sqs: Diagonals, updated in place.
        covariances: Edges of every run, a list for each distance of the band; updated in place.
        margins: Neighbours of every run that is cut inside a chain; None for others.
        betas: Decay rates of momentum and statistics.
        eps: Absolute damping of the bias-corrected diagonal.
        gamma: Relative edge tolerance.
        step: Number of this step, from 1.
        graft: "adam", "adam_official", "sgd", "momentum" or "none".
        graft_eps: Number added to the root of the "adam" graft.
        out: Tensors for the directions, which may not overlap the gradients.

    Returns:
        Squared norms of directions and graft directions, (2, runs) in fp64.

    Raises:
        ValueError: Tensors are no runs of one type that :func:`takes` accepts, or the lists do not fit together.
    """
    states, band = [exp_avgs, exp_avg_sqs, *covariances], len(covariances)
    if not len(runs) == len(margins) == len(grads):
        raise ValueError(f"{len(grads)} gradients come with {len(runs)} runs and {len(margins)} margins; pass one each")
    sums = torch.zeros(2, len(runs), dtype=torch.float64, device="cpu")
    if not grads:
        return sums
    compiled = _library(band)
    narrow = [state for state in states if isinstance(state, LowPrecisionRuns)]
    wide = [state for state in states if not isinstance(state, LowPrecisionRuns)]
    fit = are_runs(grads, *wide, out) and all(low_precision_arrays.takes(grads, state) for state in narrow)
    if compiled is None or not fit:
        raise ValueError("gradients, statistics and directions must be contiguous, of one type, and as long each")
    # These tensors and arrays must live until the call returns, because C sees addresses only.
    sides = [_sides(margin, grads[0].dtype, band) for margin in margins]
    margins_in_c = (ctypes.c_void_p * (2 * len(runs)))(
        *(None if m is None else address(m) for pair in sides for m in pair)
    )
    described, structures = _in_c(grads, states)
    described |= {
        "lengths": integers([grad.numel() for grad in grads]),
        "starts": integers([run.start for run in runs]),
        "chains": integers([run.chain or 0 for run in runs]),
        "margins": margins_in_c,
        "outs": addresses(out),
        "rates": doubles((*betas, *bias_corrections(betas, step), eps, gamma, graft_eps)),
    }
    call = _Described(len(runs), _TILE, torch.get_num_threads(), _GRAFTS[graft])
    for name, array in described.items():
        setattr(call, name, ctypes.addressof(array))
    getattr(compiled, f"sonew_directions_{SUFFIXES[grads[0].dtype]}")(
        ctypes.byref(call), ctypes.c_void_p(address(sums[0])), ctypes.c_void_p(address(sums[1]))
    )
    del structures
    return sums


class _Described(ctypes.Structure):
    """``Described`` of the source."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("runs", "tile_size", "threads", "graft")),
        *((name, ctypes.c_void_p) for name in ("lengths", "starts", "chains", "fields", "margins", "outs")),
        *((name, ctypes.c_void_p) for name in ("narrow", "loose", "ends", "rates")),
    ]


def _in_c(grads: list[Tensor], states: Sequence[Field]) -> tuple[dict[str, Any], list[Any]]:
    """Describe gradients and statistics to C, and what blocks of narrow ones have in common with other runs.

    Returns:
        Arrays by name, and structures to which they point.
    """
    nothing: list[int | None] = [None] * len(grads)
    fields: list[int | None] = [address(grad) for grad in grads]
    narrow: list[low_precision_arrays.LowPrecisionInC | None] = [None]
    loose: list[int | None] = 2 * nothing
    ends = [(0, grad.numel()) for grad in grads]
    for field in states:
        memory: Sequence[tuple[Tensor | None, Tensor | None]] = [(None, None)] * len(grads)
        if isinstance(field, LowPrecisionRuns):
            fields += nothing
            narrow.append(low_precision_arrays.in_c(field))
            if field.loose:
                memory = field.loose
                sizes = [[0 if end is None else end.numel() for end in pair] for pair in memory]
                ends = [(head, grad.numel() - tail) for (head, tail), grad in zip(sizes, grads, strict=True)]
        else:
            fields += [address(tensor) for tensor in field]
            narrow.append(None)
        loose += [None if end is None else address(end) for pair in memory for end in pair]
    pointers = [None if each is None else ctypes.addressof(each) for each in narrow]
    arrays = {name: (ctypes.c_void_p * len(of))(*of) for name, of in (("fields", fields), ("narrow", pointers))}
    arrays["loose"] = (ctypes.c_void_p * len(loose))(*loose)
    return {**arrays, "ends": integers([end for pair in ends for end in pair])}, narrow


def _sides(margins: Margins | None, dtype: torch.dtype, band: int) -> tuple[Tensor | None, Tensor | None]:
    if margins is None or not margins.left.numel():
        return None, None
    check_shapes(left=(margins.left, (3 + band, band)), right=(margins.right, (3 + band, band)))
    return margins.left.to(dtype).contiguous(), margins.right.to(dtype).contiguous()
