"""When MKOR's factors are due: layers that never report, and layers in use at other steps than the rest."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from saved_files import through_a_file
from torch import Tensor, nn

from rankwise import MKOR
from rankwise.mkor.factor_schedule import FactorSchedule

F64 = {"lr": 1e-2, "factor_dtype": "float64"}


class Attention(nn.Module):
    """One layer whose weight is used without calling it, between two ordinary ones."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(5, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.last = nn.Linear(8, 3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.last(h + self.attention(h, h, h, need_weights=False)[0])


def data(step: int) -> Tensor:
    return torch.randn(4, 6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(step)) + 0.3


def train(model: nn.Module, optimizer: Any, steps: Any) -> None:
    for step in steps:
        optimizer.zero_grad()
        model(data(step)).square().mean().backward()
        optimizer.step()


def built(model: nn.Module, **options: Any) -> MKOR:
    optimizer = MKOR(model.named_parameters(), **{**F64, **options})
    optimizer.capture(model)
    return optimizer


def rules(optimizer: MKOR) -> dict[str, str]:
    return {row.name: row.rule for row in optimizer.explain()}


@pytest.mark.parametrize("interval", [1, 2, 10])
def test_a_layer_that_never_reports_takes_the_backend(interval: int, caplog: pytest.LogCaptureFixture) -> None:
    model = Attention()
    optimizer = built(model, update_interval=interval)
    with caplog.at_level(logging.WARNING, "rankwise"):
        train(model, optimizer, range(5))
    warnings = [record.getMessage() for record in caplog.records if "out_proj" in record.getMessage()]
    assert len(warnings) == 1 and "adamw" in warnings[0]
    row = {row.name: row for row in optimizer.explain()}["attention.out_proj.weight"]
    assert (row.rule, row.owner) == ("fallback", None) and "not been called" in row.reason
    assert sorted(optimizer.matrix_states) == ["first.weight", "last.weight"]
    health = optimizer.read_health()
    assert health["layers_never_seen"] == 1.0 and health["matrices_updated"] < 2.5


def test_it_is_as_if_it_had_been_excluded() -> None:
    """From the first step on: identity factors change nothing in float64 but the order of a norm's sum."""
    model, other = Attention(), Attention()
    train(model, built(model, update_interval=2), range(6))
    excluding = built(other, update_interval=2, exclude=("*out_proj*",))
    train(other, excluding, range(6))
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-10)


class Towers(nn.Module):
    """Two models in one, of which a step uses one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.towers = nn.ModuleList(nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)) for _ in range(2))
        self.double()

    def forward(self, x: Tensor, which: int) -> Tensor:
        result: Tensor = self.towers[which](x)
        return result


def alternate(model: Towers, optimizer: MKOR, steps: Any, set_to_none: bool = True) -> None:
    for step in steps:
        optimizer.zero_grad(set_to_none=set_to_none)
        model(data(step), step % 2).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("interval", [1, 2, 3, 10])
def test_towers_in_turns_are_two_optimizers(interval: int, caplog: pytest.LogCaptureFixture) -> None:
    model, apart = Towers(), Towers()
    with caplog.at_level(logging.WARNING, "rankwise"):
        optimizer = built(model, update_interval=interval)
        alternate(model, optimizer, range(44))
    assert not caplog.records
    assert optimizer.read_health()["layers_never_seen"] == 0.0
    for which, tower in enumerate(apart.towers):
        single = MKOR(tower.named_parameters(), **F64, update_interval=interval)
        single.capture(tower)
        for step in range(which, 44, 2):
            single.zero_grad()
            tower(data(step)).square().mean().backward()
            single.step()
        for name, state in single.matrix_states.items():
            ours = optimizer.matrix_states[f"towers.{which}.{name}"]
            assert all(torch.equal(ours[side], value) for side, value in state.items())
            assert state["left_weights"].any()
    for one, two in zip(model.parameters(), apart.parameters(), strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("interval", [2, 10])
def test_towers_with_gradients_of_zero_get_their_factors(interval: int) -> None:
    """As they are under ZeRO; gradients of zero, unlike none, count as steps."""
    model = Towers()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer = built(model, update_interval=interval)
    alternate(model, optimizer, range(100), set_to_none=False)
    assert set(rules(optimizer).values()) == {"matrix", "fallback"}
    assert len(optimizer.matrix_states) == 4
    for state in optimizer.matrix_states.values():
        assert state["left_weights"].any()
    # Both are looked at once per interval: ten updates each and those of the search.
    updated = optimizer.read_health()["factors_updated"]
    assert 4 * (100 // interval) - 10 <= updated <= 4 * (100 // interval) + 20


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("cut", [1, 2, 3, 7, 12])
def test_a_resume_changes_no_bit(cut: int, set_to_none: bool) -> None:
    def start() -> tuple[Towers, MKOR]:
        model = Towers()
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        return model, built(model, update_interval=4)

    (model, optimizer), (resumed, later) = start(), start()
    alternate(model, optimizer, range(cut), set_to_none)
    resumed.load_state_dict(model.state_dict())
    later.load_state_dict(through_a_file(optimizer.state_dict()))
    alternate(model, optimizer, range(cut, 20), set_to_none)
    alternate(resumed, later, range(cut, 20), set_to_none)
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), resumed.parameters(), strict=True))
    assert rules(optimizer) == rules(later)


@pytest.mark.parametrize("captured_first", [True, False])
def test_what_never_reports_is_known_after_a_resume(captured_first: bool, caplog: pytest.LogCaptureFixture) -> None:
    model, resumed = Attention(), Attention()
    optimizer = built(model)
    train(model, optimizer, range(3))
    resumed.load_state_dict(model.state_dict())
    later = MKOR(resumed.named_parameters(), **F64)
    if captured_first:
        later.capture(resumed)
    later.load_state_dict(through_a_file(optimizer.state_dict()))
    if not captured_first:
        later.capture(resumed)
    caplog.clear()
    assert rules(later) == rules(optimizer)
    train(model, optimizer, range(3, 15))
    train(resumed, later, range(3, 15))
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), resumed.parameters(), strict=True))
    assert not caplog.records


def test_checkpoints_without_a_schedule_load() -> None:
    model, resumed = Attention(), Attention()
    optimizer = built(model, update_interval=2)
    train(model, optimizer, range(3))
    saved = optimizer.state_dict()
    del saved["factor_schedule"]
    later = built(resumed, update_interval=2)
    later.load_state_dict(copy.deepcopy(saved))
    train(resumed, later, range(3, 6))
    assert rules(later)["attention.out_proj.weight"] == "fallback"
    assert all(int(later.state[weight]["step"]) == 6 for weight in resumed.parameters())


def test_copies_keep_the_schedule() -> None:
    model = Towers()
    optimizer = built(model, update_interval=4)
    alternate(model, optimizer, range(3))
    assert copy.deepcopy(optimizer).state_dict()["factor_schedule"] == optimizer.state_dict()["factor_schedule"]


def test_a_layer_called_late_gets_factors() -> None:
    model = Attention()
    optimizer = built(model, update_interval=2)
    train(model, optimizer, range(5))
    for step in range(5, 12):
        optimizer.zero_grad()
        h = model.first(data(step))
        model.last(h + model.attention.out_proj(h)).square().mean().backward()
        for parameter in model.attention.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        optimizer.step()
    assert rules(optimizer)["attention.out_proj.weight"] == "matrix"
    assert optimizer.matrix_states["attention.out_proj.weight"]["left_weights"].any()
    assert optimizer.read_health()["layers_never_seen"] == 0.0


def due_steps(use: Any, interval: int, steps: int) -> tuple[list[int], list[int]]:
    """Steps at which a matrix is due, and those among them at which it was in use."""
    schedule = FactorSchedule(interval)
    due = []
    for count in range(1, steps + 1):
        if schedule.is_due("a", count):
            due.append(count)
            schedule.note("a", count, use(count), "a" in schedule.glimpsed)
        elif use(count) and "a" in schedule.missed:
            schedule.glimpsed.add("a")
    return due, [count for count in due if use(count)]


def test_what_is_always_in_use_is_due_every_interval() -> None:
    assert due_steps(lambda count: True, 10, 35)[0] == [1, 11, 21, 31]


@pytest.mark.parametrize("interval", [1, 2, 3, 10])
@pytest.mark.parametrize("period", range(1, 8))
def test_every_layer_in_turns_is_found(period: int, interval: int) -> None:
    for place in range(period):
        found = due_steps(lambda count, place=place: count % period == place, interval, 700)[1]
        gaps = [later - earlier for earlier, later in zip(found, found[1:], strict=False)]
        assert found and found[0] <= 4 * period + 2 * interval
        assert max(gaps) <= 4 * period + 2 * interval


def test_what_is_never_in_use_costs_nothing() -> None:
    assert due_steps(lambda count: False, 10, 1_000)[0] == list(range(1, 1_000, 10))
