"""A model's layer makes way for another one with the same weight, as conversions to other kinds of layers do."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor, nn

import rankwise


def left_factor(optimizer: rankwise.MKOR) -> Tensor:
    return optimizer.matrix_states["0.weight"]["left_vectors"].clone()


def train(model: nn.Module, optimizer: rankwise.MKOR, steps: int) -> None:
    for index in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 8, generator=torch.Generator().manual_seed(index))).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("interval", [1, 2])
def test_it_is_told_once_and_heard_again_after_a_capture(interval: int, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    optimizer = rankwise.MKOR(model.named_parameters(), lr=1e-2, update_interval=interval)
    optimizer.capture(model)
    train(model, optimizer, 4)
    other = nn.Linear(8, 8)
    other.weight, other.bias = model[0].weight, model[0].bias
    model[0] = other
    before = left_factor(optimizer)
    with caplog.at_level(logging.WARNING):
        train(model, optimizer, 6)
    (told,) = [record.message for record in caplog.records]
    assert "0.weight" in told and "2.weight" not in told and "capture(model) again" in told
    assert torch.equal(left_factor(optimizer), before)
    optimizer.capture(model)
    caplog.clear()
    train(model, optimizer, 4)
    assert not torch.equal(left_factor(optimizer), before) and not caplog.records


def test_a_layer_that_is_left_out_for_a_while_is_not_told(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    optimizer = rankwise.MKOR(model.named_parameters(), lr=1e-2, update_interval=1)
    optimizer.capture(model)
    train(model, optimizer, 2)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            optimizer.zero_grad()
            (model[1:](torch.ones(4, 8)).square().mean() + model[0].weight.square().sum()).backward()
            optimizer.step()
    assert not caplog.records
