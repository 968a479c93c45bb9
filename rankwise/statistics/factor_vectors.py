"""MKOR's factor steps get these vectors, which are made of the captured sums over all ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from rankwise.plan.step_unit import StepUnit
from rankwise.statistics.window_sums import Record

__all__ = ["GLIMPSE", "LayerVectors", "layer_vectors", "reduce_statistics", "refuse_broken_factors"]

# After so many failed factor steps of a matrix in a row, the run stops with an explanation.
TOLERATED_FAILURES = 3

GLIMPSE = 2.0**-20
"""A rank that has glimpsed a matrix adds this to its number of failures; float32 holds the sum of a million ranks."""

LayerVectors = tuple[Tensor, Tensor, Tensor]
"""Statistics of one layer: mean input, gradient of a (virtual) bias, and number of tokens, ``(1,)``."""


def layer_vectors(inputs: Tensor, tokens: Tensor, outputs: Tensor, divisor: float | Tensor) -> LayerVectors:
    """Return what a factor step takes, from sums over all ranks.

    Args:
        inputs: Sum of the inputs.
        tokens: Number of tokens, ``(1,)``.
        outputs: Sum of the output gradients.
        divisor: What the sum exceeds the gradient of the mean loss by: the number of ranks, times the loss scale.
    """
    return inputs / tokens.clamp(min=1), outputs / divisor, tokens


def reduce_statistics(
    unit: StepUnit, records: Sequence[Record], failures: Sequence[Tensor | None], divisor: float | Tensor
) -> tuple[list[LayerVectors], Tensor]:
    """Sum the statistics of a unit's matrices over the ranks, in one collective.

    Args:
        unit: The present unit.
        records: This rank's sums of every matrix, at least one, in one order on all ranks.
        failures: Failed factor steps in a row of each matrix; None on ranks that do not own it.
        divisor: What the sum exceeds the gradient of the mean loss by: the number of ranks, times the loss scale.

    Returns:
        The vectors of every matrix; and the failures and tokens of all matrices, ``(2, matrices)``.
    """
    inputs, outputs = zip(*(record.whole_sums() for record in records), strict=True)
    like, count = torch.empty(0, dtype=unit.dtype, device=unit.device), len(records)
    numbers = torch.tensor([float(record.count) for record in records], dtype=unit.dtype, device="cpu")
    parts = [part.to(like) for part in (*inputs, *outputs, _uploaded(numbers, unit.device), _stacked(failures, like))]
    packed = torch.cat(parts)
    if unit.layout.world_size > 1:
        unit.traffic.count(packed)
        dist.all_reduce(packed, group=unit.layout.group)
    lengths = [tuple(part.numel() for part in side) for side in (inputs, outputs)]
    all_inputs, all_outputs, tokens, failed = packed.split([*map(sum, lengths), count, count])
    # All are divided at once: one layer at a time would take two launches each.
    per_input = tokens.clamp(min=1).repeat_interleave(unit.indices.of(lengths[0]), output_size=len(all_inputs))
    means = (all_inputs / per_input).split(lengths[0])
    gradients = (all_outputs / divisor).split(lengths[1])
    return list(zip(means, gradients, tokens.split(1), strict=True)), torch.stack([failed, tokens])


def _uploaded(numbers: Tensor, device: torch.device) -> Tensor:
    """Copy numbers to the device, without waiting for it."""
    return numbers.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else numbers.to(device)


def _stacked(failures: Sequence[Tensor | None], like: Tensor) -> Tensor:
    """Stack one number for each matrix, 0 where this rank has none."""
    nothing = torch.zeros((), dtype=torch.int32, device=like.device)
    counts = [nothing if failed is None else failed for failed in failures]
    if any(failed.dtype != nothing.dtype for failed in counts):
        counts = [failed.to(like) for failed in counts]
    return torch.stack(counts)


def refuse_broken_factors(keys: Sequence[str], failures: Sequence[float]) -> None:
    """Stop where factors keep failing; the counts travelled with the statistics, so that all ranks stop together.

    Raises:
        RuntimeError: A matrix has failed too often.
    """
    broken = [key for key, count in zip(keys, failures, strict=True) if count >= TOLERATED_FAILURES]
    if broken:
        raise RuntimeError(
            f"MKOR: the factors of {', '.join(broken)} were not finite {TOLERATED_FAILURES} factor steps in a row. "
            "Lower the learning rate, exclude the layer ('exclude'), or set factor_dtype to 'float32'."
        )
