"""Norms of updates and weights by layer are measured for Megatron's writers, at its log interval only."""

from __future__ import annotations

import re
import sys
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_patches.layouts import MegatronLayout
from rankwise.options.validation import OptionError
from rankwise.plan.step_unit import StepUnit
from rankwise.step.optimizer import ShardedOptimizer

__all__ = ["BY", "Norms", "check_norms", "next_iteration"]

BY = ("layer", "weight")
"""What shares a norm: all weights of a transformer layer (or of a module outside the layers), or each weight alone."""
_LAYER = re.compile(r"^(.*?layers\.\d+)\.")


def check_norms(by: Any, interval: Any) -> None:
    """Check what is measured, and how often.

    Args:
        by: One of :data:`BY`; None for nothing.
        interval: Number of steps from one measured step to the next.

    Raises:
        OptionError: A value is outside its range.
    """
    if by is not None and by not in BY:
        raise OptionError(
            f"RankwiseConfig: rankwise_log_norms={by!r} is invalid: it must be one of {', '.join(BY)}, or None; leave "
            "it out to measure nothing"
        )
    if isinstance(interval, bool) or not isinstance(interval, int) or interval < 1:
        raise OptionError(
            f"RankwiseConfig: rankwise_log_interval={interval!r} is invalid: it must be a number of steps, at least 1; "
            "write e.g. 100"
        )


class _Plan(NamedTuple):
    """What is measured of a unit, planned once.

    Attributes:
        labels: Labels of all ranks of the pipeline stage, equal on all of them.
        tensors: Tensors of the unit that this rank counts: one rank counts each element.
        places: Position of each tensor's label among the labels.
    """

    labels: tuple[str, ...]
    tensors: list[Tensor]
    places: Tensor


class Norms:
    """Measures what a step changes: two norms for each layer, in one sum over ranks when they are read.

    A measured step copies the weights that this rank steps, and passes through them three more times, in a handful of
    launches; all other steps do nothing. Nothing waits for the device before :meth:`read`.

    Args:
        by: One of :data:`BY`.
        interval: Iterations from one measured step to the next.
        stage: All ranks of this pipeline stage.
    """

    def __init__(self, by: str, interval: int, stage: dist.ProcessGroup) -> None:
        self._by, self._interval, self._stage = by, interval, stage
        self._steps = 0
        self._before: list[Tensor] | None = None
        self._plans: tuple[StepUnit, _Plan] | None = None
        self._squares: Tensor | None = None

    def watch(self, inner: ShardedOptimizer) -> None:
        """Measure the steps of an optimizer, whatever wraps it.

        Args:
            inner: The optimizer.
        """
        inner.register_step_pre_hook(lambda *_: self.begin(inner))
        inner.register_step_post_hook(lambda *_: self.end(inner))

    @torch.no_grad()
    def begin(self, inner: ShardedOptimizer) -> None:
        """Begin to measure, on all ranks, before a step that will be taken.

        Args:
            inner: The optimizer.
        """
        self._steps += 1
        iteration = next_iteration()
        self._before = None
        if (self._steps if iteration is None else iteration) % self._interval == 0:
            weights = _weights(inner)
            self._before = list(torch._foreach_neg(weights)) if weights else []

    @torch.no_grad()
    def end(self, inner: ShardedOptimizer) -> None:
        """Measure after the step. The first measured step is a collective of the stage's ranks.

        Args:
            inner: The optimizer, whose tensors have the same order as before.
        """
        if self._before is None:
            return
        changes = dict(zip(map(id, _weights(inner)), self._before, strict=True))
        self._before = None
        (unit,) = inner.planned_units
        if self._plans is None or self._plans[0] is not unit:
            self._plans = unit, self._planned(inner, unit)
        plan = self._plans[1]
        squares = torch.zeros(2, len(plan.labels), dtype=torch.float64, device=unit.device)
        if plan.tensors:
            updates = [changes[id(tensor)] for tensor in plan.tensors]
            torch._foreach_add_(updates, plan.tensors)
            rows = [torch.stack(list(torch._foreach_norm(kind))).double().square() for kind in (updates, plan.tensors)]
            squares.index_add_(1, plan.places, torch.stack(rows))
        self._squares = squares

    def read(self) -> dict[str, float]:
        """Return ``update_norm/<layer>`` and ``weight_norm/<layer>`` of the last measured step, once; a collective."""
        if self._squares is None or self._plans is None:
            return {}
        squares, self._squares = self._squares, None
        dist.all_reduce(squares, group=self._stage)
        updates, weights = squares.sqrt().tolist()
        labels = self._plans[1].labels
        return {
            f"{kind}/{label}": value
            for kind, values in (("update_norm", updates), ("weight_norm", weights))
            for label, value in zip(labels, values, strict=True)
        }

    def _planned(self, inner: ShardedOptimizer, unit: StepUnit) -> _Plan:
        layout = inner.planner.source
        assert isinstance(layout, MegatronLayout)
        # One of several equal copies counts, and a weight that an earlier stage has, too, counts there.
        mine = {
            entry.shard.tensor: entry.info.name
            for entry in unit.stored_entries
            if entry.shard.copy == unit.stored.first_copy(entry.key) and entry.info.name not in layout.stage_copies
        }
        everyone: list[list[str]] = [[] for _ in range(dist.get_world_size(self._stage))]
        dist.all_gather_object(everyone, sorted({self._label(name) for name in mine.values()}), group=self._stage)
        labels = sorted({label for rank in everyone for label in rank})
        places = [labels.index(self._label(name)) for name in mine.values()]
        tensors = [unit.tensors[index] for index in mine]
        return _Plan(tuple(labels), tensors, torch.tensor(places, dtype=torch.long, device=unit.device))

    def _label(self, name: str) -> str:
        if self._by == "weight":
            return name
        layer = _LAYER.match(name)
        shard = name.partition("@")[2]
        return (layer[1] if layer else name.rpartition(".")[0]) + (f"@{shard}" if shard else "")


def _weights(inner: ShardedOptimizer) -> list[Tensor]:
    return [weight for group in inner.param_groups for weight in group["params"]]


def next_iteration() -> int | None:
    """Return the iteration that Megatron's training loop will log after the present step; None in another loop."""
    module = sys.modules.get("megatron.training.global_vars")
    try:
        done = None if module is None else getattr(module.get_args(), "curr_iteration", None)
    except AssertionError:  # another loop has imported the module without initialising it
        return None
    return None if done is None else int(done) + 1
