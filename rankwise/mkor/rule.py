"""MKOR's matrix rule: gradients are preconditioned on their way to a first-order rule."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from rankwise.mkor.factors import KroneckerFactors, gradients_of
from rankwise.mkor.layer_signature import LayerSignature
from rankwise.mkor.preconditioning import Gradient, Preconditioned
from rankwise.mkor.workspace import Workspace
from rankwise.options.validation import OptionError
from rankwise.planning.matrix_states import MatrixState, MatrixStates
from rankwise.planning.table import ParameterTable
from rankwise.planning.unit import WHOLE, Bucket, StepUnit
from rankwise.sharding import Batch, MatrixTask
from rankwise.statistics.vectors import LayerVectors
from rankwise.statistics.window_sums import Record
from rankwise.step.first_order import FirstOrder, adamw_step
from rankwise.step.health import Health
from rankwise.step.matrices import MatrixRule

__all__ = ["MKORRule", "matrix_tasks"]

logger = logging.getLogger(__name__)


_MOST_RUNS = 64
"""Of a block that is stepped where it lies: each is a row of tables that the host makes."""


class _Taken(NamedTuple):
    """A matrix that is to be stepped where it lies; see :meth:`rankwise.step.matrices.MatrixRule.take`."""

    task: MatrixTask
    indices: Sequence[int]
    values: Sequence[Tensor]


class MKORRule(MatrixRule):
    """Replaces gradients by preconditioned ones, or steps with them at once while they are in the cache.

    Args:
        unit: See the base class, as of the following.
        buckets: All of the unit's; gradients in their lists are replaced.
        groups: Param groups.
        health: Counts.
        first_order: The rule that follows.
        factors: Moves and applies the factors.
        states: The factors of the matrices this rank owns.
        vectors: The statistics of the layers whose factors are due, by key.
    """

    def __init__(
        self,
        unit: StepUnit,
        buckets: Sequence[Bucket],
        groups: Sequence[Mapping[str, Any]],
        health: Health,
        first_order: FirstOrder,
        factors: KroneckerFactors,
        states: MatrixStates,
        vectors: Mapping[str, LayerVectors],
    ) -> None:
        super().__init__(unit, buckets, groups, health)
        self._first_order, self._factors, self._states, self._vectors = first_order, factors, states, vectors
        self._product = factors.product_type(unit.device, unit.dtype)
        self._singly = factors.computes_singly(unit.device, unit.dtype)
        self._together = factors.together(unit.device, unit.dtype, self._product)
        self._taken: list[_Taken] = []
        self._taken_elements = 0
        self._space: Workspace = unit.scratch.setdefault("space", Workspace())
        self._gradients: list[Tensor | None] = [None] * len(unit.entries)
        self._places: dict[int, tuple[Bucket, int]] = {}
        self._stepped: set[int] = set()
        for bucket in buckets:
            for place, (entry, gradient) in enumerate(zip(bucket.entries, bucket.grads, strict=True)):
                self._places[entry.index] = (bucket, place)
                self._gradients[entry.index] = gradient

    def gather(self, in_place: Collection[int]) -> list[Tensor | None]:
        """The raw gradients."""
        return self._gradients

    def update(self, batch: Batch, tasks: Sequence[MatrixTask], stack: Tensor, spent: bool = False) -> Tensor:
        """The preconditioned gradients of a stack, with factors that have moved if they are due."""
        return self._factors.apply(batch.signature, self._moved(tasks), stack, self._product, self._space, spent)

    def step(self, batch: Batch, indices: Sequence[int], results: Sequence[Tensor]) -> None:
        """Step with preconditioned gradients, or keep them for a first-order rule that needs all of them."""
        if self._first_order.is_elementwise:
            runs = [(index, WHOLE) for index in indices]
            self._step_runs(runs, Preconditioned(list(results), None))
            return
        for index, result in zip(indices, results, strict=True):
            self._keep(index, result)

    def take(self, task: MatrixTask, indices: Sequence[int], values: Sequence[Tensor]) -> bool:
        """Where matrices are preconditioned in place, each for itself or many together."""
        if self._together is not None:
            return self._take_along(_Taken(task, indices, values))
        if not self._singly:
            return False
        (state,), sizes = self._moved([task]), task.signature.sizes
        results = self._space.take("result", (sum(sizes),), self.unit.dtype).split(sizes)
        self._factors.apply_to_one(task.signature, state, values, results, self._product, self._space)
        for index, result in zip(indices, results, strict=True):
            # A part without a gradient counted as zero, and stays where it is.
            if self._gradients[index] is not None:
                self._step_at_once(index, result)
        return True

    def finish(self) -> None:
        """Step what has been taken."""
        if self._taken:
            self._step_taken()

    def remaining(self) -> list[Bucket]:
        """What the first-order rule has yet to step."""
        if not self._stepped:
            return list(self.buckets)
        stepped = self._stepped
        return [
            bucket.only([place for place, entry in enumerate(bucket.entries) if entry.index not in stepped])
            for bucket in self.buckets
        ]

    def _moved(self, tasks: Sequence[MatrixTask]) -> list[MatrixState]:
        """The factors of matrices of one shape, after this step's update where there is one."""
        fresh = partial(self._factors.fresh, tasks[0].signature, self.unit.device)
        states = [self._states.obtain(task.key, fresh) for task in tasks]
        due = [place for place, task in enumerate(tasks) if task.key in self._vectors]
        if due:
            chosen = [tasks[place] for place in due]
            updated, skipped = self._factors.move(chosen, [states[place] for place in due], self._vectors)
            self.health.add("factors_updated", updated)
            self.health.add("factors_skipped", skipped)
        return states

    # --- many together ------------------------------------------------------------------------------------------

    def _take_along(self, taken: _Taken) -> bool:
        signature = taken.task.signature
        if not self._first_order.is_adamw or any(
            len(runs) > _MOST_RUNS for block in signature.blocks for runs in signature.slices_of(block)
        ):
            return False
        assert self._together is not None
        elements = sum(signature.sizes)
        if self._taken and self._taken_elements + elements > self._together.AT_ONCE:
            self._step_taken()
        self._taken.append(taken)
        self._taken_elements += elements
        return True

    def _step_taken(self) -> None:
        """Precondition what has been taken, and step with what comes of it, in the type of the products."""
        taken, self._taken, self._taken_elements = self._taken, [], 0
        gradients: list[Gradient] = []
        runs: list[tuple[int, slice]] = []
        for each, state in zip(taken, self._moved_by_shape([each.task for each in taken]), strict=True):
            for gradient, places in gradients_of(each.task.signature, state, each.values):
                gradients.append(gradient)
                runs += [(each.indices[part], own) for part, own in places]
        assert self._together is not None
        self._step_runs(runs, self._factors.precondition(gradients, self._together, self._product))

    def _moved_by_shape(self, tasks: Sequence[MatrixTask]) -> list[MatrixState]:
        """As :meth:`_moved`, of matrices of several shapes."""
        alike: dict[Any, list[MatrixTask]] = {}
        for task in tasks:
            alike.setdefault(task.signature, []).append(task)
        found = {
            task.key: state for group in alike.values() for task, state in zip(group, self._moved(group), strict=True)
        }
        return [found[task.key] for task in tasks]

    def _step_runs(self, runs: Sequence[tuple[int, slice]], found: Preconditioned) -> None:
        """Step some elements of fragments: AdamW, or anything element-wise where there are no factors."""
        by_bucket: dict[int, list[int]] = {}
        for position, (index, _) in enumerate(runs):
            # A part without a gradient counted as zero, and stays where it is.
            if self._gradients[index] is not None:
                by_bucket.setdefault(id(self._places[index][0]), []).append(position)
        for positions in by_bucket.values():
            bucket = self._places[runs[positions[0]][0]][0]
            pieces = [(self._places[index][1], own) for index, own in (runs[position] for position in positions)]
            single = bucket.pieces(pieces, [found.runs[position] for position in positions])
            if found.factors is None:
                self._first_order.apply(self.unit, [single])
            else:
                adamw_step(self.unit, single, self._chosen(found.factors, positions))
        self._stepped.update(index for index, _ in runs)

    def _chosen(self, factors: Tensor, positions: Sequence[int]) -> Tensor:
        first, last = positions[0], positions[-1]
        if last - first + 1 == len(positions):
            return factors[first : last + 1]
        return factors.index_select(0, self.unit.indices.of(tuple(positions)))

    # --- one by one ---------------------------------------------------------------------------------------------

    def _step_at_once(self, index: int, gradient: Tensor) -> None:
        if not self._first_order.is_elementwise:
            self._keep(index, gradient)
            return
        bucket, place = self._places[index]
        single = bucket.only([place])
        single.grads[0] = gradient
        self._first_order.apply(self.unit, [single])
        self._stepped.add(index)

    def _keep(self, index: int, gradient: Tensor) -> None:
        bucket, place = self._places[index]
        bucket.grads[place] = gradient.clone()


def matrix_tasks(
    unit: StepUnit, records: Mapping[str, Record], table: ParameterTable, backend: str
) -> list[MatrixTask]:
    """The unit's matrices; one whose bias is in the same param group of it takes it along.

    Args:
        unit: The unit.
        records: Of the captured weights, by name.
        table: The parameters.
        backend: For messages: what steps a bias that is left alone.

    Raises:
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
        record, position = records[key], unit.group_position[key]
        bias = None
        if record.bias is not None:
            bias = _bundled(key, names.get(id(record.bias)), unit, table, backend)
        inputs, outputs, transposed = record.shape
        blocks = table.blocks.get(key, ())
        signature = LayerSignature(outputs, inputs, bias is not None, transposed, position, blocks)
        tasks.append(MatrixTask(key, (key,) if bias is None else (key, bias), signature, signature.cost))
    return tasks


def _bundled(key: str, bias: str | None, unit: StepUnit, table: ParameterTable, backend: str) -> str | None:
    if bias in unit.layout.shapes:
        return bias if unit.group_position[bias] == unit.group_position[key] else None
    if bias is not None and table.catalog[bias][1] == table.catalog[key][1]:
        logger.warning(
            "MKOR: '%s' is stepped apart from its weight and takes %s alone; a ZeRO-3 sub_group_size that keeps "
            "them together avoids it.",
            bias,
            backend,
        )
    return None
