"""Undoes steps whose gradients are not finite, on the device; the host learns of it when the next step begins."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from rankwise.kernels.host_copies import HostCopy
from rankwise.layout.dtensors import local_view
from rankwise.plan.step_unit import StepUnit, UnitKey
from rankwise.states.element_states import States
from rankwise.states.matrix_states import MatrixStates
from rankwise.states.optimizer_spec import OptimizerSpec
from rankwise.states.param_remainders import REMAINDER
from rankwise.step.health import Health

__all__ = ["Undo", "Unsettled", "any_not_finite", "undone_where", "zeroed_where"]

Kept = tuple[Tensor, Tensor]
"""A tensor that a step changes in place, and a copy of its value before."""


def any_not_finite(unit: StepUnit, tensors: Sequence[Tensor]) -> Tensor:
    """Whether a tensor of any rank holds an infinity or a NaN.

    Returns:
        A 0-d number on the device, 1 if so, the same on every rank.
    """
    # Norms are the largest entries, because a 2-norm of finite numbers may overflow.
    sizes = torch._foreach_norm([tensor for tensor in tensors if tensor.numel()], torch.inf) if tensors else ()
    broken = torch.zeros((), dtype=torch.float32, device=unit.device)
    if sizes:
        broken = (~torch.stack(list(sizes)).isfinite().all()).to(torch.float32)
    if unit.layout.world_size > 1:
        unit.traffic.count(broken)
        dist.all_reduce(broken, dist.ReduceOp.MAX, group=unit.layout.group)
    return broken


def zeroed_where(broken: Tensor, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Replace gradients by zeros if the step is broken: no factorisation may meet a NaN."""
    return [None if grad is None else torch.where(broken > 0, 0.0, grad) for grad in grads]


class Unsettled(NamedTuple):
    """Step counts that the host must take back once it knows that a step was undone.

    Attributes:
        broken: The flag of the step.
        counts: Numbers that the host works with, and their values before.
    """

    broken: HostCopy
    counts: list[Kept]

    def settle(self) -> None:
        """Take the counts back if the step was undone; waits for no more than the flag, sent before the step's work."""
        if self.broken.read():
            for count, old in self.counts:
                count.copy_(old)


@contextmanager
def undone_where(
    broken: Tensor, tensors: Sequence[Tensor], matrix_states: MatrixStates, counts: list[Kept], counted: Sequence[str]
) -> Iterator[None]:
    """Undo everything that the context changes, bit by bit, where the flag says so.

    Args:
        broken: The flag, see :func:`any_not_finite`.
        tensors: Weights and element states, changed in place.
        matrix_states: Matrix states; those that are asked for in the context are watched.
        counts: List that receives the matrices' counts and their values before.
        counted: Names of the matrix states that the host works with.
    """
    kept: list[Kept] = [(tensor, tensor.clone()) for tensor in tensors]
    with matrix_states.watched() as before:
        yield
    for key, state in before.items():
        for name, old in state.items():
            live = matrix_states.get(key, {}).get(name)
            if live is not None:
                (counts if name in counted else kept).append((live, old))
    for tensor, old in kept:
        tensor.copy_(torch.where(broken > 0, old, tensor))


class Undo:
    """Takes steps back whose gradients are not finite.

    Attributes:
        unsettled: Counts of the last step of every unit that may have to be taken back.
    """

    def __init__(self, spec: OptimizerSpec, matrix_states: MatrixStates, health: Health) -> None:
        self._spec, self._matrix_states, self._health = spec, matrix_states, health
        self.unsettled: dict[UnitKey, Unsettled] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        # Optimizers settle before they are copied.
        return type(self), (self._spec, self._matrix_states, self._health)

    def settle(self, keys: Iterable[UnitKey] | None = None) -> None:
        """Take back the counts of steps that were undone, of all units or of some."""
        for key in list(self.unsettled) if keys is None else keys:
            unsettled = self.unsettled.pop(key, None)
            if unsettled is not None:
                unsettled.settle()

    def update(
        self,
        unit: StepUnit,
        states: States,
        weights: Sequence[Tensor | None],
        grads: Sequence[Tensor | None],
        judged: Sequence[Tensor],
        update: Callable[[Sequence[Tensor | None]], None],
    ) -> None:
        """Update, and leave every weight and state as it was if a gradient is not finite on any rank.

        Args:
            unit: The unit of the step.
            states: The optimizer's element states.
            weights: Weights of every tensor; None for one that takes no step.
            grads: Gradients of every tensor; None for one that takes no step.
            judged: Tensors that must be finite for the step to count.
            update: Takes the step with the gradients that it is given.
        """
        changed = [weight for weight in weights if weight is not None]
        counts: list[Kept] = []
        apart = ("step", REMAINDER)  # counts are taken back by the host, and a remainder follows its weight
        for index, weight in enumerate(weights):
            if weight is None:
                continue
            unit.states.allocate(states, index)  # new states must be zeros again if the step is undone
            state = states[unit.tensors[index]]
            counts.append((state["step"], state["step"] - 1))
            changed += [local_view(v) for name, v in state.items() if isinstance(v, Tensor) and name not in apart]
        broken = any_not_finite(unit, judged)
        self._health.add("skipped_steps", broken)
        finite = zeroed_where(broken, grads)
        unsettled = Unsettled(HostCopy(broken), counts)
        with undone_where(broken, changed, self._matrix_states, counts, self._spec.counted_states):
            update(finite)
        self.unsettled[unit.key] = unsettled
