"""Element-wise updates for CPUs in C++: every update one pass through memory, many runs per call.

The signatures are those of :mod:`rankwise.kernels.lists`, and so are the results but for the last bits. What C++ has
no form for (mixed types, tensors with gaps, machines without a compiler) goes to :mod:`rankwise.kernels.blocked`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from rankwise.kernels import blocked
from rankwise.kernels.blocked import adamw_
from rankwise.kernels.native.arrays import SUFFIXES, addresses, are_runs, doubles, integers
from rankwise.kernels.native.building import EXACT, library
from rankwise.updates.adamw import Scalar, bias_corrections

__all__ = [
    "adamw_",
    "is_available",
    "mars_adamw_",
    "mars_lion_",
    "mars_momentum_",
    "mars_squared_norms",
    "scaled_step_",
    "squared_norms",
]

Tensors = list[Tensor]

_SOURCE = Path(__file__).with_name("elementwise.cpp")
_TILE = 8192
"""Elements of a tile: what a thread takes at a time, and what norms are added up over."""

_MOMENTUM, _LION, _ADAMW = 0, 1, 2


def is_available() -> bool:
    """Whether the library is there or can be built, which the first call tries."""
    return library(_SOURCE, EXACT) is not None


def _call(
    name: str, lengths: Sequence[Tensor], *arguments: object, dtype: torch.dtype, before: tuple[int, ...] = ()
) -> None:
    own = library(_SOURCE, EXACT)
    assert own is not None
    counts = integers([tensor.numel() for tensor in lengths])
    function = getattr(own, f"{name}_{SUFFIXES[dtype]}")
    function(*before, ctypes.c_int64(len(lengths)), counts, *arguments, ctypes.c_int64(_TILE), torch.get_num_threads())


def squared_norms(tensors: Tensors) -> Tensor:
    """Squared 2-norm of every tensor, (tensors,) in fp64, summed in a fixed order."""
    sums = torch.zeros(len(tensors), dtype=torch.float64)
    if not tensors:
        return sums
    if not are_runs(tensors):
        return blocked.squared_norms(tensors)
    _call("squared_norms", tensors, addresses(tensors), ctypes.c_void_p(sums.data_ptr()), dtype=tensors[0].dtype)
    return sums


def mars_squared_norms(grads: Tensors, references: Tensors, k: float) -> Tensor:
    """Squared norms of the corrected gradients ``g + k (g - h)``, (fragments,) in fp64, without keeping them."""
    sums = torch.zeros(len(grads), dtype=torch.float64)
    if not grads:
        return sums
    if not are_runs(grads, references):
        return blocked.mars_squared_norms(grads, references, k)
    found = ctypes.c_void_p(sums.data_ptr())
    arguments = (addresses(grads), addresses(references), ctypes.c_double(k), found)
    _call("mars_squared_norms", grads, *arguments, dtype=grads[0].dtype)
    return sums


def mars_adamw_(
    params: Tensors,
    grads: Tensors,
    references: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    *,
    k: float,
    coefficients: Tensor | None,
    lr: Scalar,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    step: int,
    advance: bool,
) -> None:
    """MARS-AdamW from raw gradients; arguments as for :func:`rankwise.kernels.lists.mars_adamw_`."""
    correction1, correction2 = bias_corrections(betas, step)
    lists = [params, grads, references, exp_avgs, exp_avg_sqs]
    if not grads or not are_runs(*lists):
        options = {"betas": betas, "eps": eps, "weight_decay": weight_decay, "step": step, "advance": advance}
        return blocked.mars_adamw_(*lists, k=k, coefficients=coefficients, lr=lr, **options)  # type: ignore[arg-type]
    rates = (k, float(lr), *betas, correction2**0.5, eps, 1.0 / correction1, weight_decay)
    _update(_ADAMW, lists, coefficients, rates, advance)


def mars_lion_(
    params: Tensors,
    grads: Tensors,
    references: Tensors,
    exp_avgs: Tensors,
    *,
    k: float,
    coefficients: Tensor | None,
    lr: Scalar,
    beta1: float,
    weight_decay: float,
    advance: bool,
) -> None:
    """MARS-Lion from raw gradients; arguments as for :func:`rankwise.kernels.lists.mars_lion_`."""
    lists = [params, grads, references, exp_avgs]
    if not grads or not are_runs(*lists):
        options = {"lr": lr, "beta1": beta1, "weight_decay": weight_decay, "advance": advance}
        return blocked.mars_lion_(*lists, k=k, coefficients=coefficients, **options)  # type: ignore[arg-type]
    _update(_LION, [*lists, None], coefficients, (k, float(lr), beta1, 0.0, 1.0, 0.0, 1.0, weight_decay), advance)


def mars_momentum_(
    grads: Tensors,
    references: Tensors,
    exp_avgs: Tensors,
    *,
    k: float,
    coefficients: Tensor | None,
    beta1: float,
    advance: bool,
) -> None:
    """Momentum of the clipped corrected gradients; as :func:`rankwise.kernels.lists.mars_momentum_`."""
    lists = [grads, references, exp_avgs]
    if not grads or not are_runs(*lists):
        return blocked.mars_momentum_(*lists, k=k, coefficients=coefficients, beta1=beta1, advance=advance)
    _update(_MOMENTUM, [None, *lists, None], coefficients, (k, 0.0, beta1, 0.0, 1.0, 0.0, 1.0, 0.0), advance)


def _update(
    rule: int, lists: Sequence[Tensors | None], coefficients: Tensor | None, rates: Sequence[float], advance: bool
) -> None:
    """Parameters, gradients, references, first and second moments; rates as in the source."""
    grads = lists[1]
    assert grads is not None
    factors = _one_per_run(coefficients, grads, "coefficients")
    pointers = [None if tensors is None else addresses(tensors) for tensors in lists]
    _call(
        "mars_update",
        grads,
        *pointers,
        factors,
        ctypes.c_int(advance),
        doubles(rates),
        dtype=grads[0].dtype,
        before=(rule,),
    )


def scaled_step_(
    params: Tensors, directions: Tensors, ratios: Tensor | None, *, lr: Scalar, weight_decay: float
) -> None:
    """As :func:`rankwise.kernels.lists.scaled_step_`, but leaves ``directions`` alone."""
    if not params or not are_runs(params, directions):
        return blocked.scaled_step_(params, directions, ratios, lr=lr, weight_decay=weight_decay)
    factors = _one_per_run(ratios, params, "ratios")
    rates = (ctypes.c_double(float(lr)), ctypes.c_double(weight_decay))
    _call("scaled_step", params, addresses(params), addresses(directions), factors, *rates, dtype=params[0].dtype)


def _one_per_run(values: Tensor | None, runs: Tensors, name: str) -> ctypes.Array[ctypes.c_double] | None:
    if values is None:
        return None
    if values.numel() != len(runs):
        raise ValueError(f"{name} has {values.numel()} entries for {len(runs)} tensors; pass one for each")
    return doubles(values.tolist())
