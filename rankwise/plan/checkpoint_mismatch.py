"""States that are not those of the parameters they are to be taken over for: refused before anything changes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor

from rankwise.comm.owner_plan import MatrixTask
from rankwise.plan.step_unit import StepUnit

__all__ = ["InitialStates", "MisfitError", "check_shape", "refuse_strange"]

Shape = tuple[int, ...]
InitialStates = Callable[[MatrixTask, torch.device], Mapping[str, Tensor]]
"""The states of a matrix before its first step; see :class:`rankwise.plan.step_costs.StepCosts`."""

_FIX = "load it with the model and options that it was saved with, or the weights alone and start the optimizer afresh"


class MisfitError(ValueError):
    """A checkpoint's states are not those of this optimizer's parameters."""


def check_shape(owner: str, key: str, state: str, found: Sequence[int], allowed: Collection[Shape]) -> None:
    """Refuse a state of another shape than its parameter's.

    Args:
        owner: Owner of the message: the optimizer.
        key: The parameter.
        state: Name of the state.
        found: Its shape.
        allowed: What it may be.

    Raises:
        MisfitError: It is none of these.
    """
    if tuple(found) not in allowed:
        rule = " or ".join(str(tuple(shape)) for shape in allowed)
        raise MisfitError(
            f"{owner}: the state {state!r} of '{key}' has the shape {tuple(found)}, which is invalid: it must be "
            f"{rule}, as the parameter and the options of its group say; {_FIX}"
        )


def refuse_strange(
    owner: str, unit: StepUnit, states: Mapping[str, Mapping[str, Tensor]], initial: InitialStates
) -> None:
    """Compare the states of matrices that this rank owns with what a planned unit expects of them.

    Args:
        owner: Owner of the message: the optimizer.
        unit: The unit.
        states: By matrix.
        initial: Those that it would begin with.

    Raises:
        MisfitError: One has another shape.
    """
    for task in unit.exchange.owned() if unit.exchange is not None else ():
        found = states.get(task.key)
        if found:
            for name, expected in initial(task, torch.device("meta")).items():
                if name in found:
                    check_shape(owner, task.key, name, found[name].shape, [tuple(expected.shape)])
