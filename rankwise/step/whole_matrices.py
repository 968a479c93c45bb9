"""Optimizers whose rule is a function: the gradient and the states of one whole matrix in, a direction out.

The rule knows no layout. A matrix is gathered to its owner, which keeps its states and computes the direction; every
holder gets its own elements of it. See docs/extending.md.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from rankwise.comm.owner_plan import Batch, MatrixTask
from rankwise.kernels.low_precision_runs import is_narrow
from rankwise.kernels.quantization import key_of
from rankwise.plan.step_costs import ScratchMemory, StepCosts
from rankwise.plan.step_unit import Bucket, Collectives, StepUnit
from rankwise.routing.roles import ParameterInfo, Route, RoutingPolicy, Rule
from rankwise.states.declared_states import State, StoredState, scalar
from rankwise.states.element_states import StateTypes
from rankwise.states.matrix_states import MatrixState, MatrixStates, keep_narrow_
from rankwise.states.optimizer_spec import OptimizerSpec
from rankwise.step.first_order import fallback_step, step_and_decay
from rankwise.step.matrices import MatrixRule, StepMatrices, step_matrices
from rankwise.step.optimizer import ShardedOptimizer

__all__ = ["MatrixOptimizer", "MatrixSpec", "State"]

_STEP = State("step", scalar, dtype=torch.int64, counted=True)
"""The count of a matrix's steps, which every such optimizer keeps."""


class MatrixSpec(OptimizerSpec):
    """Linear weights take the rule, and each matrix of a fused one for itself; the rest takes AdamW.

    Attributes:
        states: What is kept of a matrix.
        embeddings: Whether embeddings and output heads take the rule, too.
    """

    required = (*OptimizerSpec.required, "weight_decay", "betas", "eps")
    states: ClassVar[tuple[State, ...]] = ()
    embeddings: ClassVar[bool] = False
    owns_blocks = True

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        cls.matrix_states = (*cls.states, _STEP)

    @property
    def policy(self) -> RoutingPolicy:
        """See the base class."""
        return RoutingPolicy(embeddings=self.embeddings, exclude=getattr(self.options, "exclude", ()))

    def adjust_route(self, info: ParameterInfo, group: Mapping[str, Any], chosen: Route) -> Route:
        """Matrices and stacks of them take the rule."""
        if chosen.rule == "matrix" and len(info.shape) not in (2, 3):
            return Route("fallback", f"{len(info.shape)}-D tensor")
        return chosen

    def splits(self, info: ParameterInfo) -> bool:
        """See the base class."""
        return True

    def element_states(self, info: ParameterInfo, rule: Rule, group: Mapping[str, Any]) -> StateTypes:
        """AdamW's on the fallback; those of matrices are with their owners."""
        return self.kept_as(("exp_avg", "exp_avg_sq"), info) if rule == "fallback" else {}


class _MatrixSignature(NamedTuple):
    """What matrices have in common whose directions travel together: shape and param group."""

    rows: int
    columns: int
    group: int


Update = Callable[[Tensor, dict[str, Tensor], int, Mapping[str, Any]], Tensor]


class _WholeMatrixRule(MatrixRule):
    """Owners compute directions by the optimizer's function; holders decay their weights and step along them.

    Args:
        matrices: The matrices.
        states: States of the matrices that this rank owns.
        update: Function of the optimizer.
        first_update: Number of the first step that changes weights.
    """

    def __init__(self, matrices: StepMatrices, states: MatrixStates, update: Update, first_update: int) -> None:
        super().__init__(matrices)
        self._states, self._update, self._first_update = states, update, first_update
        self._idle: set[int] = set()

    def gather(self, in_place: Collection[int]) -> list[Tensor | None]:
        """Return the gradients, by shard."""
        for bucket in self.buckets:
            if bucket.count is not None and bucket.count < self._first_update:
                self._idle.update(entry.index for entry in bucket.entries)
        return self.listed(self.by_shard(lambda bucket: bucket.grads))

    def update(self, batch: Batch, tasks: Sequence[MatrixTask], stack: Tensor, spent: bool = False) -> Tensor:
        """Return the directions, one matrix after the other, so that none depends on another matrix."""
        # Alike for matrices of one signature, as those of a batch are.
        stored = {name: how for name, how in self.unit.stored_states(tasks[0]).items() if how.state is not _STEP}
        rows = [self._direction(task, stored, values) for task, values in zip(tasks, stack, strict=True)]
        return rows[0].view(1, -1) if len(rows) == 1 else torch.stack(rows)

    def states(self, task: MatrixTask) -> MatrixState:
        """Return the states of a task's matrix that the spec declares; they are made on first use."""
        return self._states.obtain(task.key, partial(self.unit.fresh_states, task))

    def _direction(self, task: MatrixTask, stored: Mapping[str, StoredState], values: Tensor) -> Tensor:
        signature: _MatrixSignature = task.signature
        kept = self.on_device(task, self.states(task))
        states = {name: how.opened(kept[name], values.dtype) for name, how in stored.items()}
        step, group = int(kept[_STEP.name]) + 1, self.groups[signature.group]
        # In memory of its own, of one alignment wherever it lay: libraries round products by how operands are aligned.
        gradient = values.clone().view(signature.rows, signature.columns)
        direction = self._update(gradient, states, step, group)
        shapes = {"direction": signature[:2], **{name: how.shape for name, how in stored.items()}}
        _check(task.key, {"direction": direction, **states}, shapes)
        for name, how in stored.items():
            if states[name] is not kept[name] and is_narrow(how.dtype):
                noisy = step if self.unit.spec.rounds_stochastically(name) else None
                keep_narrow_([kept[name]], [states[name]], [key_of(task.key, name)], noisy)
            elif states[name] is not kept[name]:
                kept[name].copy_(states[name])
        kept[_STEP.name] += 1
        return direction.reshape(-1)

    def step(self, batch: Batch, indices: Sequence[int], results: Sequence[Tensor]) -> None:
        """Decay and step a batch's weights."""
        pairs = [
            (self.weights[at], result) for at, result in zip(indices, results, strict=True) if at not in self._idle
        ]
        if pairs:
            weights = [weight for weight, _ in pairs]
            directions = [direction.view(weight.shape) for weight, direction in pairs]
            step_and_decay(self.unit, weights, directions, self.groups[batch.signature.group])


def _check(key: str, values: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse what a function returns of other shapes, before any state is kept.

    Raises:
        RuntimeError: The direction or a state has another shape, or a state has gone or come.
    """
    found = {name: tuple(value.shape) for name, value in values.items()}
    if found != shapes:
        wrong = [
            f"{name} is {found.get(name, 'gone')} and must be {shapes.get(name, 'declared in the states of the spec')}"
            for name in {**shapes, **found}
            if found.get(name) != shapes.get(name)
        ]
        raise RuntimeError(f"update() is invalid for {key!r}: {'; '.join(wrong)}")


class MatrixOptimizer(ShardedOptimizer):
    """Base of optimizers that update whole matrices by :meth:`update`, see the module.

    Its options must have those of :attr:`MatrixSpec.required`; ``spec_class`` is a :class:`MatrixSpec`.

    Attributes:
        first_update: Number of the first step of a matrix that changes its weight; at earlier ones only states move.
    """

    spec: MatrixSpec
    first_update: ClassVar[int] = 1

    @abstractmethod
    def update(self, gradient: Tensor, states: dict[str, Tensor], step: int, group: Mapping[str, Any]) -> Tensor:
        """The direction of one matrix, whose weight becomes ``(1 - lr weight_decay) W - lr direction``.

        Args:
            gradient: (rows, columns), as stored; may be overwritten.
            states: By name, in the type of the computation; changed in place, or replaced by others of equal shape.
            step: Number of this step of the matrix, from 1.
            group: Values of the param group.

        Returns:
            (rows, columns).
        """

    def operations(self, rows: int, columns: int) -> float:
        """Rough number of operations of :meth:`update`, by which owners are chosen."""
        return 6.0 * rows * columns * min(rows, columns)

    def plan(self, unit: StepUnit) -> Collectives:
        """See the base class."""
        tasks = []
        for key in unit.keys("matrix"):
            planned = unit.parameters[key]
            rows, columns = planned.info.matrix_shape
            signature = _MatrixSignature(rows, columns, planned.step_group)
            tasks.append(MatrixTask(key, (key,), signature, self.operations(rows, columns)))
        return self.planner.choose_owners(unit, tasks)

    def step_costs(self, unit: StepUnit) -> StepCosts:
        """See the base class."""

        def opened(tasks: Sequence[MatrixTask]) -> int:
            # States that are opened and the temporaries of the rule; one matrix is computed at a time.
            sizes = [
                sum(prod(stored.shape) for stored in unit.stored_states(task).values() if stored.state is not _STEP)
                + 4 * task.signature.rows * task.signature.columns
                for task in tasks
            ]
            return 4 * max(sizes, default=0)

        return StepCosts(scratch=ScratchMemory(alone=opened, stacked=opened))

    def _update(self, unit: StepUnit, buckets: list[Bucket]) -> None:
        matrices = StepMatrices(unit, fallback_step(unit, buckets), self.step_groups, self.health)
        step_matrices(_WholeMatrixRule(matrices, self.matrix_states, self.update, self.first_update))
