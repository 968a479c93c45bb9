"""The form in which our states lie in ZeRO's files, so that DeepSpeed's own converter can read them.

``deepspeed.checkpoint.ds_to_universal`` expects Adam's two moments, laid out as the flat partition, and ``step`` for
every flat tensor, and hands them and the hyper-parameters to whatever optimizer loads the result. Ours are neither two
nor laid out so, hence they lie beside, and in their place stand moments of zero that take no room in the file and a
step of zero: for Adam, a fresh start.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed.runtime.engine import DeepSpeedEngine

from rankwise.step.optimizer import ShardedOptimizer

__all__ = ["from_stock", "stock_form", "to_stock", "zero_form"]

_MOMENTS = ("exp_avg", "exp_avg_sq")
_STATES, _GROUPS = "element_states", "hyperparameters"


def _nothing() -> torch.Tensor:
    return torch.zeros((), dtype=torch.float32, device="cpu")


def to_stock(state_dict: Mapping[str, Any], numels: list[int]) -> dict[str, Any]:
    """Put stand-ins where the converter looks, and the true states and hyper-parameters beside them.

    Args:
        state_dict: As :meth:`ShardedOptimizer.state_dict` returns it.
        numels: Elements of each flat tensor.
    """
    stand_ins = {
        index: {"step": _nothing(), **{name: _nothing().expand(numel) for name in _MOMENTS}}
        for index, numel in enumerate(numels)
    }
    groups = [{"params": group["params"]} for group in state_dict["param_groups"]]
    return {
        **state_dict,
        _STATES: state_dict["state"],
        _GROUPS: state_dict["param_groups"],
        "state": stand_ins,
        "param_groups": groups,
    }


def from_stock(state_dict: Any) -> Any:
    """Undo :func:`to_stock`; anything else is returned as it is."""
    if not isinstance(state_dict, Mapping) or _STATES not in state_dict:
        return state_dict
    found = dict(state_dict)
    found["state"], found["param_groups"] = found.pop(_STATES), found.pop(_GROUPS)
    return found


@contextmanager
def stock_form(optimizer: ShardedOptimizer) -> Iterator[None]:
    """While this lasts the optimizer's dictionaries are written, and read, in the converter's form."""
    write, load = optimizer.state_dict, optimizer.load_state_dict

    def state_dict() -> dict[str, Any]:
        numels = [tensor.numel() for group in optimizer.param_groups for tensor in group["params"]]
        return to_stock(write(), numels)

    optimizer.state_dict = state_dict  # type: ignore[method-assign]
    optimizer.load_state_dict = lambda state_dict: load(from_stock(state_dict))  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        del optimizer.state_dict, optimizer.load_state_dict


@contextmanager
def zero_form(engine: DeepSpeedEngine) -> Iterator[None]:
    """The form of states in ZeRO's files; stage 0, which DeepSpeed cannot convert, has none."""
    optimizer = engine.basic_optimizer
    if isinstance(optimizer, ShardedOptimizer) and engine.zero_optimization():
        with stock_form(optimizer):
            yield
    else:
        yield
