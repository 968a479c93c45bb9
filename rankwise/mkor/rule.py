"""MKOR's matrix rule: gradients are preconditioned on their way to a first-order rule."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from rankwise.mkor.factors import KroneckerFactors, LayerSignature
from rankwise.mkor.workspace import Workspace
from rankwise.options.validation import OptionError
from rankwise.planning.matrix_states import MatrixState, MatrixStates
from rankwise.planning.table import ParameterTable
from rankwise.planning.unit import Bucket, StepUnit
from rankwise.sharding import Batch, MatrixTask
from rankwise.statistics.vectors import LayerVectors
from rankwise.statistics.window_sums import Record
from rankwise.step.first_order import FirstOrder
from rankwise.step.health import Health
from rankwise.step.matrices import MatrixRule

__all__ = ["MKORRule", "matrix_tasks"]

logger = logging.getLogger(__name__)


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

    def update(self, batch: Batch, tasks: Sequence[MatrixTask], stack: Tensor) -> Tensor:
        """The preconditioned gradients of a stack, with factors that have moved if they are due."""
        return self._factors.apply(batch.signature, self._moved(tasks), stack, self._product, self._space)

    def step(self, batch: Batch, indices: Sequence[int], results: Sequence[Tensor]) -> None:
        """Keep preconditioned gradients for the first-order rule."""
        for index, result in zip(indices, results, strict=True):
            self._keep(index, result)

    def take(self, task: MatrixTask, indices: Sequence[int], values: Sequence[Tensor]) -> bool:
        """Where a matrix is preconditioned for itself and in place; steps it at once if the first-order rule can."""
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
