"""Plans of matrices that are preconditioned and stepped together where they lie depend on the matrices alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from rankwise.comm.owner_plan import MatrixTask
from rankwise.intervals import Run
from rankwise.kernels.run_views import TensorRuns
from rankwise.mkor.layer_signature import LayerSignature
from rankwise.mkor.product_groups import GradientForm, ProductGroups
from rankwise.plan.step_unit import WHOLE
from rankwise.states.entries import Entry
from rankwise.states.matrix_states import MatrixState

__all__ = ["LocalMatrix", "LocalMatrixPlan"]


class LocalMatrix(NamedTuple):
    """A matrix that is to be stepped where it lies: its task, and the indices of its parts' shards."""

    task: MatrixTask
    indices: Sequence[int]


class _PartRun(NamedTuple):
    """Some elements of a shard, by its index and by its number among the parts of all matrices."""

    shard: int
    part: int
    own: slice


class _Factored(NamedTuple):
    """A gradient, the place of the task whose state has its factors, and the names of these factors."""

    form: GradientForm
    place: int
    left: str | None
    right: str | None


class LocalMatrixPlan:
    """Plan of matrices that are stepped where they lie.

    Args:
        taken: Matrices of the plan.
        states: States of the matrices, which say which sides have factors.

    Attributes:
        tasks: Tasks of the matrices.
        weights: Indices of the weights' shards.
        alike: Places of the tasks of each signature.
        runs: Runs of the gradients: index and elements of a shard.
        arrangement: Arrangement of the gradients for products.
    """

    def __init__(self, taken: Sequence[LocalMatrix], states: Sequence[MatrixState]) -> None:
        self.tasks = [matrix.task for matrix in taken]
        self.weights = [matrix.indices[0] for matrix in taken]
        self.alike: dict[Any, list[int]] = {}
        for place, task in enumerate(self.tasks):
            self.alike.setdefault(task.signature, []).append(place)
        self._gradients: list[_Factored] = []
        self._runs: list[_PartRun] = []
        first = 0
        for place, (matrix, state) in enumerate(zip(taken, states, strict=True)):
            for gradient, parts in _gradients_of(matrix.task.signature, place, state):
                self._gradients.append(gradient)
                self._runs += [_PartRun(matrix.indices[part], first + part, elements) for part, elements in parts]
            first += len(matrix.indices)
        self.runs = [(run.shard, run.own) for run in self._runs]
        self.arrangement = ProductGroups([gradient.form for gradient in self._gradients])

    def values(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Return the runs of all matrices, cut from their parts."""
        return [parts[run.part] if run.own == WHOLE else parts[run.part][run.own] for run in self._runs]

    def places(self, entries: Sequence[Entry]) -> TensorRuns[int]:
        """Where the runs lie in the unit's weights and gradients."""
        places: list[tuple[int, Run]] = []
        for index, own in self.runs:
            shard = entries[index].shard
            start, stop, _ = own.indices(shard.numel)
            places.append((shard.tensor, Run(shard.offset + start, stop - start)))
        return TensorRuns.of(places)

    def pieces(self, entries: Sequence[Entry]) -> tuple[list[int], list[tuple[int, slice]]]:
        """Return the numbers of the runs that belong to some entries, and their entries' places and elements."""
        place_of = {entry.index: place for place, entry in enumerate(entries)}
        positions = [position for position, (index, _) in enumerate(self.runs) if index in place_of]
        return positions, [(place_of[index], elements) for index, elements in map(self.runs.__getitem__, positions)]

    def factors(self, states: Sequence[Mapping[str, Tensor]]) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """Return the factors for the rows and for the columns of every gradient."""
        lefts = [None if left is None else states[place][left] for _, place, left, _ in self._gradients]
        rights = [None if right is None else states[place][right] for _, place, _, right in self._gradients]
        return lefts, rights


def _gradients_of(
    signature: LayerSignature, place: int, state: MatrixState
) -> Iterator[tuple[_Factored, list[tuple[int, slice]]]]:
    """Yield the matrices that a layer's gradient consists of, which are its blocks or itself.

    Yields:
        A matrix, and for each of its runs the part of the layer that has it, and the elements of that part.
    """
    if not signature.blocks:
        lengths = [(size,) for size in signature.sizes]
        yield _factored(signature, place, state, "left", *lengths), [(part, WHOLE) for part in range(len(lengths))]
    for block in signature.blocks:
        slices = signature.slices_of(block)
        lengths = [tuple(elements.stop - elements.start for elements in part_slices) for part_slices in slices]
        runs = [(part, elements) for part, part_slices in enumerate(slices) for elements in part_slices]
        yield _factored(signature.of_block(block), place, state, f"left[{block.name}]", *lengths), runs


def _factored(
    signature: LayerSignature,
    place: int,
    state: MatrixState,
    name: str,
    weights: tuple[int, ...],
    biases: tuple[int, ...] = (),
) -> _Factored:
    left, right = (side if side in state else None for side in (name, "right"))
    rows, columns = signature.outputs, signature.inputs
    if signature.transposed:
        left, right, rows, columns = right, left, columns, rows
    sides = left is not None, right is not None
    return _Factored(GradientForm(rows, columns, weights, biases, signature.transposed, *sides), place, left, right)
