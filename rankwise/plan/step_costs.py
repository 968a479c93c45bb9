"""What one step costs beyond its layout, owners and states, for estimates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from rankwise.comm.owner_plan import Batch, MatrixTask, Reply, own_pieces

__all__ = ["PASS_TABLE_BYTES", "TABLE_BYTES", "Joint", "ScratchMemory", "StepCosts", "tables"]


class Joint(NamedTuple):
    """A message among the ranks that compute a batch of slices together.

    Attributes:
        bytes: What each rank hands over.
        kind: Whether every rank gets the sum of all, its part of the sum, or what all have handed over.
    """

    bytes: int
    kind: Literal["sum", "scatter", "gather"] = "sum"

    def passed(self, ranks: int) -> float:
        """Bytes that pass each link of a ring of so many ranks."""
        times = {"sum": 2 / ranks, "scatter": 1 / ranks, "gather": 1.0}[self.kind]
        return self.bytes * times * (ranks - 1)


def _no_joint(batch: Batch) -> tuple[Joint, ...]:
    return ()


def _no_messages(batch: Batch) -> tuple[int, ...]:
    return ()


def _nothing(tasks: Sequence[MatrixTask]) -> int:
    return 0


def _none_of(task: MatrixTask) -> int:
    return 0


TABLE_BYTES = 16 / 2048
"""Bytes per element of the tables that say where the tiles of norms and codes lie."""

PASS_TABLE_BYTES = 16 / 8192
"""Bytes per element of the tables of passes, whose programs take several tiles each."""


def tables(elements: int, largest: int) -> float:
    """Bytes of the tables of element-wise passes: where their tiles lie, and a sum for each tile."""
    return elements * (TABLE_BYTES + PASS_TABLE_BYTES + 8 / 2048)


@dataclass(frozen=True)
class ScratchMemory:
    """Memory that a rule needs on a device, in bytes, beside weights, gradients, states, messages and results.

    Attributes:
        elements: Memory of element-wise passes, given all elements and those of the largest parameter.
        alone: Memory for matrices that lie whole on their owner.
        stacked: Memory for the matrices of a batch that an owner has gathered.
        spends_stack: Whether the result overwrites what was gathered.
    """

    elements: Callable[[int, int], float] = tables
    alone: Callable[[Sequence[MatrixTask]], int] = _nothing
    stacked: Callable[[Sequence[MatrixTask]], int] = _nothing
    spends_stack: bool = False


@dataclass(frozen=True)
class StepCosts:
    """What a step costs for one unit of an optimizer.

    Attributes:
        sums: Quantities in each all-reduce of per-parameter sums.
        halo_fields: Values fetched for each neighbour across a shard border.
        reply: What an owner returns to the holders of its matrices.
        together: Messages among the ranks that compute a batch of slices, in a step after the first.
        scalars: Bytes of every further all-reduce of a step.
        periodic: Bytes of the all-reduces of every ``period``-th step.
        period: Steps between the all-reduces of ``periodic``, and between changes of the matrix states.
        periodic_together: Bytes of each message of these steps among the ranks that compute a batch of slices.
        brought: Elements that the host sends to another device with a matrix, besides it and its states, every
            ``period``-th step.
        element_flops: Rough number of operations per parameter element outside the matrix rule.
        scratch: Memory that a step needs besides.
    """

    sums: tuple[int, ...] = ()
    halo_fields: int = 0
    reply: Callable[[Batch], Reply] = own_pieces
    together: Callable[[Batch], tuple[Joint, ...]] = _no_joint
    scalars: tuple[int, ...] = ()
    periodic: tuple[int, ...] = ()
    period: int = 1
    periodic_together: Callable[[Batch], tuple[int, ...]] = _no_messages
    brought: Callable[[MatrixTask], int] = _none_of
    element_flops: float = 12.0
    scratch: ScratchMemory = ScratchMemory()
