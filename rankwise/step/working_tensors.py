"""The beginning and the end of a step: counts, flat weights and gradients, buckets, weights written back.

Which entries are stepped together, and where they lie, is planned once for every set of tensors that take a step.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rankwise.kernels import graphs
from rankwise.layout.layout_source import real_view, refuse_unreadable
from rankwise.options.validation import OptionError
from rankwise.plan.notes import Note
from rankwise.plan.planner import Planner
from rankwise.plan.step_unit import Bucket, StepUnit
from rankwise.plan.transition import Transition
from rankwise.routing.roles import Rule
from rankwise.states.element_states import States, offset_runs
from rankwise.states.entries import Entry, PlannedEntries
from rankwise.states.param_remainders import NARROW, REMAINDER
from rankwise.step.followed_states import FollowedStates
from rankwise.updates.remainders import join, split

__all__ = ["BEGUN", "BUCKETS", "WorkingTensors", "are_deferred", "deferred_steps"]

BEGUN: Note[list[str]] = Note("matrices that had states and are fresh in the step under way")
BUCKETS: Note[dict[Any, list[_BucketPlan]]] = Note("how entries fall into buckets, by their counts")
_LENGTHS: Note[list[int]] = Note("elements of the tensors when the first step began")
_deferred = threading.local()


@contextmanager
def deferred_steps() -> Iterator[None]:
    """Make every ``step()`` of this thread do nothing: frameworks take one on zero gradients while they are set up."""
    _deferred.depth = getattr(_deferred, "depth", 0) + 1
    try:
        yield
    finally:
        _deferred.depth -= 1


def are_deferred() -> bool:
    """Whether the thread is inside :func:`deferred_steps`."""
    return getattr(_deferred, "depth", 0) > 0


Flats = list[Tensor | None]
"""A flat tensor for each of a unit's tensors; None for those that take no step."""


class WorkingTensors:
    """Begins and ends steps."""

    def __init__(self, planner: Planner, transition: Transition, followed: FollowedStates) -> None:
        self._planner, self._spec, self._transition, self._followed = planner, planner.spec, transition, followed
        self._most_idle = 0

    def counts_on_device(self, unit: StepUnit) -> bool:
        """Whether the host knows no step counts; on CPUs, which have no graphs, it always knows them."""
        return self._spec.capturable and getattr(unit.kernels, "STEPS_ON_DEVICE", False)

    def refuse_frozen(self, unit: StepUnit, groups: Sequence[dict[str, Any]]) -> None:
        """Refuse captures whose replays would not be further steps.

        Raises:
            RuntimeError: The step is being captured, and something it depends on would be frozen.
        """
        if not graphs.is_capturing(unit.device):
            return
        name = self._spec.name
        if not self._spec.capturable:
            known = "capturable" in self._spec.options.names()
            fix = "build it with capturable=True" if known else "leave step() out of the graph"
            raise RuntimeError(
                f"{name}.step() cannot be captured in a graph, because the graph would repeat one step's number; {fix}"
            )
        positions = {unit.parameters[entry.key].position for entry in unit.entries}
        rates = [groups[position]["lr"] for position in positions]
        if any(isinstance(rate, Tensor) and rate.device != unit.device for rate in rates):
            raise RuntimeError(
                f"{name}: lr is a tensor on another device than the weights, which a graph cannot read; make it one on "
                f"{unit.device}, and change it in place"
            )

    def are_all_zero(self, unit: StepUnit) -> bool:
        """Whether all gradients are zero, on all ranks; a collective, for which the host waits."""
        grads = [grad for grad in unit.local_gradients() if grad is not None]
        nonzero = torch.zeros((), dtype=torch.float32, device=unit.device)
        for grad in grads:
            nonzero += torch.count_nonzero(grad).to(nonzero)
        nonzero += float(not grads)
        if unit.layout.world_size > 1:
            dist.all_reduce(nonzero, group=unit.layout.group)
        return not nonzero

    def make_states(self, unit: StepUnit, states: States) -> None:
        """Make the states of every tensor that has a gradient, as before the first step."""
        for index, tensor in enumerate(unit.tensors):
            if tensor.grad is not None:
                unit.states.allocate(states, index)
                self._begin_count(states, tensor)

    def open(self, unit: StepUnit, states: States) -> tuple[Flats, Flats] | None:
        """Count the step of every tensor that takes one, and view weights and gradients; None if no tensor does.

        Where every rank has the whole parameters, a missing gradient is missing on all of them
        (``DistributedDataParallel`` and DeepSpeed make sure of it), and the parameter takes no step, as in one process.

        Raises:
            RuntimeError: A gradient is sparse, or a tensor or its gradient has another length than before; or states
                were replaced, see :meth:`FollowedStates.follow`.
            OptionError: A gradient has its values elsewhere.
        """
        idle = [tensor for tensor in unit.tensors if tensor.grad is None and tensor.requires_grad]
        if len(idle) > self._most_idle:
            self._most_idle = len(idle)
            self._planner.source.refuse_replaced(self._spec.name, idle)
        # Ranks that have other shards must take part in every collective: a missing gradient counts as zeros.
        zeros = not unit.missing_alike
        if not zeros and all(tensor.grad is None for tensor in unit.tensors):
            self._refuse_weightless(idle)
            return None
        held, grads = unit.local_tensors(), unit.local_gradients()
        for tensor, grad in zip(unit.tensors, grads, strict=True):
            if grad is not None and (type(grad) is not Tensor or grad.is_sparse):
                self._refuse_gradient(tensor, grad)
        self._refuse_other_lengths(unit, held, grads)
        if any(map(Tensor.is_inference, held)):
            self._refuse_inference(unit, held, grads)
        taking = [index for index, grad in enumerate(grads) if zeros or grad is not None]
        unit.notes[BEGUN] = self._followed.follow(unit, states, taking)
        weights: Flats = [None] * len(held)
        flat_grads: Flats = [None] * len(held)
        for index in taking:
            weights[index] = weight = self._whole(unit, states, index, held[index])
            grad = grads[index]
            flat_grads[index] = torch.zeros_like(weight) if grad is None else _flat(grad, unit.dtype)
        self._count(unit, states, [unit.tensors[index] for index in taking])
        return weights, flat_grads

    def _whole(self, unit: StepUnit, states: States, index: int, local: Tensor) -> Tensor:
        """The 1-D values of a weight in the type of the step, including the bits that a narrow one lacks."""
        if not self._spec.options.store_param_remainders:
            return _flat(local, unit.dtype)
        remainder = unit.states.flat(states, index, REMAINDER)
        if remainder is not None:
            return join(_flat(local, NARROW), remainder).to(unit.dtype)
        if REMAINDER in states.get(unit.tensors[index], ()):
            raise RuntimeError(
                f"{self._spec.name}: '{self._planner.name_of(unit.tensors[index])}' was brought from bfloat16 to "
                f"{str(local.dtype).removeprefix('torch.')} since its remainder was stored, which would be lost; bring "
                "it back, or build a new optimizer without store_param_remainders"
            )
        return _flat(local, unit.dtype)

    def _refuse_weightless(self, idle: Sequence[Tensor]) -> None:
        """Refuse parameters of the meta device, where the step would find no gradient at all and train nothing."""
        for tensor in idle:
            if tensor.is_meta:
                raise OptionError(
                    f"{self._spec.name}: the parameter '{self._planner.name_of(tensor)}' is invalid, because it is on "
                    "the meta device: it must be the one that the model uses, and to_empty() and load_state_dict("
                    "assign=True) put others in the places of such parameters; build the optimizer after them"
                )

    def _refuse_gradient(self, tensor: Tensor, grad: Tensor) -> None:
        name = self._spec.name
        if grad.is_sparse:
            raise RuntimeError(f"{name} does not support sparse gradients; use dense embeddings.")
        refuse_unreadable(name, f"{self._planner.name_of(tensor) or 'parameter'}.grad", grad)

    def _refuse_inference(self, unit: StepUnit, held: Sequence[Tensor], grads: Sequence[Tensor | None]) -> None:
        for tensor, local, grad in zip(unit.tensors, held, grads, strict=True):
            if local.is_inference() and (grad is not None or tensor.requires_grad and not unit.missing_alike):
                raise RuntimeError(
                    f"{self._spec.name}: '{self._planner.name_of(tensor) or 'a parameter'}' was made or moved in "
                    "inference mode, and torch forbids to change such tensors; build, load and move the model outside "
                    "of torch.inference_mode(), or train copy.deepcopy(model) with an optimizer built on the copy"
                )

    def _refuse_other_lengths(self, unit: StepUnit, held: Sequence[Tensor], grads: Sequence[Tensor | None]) -> None:
        """Refuse tensors of another length, before the step is counted and a kernel writes beyond a shorter one."""
        lengths = [tensor.numel() for tensor in held]
        planned = unit.notes.obtain(_LENGTHS, lambda: lengths)
        for tensor, grad, length, before in zip(unit.tensors, grads, lengths, planned, strict=True):
            if length != before:
                self._refuse_length("tensor", tensor, length, before)
            if grad is not None and grad.numel() != length:
                self._refuse_length("gradient", tensor, grad.numel(), length)

    def _refuse_length(self, what: str, tensor: Tensor, found: int, wanted: int) -> None:
        raise RuntimeError(
            f"{self._spec.name}: the {what} of {self._planner.name_of(tensor) or 'some parameters'} has {found} "
            f"elements, but must have {wanted}: it was replaced since the step was planned"
        )

    def _count(self, unit: StepUnit, states: States, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            if "step" not in states[tensor]:
                # A rank with an empty part makes the states of the others, because checkpoints save them together.
                unit.states.allocate_empty(states, tensor)
                graphs.refuse_capture(tensor.device, "the first step of a parameter")
                self._begin_count(states, tensor)
        counts = [states[tensor]["step"] for tensor in tensors]
        if counts:
            torch._foreach_add_(counts, 1.0)

    def _begin_count(self, states: States, tensor: Tensor) -> None:
        count = torch.zeros((), dtype=torch.float32, device=self._spec.count_device(tensor))
        states[tensor]["step"] = self._followed.counts[tensor] = count

    def buckets(
        self,
        unit: StepUnit,
        states: States,
        groups: Sequence[dict[str, Any]],
        weights: Sequence[Tensor | None],
        grads: Sequence[Tensor | None],
    ) -> list[Bucket]:
        """The shards that take the step, together with those that share their rule, param group and count."""
        step_groups = self._spec.step_groups.views(groups)
        # Counts that only the device knows cannot be grouped by.
        known = not self.counts_on_device(unit)
        counts = tuple(
            None if weight is None else int(states[tensor]["step"]) if known else 0
            for tensor, weight in zip(unit.tensors, weights, strict=True)
        )
        transition = self._transition
        buckets = []
        key = transition.began, transition.afresh
        for place, rule, before, entries in _plans_of(unit, counts, transition.before, key):
            tensors, runs = entries.once("runs", offset_runs)
            own_weights, own_grads = (
                runs.cut([flat for tensor in tensors if (flat := flats[tensor]) is not None])
                for flats in (weights, grads)
            )
            count = counts[tensors[0]]
            assert count is not None
            buckets.append(
                Bucket(
                    step_groups[place],
                    rule,
                    count - before if known else None,
                    entries,
                    own_weights,
                    own_grads,
                    unit.narrow,
                    partial(_counts_of, unit, states, before),
                )
            )
        return buckets

    def close(self, unit: StepUnit, states: States, weights: Sequence[Tensor | None]) -> None:
        """Write weights back whose working views are copies."""
        for index, (tensor, weight) in enumerate(zip(unit.local_tensors(), weights, strict=True)):
            if weight is None or weight.data_ptr() == tensor.data_ptr():
                continue
            target = real_view(tensor.detach())
            remainder = unit.states.flat(states, index, REMAINDER)
            if remainder is None:
                target.copy_(weight.view(target.shape))
            else:
                split(weight.view(target.shape).float(), target, remainder.view(target.shape))


def _flat(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """View a tensor's values in one dimension and this type; copies where that is not possible."""
    if tensor.dtype == dtype and tensor.is_contiguous():
        return tensor.detach().view(-1)
    # Gradients of complex parameters may be lazy conjugates.
    return real_view(tensor.detach().resolve_conj()).to(dtype).contiguous().view(-1)


def _counts_of(unit: StepUnit, states: States, before: int, entries: Sequence[Entry]) -> Tensor:
    """Step counts by entry; each tensor's count is read once, however many shards it has."""
    runs = [(tensor, len(list(members))) for tensor, members in groupby(entry.shard.tensor for entry in entries)]
    parts = [states[unit.tensors[tensor]]["step"].expand(length) for tensor, length in runs]
    counts = parts[0] if len(parts) == 1 else torch.cat(parts)
    return counts - before if before else counts


_KEPT = 32


_BucketPlan = tuple[int, Rule, int, PlannedEntries]
"""Of entries of one group, rule and count: index of the group's view, the rule, the steps in their counts that were
taken before their states began, and the entries in storage order."""


def _plans_of(
    unit: StepUnit, counts: tuple[int | None, ...], before: Callable[[str], int], key: Any
) -> list[_BucketPlan]:
    """The buckets of a step; plans are reused while the same tensors take a step.

    Args:
        unit: The unit of the step.
        counts: Counts of every tensor; None for one that takes no step. Only which are equal matters.
        before: Returns the steps in a parameter's count that were taken before its states began.
        key: Changes when ``before`` returns other values.
    """
    kept = unit.notes.obtain(BUCKETS, dict)
    first = next((count for count in counts if count is not None), 0)
    sign = (key, counts if not first else tuple(None if count is None else count - first for count in counts))
    plans = kept.get(sign)
    if plans is None:
        if len(kept) >= _KEPT:
            kept.clear()
        plans = kept[sign] = _planned(unit, counts, before)
    return plans


def _planned(unit: StepUnit, counts: Sequence[int | None], before: Callable[[str], int]) -> list[_BucketPlan]:
    members: dict[tuple[int, Rule, int, int], list[Entry]] = {}
    for entry in unit.entries:
        count = counts[entry.shard.tensor]
        if count is not None:
            earlier = before(entry.info.name)
            sign = (unit.parameters[entry.key].step_group, entry.route.rule, count - earlier, earlier)
            members.setdefault(sign, []).append(entry)
    return [(place, rule, earlier, PlannedEntries(entries)) for (place, rule, _, earlier), entries in members.items()]
