"""MKOR's matrix rule: gradients are preconditioned on their way to a first-order rule."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from rankwise.comm.batch_messages import BatchPlan
from rankwise.comm.owner_plan import Batch, MatrixTask, slice_tasks
from rankwise.comm.slice_holders import Holders
from rankwise.kernels.run_views import RunViews, chosen_of
from rankwise.layout.equal_slices import SlicedMatrix
from rankwise.layout.layout import LayoutError
from rankwise.mkor.backends import FirstOrder
from rankwise.mkor.factors import KroneckerFactors
from rankwise.mkor.layer_signature import LayerSignature, layer_of
from rankwise.mkor.local_matrices import LocalMatrixPlan
from rankwise.mkor.preconditioning import Preconditioned
from rankwise.mkor.sketches import Sketches
from rankwise.mkor.sliced_windows import SlicedWindows, coded_wire
from rankwise.mkor.workspace import SPACE, Workspace
from rankwise.options.validation import OptionError
from rankwise.plan.notes import Note
from rankwise.plan.step_unit import WHOLE, Bucket, StepUnit
from rankwise.states.element_states import offset_runs
from rankwise.states.entries import Entry
from rankwise.states.matrix_states import MatrixState, MatrixStates
from rankwise.states.parameter_table import ParameterTable
from rankwise.statistics.factor_vectors import LayerVectors
from rankwise.statistics.window_sums import Record
from rankwise.step.first_order import adamw_step
from rankwise.step.matrices import MatrixRule, StepMatrices

__all__ = ["TAKEN", "MKORRule", "divisible", "matrix_tasks", "sliced_tasks", "uncaptured_tasks"]

_MOST_RUNS = 64
"""Most runs of a block that is stepped where it lies: each is a row of tables that the host makes."""


class _InPlace(NamedTuple):
    """What the matrices of an exchange that lie in place are stepped by.

    Attributes:
        matrices: All of them.
        plans: Of those that are stepped together, a plan for as many as are at a time.
        rest: The others.
    """

    matrices: Sequence[BatchPlan]
    plans: list[LocalMatrixPlan]
    rest: list[BatchPlan]


TAKEN: Note[_InPlace] = Note("matrices that were preconditioned together, and how they lie")


class MKORRule(MatrixRule):
    """Replaces gradients by preconditioned ones, or steps with them at once while they are in the cache.

    Args:
        matrices: All buckets of the unit; gradients in their lists are replaced.
        first_order: The rule that steps with the preconditioned gradients.
        factors: Moves and applies the factors.
        states: The factors of the matrices this rank owns.
        vectors: The statistics of the layers whose factors are due, by key; or what makes some of gradients.
        holders: Gives those that own slices of the same matrices as this rank.
    """

    def __init__(
        self,
        matrices: StepMatrices,
        first_order: FirstOrder,
        factors: KroneckerFactors,
        states: MatrixStates,
        vectors: Mapping[str, LayerVectors] | Sketches,
        holders: Callable[[], Holders],
    ) -> None:
        super().__init__(matrices)
        self._holders = holders
        unit = self.unit
        self._first_order, self._factors, self._states, self._vectors = first_order, factors, states, vectors
        self._product = factors.product_type(unit.work_device, unit.dtype)
        self._singly = factors.computes_singly(unit.work_device, unit.dtype)
        self._together = factors.together(unit.work_device, unit.dtype, self._product)
        self._space = unit.notes.obtain(SPACE, Workspace)
        self._gradients: list[Tensor | None] = [None] * len(unit.entries)
        self._places: dict[int, tuple[Bucket, int]] = {}
        self._stepped: set[int] = set()
        for bucket in self.buckets:
            for place, (entry, gradient) in enumerate(zip(bucket.entries, bucket.grads, strict=True)):
                self._places[entry.index] = (bucket, place)
                self._gradients[entry.index] = gradient

    def gather(self, in_place: Collection[int]) -> list[Tensor | None]:
        """The raw gradients."""
        return self._gradients

    def states(self, task: MatrixTask) -> MatrixState:
        """The factors, and how often they failed."""
        return self._states.obtain(task.key, partial(self.unit.fresh_states, task))

    def changes_states(self, task: MatrixTask) -> bool:
        """Whether factors are due."""
        return layer_of(task) in self._vectors

    def update(self, batch: Batch, tasks: Sequence[MatrixTask], stack: Tensor, spent: bool = False) -> Tensor:
        """The preconditioned gradients of a stack, with factors that have moved if they are due."""
        if batch.partners:
            return self._of_slices(batch, tasks, stack)
        elements = batch.signature.sizes[0]
        states = list(map(self._state_of, tasks))
        self._move(tasks, states, lambda place: stack[place, :elements])
        return self._factors.apply(batch.signature, states, stack, self._product, self._space, spent)

    def _of_slices(self, batch: Batch, tasks: Sequence[MatrixTask], stack: Tensor) -> Tensor:
        """The preconditioned slices of matrices that this rank and its partners have."""
        signature: LayerSignature = batch.signature
        assert signature.cut is not None
        states = [self._state_of(task) for task in tasks]
        coded = coded_wire(self._factors.comm_dtype, self.unit.dtype)
        slices = SlicedWindows(signature.cut, states, self._holders(), self._factors.comm_dtype is not None, coded)
        others = [] if coded is not None else slices.gathered(slices.other, range(len(tasks)))
        for decay, places in self._due_by_decay(tasks).items():
            own = slices.gathered(slices.own, places)
            other = [others[place] for place in places] if others else slices.gathered(slices.other, places)
            moving = [slices.whole(*windows) for windows in zip(places, own, other, strict=True)]
            chosen = [tasks[place] for place in places]
            counts = self._factors.move(chosen, moving, self._vectors_of(chosen), decay, slices.norms)
            slices.keep(slices.own, places, own)
            slices.keep(slices.other, places, other)
            if self.unit.layout.rank == batch.partners[0]:  # one of them counts for all
                self._count(*counts)
        matrices = stack.view(len(tasks), signature.outputs, signature.inputs)
        return slices.precondition(matrices, others, self._product, self._factors.rescales).view_as(stack)

    def step(self, batch: Batch, indices: Sequence[int], results: Sequence[Tensor]) -> None:
        """Step with preconditioned gradients, or keep them for a first-order rule that needs all of them."""
        if self._first_order.is_elementwise:
            runs = [(index, WHOLE) for index in indices]
            self._step_runs(runs, Preconditioned(list(results), None))
            return
        for index, result in zip(indices, results, strict=True):
            self._keep(index, result)

    def step_in_place(self, matrices: Sequence[BatchPlan]) -> Sequence[BatchPlan]:
        """Where gradients are preconditioned in place: many together, for AdamW, or each for itself."""
        if self._together is not None:
            return self._step_together(matrices) if self._first_order.is_adamw else matrices
        if not self._singly:
            return matrices
        for plan in matrices:
            self._step_singly(plan)
        return ()

    def _step_singly(self, matrix: BatchPlan) -> None:
        task, indices = matrix.owned[0], [piece.shard for piece in matrix.local]
        values, sizes = [self._gradient_of(index) for index in indices], task.signature.sizes
        state = self._state_of(task)
        self._move([task], [state], lambda _: values[0])
        results = self._space.take("result", (sum(sizes),), self.unit.dtype).split(sizes)
        self._factors.apply_to_one(task.signature, state, values, results, self._product, self._space)
        # A part without a gradient counted as zero, and stays where it is.
        places = [place for place, index in enumerate(indices) if self._gradients[index] is not None]
        self.step(matrix.batch, [indices[place] for place in places], [results[place] for place in places])

    def _gradient_of(self, index: int, own: slice = WHOLE) -> Tensor:
        """The gradient of some elements of a shard; zeros where it has none."""
        gradient = self._gradients[index]
        if gradient is None:
            numel = self.unit.entries[index].shard.numel
            gradient = torch.zeros(numel, dtype=self.unit.dtype, device=self.unit.device)
        return gradient if own == WHOLE else gradient[own]

    def remaining(self) -> list[Bucket]:
        """What the first-order rule has yet to step."""
        if not self._stepped:
            return list(self.buckets)
        stepped = self._stepped
        return [
            bucket.only([place for place, entry in enumerate(bucket.entries) if entry.index not in stepped])
            for bucket in self.buckets
        ]

    def _move(
        self,
        tasks: Sequence[MatrixTask],
        states: Sequence[MatrixState],
        gradient: Callable[[int], Tensor] | None = None,
    ) -> None:
        """Do this step's update of the factors of matrices, where there is one.

        Args:
            tasks: The matrices, those of one signature one after another; of one signature only if there are sketches.
            states: Their states.
            gradient: Of the weight of one, by its place among them; None where there are no sketches.
        """
        for decay, places in self._due_by_decay(tasks).items():
            chosen, vectors = [tasks[place] for place in places], self._vectors
            if isinstance(vectors, Sketches):
                assert gradient is not None
                vectors = vectors.of(chosen, [gradient(place) for place in places])
            else:
                vectors = self._vectors_of(chosen)
            self._count(*self._factors.move(chosen, [states[place] for place in places], vectors, decay))

    def _count(self, updated: Tensor, skipped: Tensor) -> None:
        self.health.add("factors_updated", updated)
        self.health.add("factors_skipped", skipped)

    def _due_by_decay(self, tasks: Sequence[MatrixTask]) -> Mapping[float, Sequence[int]]:
        """Places of the matrices whose factors move, by what they keep of themselves."""
        vectors = self._vectors
        due = [place for place, task in enumerate(tasks) if layer_of(task) in vectors]
        if not isinstance(vectors, Sketches):
            return {self._factors.decay: due} if due else {}
        places_by_decay: defaultdict[float, list[int]] = defaultdict(list)
        for place in due:
            places_by_decay[vectors.decay(tasks[place].key)].append(place)
        return places_by_decay

    def _state_of(self, task: MatrixTask) -> MatrixState:
        return self.on_device(task, self.states(task))

    def _vectors_of(self, tasks: Sequence[MatrixTask]) -> Mapping[str, LayerVectors]:
        """The statistics of some layers, where the factors are moved."""
        assert not isinstance(self._vectors, Sketches)
        link = self.unit.link
        if link is None:
            return self._vectors
        layers = dict.fromkeys(map(layer_of, tasks))
        return {layer: tuple(link.bring(self._vectors[layer])) for layer in layers}  # type: ignore[misc]

    # --- many together ------------------------------------------------------------------------------------------

    def _step_together(self, matrices: Sequence[BatchPlan]) -> Sequence[BatchPlan]:
        """What follows from which they are is known from the last time, where that has been the same list."""
        planned, flats = self.unit.notes.get(TAKEN), self._flat_gradients()
        if planned is None or planned.matrices is not matrices:
            planned = self._planned(matrices)
            if any(self._gradients[piece.shard] is None for plan in matrices for piece in plan.local):
                flats = None
            else:
                self.unit.notes[TAKEN] = planned
        states = [list(map(self._state_of, plan.tasks)) for plan in planned.plans]
        if not isinstance(self._vectors, Sketches):
            self._move_together(planned.plans, states)
        for plan, own in zip(planned.plans, states, strict=True):
            if flats is None:
                values = [self._gradient_of(*run) for run in plan.runs]
                self._step_runs(plan.runs, self._preconditioned(plan, own, values))
            else:
                tensors, runs = plan.places
                self._step_plan(plan, own, runs.cut([flats[tensor] for tensor in tensors]))
        return planned.rest

    def _move_together(self, plans: Sequence[LocalMatrixPlan], states: Sequence[Sequence[MatrixState]]) -> None:
        """Move the factors of all plans' matrices, those of one signature one after another."""
        alike: defaultdict[LayerSignature, list[tuple[MatrixTask, MatrixState]]] = defaultdict(list)
        for plan, own in zip(plans, states, strict=True):
            for signature, places in plan.alike.items():
                alike[signature] += [(plan.tasks[place], own[place]) for place in places]
        ordered = list(chain.from_iterable(alike.values()))
        self._move([task for task, _ in ordered], [state for _, state in ordered])

    def _step_plan(self, plan: LocalMatrixPlan, states: Sequence[MatrixState], values: Sequence[Tensor]) -> None:
        # These gradients are let go of here: the next plan's take as much memory.
        preconditioned = self._preconditioned(plan, states, values)
        for bucket in self.buckets:
            positions, pieces = bucket.entries.once(("taken", plan), plan.pieces)
            if pieces:
                self._step_pieces(bucket, pieces, preconditioned, positions)
        self._stepped.update(index for index, _ in plan.runs)

    def _flat_gradients(self) -> dict[int, Tensor] | None:
        """By tensor of the unit; None where some gradients are other tensors by now."""
        flats: dict[int, Tensor] = {}
        for bucket in self.buckets:
            planned = bucket.grads.as_planned if isinstance(bucket.grads, RunViews) else None
            if planned is None:
                return None
            flats.update(zip(bucket.entries.once("tensors", _tensors_of), planned[0], strict=True))
        return flats

    def _planned(self, matrices: Sequence[BatchPlan]) -> _InPlace:
        chunks: list[list[BatchPlan]] = []
        rest: list[BatchPlan] = []
        elements = 0
        for matrix in matrices:
            if not _takes(matrix.batch.signature):
                rest.append(matrix)
                continue
            if not chunks or elements + matrix.length > self._at_once:
                chunks.append([])
                elements = 0
            chunks[-1].append(matrix)
            elements += matrix.length
        states = ([self._state_of(matrix.owned[0]) for matrix in chunk] for chunk in chunks)
        plans = [LocalMatrixPlan(chunk, own, self.unit.entries) for chunk, own in zip(chunks, states, strict=True)]
        return _InPlace(matrices, plans, rest)

    @property
    def _at_once(self) -> int:
        assert self._together is not None
        return int(self._together.AT_ONCE)

    def _preconditioned(
        self, plan: LocalMatrixPlan, states: Sequence[MatrixState], values: Sequence[Tensor]
    ) -> Preconditioned:
        if isinstance(self._vectors, Sketches):
            for places in plan.alike.values():
                gradient = partial(self._gradient_at, [plan.weights[place] for place in places])
                self._move([plan.tasks[place] for place in places], [states[place] for place in places], gradient)
        assert self._together is not None
        factors = plan.factors(states)
        return self._factors.precondition(plan.arrangement, values, *factors, self._together, self._product)

    def _gradient_at(self, shards: Sequence[int], place: int) -> Tensor:
        return self._gradient_of(shards[place])

    def _step_runs(self, runs: Sequence[tuple[int, slice]], preconditioned: Preconditioned) -> None:
        """Step some elements of shards: AdamW, or anything element-wise where there are no factors."""
        by_bucket: dict[int, list[int]] = {}
        for position, (index, _) in enumerate(runs):
            # A part without a gradient counted as zero, and stays where it is.
            if self._gradients[index] is not None:
                by_bucket.setdefault(id(self._places[index][0]), []).append(position)
        for positions in by_bucket.values():
            bucket = self._places[runs[positions[0]][0]][0]
            pieces = [(self._places[index][1], own) for index, own in (runs[position] for position in positions)]
            self._step_pieces(bucket, pieces, preconditioned, positions)
        self._stepped.update(index for index, _ in runs)

    def _step_pieces(
        self,
        bucket: Bucket,
        runs: Sequence[tuple[int, slice]],
        preconditioned: Preconditioned,
        positions: Sequence[int],
    ) -> None:
        pieces = bucket.pieces(runs, chosen_of(preconditioned.runs, positions), self._first_order.states)
        if preconditioned.factors is None:
            self._first_order.apply(self.unit, [pieces])
        else:
            adamw_step(self.unit, pieces, self._chosen(preconditioned.factors, positions))

    def _chosen(self, factors: Tensor, positions: Sequence[int]) -> Tensor:
        first, last = positions[0], positions[-1]
        if last - first + 1 == len(positions):
            return factors[first : last + 1]
        return factors.index_select(0, self.unit.indices.of(tuple(positions)))

    def _keep(self, index: int, gradient: Tensor) -> None:
        bucket, place = self._places[index]
        bucket.grads[place] = gradient.clone()


def _tensors_of(entries: Sequence[Entry]) -> tuple[int, ...]:
    return offset_runs(entries).tensors


def _takes(signature: LayerSignature) -> bool:
    """Whether the blocks of such a layer lie in few enough runs."""
    return all(len(runs) <= _MOST_RUNS for block in signature.blocks for runs in signature.slices_of(block))


def uncaptured_tasks(unit: StepUnit, table: ParameterTable) -> list[MatrixTask]:
    """The unit's matrices, none with a bias, where no layer is asked what it is.

    Args:
        unit: The unit.
        table: The parameters.
    """
    tasks = []
    for key in unit.keys("matrix"):
        info, position = unit.parameters[key].info, unit.parameters[key].position
        sides = info.logical_matrix_shape
        blocks = table.blocks.get(table.base_name(key), ())
        signature = LayerSignature(*sides, False, info.transposed, position, blocks)
        tasks.append(MatrixTask(key, (key,), signature, signature.cost))
    return tasks


def matrix_tasks(unit: StepUnit, records: Mapping[str, Record], table: ParameterTable, window: int) -> list[MatrixTask]:
    """The unit's matrices; one whose bias is in the same param group of it takes it along.

    Args:
        unit: The unit.
        records: Records of the captured weights, by name.
        table: The parameters.
        window: Vectors of each factor inverse; 0 for dense ones.

    Raises:
        LayoutError: A weight and its bias, of one param group, are in different units.
        OptionError: A matrix was not captured.
    """
    unknown = [key for key in unit.keys("matrix") if key not in records]
    if unknown:
        raise OptionError(
            f"MKOR has no statistics of {', '.join(unknown)}, added after the capture: call "
            "optimizer.capture(model) again after add_param_group."
        )
    tasks = []
    names = {id(parameter): name for name, parameter in table.parameters.items()}
    for key in unit.keys("matrix"):
        record, position = records[key], unit.parameters[key].position
        bias = None
        if record.bias is not None:
            bias = _bundled(key, names.get(id(record.bias)), unit, table)
        inputs, outputs, transposed = record.shape
        blocks = table.blocks.get(key, ())
        signature = LayerSignature(outputs, inputs, bias is not None, transposed, position, blocks, window)
        tasks.append(MatrixTask(key, (key,) if bias is None else (key, bias), signature, signature.cost))
    return tasks


def sliced_tasks(tasks: Sequence[MatrixTask], matrices: Mapping[str, SlicedMatrix]) -> list[MatrixTask]:
    """Replace tasks of matrices by those of their slices.

    Args:
        tasks: The tasks.
        matrices: Some of their matrices, by name.
    """
    found: list[MatrixTask] = []
    for task in tasks:
        matrix = matrices.get(task.key)
        if matrix is None:
            found.append(task)
        else:
            found += slice_tasks(matrix, task.signature.of_slice(matrix.shape, matrix.axis, matrix.count), task.cost)
    return found


def divisible(signature: LayerSignature) -> bool:
    """Whether ranks may compute such a matrix together: it has windows, and neither blocks nor a bias of its own."""
    return signature.window > 0 and not (signature.has_bias or signature.blocks or signature.transposed)


def _bundled(key: str, bias: str | None, unit: StepUnit, table: ParameterTable) -> str | None:
    """The bias, if it is stepped with its weight: they are in one param group."""
    if bias is None or table.catalog[bias][1] != table.catalog[key][1]:
        return None
    if bias not in unit.layout.shapes:
        raise LayoutError(f"MKOR: '{bias}' must be stepped together with '{key}', but the framework steps it apart.")
    return bias
