"""MKOR where the host learns of a factor step, and of a loss, only when the next step begins, as on a device."""

from __future__ import annotations

import copy
import logging
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from cases import assert_same, weights
from torch import Tensor, nn

from rankwise import MKOR
from rankwise.kernels.host_copies import HostCopy


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[HostCopy]]:
    """All copies, none of which is there at once; reading one marks it so."""
    copies: list[HostCopy] = []
    make = HostCopy.__init__

    def making(self: HostCopy, values: Tensor) -> None:
        make(self, values)
        self.is_here = False
        copies.append(self)

    monkeypatch.setattr(HostCopy, "__init__", making)
    yield copies


class Net(nn.Module):
    """Two layers, and one that is used when asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.rare = nn.Linear(5, 8), nn.Linear(8, 3), nn.Linear(8, 8)
        self.uses_rare = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).tanh()
        weight = 0.0 * self.rare.weight.sum() + 0.0 * self.rare.bias.sum()  # a gradient without a call
        return self.last(self.rare(x) if self.uses_rare else x) + weight


def started(**options: Any) -> tuple[Net, MKOR]:
    torch.manual_seed(0)
    model = Net().double()
    settings = {"lr": 1e-2, "factor_dtype": "float64", "update_interval": 2, **options}
    optimizer = MKOR(model.named_parameters(), **settings)
    optimizer.capture(model)
    return model, optimizer


def step(model: Net, optimizer: MKOR, index: int, broken: bool = False, value: float | None = None) -> None:
    optimizer.zero_grad()
    x = torch.randn(7, 5, generator=torch.Generator().manual_seed(index), dtype=torch.float64) + 0.5
    loss = model(x).square().mean()
    loss.backward()
    if broken:
        optimizer.statistics.records["first.weight"].sum_input[0] = torch.nan
    optimizer.record_loss(loss if value is None else value)
    optimizer.step()


def trained(steps: int = 8, **options: Any) -> dict[str, Tensor]:
    model, optimizer = started(**options)
    for index in range(steps):
        step(model, optimizer, index)
    return weights(model)


@pytest.mark.parametrize("interval", [1, 2, 3])
def test_the_bits_are_the_same(interval: int, request: pytest.FixtureRequest) -> None:
    """The layer that is never called leaves a step later; what it is has no gradient but zero."""
    at_once = trained(update_interval=interval)
    copies = request.getfixturevalue("late")
    assert_same(trained(update_interval=interval), at_once)
    assert copies


def test_a_silent_layer_leaves_as_the_next_step_begins(late: list[HostCopy], caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer = started()
    with caplog.at_level(logging.WARNING):
        step(model, optimizer, 0)
        assert "rare.weight" in optimizer.matrix_states and not caplog.records
        step(model, optimizer, 1)
    assert "rare.weight" not in optimizer.matrix_states
    (record,) = [record for record in caplog.records if "no input was seen of" in record.message]
    assert "rare.weight" in record.message
    model.uses_rare = True
    for index in range(2, 8):
        step(model, optimizer, index)
    state = optimizer.matrix_states["rare.weight"]
    assert set(state) == {"left_vectors", "left_weights", "right_vectors", "right_weights", "failures"}
    assert state["left_weights"].any()


def test_broken_factors_are_told_by_a_step_and_by_nothing_else(late: list[HostCopy]) -> None:
    model, optimizer = started()
    for index in range(6):
        step(model, optimizer, index, broken=index % 2 == 0)
    step(model, optimizer, 6)
    optimizer.state_dict()
    optimizer.read_health()
    copy.deepcopy(optimizer)
    before = weights(model)
    with pytest.raises(RuntimeError, match=r"factors of first\.weight were not finite 3 factor steps in a row"):
        step(model, optimizer, 7)
    assert_same(weights(model), before)


@pytest.mark.parametrize("after", range(1, 6))
@pytest.mark.parametrize("through", ["state_dict", "deepcopy", "pickle"])
def test_a_checkpoint_after_any_step(after: int, through: str, late: list[HostCopy]) -> None:
    model, optimizer = started()
    for index in range(after):
        step(model, optimizer, index)
    if through == "state_dict":
        twin, continued = started()
        twin.load_state_dict(model.state_dict())
        continued.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    else:
        copied = copy.deepcopy if through == "deepcopy" else lambda pair: pickle.loads(pickle.dumps(pair))
        twin, continued = copied((model, optimizer))
        continued.capture(twin)
    schedule = continued.factor_steps.schedule
    assert schedule.state_dict() == optimizer.factor_steps.schedule.state_dict()
    assert schedule.left_out == {"rare.weight"} and schedule.heard == {"first.weight", "last.weight"}
    for index in range(after, 8):
        step(model, optimizer, index)
        step(twin, continued, index)
    assert_same(weights(twin), weights(model))


def test_loading_forgets_what_is_under_way(late: list[HostCopy]) -> None:
    model, optimizer = started()
    start = copy.deepcopy(optimizer.state_dict())
    step(model, optimizer, 0, broken=True)
    optimizer.load_state_dict(start)
    assert not optimizer.factor_steps.schedule.heard and not optimizer.factor_steps.has_news


def test_who_asks_is_told_all(late: list[HostCopy]) -> None:
    model, optimizer = started()
    step(model, optimizer, 0)
    assert optimizer.factor_steps.has_news
    assert optimizer.read_health()["layers_never_seen"] == 1
    model, optimizer = started()
    step(model, optimizer, 0)
    optimizer.capture(model)
    assert optimizer.factor_steps.schedule.left_out == {"rare.weight"}


def test_loading_mends_broken_factors(late: list[HostCopy]) -> None:
    model, optimizer = started()
    start = copy.deepcopy(optimizer.state_dict())
    for index in range(7):
        step(model, optimizer, index, broken=index in (0, 2, 4))
    optimizer.read_health()
    optimizer.load_state_dict(start)
    step(model, optimizer, 7)


LOSSES = [5.0, 4.0, 3.0, 3.0, 3.0, 3.0, 3.0]
KNEE = {"hybrid": True, "hybrid_min_steps": 2, "hybrid_patience": 1, "hybrid_ema": 0.0, "hybrid_beta": 0.5}


def test_the_switch_comes_a_step_later(request: pytest.FixtureRequest) -> None:
    switched = []
    for mode in ("at once", "late"):
        if mode == "late":
            request.getfixturevalue("late")
        model, optimizer = started(**KNEE)
        found = []
        for index, value in enumerate(LOSSES):
            step(model, optimizer, index, value=value)
            found.append(optimizer.switched)
        switched.append(found.index(True))
        assert not optimizer.matrix_states
    assert switched == [3, 4]


@pytest.mark.parametrize("after", range(2, 6))
def test_a_checkpoint_around_the_switch(after: int, late: list[HostCopy]) -> None:
    model, optimizer = started(**KNEE)
    for index in range(after):
        step(model, optimizer, index, value=LOSSES[index])
    twin, continued = started(**KNEE)
    twin.load_state_dict(model.state_dict())
    continued.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for index in range(after, len(LOSSES)):
        step(model, optimizer, index, value=LOSSES[index])
        step(twin, continued, index, value=LOSSES[index])
    assert optimizer.switched and continued.switched
    assert_same(weights(twin), weights(model))
