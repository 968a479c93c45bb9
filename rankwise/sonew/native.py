"""SONew's pass over runs in C++; as :mod:`rankwise.sonew.blocked`, to the last bit of states and directions."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from rankwise.kernels.native.arrays import SUFFIXES, addresses, are_runs, doubles, integers
from rankwise.kernels.native.building import EXACT, library
from rankwise.kernels.sizes import check_shapes
from rankwise.sonew import blocked as blocked_sonew
from rankwise.sonew.blocked import Margins, Run
from rankwise.updates.adamw import bias_corrections

__all__ = ["sonew_directions"]

_SOURCE = Path(__file__).with_name("sonew.cpp")
_TILE = 32768
"""Elements of a tile: what a thread takes at a time, and what norms are added up over."""
_GRAFTS = {"none": 0, "adam": 1, "adam_official": 2, "momentum": 3, "sgd": 4}


def sonew_directions(
    runs: Sequence[Run],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    covariances: Sequence[list[Tensor]],
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
    """Advance the statistics of runs and write their directions; norms for the graft in the same pass.

    Arguments and results as for :func:`rankwise.sonew.blocked.sonew_directions`.
    """
    fields = [grads, exp_avgs, exp_avg_sqs, *covariances]
    # Compiled for the band: its loops over neighbours are unrolled.
    own = library(_SOURCE, (*EXACT, f"-DBAND={len(covariances)}")) if grads and are_runs(*fields, out) else None
    if own is None:
        return blocked_sonew.sonew_directions(
            runs,
            grads,
            exp_avgs,
            exp_avg_sqs,
            covariances,
            margins,
            betas=betas,
            eps=eps,
            gamma=gamma,
            step=step,
            graft=graft,
            graft_eps=graft_eps,
            out=out,
        )
    if not len(runs) == len(margins) == len(grads):
        raise ValueError(f"{len(grads)} gradients come with {len(runs)} runs and {len(margins)} margins; pass one each")
    sums = torch.zeros(2, len(runs), dtype=torch.float64)
    # Kept until the call returns: C sees addresses only.
    sides = [_sides(found, grads[0].dtype, len(covariances)) for found in margins]
    known = (ctypes.c_void_p * (2 * len(runs)))(*(None if m is None else m.data_ptr() for pair in sides for m in pair))
    getattr(own, f"sonew_directions_{SUFFIXES[grads[0].dtype]}")(
        ctypes.c_int64(len(runs)),
        integers([grad.numel() for grad in grads]),
        integers([run.start for run in runs]),
        integers([run.chain or 0 for run in runs]),
        addresses([tensor for field in fields for tensor in field]),
        known,
        addresses(out),
        doubles((*betas, *bias_corrections(betas, step), eps, gamma, graft_eps)),
        _GRAFTS[graft],
        ctypes.c_void_p(sums[0].data_ptr()),
        ctypes.c_void_p(sums[1].data_ptr()),
        ctypes.c_int64(_TILE),
        torch.get_num_threads(),
    )
    return sums


def _sides(margins: Margins | None, dtype: torch.dtype, band: int) -> tuple[Tensor | None, Tensor | None]:
    if margins is None or not margins.left.numel():
        return None, None
    check_shapes(left=(margins.left, (3 + band, band)), right=(margins.right, (3 + band, band)))
    return margins.left.to(dtype).contiguous(), margins.right.to(dtype).contiguous()
