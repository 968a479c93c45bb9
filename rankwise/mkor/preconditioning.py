"""These classes describe gradients in memory with their factor inverses, and preconditioned gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from rankwise.mkor.product_groups import GradientForm
from rankwise.mkor.vector_windows import Factor, Window

__all__ = [
    "AT_ONCE",
    "Gradient",
    "Preconditioned",
    "scratch_of",
]

AT_ONCE = 12 << 24
"""So many elements are preconditioned together on a device at most, unless a single matrix has more. Scratch memory has
as many in the type of the products, and those of the largest matrix once more."""


@dataclass(frozen=True)
class Gradient:
    """The gradient of one matrix in memory, with its factor inverses.

    Attributes:
        rows: Rows of the weight in memory.
        columns: Columns of the weight in memory.
        weights: Elements of the weight's gradient in order, in one or several 1-D runs.
        biases: Elements of the bias's gradient in such runs; empty where it does not ride along.
        turned: Whether the bias is one more row; otherwise it is one more column.
        left: Factor inverse for the rows, or None for the identity.
        right: Factor inverse for the columns, of the same kind, or None for the identity.
    """

    rows: int
    columns: int
    weights: Sequence[Tensor]
    biases: Sequence[Tensor]
    turned: bool
    left: Factor | None
    right: Factor | None

    @property
    def form(self) -> GradientForm:
        """The form of the gradient, without its values."""
        weights, biases = (tuple(run.numel() for run in runs) for runs in (self.weights, self.biases))
        left, right = self.left, self.right
        windows = isinstance(left, Window) or isinstance(right, Window)
        return GradientForm(
            self.rows, self.columns, weights, biases, self.turned, left is not None, right is not None, windows
        )

    @property
    def runs(self) -> list[Tensor]:
        """Runs of the weight, then of the bias."""
        return [*self.weights, *self.biases]

    @property
    def numel(self) -> int:
        """Number of elements of all runs."""
        return sum(run.numel() for run in self.runs)


class Preconditioned(NamedTuple):
    """Preconditioned gradients.

    Attributes:
        runs: 1-D runs in the type of the products.
        factors: (runs,) fp32 factors that the runs have yet to be multiplied by; None where there are none.
    """

    runs: list[Tensor]
    factors: Tensor | None


def scratch_of(sizes: Sequence[int]) -> int:
    """Return the bytes of scratch memory for matrices of these sizes on a device, with products in bfloat16."""
    largest = max(sizes, default=0)
    return 2 * (min(sum(sizes), max(AT_ONCE, largest)) + largest)
