"""Optimizers whose rule is a function: the gradient and the states of one whole matrix in, a direction out.

The rule knows no layout. A matrix is gathered to its owner, which keeps its states and computes the direction; every
holder gets its own elements of it. See docs/extending.md.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from rankwise.comm.owner_plan import Batch, MatrixTask
from rankwise.kernels.low_precision_runs import is_coded, is_narrow
from rankwise.kernels.quantization import key_of
from rankwise.plan.step_costs import ScratchMemory, StepCosts
from rankwise.plan.step_unit import Bucket, StepUnit
from rankwise.routing.roles import ParameterInfo, Route, RoutingPolicy, Rule
from rankwise.states.element_states import StateTypes
from rankwise.states.matrix_states import MatrixState, MatrixStates, keep_narrow_
from rankwise.states.optimizer_spec import OptimizerSpec
from rankwise.states.packed_states import PackedLayout, StateRun
from rankwise.step.first_order import fallback_step, step_and_decay
from rankwise.step.matrices import MatrixRule, StepMatrices, step_matrices
from rankwise.step.optimizer import ShardedOptimizer

__all__ = ["MatrixOptimizer", "MatrixSpec", "State"]

STEP = "step"
"""Name of the count of a matrix's steps, which every such optimizer keeps."""


@dataclass(frozen=True)
class State:
    """A state that the owner of a matrix keeps.

    Attributes:
        name: Its key in the dictionary that the rule gets.
        shape: Its shape, given rows, columns and the param group; None from it: this matrix has no such state. Left
            out: one value for every element, which the option ``state_dtype`` may keep in fewer bits.
        fill: Overwrites a tensor of zeros with the first values; left out: zeros.
    """

    name: str
    shape: Callable[[int, int, Mapping[str, Any]], tuple[int, ...] | None] | None = None
    fill: Callable[[Tensor], Any] | None = None


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
    counted_states = (STEP,)

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        cls.matrix_state_names = (*(state.name for state in cls.states), STEP)

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

    def kept(self, rows: int, columns: int, group: Mapping[str, Any]) -> dict[str, _Kept]:
        """The states of a matrix by name.

        Args:
            rows: Rows of the matrix.
            columns: Columns of the matrix.
            group: Param group of the matrix.
        """
        found = {}
        for state in self.states:
            own = (rows, columns) if state.shape is None else state.shape(rows, columns, group)
            if own is not None:
                narrow = self.type_of(state.name, rows * columns) if state.shape is None else None
                found[state.name] = _Kept(tuple(own), narrow)
        return found

    def matrix_state_shapes(
        self, info: ParameterInfo, group: Mapping[str, Any]
    ) -> Mapping[str, Collection[tuple[int, ...]]]:
        """See the base class."""
        kept = self.kept(*info.matrix_shape, group)
        return {name: [state.stored_shape] for name, state in kept.items()}


class _Kept(NamedTuple):
    """How a state of one matrix is kept.

    Attributes:
        shape: Shape of what the rule gets.
        narrow: Its type, where that is not the one of the computation.
    """

    shape: tuple[int, ...]
    narrow: torch.dtype | None

    @property
    def packing(self) -> PackedLayout | None:
        """Where codes and exponents lie; None where there are none."""
        numel = prod(self.shape)
        if self.narrow is None or not is_coded(self.narrow):
            return None
        return PackedLayout(self.narrow, numel, [StateRun(0, numel, 0, self.narrow)])

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape of what is kept."""
        return self.shape if self.packing is None else (self.packing.numel,)

    def fresh(self, fill: Callable[[Tensor], Any] | None, dtype: torch.dtype, device: torch.device) -> Tensor:
        """What is kept before the first step."""
        if self.packing is not None and (fill is None or device.type == "meta"):
            return self.packing.fresh(device)
        values = torch.zeros(self.shape, dtype=dtype, device=device)
        if fill is not None:
            fill(values)
        return self.packing.packed(values.view(-1)) if self.packing is not None else values.to(self.narrow or dtype)

    def opened(self, kept: Tensor, dtype: torch.dtype) -> Tensor:
        """What the rule gets: the state itself, or a copy if it is narrow."""
        return kept.to(dtype) if self.packing is None else self.packing.opened(kept, self.shape, dtype)


class _MatrixSignature(NamedTuple):
    """What matrices have in common whose directions travel together: shape, param group, and how states are kept."""

    rows: int
    columns: int
    group: int
    states: tuple[tuple[str, _Kept], ...]


Update = Callable[[Tensor, dict[str, Tensor], int, Mapping[str, Any]], Tensor]


class _WholeMatrixRule(MatrixRule):
    """Owners compute directions by the optimizer's function; holders decay their weights and step along them.

    Args:
        matrices: The matrices.
        states: States of the matrices that this rank owns.
        update: Function of the optimizer.
        fresh: Gives a matrix's states before its first step.
        first_update: Number of the first step that changes weights.
    """

    def __init__(
        self,
        matrices: StepMatrices,
        states: MatrixStates,
        update: Update,
        fresh: Callable[[MatrixTask, torch.device], MatrixState],
        first_update: int,
    ) -> None:
        super().__init__(matrices)
        self._states, self._update, self._fresh, self._first_update = states, update, fresh, first_update
        self._idle: set[int] = set()

    def gather(self, in_place: Collection[int]) -> list[Tensor | None]:
        """The gradients."""
        for bucket in self.buckets:
            if bucket.count is not None and bucket.count < self._first_update:
                self._idle.update(entry.index for entry in bucket.entries)
        return self.listed(self.by_shard(lambda bucket: bucket.grads))

    def update(self, batch: Batch, tasks: Sequence[MatrixTask], stack: Tensor, spent: bool = False) -> Tensor:
        """The directions, one matrix after the other: what is computed depends on no other matrix then."""
        rows = [self._direction(task, values) for task, values in zip(tasks, stack, strict=True)]
        return rows[0].view(1, -1) if len(rows) == 1 else torch.stack(rows)

    def _state_of(self, task: MatrixTask) -> MatrixState:
        return self._states.obtain(task.key, partial(self._fresh, task, self.unit.device))

    def states(self, task: MatrixTask) -> MatrixState:
        """Those of the spec; the count stays on the host."""
        state = self._state_of(task)
        return {name: state[name] for name, _ in task.signature.states}

    def _direction(self, task: MatrixTask, values: Tensor) -> Tensor:
        signature: _MatrixSignature = task.signature
        kept = self.on_device(task, self._state_of(task))
        states = {name: how.opened(kept[name], values.dtype) for name, how in signature.states}
        step, group = int(kept[STEP]) + 1, self.groups[signature.group]
        # In memory of its own, of one alignment wherever it lay: libraries round products by how operands are aligned.
        gradient = values.clone().view(signature.rows, signature.columns)
        direction = self._update(gradient, states, step, group)
        _check(task.key, direction, states, signature)
        for name, how in signature.states:
            if states[name] is not kept[name] and is_narrow(how.narrow):
                noisy = step if self.unit.spec.rounds_stochastically(name) else None
                keep_narrow_([kept[name]], [states[name]], [key_of(task.key, name)], noisy)
            elif states[name] is not kept[name]:
                kept[name].copy_(states[name])
        kept[STEP] += 1
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


def _check(key: str, direction: Tensor, states: Mapping[str, Tensor], signature: _MatrixSignature) -> None:
    """Refuse what a function returns of other shapes, before any state is kept.

    Raises:
        RuntimeError: The direction or a state has another shape, or a state has gone or come.
    """
    shapes = {"direction": signature[:2], **{name: how.shape for name, how in signature.states}}
    found = {"direction": tuple(direction.shape), **{name: tuple(value.shape) for name, value in states.items()}}
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

    def plan(self, unit: StepUnit) -> None:
        """See the base class."""
        tasks = []
        for key in unit.keys("matrix"):
            planned = unit.parameters[key]
            rows, columns = planned.info.matrix_shape
            kept = self.spec.kept(rows, columns, planned.group)
            signature = _MatrixSignature(rows, columns, planned.step_group, tuple(kept.items()))
            tasks.append(MatrixTask(key, (key,), signature, self.operations(rows, columns)))
        self.planner.choose_owners(unit, tasks)

    def step_costs(self, unit: StepUnit) -> StepCosts:
        """See the base class."""

        def opened(tasks: Sequence[MatrixTask]) -> int:
            # States that are opened and the temporaries of the rule; one matrix is computed at a time.
            sizes = [
                sum(prod(kept.shape) for _, kept in task.signature.states)
                + 4 * task.signature.rows * task.signature.columns
                for task in tasks
            ]
            return 4 * max(sizes, default=0)

        return StepCosts(matrix_state=partial(self._fresh, unit), scratch=ScratchMemory(alone=opened, stacked=opened))

    def _fresh(self, unit: StepUnit, task: MatrixTask, device: torch.device) -> MatrixState:
        fills = {state.name: state.fill for state in self.spec.states}
        found = {name: kept.fresh(fills[name], unit.dtype, device) for name, kept in task.signature.states}
        return {**found, STEP: torch.zeros((), dtype=torch.int64, device=torch.device("cpu"))}

    def _update(self, unit: StepUnit, buckets: list[Bucket]) -> None:
        matrices = StepMatrices(unit, fallback_step(unit, buckets), self.step_groups, self.health)
        fresh = partial(self._fresh, unit)
        step_matrices(_WholeMatrixRule(matrices, self.matrix_states, self.update, fresh, self.first_update))
