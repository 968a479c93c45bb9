"""The states of matrices are declared once; what is planned, estimated, saved and cut is what a step keeps."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from cases import CASES, Case
from simulated import CASES as SIMULATED
from simulated import Framework
from torch import nn

from rankwise.extension import MatrixSpec, State
from rankwise.ldadam.spec import LDAdamSpec
from rankwise.plan.step_unit import Collectives, StepUnit
from rankwise.states.declared_states import MatrixForm, StatePart
from rankwise.step.optimizer import ShardedOptimizer

WITH_MATRICES = [case for case in CASES if case.cls.spec_class.matrix_states]


def stepped(case: Case, **options: Any) -> tuple[ShardedOptimizer, StepUnit]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 8, bias=False))
    optimizer = case.build(model.named_parameters(), model, **options)
    for _ in range(2):
        model(torch.randn(5, 12)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    (unit,) = optimizer.planned_units
    return optimizer, unit


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
@pytest.mark.parametrize("case", WITH_MATRICES, ids=lambda case: case.name)
def test_a_step_keeps_what_is_declared(case: Case, dtype: str | None) -> None:
    optimizer, unit = stepped(case, **({} if dtype is None else {"state_dtype": dtype}))
    assert unit.exchange is not None and unit.exchange.owned()
    for task in unit.exchange.owned():
        stored, kept = unit.stored_states(task), optimizer.matrix_states[task.key]
        assert list(stored) == list(kept)
        for name, state in stored.items():
            fresh = state.fresh(unit.dtype, unit.device)
            assert (fresh.shape, fresh.dtype) == (kept[name].shape, kept[name].dtype), name
            assert state.stored_shape == tuple(kept[name].shape) and state.nbytes(unit.dtype) == kept[name].nbytes


def test_a_plan_is_frozen() -> None:
    _, unit = stepped(WITH_MATRICES[0])
    for field in dataclasses.fields(StepUnit):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(unit, field.name, None)
    with pytest.raises(dataclasses.FrozenInstanceError):
        unit.collectives.exchange = None  # type: ignore[misc]


def test_a_rule_plans_a_unit_without_collectives() -> None:
    """It returns what it has planned, and the unit of the steps has it; the unit that it was given stays as it was."""
    framework = Framework("flat", SIMULATED["ldadam-ef"], torch.float32)
    given = []
    plan = framework.optimizer.plan

    def spy(unit: StepUnit) -> Collectives:
        given.append(unit)
        return plan(unit)

    framework.optimizer.plan = spy  # type: ignore[method-assign]
    framework.step()
    (unit,) = framework.optimizer.planned_units
    assert len(given) == 1 and given[0].exchange is None and unit.exchange is not None
    assert unit.notes is given[0].notes and unit.traffic is given[0].traffic


@pytest.mark.parametrize("shape", [(12, 20), (20, 12), (8, 8)])
@pytest.mark.parametrize("axis", [0, 1])
def test_slices_make_up_a_state(shape: tuple[int, int], axis: int) -> None:
    """Of a basis if the short side is cut, of moments if the long one is; the others are whole in every slice."""
    _, unit = stepped(next(case for case in WITH_MATRICES if case.name == "ldadam"))
    stored = unit.spec.stored_states(MatrixForm(*shape), {"rank": 2})
    cut = {name for name, state in stored.items() if state.axis(axis) is not None}
    short = int(shape[0] > shape[1])
    assert cut == ({"basis"} if axis == short else {"exp_avg", "exp_avg_sq"})
    for name, state in stored.items():
        whole = torch.randn(state.shape)
        parts = [StatePart("w", number, 4, state.axis(axis)) for number in range(4)]
        own = state.of_slice(axis, 4)
        assert all(part.of(whole).shape == own.shape and part.whole_shape(own.shape) == state.shape for part in parts)
        if name in cut:
            assert torch.equal(torch.cat([part.of(whole) for part in parts], dim=state.axis(axis)), whole)
        else:
            assert all(torch.equal(part.of(whole), whole) for part in parts)


def test_shapes_see_all_options() -> None:
    """Also those that no group can set."""
    seen = []

    class Spec(MatrixSpec):
        states = (State("row", lambda rows, columns, group: seen.append(dict(group)) or (rows,)),)

    known = LDAdamSpec("LDAdam", WITH_MATRICES[0].build([("w", nn.Parameter(torch.zeros(8, 9)))]).options)
    Spec("Mine", known.options).stored_states(MatrixForm(3, 4), {"rank": 7})
    assert seen[0]["rank"] == 7 and seen[0]["rho"] == known.options.rho
