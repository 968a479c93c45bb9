"""Undoes steps whose gradients are not finite, on the device; the host learns of it when the next step begins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from rankwise.kernels.host_copies import HostCopy
from rankwise.layout.dtensors import local_view
from rankwise.plan.step_unit import StepUnit
from rankwise.states.element_states import States
from rankwise.states.matrix_states import MatrixStates
from rankwise.states.optimizer_spec import OptimizerSpec
from rankwise.states.param_remainders import REMAINDER
from rankwise.step.health import Health

__all__ = ["Undo", "Unsettled"]

Kept = tuple[Tensor, Tensor]
"""A tensor that a step changes in place, and a copy of its value before."""


def _any_not_finite(unit: StepUnit, tensors: Sequence[Tensor]) -> Tensor:
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


class Undo:
    """Takes steps back whose gradients are not finite.

    Attributes:
        unsettled: Counts of the last step that may have to be taken back, by the identity of its unit.
    """

    def __init__(self, spec: OptimizerSpec, matrix_states: MatrixStates, health: Health) -> None:
        self._spec, self._matrix_states, self._health = spec, matrix_states, health
        self.unsettled: dict[int, Unsettled] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        # Optimizers settle before they are copied.
        return type(self), (self._spec, self._matrix_states, self._health)

    def settle(self, unit: StepUnit | None = None) -> None:
        """Take back the counts of steps that were undone, of one unit or of all."""
        for key in list(self.unsettled) if unit is None else [id(unit)]:
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
        """Update, and leave every weight and state as it was if a gradient is not finite on any rank, or this raises.

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
        broken = _any_not_finite(unit, judged)
        self._health.add("skipped_steps", broken)
        # No factorisation may meet a NaN.
        finite = [None if grad is None else torch.where(broken > 0, 0.0, grad) for grad in grads]
        unsettled = Unsettled(HostCopy(broken), counts)
        kept: list[Kept] = [(tensor, tensor.clone()) for tensor in changed]
        is_whole = False
        try:
            with self._matrix_states.watched() as before:
                update(finite)
            is_whole = True
        finally:
            counted = {state.name for state in self._spec.matrix_states if state.counted}
            for key, state in before.items():
                for name, old in state.items():
                    live = self._matrix_states.get(key, {}).get(name)
                    if live is not None:
                        (counts if name in counted else kept).append((live, old))
            for tensor, old in kept if is_whole else [*kept, *counts]:
                # A step that raised half-way is no step.
                tensor.copy_(torch.where(broken > 0, old, tensor) if is_whole else old)
        self.unsettled[id(unit)] = unsettled
