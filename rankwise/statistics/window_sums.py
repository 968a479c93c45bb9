"""The sums of one weight, which the hooks add to and steps take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from rankwise.statistics.linear_views import LinearShape, SummedPart

__all__ = ["CommitListener", "ModuleCall", "Record", "clear", "hand_over"]


@dataclass(eq=False)
class Record:
    """Sums of one weight over the current accumulation window.

    Attributes:
        name: of the first module that uses the weight, in the model given to `Capture`.
        parameter: the weight.
        bias: the bias all modules of the weight add, or None if they add none or different ones.
        shape: features and orientation, taken from the module: a weight may be sharded to nothing.
        inputs: the part of the input that this rank sums up; all of it unless ranks share the layer.
        outputs: the same of the output gradient.
        sum_input: sum of that part of the input over tokens.
        sum_output_grad: sum of that part of the output gradient over tokens, with the loss scale in it.
        count: number of tokens in the sums; 0 if no backward pass came by.
        touched: whether there is anything in the sums.
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

    @property
    def transposed(self) -> bool:
        """Whether the weight is ``(in_features, out_features)``."""
        return self.shape.transposed

    def whole_sums(self) -> tuple[Tensor, Tensor]:
        """The sums of inputs ``(in_features,)`` and output gradients ``(out_features,)``, valid until they are cleared.

        Zero where other ranks sum up.
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


def hand_over(records: Sequence[Record]) -> None:
    """Start the sums afresh within the window: somebody has copied them."""
    sums = [own for record in records if record.touched for own in (record.sum_input, record.sum_output_grad)]
    if sums:
        torch._foreach_zero_(sums)
    for record in records:
        record.count, record.touched = 0, False


def clear(records: Sequence[Record]) -> None:
    """Forget the sums, and what the window's module calls would add to them."""
    hand_over(records)
    for record in records:
        record.epoch += 1


@dataclass(eq=False)
class ModuleCall:
    """One forward call that waits for its output gradient."""

    record: Record
    sum_input: Tensor
    count: int
    epoch: int = -1


class CommitListener(Protocol):
    """Follows the sums as the backward pass adds to them."""

    open: bool
    """Whether a window has begun that all ranks must end together."""

    def committed(self, record: Record) -> None:
        """A weight has got the sums of a module call."""

    def abandon(self) -> None:
        """The window is dropped."""
