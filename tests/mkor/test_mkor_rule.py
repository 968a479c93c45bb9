"""MKOR's optimizer against its rule, called in a loop: rules of the factors, backends, biases, MKOR-H's switch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import weights
from factor_windows import dense
from test_mkor import Conv1D, loss, make
from torch import Tensor, nn

from rankwise import MKOR
from rankwise.mkor.rule import Knee, mkor_step, watched_loss
from rankwise.mkor.windows import factor_of
from rankwise.updates.adamw import adamw_update, bias_corrections, decoupled_step
from rankwise.updates.lamb import lamb_direction, trust_ratio
from rankwise.updates.sgd import sgd_direction

STEPS, BETAS, EPS, DECAY = 7, (0.85, 0.97), 1e-6, 0.1
Weights = dict[str, Tensor]
ADAM = {"betas": BETAS, "eps": EPS}
BACKENDS: dict[str, dict[str, Any]] = {
    "adamw": ADAM,
    "lamb": ADAM,
    "sgd": {"momentum": 0.8, "nesterov": False},
    "sgd, nesterov": {"momentum": 0.8, "nesterov": True},
    "sgd, plain": {"momentum": 0.0, "nesterov": False},
}


def rate(step: int) -> float:
    return 0.02 * min(step, 3) / 3


def backend_step(kind: str, x: Tensor, V: Tensor, kept: list[Tensor], step: int) -> Tensor:
    """The first-order rule with what a parameter keeps."""
    if kind.startswith("sgd"):
        before = None if step == 1 else kept[0]
        kept[0], direction = sgd_direction(V, before, x, weight_decay=DECAY, **BACKENDS[kind])
        return x - rate(step) * direction
    corrections = bias_corrections(BETAS, step)
    if kind == "adamw":
        kept[0], kept[1], direction = adamw_update(V, *kept, betas=BETAS, eps=EPS, corrections=corrections)
        return decoupled_step(x, direction, rate(step), DECAY)
    kept[0], kept[1], direction = lamb_direction(V, *kept, x, BETAS, EPS, DECAY, corrections)
    return x - rate(step) * trust_ratio(x.norm(), direction.norm(), None) * direction


class Rule:
    """The rule's options, and the factors of every layer by its name; activations are looked at directly.

    Args:
        bundle: Whether biases are columns of their weights.
        gain: Factor of the output gradients.
        limit: Longest side with a factor; a layer whose sides are both longer has none.
    """

    def __init__(self, bundle: bool = True, gain: float = 1.0, limit: int = 10**9, **options: Any) -> None:
        self.bundle, self.gain, self.limit, self.options = bundle, gain, limit, options
        self.factors: dict[str, list[Tensor | None]] = {}

    def precondition(self, name: str, layer: nn.Module, x: Tensor, z: Tensor, step: int) -> None:
        """Put ``V`` in the place of a layer's gradients."""
        turned, bias = isinstance(layer, Conv1D), layer.bias if self.bundle else None
        D = layer.weight.grad.T if turned else layer.weight.grad
        outputs, inputs = D.shape
        if min(outputs, inputs) > self.limit:
            return
        a, g = x.detach().flatten(0, -2).mean(0), z.grad.flatten(0, -2).sum(0) * self.gain
        if bias is not None:
            D, a = torch.cat([D, bias.grad[:, None]], dim=1), torch.cat([a, a.new_ones(1)])
        sides = ((outputs, g), (inputs, a))
        first = [torch.eye(len(vector)).double() if side <= self.limit else None for side, vector in sides]
        V, *self.factors[name] = mkor_step(D, a, g, *self.factors.get(name, first), step, **self.options)
        layer.weight.grad = (V[:, :inputs].T if turned else V[:, :inputs]).clone()
        if bias is not None:
            bias.grad = V[:, inputs].clone()


def by_rule(backend: str, options: dict[str, Any]) -> tuple[Weights, Weights]:
    """Weights and factors after all steps."""
    model, rule = make(), Rule(**options)
    seen: dict[str, tuple[Tensor, Tensor]] = {}
    kept = {name: [torch.zeros_like(p), torch.zeros_like(p)] for name, p in model.named_parameters()}

    def see(name: str, x: Tensor, z: Tensor) -> None:
        z.retain_grad()
        seen[name] = (x, z)

    for step in range(1, STEPS + 1):
        model.zero_grad()
        loss(model, step, see=see).backward()
        for name, layer in model.layers().items():
            rule.precondition(name, layer, *seen[name], step)
        for name, parameter in model.named_parameters():
            parameter.data = backend_step(backend, parameter.data, parameter.grad, kept[name], step)
    factors = {
        f"{name}.{side}": J
        for name, pair in rule.factors.items()
        for side, J in zip(("left", "right"), pair, strict=True)
        if J is not None
    }
    return weights(model), factors


OWN_NAMES = {"gamma": "factor_decay", "gain": "output_gain", "limit": "max_factor_dim"}


def by_optimizer(backend: str, options: dict[str, Any]) -> tuple[Weights, Weights]:
    model, given = make(), {OWN_NAMES.get(name, name): value for name, value in options.items()}
    if "rescale" in given:
        given["rescale"] = None
    named: Any = list(model.named_parameters())
    if not given.pop("bundle", True):
        named = [{"params": [pair for pair in named if ("bias" in pair[0]) == vectors]} for vectors in (False, True)]
    optimizer = MKOR(
        named,
        lr=0.02,
        backend=backend.partition(",")[0],
        weight_decay=DECAY,
        factor_dtype="float64",
        **BACKENDS[backend],
        **given,
    )
    optimizer.capture(model)
    for step in range(1, STEPS + 1):
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        optimizer.zero_grad()
        loss(model, step).backward()
        optimizer.step()
    factors = {
        f"{name.removesuffix('.weight')}.{side}": dense(factor)
        for name, state in optimizer.matrix_states.items()
        for side in ("left", "right")
        if (factor := factor_of(state, side)) is not None
    }
    return weights(model), factors


OPTIONS: list[dict[str, Any]] = [
    {"update_interval": 3},
    {"update_interval": 1, "rule": "ema", "gamma": 0.7},  # the stabilizer acts
    {"update_interval": 2, "rule": "ema", "stabilizer": None},
    {"update_interval": 3, "rule": "paper_literal"},
    {"update_interval": 4, "rescale": False},
    {"update_interval": 5, "stabilizer": (1.0, 0.5)},
    {"update_interval": 3, "gain": 30.0},
    {"update_interval": 3, "limit": 6},
    {"update_interval": 3, "limit": 5},
    {"update_interval": 3, "bundle": False},
]


def check(backend: str, options: dict[str, Any], tolerance: float = 1e-11) -> None:
    moved, factors = by_rule(backend, options)
    start = weights(make())
    for found, wanted in zip(by_optimizer(backend, options), (moved, factors), strict=True):
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            assert (found[name] - value).norm() <= tolerance * value.norm(), name
    assert all((moved[name] - start[name]).abs().max() > 1e-3 for name in moved)
    assert all((J - torch.eye(len(J))).abs().max() > 1e-8 for J in factors.values())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rule", ["official", "ema"])
def test_the_optimizer_follows_the_rule(rule: str, backend: str) -> None:
    check(backend, {"rule": rule, "update_interval": 3})


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_optimizer_follows_the_rule_with(options: dict[str, Any]) -> None:
    check("adamw", options)


def test_what_the_comparison_sees() -> None:
    """The stabilizer changes the weights by far more than rounding."""
    stable, free = (by_rule("adamw", {**OPTIONS[1], **more})[0] for more in ({}, {"stabilizer": None}))
    assert max((stable[name] - free[name]).abs().max() for name in free) > 1e-4


def test_the_switch_follows_the_criterion() -> None:
    """MKOR-H leaves its factors behind at the step at which the averaged loss has passed its knee."""
    settings = {"beta": 0.3, "patience": 2, "min_steps": 3, "ema": 0.5}
    model, knee = make(), Knee()
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
