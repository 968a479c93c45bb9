"""What steps have planned holds, or is planned again, whatever is done to weights, gradients, states and groups."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from rankwise import MARS, MKOR, LDAdam, SONew
from rankwise.kernels import lists, triton
from rankwise.kernels.dispatch import using
from rankwise.mkor.preconditioned_matrices import TAKEN
from rankwise.step.working_tensors import BUCKETS

pytest.importorskip("triton")

KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "mars-adamw": (MARS, {}),
    "mars-muon": (MARS, {"variant": "muon", "ns_dtype": "float32", "optimize_1d": False}),
    "sonew": (SONew, {}),
    "ldadam": (LDAdam, {"rank": 2}),
    "mkor": (MKOR, {"update_interval": 2, "factor_dtype": "float32", "product_dtype": "float32"}),
    "mkor-sketch": (MKOR, {"rule": "sketch", "factor_dtype": "float32", "product_dtype": "float32"}),
}


class Run:
    """A model with an optimizer; ``forgetful`` ones plan every step anew."""

    def __init__(self, name: str, forgetful: bool) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
        self.late = nn.Linear(8, 8, bias=False)
        kind, options = KINDS[name]
        self.optimizer = kind(list(self.model.named_parameters()), lr=1e-2, weight_decay=0.1, **options)
        self.optimizer.capture(self.model)
        self.forgetful = forgetful

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def step(self, seed: int, without: int | None = None) -> None:
        if self.forgetful:
            from rankwise.kernels.triton import segments, tables

            for cache in (segments.planned_table, tables.table_of):
                cache.cache_clear()
            for unit in self.optimizer.planned_units:
                unit.notes.drop(BUCKETS)
                unit.notes.drop(TAKEN)
        torch.manual_seed(seed)
        if self.optimizer.needs_capture:
            self.model(torch.randn(5, 6)).square().mean().backward()
        for place, parameter in enumerate(self.parameters):
            parameter.grad = None if place == without else torch.randn_like(parameter)
        self.optimizer.step()


def other_memory(run: Run) -> None:
    for parameter in run.parameters:
        parameter.data = parameter.data.clone()


def columns_in_place_of_rows(run: Run) -> None:
    """Weights that do not lie in a row: the step works on a copy."""
    weight = run.parameters[0]
    weight.data = weight.data.t().contiguous().t()


def own_states_again(run: Run) -> None:
    run.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))


def states_elsewhere(run: Run) -> None:
    """As offloading does it."""
    for state in run.optimizer.state.values():
        state.update({name: value.clone() for name, value in state.items() if isinstance(value, torch.Tensor)})


def another_rate(run: Run) -> None:
    run.optimizer.param_groups[0]["lr"] = 3e-2


def a_group_more(run: Run) -> None:
    run.optimizer.add_param_group({"params": [("late", run.late.weight)], "lr": 1e-3})
    # What MKOR has no statistics of takes its fallback.
    run.optimizer.capture(run.model)


def into_the_other_group(run: Run) -> None:
    for key in ("params", "param_names"):
        first, second = (group[key] for group in run.optimizer.param_groups)
        second.append(first.pop(2))


def a_copy_goes_on(run: Run) -> None:
    run.model, run.optimizer, run.late = copy.deepcopy((run.model, run.optimizer, run.late))
    run.optimizer.capture(run.model)


CHANGES: list[Callable[[Run], None]] = [
    other_memory,
    own_states_again,
    another_rate,
    states_elsewhere,
    columns_in_place_of_rows,
    a_group_more,
    into_the_other_group,
    a_copy_goes_on,
    other_memory,
]


@pytest.mark.parametrize(
    ("name", "form"),
    [("mars-adamw", triton), ("mars-muon", lists), ("sonew", lists), ("ldadam", lists), ("mkor", triton)],
)
def test_changes_between_steps(name: str, form: Any, interpreter: None) -> None:
    """Bit by bit what a step gives that is planned anew."""
    prepared, forgetful = Run(name, False), Run(name, True)
    # A bias that leaves its weight's group leaves its factor, too: MKOR refuses that.
    changes = [change for change in CHANGES if name != "mkor" or change is not into_the_other_group]
    with using(form):
        for number, change in enumerate([lambda run: None, *changes]):
            for run in (prepared, forgetful):
                change(run)
                run.step(2 * number)
                # From here on counts differ, so that tensors are grouped otherwise.
                run.step(2 * number + 1, without=number % len(run.parameters))
            for mine, theirs in zip(prepared.parameters, forgetful.parameters, strict=True):
                assert torch.equal(mine, theirs), change.__name__


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("whole", [True, False])
def test_plans_hold_no_memory(name: str, whole: bool) -> None:
    """Neither gradients that are dropped, nor weights and states that a framework moves away."""
    kind, options = KINDS[name]
    arrays = [numpy.random.default_rng(number).random(64 if whole else 65, numpy.float32) for number in range(2)]
    weight, grad = (torch.from_numpy(array)[:64].view(8, 8) for array in arrays)
    parameter = nn.Parameter(weight)
    optimizer = kind([("weight", parameter)], **options)
    layer = nn.Linear(8, 8, bias=False)
    layer.weight = parameter
    optimizer.capture(layer)
    for _ in range(2):
        layer(torch.ones(2, 8)).sum().backward()
        parameter.grad = grad
        optimizer.step()
    held = [weakref.ref(array) for array in arrays]
    parameter.grad, parameter.data = None, torch.zeros(8, 8)
    del arrays, weight, grad
    assert [array() for array in held] == [None, None]
