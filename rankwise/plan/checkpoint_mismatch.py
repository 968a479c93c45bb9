"""Refuses states of other parameters than those they are loaded for, before anything changes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import prod

from torch import Tensor

from rankwise.kernels.low_precision_runs import blocks_of
from rankwise.plan.step_unit import StepUnit

__all__ = ["MisfitError", "check_shape", "refuse_strange"]

Shape = tuple[int, ...]

_FIX = "load it with the model and options that it was saved with, or the weights alone and start the optimizer afresh"


class MisfitError(ValueError):
    """A checkpoint's states are not those of this optimizer's parameters."""


def check_shape(owner: str, key: str, state: str, found: Sequence[int], allowed: Collection[Shape]) -> None:
    """Refuse a state of a parameter whose shape is none of those that its options allow.

    Raises:
        MisfitError: The shape is none of these.
    """
    if tuple(found) not in allowed:
        rule = " or ".join(str(tuple(shape)) for shape in allowed)
        if any(_are_codes(found, shape) or _are_codes(shape, found) for shape in allowed):
            rule += " (one of them is of a state in 8 bits: state_dtype is another one than it was saved with)"
        raise MisfitError(
            f"{owner}: the state {state!r} of '{key}' has the shape {tuple(found)}, which is invalid: it must be "
            f"{rule}, as the parameter and the options of its group say; {_FIX}"
        )


def _are_codes(packed: Sequence[int], opened: Sequence[int]) -> bool:
    """Whether a shape is that of codes and their exponents, of a state that has another shape when it is opened."""
    numel = prod(opened)
    return tuple(packed) == (numel + blocks_of(0, numel),)


def refuse_strange(owner: str, unit: StepUnit, states: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Compare the states of the matrices that this rank owns with what a planned unit expects.

    Raises:
        MisfitError: A state has another shape than the one it would begin with.
    """
    for task in unit.exchange.owned() if unit.exchange is not None else ():
        for key in filter(states.get, (task.key, task.whole or "")):
            for name, stored in unit.stored_states(task).items():
                if name in states[key]:
                    shape = stored.stored_shape
                    whole = shape if key == task.key else unit.state_part(task, name).whole_shape(shape)
                    check_shape(owner, key, name, states[key][name].shape, [whole])
