"""What LDAdam's matrices of a batch have in common, and the memory that they need."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rankwise.comm.owner_plan import MatrixTask
from rankwise.ldadam.sliced_formulas import Cut, exchanged

__all__ = [
    "ELEMENTS_AT_ONCE",
    "LowRankSignature",
    "calls_of",
    "scratch_alone",
    "scratch_of_a_stack",
]

ELEMENTS_AT_ONCE = 1 << 26
"""Elements of the bases and (r, n) coordinates that a device computes together; scratch memory has two to three times
as many."""


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

    def sends_less_in_slices(self, axis: int, partners: int, products: int, slower: float = 1.0) -> bool:
        """Whether ranks compute this whole matrix together for less than if one gathered it and returned the factors.

        Args:
            axis: Of which they have slices.
            partners: Ranks, with equal shares.
            products: See :meth:`factors_length`.
            slower: How many times as long an element takes between two ranks as around a ring.
        """
        # All ranks' together, over their number less one; a ring sends twice what it sums.
        messages = exchanged(self.cut_along(axis), self.short, self.long, self.rank)
        together = sum(size * (partners if gathered else 2) for size, gathered in messages)
        share = self.rows * self.columns / partners
        if (self.rows, self.columns)[axis] < partners * self.rank:
            return False  # what owners keep whole, a basis or moments, would be more than their part of the matrix
        return together <= slower * (share + min(self.factors_length(products), products * share))


def scratch_alone(tasks: Sequence[MatrixTask], narrow: bool = False) -> int:
    """Bytes for matrices that are stepped where they lie: bases, coordinates, images, and what is solved.

    Args:
        tasks: The matrices.
        narrow: Whether their states are opened, of as many matrices at a time.
    """
    signatures = [task.signature for task in tasks]
    counts = Counter((one.rank, one.rows, one.columns, one.short, one.long) for one in signatures)
    sizes = {key: (count, key[0] * (key[3] + key[4])) for key, count in counts.items()}
    most = max((_elements_of_a_call(call) for call in calls_of(sizes)), default=0)
    opened = sum(one.rank * (one.short + 2 * one.long) for one in signatures) if narrow else 0
    if opened > ELEMENTS_AT_ONCE:
        # Fewer at a time: what is opened has about as many elements as what is there beside it.
        opened, most = ELEMENTS_AT_ONCE, min(most, ELEMENTS_AT_ONCE * 5 // 4)
    return 4 * (opened + most)


def _elements_of_a_call(call: Sequence[tuple[tuple[int, ...], range]]) -> int:
    """Elements that are there at once: all scaled columns beside their halves, or the last products of a shape."""
    images = coordinates = last = grams = 0
    for (rank, _, _, short, long), places in call:
        own_images, own_coordinates = len(places) * rank * short, len(places) * rank * long
        images, coordinates = images + own_images, coordinates + own_coordinates
        last = max(last, own_images + 2 * own_coordinates)
        grams += 4 * len(places) * rank * rank
    return grams + max(images + 2 * coordinates, 2 * images + last)


def calls_of(sizes: Mapping[Any, tuple[int, int]]) -> Iterator[list[tuple[Any, range]]]:
    """Yield which matrices are computed together.

    Args:
        sizes: By a key that begins with the rank: how many matrices are alike, and :data:`ELEMENTS_AT_ONCE` of one.

    Yields:
        Keys of one rank, each with the places of some matrices among those that are alike.
    """
    call: list[tuple[Any, range]] = []
    elements = 0
    for key in sorted(sizes):
        count, own = sizes[key]
        chunk = max(1, ELEMENTS_AT_ONCE // own)
        for first in range(0, count, chunk):
            places = range(first, min(first + chunk, count))
            if call and (call[0][0][0] != key[0] or elements + len(places) * own > ELEMENTS_AT_ONCE):
                yield call
                call, elements = [], 0
            call.append((key, places))
            elements += len(places) * own
    if call:
        yield call


def scratch_of_a_stack(tasks: Sequence[MatrixTask]) -> int:
    """Bytes for matrices that have been gathered: some sets of coordinates."""
    return 4 * 5 * sum(task.signature.rank * task.signature.long for task in tasks)
