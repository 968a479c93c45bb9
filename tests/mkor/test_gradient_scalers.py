"""MKOR under gradient scalers: gradients are unscaled before the step, what passes the hooks is not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from cases import assert_same, weights
from test_mkor import STEPS as TRAIN_STEPS
from test_mkor import build, data, loss, make, train
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.amp.grad_scaler import OptState

from rankwise import MKOR

# Powers of two: scaling and unscaling change no bit.
SCALE = 2.0**12
STEPS = 7


class OwnScaler(GradScaler):
    """A user's own, with a method in place of torch's, which it does not call."""

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        assert self._scale is not None
        state = self._per_optimizer_states[id(optimizer)]
        inverse = self._scale.double().reciprocal().float()
        state["found_inf_per_device"] = self._unscale_grads_(optimizer, inverse, torch.zeros(()), False)
        state["stage"] = OptState.UNSCALED


def scaled_step(scaler: GradScaler, optimizer: MKOR, value: Tensor, model: nn.Module) -> None:
    scaler.scale(value).backward()
    scaler.step(optimizer)
    scaler.update()
    model.zero_grad(set_to_none=False)


@contextmanager
def overflowing(parameter: nn.Parameter) -> Iterator[None]:
    handle = parameter.register_hook(lambda grad: grad * torch.inf)
    yield
    handle.remove()


def losses(model: nn.Module) -> Iterator[Tensor]:
    for step in range(STEPS):
        x, y = data(step)
        yield (model(x) - y).square().mean()


def by_the_scaler(scaler: GradScaler, optimizer: MKOR, model: nn.Module) -> None:
    scaler.step(optimizer)


def clipped(scaler: GradScaler, optimizer: MKOR, model: nn.Module) -> None:
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    scaler.step(optimizer)


def by_hand(scaler: GradScaler, optimizer: MKOR, model: nn.Module) -> None:
    scaler.unscale_(optimizer)
    optimizer.step()


STEP: dict[str, Callable[[Any, MKOR, nn.Module], None]] = {"step": by_the_scaler, "clip": clipped, "by hand": by_hand}


def scaled_run(scaler: GradScaler, how: str, told: bool = False, **options: Any) -> dict[str, Tensor]:
    model = make()
    optimizer = MKOR(model.named_parameters(), lr=1e-2, **{"factor_dtype": "float64", **options})
    optimizer.capture(model, **({"loss_scale": scaler.get_scale} if told else {}))
    for value in losses(model):
        scaler.scale(value).backward()
        STEP[how](scaler, optimizer, model)
        scaler.update()
        model.zero_grad()
    return weights(model)


@pytest.mark.parametrize("how", STEP)
@pytest.mark.parametrize("kind", [GradScaler, OwnScaler])
def test_the_scale_is_learned_from_the_scaler(kind: type[GradScaler], how: str) -> None:
    """Without a word in ``capture()``, and while the scale grows; the factors of an interval meet different scales."""
    expected = scaled_run(GradScaler("cpu", enabled=False), how, update_interval=2)
    for told in (False, True):
        scaler = kind("cpu", init_scale=SCALE, growth_interval=2)
        assert_same(scaled_run(scaler, how, told, update_interval=2), expected)
        assert scaler.get_scale() > SCALE


def test_what_a_scaler_skips_leaves_no_statistics() -> None:
    """Even finite ones: here the overflow is in a parameter that MKOR does not watch."""
    model, other = make(), make()
    expected = train(model, build(model, update_interval=1))
    optimizer = build(other, update_interval=1)
    scaler = GradScaler("cpu", init_scale=SCALE)
    for step in range(TRAIN_STEPS):
        with overflowing(other.norm.weight):
            scaled_step(scaler, optimizer, loss(other, step + 70), other)
        # A forward pass while the scaler is not done with the step belongs to it.
        scaler.scale(loss(other, step)).backward()
        scaler.unscale_(optimizer)
        loss(other, step + 50)
        scaler.step(optimizer)
        scaler.update()
        other.zero_grad(set_to_none=bool(step % 2))
    assert_same(weights(other), expected)


def test_a_scaler_that_is_gone_says_nothing_of_later_steps() -> None:
    model, other = make(), make()
    expected = train(model, build(model, update_interval=1))
    optimizer, scaler = build(other, update_interval=1), GradScaler("cpu", init_scale=SCALE)
    for step in range(TRAIN_STEPS):
        if step < 3:
            scaled_step(scaler, optimizer, loss(other, step), other)
        else:
            loss(other, step).backward()
            optimizer.step()
            other.zero_grad()
    assert_same(weights(other), expected)
