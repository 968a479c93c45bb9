"""Matrices that are preconditioned and stepped together where they lie: what follows from which they are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from torch import Tensor

from rankwise.comm.batch_messages import BatchPlan
from rankwise.intervals import Run
from rankwise.kernels.run_views import TensorRuns
from rankwise.mkor.layer_signature import LayerSignature
from rankwise.mkor.product_groups import GradientForm, ProductGroups
from rankwise.mkor.windows import Factor, factor_of
from rankwise.plan.step_unit import WHOLE
from rankwise.states.entries import Entry
from rankwise.states.matrix_states import MatrixState

__all__ = ["LocalMatrixPlan"]


class _Factored(NamedTuple):
    """A gradient: which of the tasks' states have its factors, and by which names."""

    form: GradientForm
    place: int
    left: str | None
    right: str | None


class LocalMatrixPlan:
    """Plan of matrices that are stepped where they lie.

    Args:
        matrices: The matrices, as :meth:`rankwise.step.matrices.MatrixRule.step_in_place` gets them.
        states: States of the matrices: which sides have factors.
        entries: The unit's shards.

    Attributes:
        tasks: Tasks of the matrices.
        weights: Indices of their weights' shards.
        alike: Places of the tasks that have one signature.
        runs: Runs of their gradients: index and elements of a shard.
        arrangement: Arrangement of their gradients.
    """

    def __init__(self, matrices: Sequence[BatchPlan], states: Sequence[MatrixState], entries: Sequence[Entry]) -> None:
        self._entries = entries
        self.tasks = [matrix.owned[0] for matrix in matrices]
        self.weights = [matrix.local[0].shard for matrix in matrices]
        self.alike: dict[Any, list[int]] = {}
        for place, task in enumerate(self.tasks):
            self.alike.setdefault(task.signature, []).append(place)
        self._gradients: list[_Factored] = []
        self.runs: list[tuple[int, slice]] = []
        for place, (matrix, state) in enumerate(zip(matrices, states, strict=True)):
            for gradient, parts in _gradients_of(self.tasks[place].signature, place, state):
                self._gradients.append(gradient)
                self.runs += [(matrix.local[part].shard, own) for part, own in parts]
        self.arrangement = ProductGroups([gradient.form for gradient in self._gradients])

    @cached_property
    def places(self) -> TensorRuns[int]:
        """Where the runs lie in the unit's weights and gradients."""
        places: list[tuple[int, Run]] = []
        for index, own in self.runs:
            shard = self._entries[index].shard
            start, stop, _ = own.indices(shard.numel)
            places.append((shard.tensor, Run(shard.offset + start, stop - start)))
        return TensorRuns.of(places)

    def pieces(self, entries: Sequence[Entry]) -> tuple[list[int], list[tuple[int, slice]]]:
        """Places here of the runs that belong to these entries; and their places there, with the entry's elements."""
        place_of = {entry.index: place for place, entry in enumerate(entries)}
        found = [position for position, (index, _) in enumerate(self.runs) if index in place_of]
        return found, [(place_of[index], own) for index, own in map(self.runs.__getitem__, found)]

    def factors(self, states: Sequence[Mapping[str, Tensor]]) -> tuple[list[Factor | None], list[Factor | None]]:
        """Factors for the rows and for the columns of every gradient."""
        lefts = [factor_of(states[place], left) for _, place, left, _ in self._gradients]
        rights = [factor_of(states[place], right) for _, place, _, right in self._gradients]
        return lefts, rights


def _gradients_of(
    signature: LayerSignature, place: int, state: MatrixState
) -> Iterator[tuple[_Factored, list[tuple[int, slice]]]]:
    """The matrices that a layer's gradient consists of: its blocks, or itself.

    Yields:
        A matrix, and where each of its runs is: in which of the layer's parts, and which of its elements.
    """
    if not signature.blocks:
        lengths = [(size,) for size in signature.sizes]
        yield _factored(signature, place, state, "left", *lengths), [(part, WHOLE) for part in range(len(lengths))]
    for block in signature.blocks:
        slices = signature.slices_of(block)
        lengths = [tuple(own.stop - own.start for own in found) for found in slices]
        runs = [(part, own) for part, found in enumerate(slices) for own in found]
        yield _factored(signature.of_block(block), place, state, f"left[{block.name}]", *lengths), runs


def _factored(
    signature: LayerSignature,
    place: int,
    state: MatrixState,
    name: str,
    weights: tuple[int, ...],
    biases: tuple[int, ...] = (),
) -> _Factored:
    left, right = (None if factor_of(state, side) is None else side for side in (name, "right"))
    rows, columns = signature.outputs, signature.inputs
    if signature.transposed:
        left, right, rows, columns = right, left, columns, rows
    sides = left is not None, right is not None
    form = GradientForm(rows, columns, weights, biases, signature.transposed, *sides, signature.window > 0)
    return _Factored(form, place, left, right)
