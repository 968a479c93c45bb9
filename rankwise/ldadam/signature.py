"""What LDAdam's matrices of a batch have in common, and the memory that they need."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rankwise.comm.owner_plan import MatrixTask
from rankwise.ldadam.sliced_formulas import Cut, exchanged

__all__ = [
    "ELEMENTS_AT_ONCE",
    "LowRankSignature",
    "scratch_alone",
    "scratch_of_a_stack",
]

ELEMENTS_AT_ONCE = 1 << 26
"""Elements of the (r, n) coordinates that a device computes together; the scratch memory holds twice as many."""


class LowRankSignature(NamedTuple):
    """What the matrices of a batch, or the slices of matrices, have in common.

    Attributes:
        rows: Rows of one of them.
        columns: Columns of one of them.
        rank: Rank of the subspace.
        group: Position of the param group.
        right: Whether the whole matrix is projected from the right.
        cut: The side of the whole matrix of which they are slices; None for whole matrices.
    """

    rows: int
    columns: int
    rank: int
    group: int
    right: bool
    cut: Cut | None = None

    @property
    def short(self) -> int:
        """Length of the side that is projected."""
        return self.columns if self.right else self.rows

    @property
    def long(self) -> int:
        """Length of the other side."""
        return self.rows if self.right else self.columns

    def factors_length(self, products: int) -> int:
        """Elements of the basis and of each product's other factor.

        Args:
            products: One is the direction; with error feedback another one is what the buffer loses.
        """
        return self.rank * (self.short + products * self.long)

    def cut_along(self, axis: int) -> Cut:
        """The side of this whole matrix that slices of its rows (0) or columns (1) cut."""
        return "long" if self.right == (axis == 0) else "short"

    def sends_less_in_slices(self, axis: int, partners: int, products: int) -> bool:
        """Whether ranks compute this whole matrix together for less than if one gathered it and returned the factors.

        Args:
            axis: Of which they have slices.
            partners: Ranks, with equal shares.
            products: See :meth:`factors_length`.
        """
        # All ranks' together, over their number less one; a ring sends twice what it sums.
        together = 2 * sum(exchanged(self.cut_along(axis), self.short, self.long, self.rank))
        share = self.rows * self.columns / partners
        return together <= share + min(self.factors_length(products), products * share)


def scratch_alone(tasks: Sequence[MatrixTask], narrow: bool = False) -> int:
    """Bytes for matrices that are stepped where they lie: their halves, coordinates, images, and what is solved.

    Args:
        tasks: The matrices.
        narrow: Whether their states are opened, of as many matrices at a time.
    """
    coordinates = images = grams = matrices = 0
    for task in tasks:
        signature: LowRankSignature = task.signature
        rank, long = signature.rank, signature.long
        coordinates, images = coordinates + rank * long, images + rank * signature.short
        matrices += signature.short * long
        grams += 4 * rank * rank
    opened = images + 2 * coordinates if narrow else 0
    share = min(1.0, ELEMENTS_AT_ONCE / max(opened or coordinates, 1))
    halved = min(share, HALVED_AT_ONCE / max(matrices, 1))
    return int(4 * (share * opened + halved * (matrices + 4 * (coordinates + images) + grams)))


def scratch_of_a_stack(tasks: Sequence[MatrixTask]) -> int:
    """Bytes for matrices that have been gathered: some sets of coordinates."""
    return 4 * 5 * sum(task.signature.rank * task.signature.long for task in tasks)
