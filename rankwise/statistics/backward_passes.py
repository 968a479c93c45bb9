"""This module says which backward passes add to a weight's gradient, and which gradients were thrown away since."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from rankwise.layout.dtensors import is_sharded, local_view
from rankwise.statistics.window_sums import Record

__all__ = ["BackwardPasses", "adds_to_any", "will_add_to"]


def will_add_to(record: Record, weight: Tensor) -> bool:
    """Whether the backward pass that runs now adds to the gradient of a weight.

    It does not where the weight is frozen by now, nor in ``torch.autograd.grad`` and ``backward(inputs=...)`` that ask
    for other gradients.

    Args:
        record: Statistics of the weight, which remember its node in the graph.
        weight: Tensor that the module multiplied by: the record's parameter, or the whole weight in place of a shard.
    """
    if not weight.requires_grad:
        return False
    if torch._C._current_graph_task_id() == -1:  # compiled autograd runs hooks outside the engine
        return True
    if record.accumulator is not None and record.accumulator[0] is weight and _will_run(record.accumulator[1]):
        return True
    # A weight that has been moved to another device has a new node.
    node = get_gradient_edge(weight).node
    record.accumulator = (weight, node)
    return _will_run(node)


def adds_to_any(weights: Iterable[Tensor]) -> bool:
    """Whether the backward pass that runs now adds to the gradient of one of these weights.

    A shard that wants a gradient counts as one of them: another tensor takes its place in the graph.
    """
    if torch._C._current_graph_task_id() == -1:
        return True
    trained = (weight for weight in weights if weight.requires_grad)
    return any(is_sharded(weight) or _will_run(get_gradient_edge(weight).node) for weight in trained)


def _will_run(node: Any) -> bool:
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # torch.autograd.grad hands this very gradient to its caller
        return False


class BackwardPasses:
    """Tells backward passes apart, and finds records whose gradients were thrown away between two of them.

    If a gradient is gone (``None``, or zeros in place), its statistics are dropped. If it was never seen at the weight,
    because a hook moved it while the backward pass ran, its absence later means nothing.

    Args:
        kept: Whether the next backward pass adds to the gradient of a parameter, where a framework keeps gradients
            elsewhere; it returns None where they are at the parameter.
    """

    def __init__(self, kept: Callable[[Tensor], bool | None]) -> None:
        self._kept = kept
        self._present = -1
        self._outer: dict[int, int] = {}
        self._added: dict[int, list[Record]] = {}

    def begins(self, born: int) -> bool:
        """Whether this is the first call in a backward pass; a pass that runs inside another one belongs to that one.

        Args:
            born: Graph task in which activation checkpointing repeated the forward pass; -1 if it did not.
        """
        task = torch._C._current_graph_task_id()
        if task == -1 or (task == self._present and born in (-1, task)):
            return False
        if born not in (-1, task):
            self._outer[task] = born
        top = task
        while top in self._outer:
            top = self._outer[top]
        if top == self._present:
            return False
        self._present = top
        self._outer = {inner: outer for inner, outer in self._outer.items() if inner > top}
        self._added = {other: records for other, records in self._added.items() if other >= top}
        return True

    def added(self, record: Record, weight: Tensor) -> None:
        """Note that the present backward pass will add to the gradient of a record's weight."""
        record.weight, record.gradient = weight, None
        task = torch._C._current_graph_task_id()
        if task == -1:
            return
        if task not in self._added:
            self._added[task] = []
            queue = torch.autograd.Variable._execution_engine.queue_callback  # type: ignore[attr-defined]
            # At the end it queues itself again, to run after what reduces gradients, which may be queued later.
            queue(partial(queue, partial(self._see, task)))
        self._added[task].append(record)

    def _see(self, task: int) -> None:
        """Note at the end of a backward pass whether gradients are at their weights, and their versions."""
        for record in self._added.pop(task, ()):
            if self._kept(record.parameter) is None:
                grad = _gradient(record)
                record.gradient = (grad is not None, 0 if grad is None else _changes_of(grad))

    def thrown_away(self, records: Collection[Record], in_step: bool = False) -> list[Record]:
        """Return records that have sums while their gradients are gone; called as a backward pass or a step begins.

        Args:
            records: Records of all weights.
            in_step: Whether to look only at gradients that were at their parameters when a backward pass ended.
        """
        gone, changed = [], []
        for record in records:
            if not record.touched or (in_step and record.gradient is None):
                continue
            kept = None if in_step else self._kept(record.parameter)
            if kept is None:
                grad = _gradient(record)
                if grad is None:
                    kept = record.gradient is not None and not record.gradient[0]
                elif record.gradient is not None and not in_step and _may_have_changed(grad, record.gradient):
                    changed.append((record, local_view(grad)))
            if kept is False:
                gone.append(record)
        return gone + _zeroed(changed)


def _gradient(record: Record) -> Tensor | None:
    grad = record.parameter.grad
    return record.weight.grad if grad is None and record.weight is not None else grad


def _changes_of(grad: Tensor) -> int | None:
    """Return how often a gradient was changed in place; None for a tensor of inference mode, which does not count."""
    return None if grad.is_inference() else grad._version


def _may_have_changed(grad: Tensor, seen: tuple[bool, int | None]) -> bool:
    changes = _changes_of(grad)
    return changes is None or seen != (True, changes)


def _zeroed(changed: list[tuple[Record, Tensor]]) -> list[Record]:
    """Return records whose gradients were set to zero. The host waits for the device if there are any to look at."""
    filled = [(record, grad) for record, grad in changed if grad.numel()]
    if not filled:
        return []
    zero = [not any_left for any_left in torch.stack([grad.any().cpu() for _, grad in filled]).tolist()]
    if all(zero):
        return [record for record, _ in changed]  # records of which this rank has no element are among them
    return [record for (record, _), is_zero in zip(filled, zero, strict=True) if is_zero]
