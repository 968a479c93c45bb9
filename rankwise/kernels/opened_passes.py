"""Forms without code for narrow states work on them one shard at a time: it is opened, updated and encoded again."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rankwise.kernels.low_precision_runs import LowPrecisionRuns
from rankwise.kernels.passes import Field, Pass, Tensors
from rankwise.kernels.quantization import decode_, encode_

__all__ = ["norms_with_opened", "run_opened"]


def run_opened(update: Pass, run: Callable[[Pass], None]) -> None:
    """Do a pass some of whose fields are narrow."""
    for place in range(len(update.grads)):
        single = update.only([place])
        narrow = {name: field for name, field in single.fields.items() if isinstance(field, LowPrecisionRuns)}
        opened = {name: _opened(field, single.grads) for name, field in narrow.items()}
        run(Pass(single.rule, {**single.fields, **opened}, single.scalars, single.factors))
        for name, field in narrow.items():
            if name != "reference" or single.scalars.advance:
                encode_(opened[name], field)


def norms_with_opened(
    tensors: Tensors, references: LowPrecisionRuns, k: float, norms: Callable[[Tensors, Field | None, float], Tensor]
) -> Tensor:
    """Compute what :func:`rankwise.kernels.lists.squared_norms` does, with narrow references.

    Args:
        tensors: Gradients ``g``.
        references: Gradients ``h`` in codes: ``g + k (g - h)`` is measured.
        k: Factor of the change since the reference.
        norms: Measures with references that are lists of tensors.
    """
    measured = [norms([tensor], _opened(references.only([place]), [tensor]), k) for place, tensor in enumerate(tensors)]
    return torch.cat(measured) if measured else norms([], None, k)


def _opened(runs: LowPrecisionRuns, like: Tensors) -> Tensors:
    values = [torch.empty_like(tensor) for tensor in like]
    decode_(values, runs)
    return values
