"""What MKOR's factor steps learn from the captured sums, agreed on by all ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from rankwise.planning.unit import StepUnit

__all__ = ["GLIMPSE", "CapturedSums", "LayerVectors", "layer_vectors", "reduce_statistics", "refuse_broken_factors"]

# Consecutive factor steps a matrix may fail before the run stops with an explanation.
TOLERATED_FAILURES = 3

GLIMPSE = 2.0**-20
"""What a rank adds to a matrix's number of failures if it has glimpsed it; float32 holds the sum of up to a million."""

CapturedSums = tuple[Tensor, int, Tensor]
"""See :meth:`rankwise.statistics.hooks.Capture.take`."""

LayerVectors = tuple[Tensor, Tensor, Tensor]
"""Of one layer: mean input, gradient of a (virtual) bias, and number of tokens, ``(1,)``."""


def layer_vectors(inputs: Tensor, tokens: Tensor, outputs: Tensor, divisor: float | Tensor) -> LayerVectors:
    """What a factor step takes, from sums over all ranks.

    Args:
        inputs: Sum of the inputs.
        tokens: Their number, ``(1,)``.
        outputs: Sum of the output gradients.
        divisor: What output gradients were multiplied by, over and above the mean over the batch.
    """
    return inputs / tokens.clamp(min=1), outputs / divisor, tokens


def reduce_statistics(
    unit: StepUnit, sums: Sequence[CapturedSums], failures: Sequence[Tensor | None], divisor: float | Tensor
) -> tuple[list[LayerVectors], Tensor]:
    """Sum the statistics of a unit's matrices over the ranks, in one collective.

    Args:
        unit: The unit.
        sums: This rank's sums of every matrix, at least one, in the same order on every rank.
        failures: For each, the failed factor steps in a row; None on ranks that do not own it.
        divisor: What output gradients were multiplied by, over and above the mean over the batch.

    Returns:
        The vectors of every matrix; the failures of all and their numbers of tokens, ``(2, matrices)``.
    """
    like = torch.empty(0, dtype=unit.dtype, device=unit.device)
    parts: list[Tensor] = []
    for (inputs, count, outputs), failed in zip(sums, failures, strict=True):
        tokens = like.new_tensor([float(count)])
        own_failures = like.new_zeros(1) if failed is None else failed.to(unit.dtype).view(1)
        parts += [inputs.to(like), outputs.to(like), tokens, own_failures]
    packed = torch.cat(parts)
    if unit.layout.world_size > 1:
        unit.traffic.count(packed)
        dist.all_reduce(packed, group=unit.layout.group)
    pieces = packed.split([part.numel() for part in parts])
    vectors = [
        layer_vectors(inputs, tokens, outputs, divisor)
        for inputs, outputs, tokens in zip(pieces[0::4], pieces[1::4], pieces[2::4], strict=True)
    ]
    return vectors, torch.stack([torch.cat(pieces[3::4]), torch.cat(pieces[2::4])])


def refuse_broken_factors(keys: Sequence[str], failures: Sequence[float]) -> None:
    """Stop where factors keep failing; the counts travelled with the statistics, so all ranks stop together.

    Args:
        keys: The matrices.
        failures: Failed factor steps in a row of each.

    Raises:
        RuntimeError: A matrix has failed too often.
    """
    broken = [key for key, count in zip(keys, failures, strict=True) if count >= TOLERATED_FAILURES]
    if broken:
        raise RuntimeError(
            f"MKOR: the factors of {', '.join(broken)} were not finite {TOLERATED_FAILURES} factor steps in a row. "
            "Lower the learning rate, exclude the layer ('exclude'), or set factor_dtype to 'float32'."
        )
