r"""Triton kernels for CUDA: what :mod:`rankwise.updates` does, over many tensors per launch and without host syncs.

Importing this package needs no Triton; its functions are imported from their modules at the first use. Everything is
fp32 (others: use the plain functions), where not said otherwise. *Runs* are lists of contiguous 1-D tensors, one per
fragment, of any lengths (0 too) and alignments; the number of launches does not depend on how many there are. Norms
are fp64, summed in a fixed order and without atomics: two calls give the same bits. ``lr`` is a float or a 0-d tensor.

============================ ==================================================== ======================== ============
function                     does                                                 bytes per element        launches
                                                                                  (read + written)
============================ ==================================================== ======================== ============
``mars_squared_norms``       runs -> (n,) fp64                                    8 + 0                    2
``mars_adamw_``              corrected gradient, clip, AdamW, h := g              20 + 16                  1
``mars_lion_``               the same with Lion                                   16 + 12                  1
``mars_momentum_``           the same, momentum only                              12 + 8                   1
``adamw_``                   AdamW                                                16 + 12                  1
``squared_norms``            runs -> (n,) fp64                                    4 + 0                    2
``scaled_step_``             decay and a step times one ratio per run             8 + 4                    1
``sonew_directions``         statistics, direction, norms of it and of the graft; 4 (3 + b) + 4 (3 + b)    3 (b = 0: 2)
                             bands b <= 8, halos, chains of rows or tensors
``symmetric_product``        (B, m, n) -> X X^T (B, m, m), fp32, fp16 or bf16     half the operations      1
``symmetric_polynomial``     (B, m, m) -> b A + c A^2                             half the operations      1
``newton_schulz``            (..., m, n), as ``linalg.newton_schulz``             3 m^2 n + m^3 per step   2 per step
``update_factors_``          list of (d, d) inverses (fp32, fp16, bf16) and       2 reads + 1 write of     3
                             (n, d) vectors: stabilise, rank-1 update, keep the   the storage type
                             old one where the result is not finite
``rescale_``                 runs: gradient's norm to its preconditioned form     12 + 4                   3
``low_rank_moments``         LDAdam's rotation, moments, direction on (B, r, n)   12 + 12                  1
``low_rank_step_``           W -= lr U D and F = C - U Z on fragments             8 + 8 (no feedback       1
                                                                                  4 + 4)
============================ ==================================================== ======================== ============

``newton_schulz`` lies in the module of that name and has one library product per step besides. ``mars_*`` write 4 bytes
less without ``advance``. All of it compiles with Triton 3.2 and later. Where tensors lie is uploaded once per set of
addresses (:mod:`.tables`); steps on the same memory upload nothing. All but ``update_factors_`` can be captured in a
graph; there a step's number is a tensor on the device, with an entry per run or matrix.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from rankwise.kernels.triton.mars import adamw_, mars_adamw_, mars_lion_, mars_momentum_, mars_squared_norms
    from rankwise.kernels.triton.newton_schulz import symmetric_polynomial, symmetric_product
    from rankwise.kernels.triton.steps import scaled_step_, squared_norms

__all__ = [
    "adamw_",
    "is_available",
    "mars_adamw_",
    "mars_lion_",
    "mars_momentum_",
    "mars_squared_norms",
    "scaled_step_",
    "squared_norms",
    "symmetric_polynomial",
    "symmetric_product",
]

STEPS_ON_DEVICE = True
"""As :data:`rankwise.kernels.lists.STEPS_ON_DEVICE`."""

_MODULES = {
    "mars": ("adamw_", "mars_adamw_", "mars_lion_", "mars_momentum_", "mars_squared_norms"),
    "newton_schulz": ("symmetric_polynomial", "symmetric_product"),
    "steps": ("scaled_step_", "squared_norms"),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}


def is_available(device: torch.device, dtype: torch.dtype = torch.float32) -> bool:
    """Whether the kernels run there: a CUDA device of compute capability 7.0 or later, fp32, Triton installed."""
    if device.type != "cuda" or dtype != torch.float32 or torch.version.cuda is None:
        return False
    return find_spec("triton") is not None and torch.cuda.get_device_capability(device) >= (7, 0)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
