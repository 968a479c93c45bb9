"""The objects an optimizer holds, each by itself: none of them needs the optimizer."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases import Case, advance, cases, setup
from torch import Tensor, nn

from rankwise.mars.options import MARSOptions
from rankwise.mars.spec import MARSSpec
from rankwise.mkor.hybrid_switch import Switch
from rankwise.mkor.options import MKOROptions
from rankwise.options.validation import OptionError
from rankwise.plan.group_changes import GroupChanges
from rankwise.plan.planner import Planner
from rankwise.plan.step_costs import StepCosts
from rankwise.plan.step_unit import StepUnit
from rankwise.states.group_values import GroupValues
from rankwise.states.matrix_states import MatrixStates
from rankwise.states.parameter_table import ParameterTable
from rankwise.statistics.collector import Collector
from rankwise.step.reports import health_of
from rankwise.step.undo import Undo


class Parts:
    """What a MARS optimizer of two weights in two groups would hold."""

    def __init__(self, **options: Any) -> None:
        self.options = MARSOptions(variant="muon", **options)
        self.spec = MARSSpec("MARS", self.options)
        defaults = {name: getattr(self.options, name) for name in self.spec.group_options}
        self.weights = [nn.Parameter(torch.ones(4, 6)), nn.Parameter(torch.ones(6))]
        self.groups: list[dict[str, Any]] = [
            {"params": [weight], "param_names": [name], **defaults}
            for name, weight in zip(("wide", "bias"), self.weights, strict=True)
        ]
        self.table = ParameterTable(self.spec)
        self.values = GroupValues(self.spec, defaults)
        self.matrix_states = MatrixStates()
        self.undo = Undo(self.spec, self.matrix_states, health_of(self.spec))
        self.planner = Planner(self.spec, self.table, self.values, self.matrix_states, self.undo.settle)
        self.group_changes = GroupChanges(self.spec, self.values, self.table, self.planner, self.matrix_states)
        for index in range(len(self.groups)):
            self.table.add_group(self.groups, index)

    def plan(self, unit: StepUnit) -> None:
        """As an optimizer without collectives of its own."""

    def step_costs(self, unit: StepUnit) -> StepCosts:
        return StepCosts()


def test_the_table_names_and_routes() -> None:
    table = Parts().table
    assert {name: chosen.rule for name, chosen in table.routes.items()} == {"wide": "matrix", "bias": "fallback"}
    assert table.names_by_group(2) == [["wide"], ["bias"]]
    assert table.base_name("wide[3]") == "wide" and table.base_name("tall") == ""
    assert not table.is_idle
    table.send_to_fallback(["wide"], "nobody uses it")
    assert table.is_idle
    with pytest.raises(OptionError, match="MARS would update none of the 2 parameters .*nobody uses it"):
        table.refuse_if_idle()


def test_a_copied_table_knows_the_copied_parameters() -> None:
    parts = Parts()
    table, weights = copy.deepcopy((parts.table, parts.weights))
    assert table.plain.name_of(weights[0]) == "wide" and table.plain.name_of(parts.weights[0]) is None


def test_values_are_judged_by_themselves() -> None:
    parts = Parts()
    parts.values.refuse_changes(parts.groups)
    parts.groups[1]["betas"] = (0.9, 1.5)
    with pytest.raises(OptionError, match="betas"):
        parts.values.refuse_changes(parts.groups)


def test_the_planner_plans_once_and_forgets() -> None:
    parts = Parts()
    unit = parts.planner.plan_present(parts, parts.groups)
    assert parts.planner.find(parts.groups) is unit and unit.keys("matrix") == ["wide"]
    assert parts.planner.places()[id(parts.weights[1])] == (unit, 1)
    assert copy.deepcopy(parts.planner).units == {}
    parts.planner.forget()
    assert parts.planner.find(parts.groups) is None


def test_a_unit_that_cannot_be_planned_is_not_kept() -> None:
    class Failing(Parts):
        def plan(self, unit: StepUnit) -> None:
            raise ZeroDivisionError

    parts = Failing()
    with pytest.raises(ZeroDivisionError):
        parts.planner.plan_present(parts, parts.groups)
    assert not parts.planner.units and not parts.planner.loads


def test_moved_parameters_are_followed() -> None:
    parts = Parts()
    states: dict[Tensor, dict[str, Any]] = {}
    parts.group_changes.follow(None, parts.groups, states)
    unit = parts.planner.plan_present(parts, parts.groups)
    assert not parts.group_changes.follow(unit, parts.groups, states)
    parts.groups[0]["params"], parts.groups[1]["params"] = [], [parts.weights[1], parts.weights[0]]
    assert parts.group_changes.follow(parts.planner.find(parts.groups), parts.groups, states)
    assert parts.table.catalog["wide"][1] == 1


def test_the_switch_needs_losses_and_factors_alone() -> None:
    parts = Parts()
    parts.matrix_states["wide"] = {"left": torch.eye(4)}
    unit = parts.planner.plan_present(parts, parts.groups)
    statistics = Collector(parts.table, parts.planner)
    switch = Switch(MKOROptions(hybrid=True), statistics, parts.matrix_states, parts.planner)

    def seen(loss: float) -> bool:
        switch.detector.load_state_dict({**switch.detector.state_dict(), "switched": loss < 1})
        return switch.detector.switched

    switch.detector.update = seen  # type: ignore[method-assign]
    for loss, is_over in ((2.0, False), (0.5, True)):
        switch.record(loss)
        switch.consider(unit)
        assert switch.is_over == is_over and bool(parts.matrix_states) != is_over


@cases(names=["mars-m", "sonew-tridiagonal", "ldadam"])
def test_an_optimizer_is_gone_when_nobody_names_it(case: Case) -> None:
    """No part of it names it: its states are not left to the collector of cycles."""
    model, optimizer = setup(case)
    advance(model, optimizer, range(2))
    gone = weakref.ref(optimizer)
    gc.disable()
    try:
        del optimizer
        assert gone() is None
    finally:
        gc.enable()


def _settles_its_own(twin: Any, optimizer: Any) -> None:
    """Plans are forgotten when the counts of the copy are known, not those of the original."""
    settled = []
    for each in (twin, optimizer):
        each.undo.unsettled["unit"] = SimpleNamespace(settle=lambda each=each: settled.append(each))
    twin.planner.forget()
    assert settled == [twin]
    optimizer.undo.unsettled.clear()


@cases(exact=False)
def test_copies_share_nothing_and_have_nothing_planned(case: Case) -> None:
    model, optimizer = setup(case)
    advance(model, optimizer, range(2))
    for twin in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert set(vars(twin)) >= set(twin.held)
        own = [name for name in twin.held if getattr(twin, name) is getattr(optimizer, name)]
        assert all(isinstance(getattr(twin, name), bool | str) for name in own), own
        assert not twin.planned_units and not twin.planner.owner_of and not twin.undo.unsettled
        assert twin.table.parameters.keys() == optimizer.table.parameters.keys()
        assert twin.reports is not optimizer.reports and twin.saved is not optimizer.saved
        _settles_its_own(twin, optimizer)
