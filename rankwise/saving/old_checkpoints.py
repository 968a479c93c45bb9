"""States of checkpoints of earlier versions, and what is kept in their place since."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from rankwise.states.optimizer_spec import OptimizerSpec
from rankwise.states.param_remainders import REMAINDER

__all__ = ["with_replaced"]

_BESIDE = ("step", REMAINDER)


def with_replaced(
    spec: type[OptimizerSpec] | OptimizerSpec,
    states: Mapping[str, Any],
    record: Mapping[str, Any] | None,
    group: Mapping[str, Any],
) -> dict[str, Any]:
    """The states of one tensor as they would be saved now.

    Args:
        spec: The states that its rules keep.
        states: As saved, by name.
        record: What the tensor stores, see :meth:`rankwise.states.element_states.ElementStates.record`; None: one
            parameter, all of whose states have its shape; nothing: an empty part of one.
        group: Group of the tensor, as saved.
    """
    found = dict(states)
    for name, olds in spec.replaced.items():
        if name in states or not all(isinstance(states.get(old), Tensor) for old in olds):
            continue
        kept = _kept_by_run(record, states) if record else []
        kept = kept or [set(states).difference(_BESIDE)]
        chosen = [run for run, names in enumerate(kept) if spec.is_replaced(name, names, group)]
        if len(chosen) == len(kept):
            found[name] = spec.made_of(name, {old: found.pop(old) for old in olds}, group)
        elif chosen:
            assert record is not None
            theirs = {old: _of_runs(states[old], record, old, chosen) for old in olds}
            found[name] = spec.made_of(name, theirs, group)
            others = [run for run in range(len(kept)) if run not in chosen]
            found |= {old: _of_runs(states[old], record, old, others) for old in olds}
            found = {state: own for state, own in found.items() if state not in olds or own.numel()}
    return found


def _kept_by_run(record: Mapping[str, Any], states: Collection[str]) -> list[set[str]]:
    """The names of the states that each run has."""
    names = [name for name in record["states"] if name in states and name not in _BESIDE]
    return [{name for name in names if record["states"][name][run] is not None} for run in range(len(record["runs"]))]


def _of_runs(state: Tensor, record: Mapping[str, Any], name: str, chosen: Collection[int]) -> Tensor:
    """A state of some runs only, one after the other, as those keep it that are not all."""
    flat, parts = state.reshape(-1), [state.new_empty(0)]
    for run in chosen:
        (_, _, start, end, _), first = record["runs"][run], record["states"][name][run]
        if first is not None:
            parts.append(flat[first : first + end - start])
    return torch.cat(parts)
