"""The sums of one weight, which the hooks add to and steps take."""

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
        changes: number of times that the sums were added to or forgotten.
        weight: what the module multiplied by in the last backward pass, whole where `parameter` is a shard.
        gradient: whether the gradient was at the weight when that pass ended, and its version; None before.
        accumulator: a weight, and the node of autograd's graph that adds to its gradient.
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


def clear(records: Sequence[Record]) -> None:
    """Forget the sums, and what the window's module calls would add to them."""
    sums = [own for record in records if record.touched for own in (record.sum_input, record.sum_output_grad)]
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
        weight: what the module multiplied by.
        born: the graph task in which the call was made, by activation checkpointing; or -1.
    """

    record: Record
    weight: Tensor
    sum_input: Tensor
    count: int
    born: int
    epoch: int = -1


class CommitListener(Protocol):
    """Follows the sums as the backward pass adds to them."""

    def committed(self, record: Record) -> None:
        """A weight has got the sums of a module call."""

    def dropped(self, records: Sequence[Record]) -> None:
        """Sums of these weights were forgotten, perhaps on this rank alone."""
