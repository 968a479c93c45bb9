"""Gradients as they lie in memory with their factor inverses, and what preconditioning makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from rankwise.mkor.product_groups import GradientForm

__all__ = [
    "AT_ONCE",
    "Gradient",
    "Preconditioned",
    "scratch_of",
]

AT_ONCE = 12 << 24
"""Elements that are preconditioned together on a device at most, but for a larger matrix: as many in the type of the
products, and those of its largest matrix once more, are all the scratch memory."""


@dataclass(frozen=True)
class Gradient:
    """The gradient of one matrix, as it lies in memory, with its factor inverses.

    Attributes:
        rows: Rows of the weight as it lies.
        columns: Columns of it.
        weights: Its elements in order, in one or several 1-D runs.
        biases: The bias's, alike, where it rides along.
        turned: Whether the bias is one more row; otherwise it is one more column.
        left: (d, d) for the rows, or None for the identity.
        right: (d, d) for the columns, alike.
    """

    rows: int
    columns: int
    weights: Sequence[Tensor]
    biases: Sequence[Tensor]
    turned: bool
    left: Tensor | None
    right: Tensor | None

    @property
    def form(self) -> GradientForm:
        """What is known of it without its values."""
        weights, biases = (tuple(run.numel() for run in runs) for runs in (self.weights, self.biases))
        sides = (side is not None for side in (self.left, self.right))
        return GradientForm(self.rows, self.columns, weights, biases, self.turned, *sides)

    @property
    def runs(self) -> list[Tensor]:
        """Runs of the weight, then of the bias."""
        return [*self.weights, *self.biases]

    @property
    def numel(self) -> int:
        """Elements of all runs."""
        return sum(run.numel() for run in self.runs)


class Preconditioned(NamedTuple):
    """What has become of some gradients.

    Attributes:
        runs: 1-D, in the type of the products.
        factors: (runs,) fp32, what they are yet to be multiplied by; None: by nothing.
    """

    runs: list[Tensor]
    factors: Tensor | None


def scratch_of(sizes: Sequence[int]) -> int:
    """Bytes that matrices of these sizes take on a device, with products in bfloat16."""
    largest = max(sizes, default=0)
    return 2 * (min(sum(sizes), max(AT_ONCE, largest)) + largest)
