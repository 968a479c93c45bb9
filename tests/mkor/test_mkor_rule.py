"""MKOR's optimizer against its rule, called in a loop: rules of the factors, backends, biases, MKOR-H's switch."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rankwise import MKOR
from rankwise.kernels import lists
from rankwise.kernels.dispatch import using
from rankwise.mkor.rule import Knee, mkor_step, watched_loss
from rankwise.updates.adamw import adamw_update, bias_corrections, decoupled_step
from rankwise.updates.lamb import lamb_direction, trust_ratio
from rankwise.updates.sgd import sgd_direction

STEPS, BETAS, EPS, DECAY, MOMENTUM = 7, (0.85, 0.97), 1e-6, 0.1, 0.8
Weights = dict[str, Tensor]


def net() -> nn.Sequential:
    """Matrices of several shapes, two of them alike, with and without a bias."""
    torch.manual_seed(0)
    widths = (5, 8, 8, 8, 3)
    layers = [nn.Linear(*pair, bias=bias) for pair, bias in zip(pairwise(widths), (1, 0, 1, 1), strict=True)]
    return nn.Sequential(*layers).double()


def loss(model: nn.Sequential, step: int, see: Any = lambda *_: None) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(8, 3, 5, generator=generator, dtype=torch.float64) + 0.5
    y = torch.randn(8, 3, 3, generator=generator, dtype=torch.float64)
    for index, layer in enumerate(model):
        output = layer(x)
        see(index, x, output)
        x = torch.tanh(output)
    return (output - y).square().mean() * 4


def rate(step: int) -> float:
    return 0.02 * min(step, 3) / 3


def backend_step(kind: str, x: Tensor, V: Tensor, kept: list[Tensor], step: int) -> Tensor:
    """The first-order rule with what a parameter keeps."""
    if kind == "sgd":
        kept[0], direction = sgd_direction(
            V, None if step == 1 else kept[0], x, momentum=MOMENTUM, nesterov=True, weight_decay=DECAY
        )
        return x - rate(step) * direction
    corrections = bias_corrections(BETAS, step)
    if kind == "adamw":
        kept[0], kept[1], direction = adamw_update(V, *kept, betas=BETAS, eps=EPS, corrections=corrections)
        return decoupled_step(x, direction, rate(step), DECAY)
    kept[0], kept[1], direction = lamb_direction(V, *kept, x, BETAS, EPS, DECAY, corrections)
    return x - rate(step) * trust_ratio(x.norm(), direction.norm(), None) * direction


def by_rule(backend: str, options: dict[str, Any]) -> tuple[Weights, dict[str, Tensor]]:
    """Weights and factors after all steps."""
    model, seen = net(), {}
    kept = {name: [torch.zeros_like(p), torch.zeros_like(p)] for name, p in model.named_parameters()}
    sides: list[Any] = [None] * len(model)

    def see(index: int, x: Tensor, z: Tensor) -> None:
        z.retain_grad()
        seen[index] = (x, z)

    for step in range(1, STEPS + 1):
        model.zero_grad()
        loss(model, step, see).backward()
        for index, layer in enumerate(model):
            D, (x, z) = layer.weight.grad, seen[index]
            a, g = x.detach().flatten(0, -2).mean(0), z.grad.flatten(0, -2).sum(0)
            if layer.bias is not None:
                D, a = torch.cat([D, layer.bias.grad[:, None]], dim=1), torch.cat([a, a.new_ones(1)])
            L, R = sides[index] or (torch.eye(len(g)).double(), torch.eye(len(a)).double())
            V, *sides[index] = mkor_step(D, a, g, L, R, step, **options)
            parts = {"weight": V[:, : layer.in_features]}
            parts |= {} if layer.bias is None else {"bias": V[:, -1]}
            for name, gradient in parts.items():
                parameter = getattr(layer, name)
                state = kept[f"{index}.{name}"]
                parameter.data = backend_step(backend, parameter.data, gradient, state, step)
    factors = {
        f"{i}.{side}": J for i, pair in enumerate(sides) for side, J in zip(("left", "right"), pair, strict=True)
    }
    return {name: p.detach() for name, p in model.named_parameters()}, factors


def by_optimizer(backend: str, options: dict[str, Any]) -> tuple[Weights, dict[str, Tensor]]:
    model = net()
    own = {"momentum": MOMENTUM, "nesterov": True} if backend == "sgd" else {"betas": BETAS, "eps": EPS}
    given = {name.replace("gamma", "factor_decay"): value for name, value in options.items()}
    if "rescale" in given:
        given["rescale"] = None
    optimizer = MKOR(
        model.named_parameters(),
        lr=0.02,
        backend=backend,
        weight_decay=DECAY,
        factor_dtype="float64",
        **own,
        **given,
    )
    optimizer.capture(model)
    for step in range(1, STEPS + 1):
        optimizer.param_groups[0]["lr"] = rate(step)
        optimizer.zero_grad()
        loss(model, step).backward()
        optimizer.step()
    states = {
        f"{i}.{side}": optimizer.matrix_states[f"{i}.weight"][side] for i in range(4) for side in ("left", "right")
    }
    return {name: p.detach() for name, p in model.named_parameters()}, states


OPTIONS: list[dict[str, Any]] = [
    {"update_interval": 2},
    {"update_interval": 1, "rule": "ema", "gamma": 0.7},  # the stabilizer acts
    {"update_interval": 1, "rule": "ema", "stabilizer": None},
    {"update_interval": 3, "rule": "paper_literal"},
    {"update_interval": 2, "rescale": False},
    {"update_interval": 2, "stabilizer": (1.0, 0.5)},
]


def check(backend: str, options: dict[str, Any], tolerance: float = 1e-12) -> None:
    weights, factors = by_rule(backend, options)
    start = dict(net().named_parameters())
    for found, wanted in zip(by_optimizer(backend, options), (weights, factors), strict=True):
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            assert (found[name] - value).norm() <= tolerance * value.norm(), name
    assert all((weights[name] - start[name]).abs().max() > 1e-3 for name in weights)
    assert all((J - torch.eye(len(J))).abs().max() > 1e-6 for J in factors.values())


@pytest.mark.parametrize("backend", ["adamw", "lamb", "sgd"])
def test_the_optimizer_follows_the_rule(backend: str) -> None:
    check(backend, OPTIONS[0])


@pytest.mark.parametrize("form", ["chosen", "lists"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_optimizer_follows_the_rule_with(options: dict[str, Any], form: str) -> None:
    if form == "lists":
        with using(lists):
            check("adamw", options)
    else:
        check("adamw", options)


def test_the_switch_follows_the_criterion() -> None:
    """MKOR-H leaves its factors behind at the step at which the averaged loss has passed its knee."""
    settings = {"beta": 0.3, "patience": 2, "min_steps": 3, "ema": 0.5}
    model, knee = net(), Knee()
    optimizer = MKOR(model.named_parameters(), hybrid=True, **{f"hybrid_{name}": v for name, v in settings.items()})
    optimizer.capture(model)
    switched = []
    for step, value in enumerate((4.0, 3.0, 2.0, 1.5, 1.5, 1.5, 1.4, 1.4, 1.4, 1.4, 1.4, 1.4)):
        optimizer.zero_grad()
        loss(model, step).backward()
        optimizer.record_loss(value)
        optimizer.step()
        knee = watched_loss(knee, value, **settings)
        assert optimizer.switched == knee.switched
        switched.append(knee.switched)
    assert 3 < switched.index(True) < 11
