"""A record has the sums of one weight, which hooks add to and steps take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from rankwise.statistics.linear_views import LinearShape, SummedPart

__all__ = ["CommitListener", "ModuleCall", "Record", "clear"]


@dataclass(eq=False)
class Record:
    """Sums of one weight over the current accumulation window.

    Attributes:
        name: Name of the first module that uses the weight, in the model given to `Capture`.
        parameter: The weight.
        bias: Bias that all modules of the weight add, or None if they add none or different ones.
        shape: Features and orientation, taken from the module, as a weight may be sharded to nothing.
        inputs: Part of the input that this rank sums up; all of it unless ranks share the layer.
        outputs: Part of the output gradient that this rank sums up.
        sum_input: Sum over tokens of this rank's part of the input.
        sum_output_grad: Sum over tokens of this rank's part of the output gradient, which includes the loss scale.
        count: Number of tokens in the sums; 0 if no backward pass counted.
        touched: Whether anything was added to the sums.
        changes: How often the sums were added to or forgotten.
        weight: What the module multiplied by in the last backward pass, whole where `parameter` is a shard.
        gradient: Whether the gradient was at the weight when that pass ended, and its version; None before.
        accumulator: A weight, and the node of autograd's graph that adds to its gradient.
    """

    name: str
    parameter: Parameter
    bias: Parameter | None
    shape: LinearShape
    inputs: SummedPart
    outputs: SummedPart
    sum_input: Tensor = field(repr=False)
    sum_output_grad: Tensor = field(repr=False)
    count: int = 0
    epoch: int = field(default=0, repr=False)
    touched: bool = field(default=False, repr=False)
    changes: int = field(default=0, repr=False)
    weight: Tensor | None = field(default=None, repr=False)
    gradient: tuple[bool, int | None] | None = field(default=None, repr=False)
    accumulator: tuple[Tensor, Any] | None = field(default=None, repr=False)

    @property
    def transposed(self) -> bool:
        """Whether the weight is ``(in_features, out_features)``."""
        return self.shape.transposed

    def whole_sums(self) -> tuple[Tensor, Tensor]:
        """Return the sums of inputs ``(in_features,)`` and output gradients ``(out_features,)``, valid until cleared.

        They are zero for features that other ranks sum up.
        """
        inputs = self.inputs.widened(self.sum_input, self.shape.in_features)
        return inputs, self.outputs.widened(self.sum_output_grad, self.shape.out_features)

    def move_to(self, device: torch.device) -> None:
        """Follow a model that was moved, or materialized, after the record was made."""
        if self.sum_input.device != device:
            if self.touched:
                self.sum_input, self.sum_output_grad = self.sum_input.to(device), self.sum_output_grad.to(device)
            else:
                self.sum_input = torch.zeros_like(self.sum_input, device=device)
                self.sum_output_grad = torch.zeros_like(self.sum_output_grad, device=device)


def clear(records: Sequence[Record]) -> None:
    """Clear the sums, and start an epoch in which inputs that were counted count anew."""
    sums = [total for record in records if record.touched for total in (record.sum_input, record.sum_output_grad)]
    if sums:
        torch._foreach_zero_(sums)
    for record in records:
        record.changes += record.touched
        record.count, record.touched = 0, False
        record.epoch += 1


@dataclass(eq=False)
class ModuleCall:
    """One forward call that waits for its output gradient.

    Attributes:
        weight: Tensor that the module multiplied by.
        born: Graph task in which activation checkpointing made the call; -1 for an ordinary forward pass.
    """

    record: Record
    weight: Tensor
    sum_input: Tensor
    count: int
    born: int
    epoch: int = -1


class CommitListener(Protocol):
    """What follows the sums as the backward pass adds to them."""

    def committed(self, record: Record) -> None:
        """Hear that a weight has got the sums of a module call."""

    def dropped(self, records: Sequence[Record]) -> None:
        """Hear that the sums of these weights were forgotten, perhaps on this rank alone."""
