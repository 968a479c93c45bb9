"""A layer's factors begin with the next forward pass after a reset, whatever was due, and so does MKOR-H's switch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rankwise import MKOR


def _model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 8))


def _step(model: nn.Module, optimizer: MKOR, number: int) -> None:
    optimizer.zero_grad()
    loss = model(torch.randn(12, 16, generator=torch.Generator().manual_seed(number))).square().mean()
    if optimizer.needs_loss:
        optimizer.record_loss(loss)
    loss.backward()
    optimizer.step()


@pytest.mark.parametrize("forget", [False, True])
@pytest.mark.parametrize("hybrid", [False, True])
@pytest.mark.parametrize("steps", [5, 30, 31])
def test_mkor_is_fresh_after_a_reset(steps: int, hybrid: bool, forget: bool) -> None:
    options = {"hybrid": True, "hybrid_min_steps": 50} if hybrid else {}
    model = _model()
    optimizer = MKOR(model.named_parameters(), lr=1e-3, **options)
    optimizer.capture(model)
    for number in range(steps):
        _step(model, optimizer, number)
    other = _model()
    other.load_state_dict(model.state_dict())
    fresh = MKOR(other.named_parameters(), lr=1e-3, **options)
    fresh.capture(other)
    if forget:
        optimizer.forget_states()
    else:
        optimizer.state.clear()
    for number in range(100, 125):
        _step(model, optimizer, number)
        _step(other, fresh, number)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(model.parameters(), other.parameters(), strict=True))
    assert optimizer.switch.state_dict() == fresh.switch.state_dict()
