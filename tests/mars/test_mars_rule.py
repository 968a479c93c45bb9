"""MARS's optimizer against its rules, called in a loop: every variant, mode and kernel form, to rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rankwise import MARS
from rankwise.mars.rule import mars_adamw_step, mars_lion_step, mars_m_step, mars_shampoo_step
from rankwise.updates.adamw import adamw_update, bias_corrections, decoupled_step

STEPS, BETAS, EPS, DECAY, RATIO = 7, (0.9, 0.97), 1e-6, 0.1, 0.25
# The norms of their gradients are on either side of the clip.
SHAPES = {"wide.weight": (4, 9), "tall.weight": (12, 5), "square.weight": (6, 6), "twin.weight": (4, 9), "a.bias": (5,)}
SIZES = dict(zip(SHAPES, (0.05, 1.0, 0.2, 0.5, 0.3), strict=True))
MATRIX_RULES: dict[str, Any] = {"lion": mars_lion_step, "shampoo": mars_shampoo_step, "muon": mars_m_step}


def gradient(name: str, batch: int, x: Tensor) -> Tensor:
    """Depends on batch and weights, so that the exact mode compares with something else."""
    noise = torch.randn(
        SHAPES[name],
        dtype=torch.float64,
        generator=torch.Generator().manual_seed(10 * batch + list(SHAPES).index(name)),
    )
    return SIZES[name] * (noise + x)


def rate(step: int) -> float:
    return 0.02 * min(step, 3) / 3


def start(name: str) -> Tensor:
    return gradient(name, 99, torch.zeros(SHAPES[name], dtype=torch.float64))


def by_rule(variant: str, name: str, exact: bool, gamma: float, clip: float | None) -> Tensor:
    x = start(name)
    h, m, v = (torch.zeros_like(x) for _ in range(3))
    numbers = {"gamma": gamma, "clip": clip, "weight_decay": DECAY}
    for step in range(1, STEPS + 1):
        g, before = gradient(name, step, x), x
        if x.dim() < 2:  # the fallback
            corrections = bias_corrections(BETAS, step)
            m, v, direction = adamw_update(g, m, v, betas=BETAS, eps=EPS, corrections=corrections)
            x = decoupled_step(x, direction, RATIO * rate(step), DECAY)
        elif variant == "adamw":
            x, m, v = mars_adamw_step(x, g, h, m, v, step, lr=rate(step), betas=BETAS, eps=EPS, **numbers)
        else:
            eps = {"eps": EPS} if variant == "shampoo" else {}
            x, m = MATRIX_RULES[variant](x, g, h, m, lr=rate(step), beta1=BETAS[0], **eps, **numbers)
        h = gradient(name, step + 1, before) if exact else g
    return x


def by_optimizer(variant: str, exact: bool, gamma: float, clip: float | None) -> tuple[dict[str, Tensor], MARS]:
    weights = {name: start(name).requires_grad_() for name in SHAPES}
    options: dict[str, Any] = {} if variant in ("adamw", "lion") else {"ns_dtype": "float64"}
    optimizer = MARS(
        weights.items(),
        lr=0.02,
        lr_1d=0.02 * RATIO,
        variant=variant,
        betas=BETAS,
        betas_1d=BETAS,
        eps=EPS,
        weight_decay=DECAY,
        weight_decay_1d=DECAY,
        gamma=gamma,
        clip=clip,
        exact=exact,
        **options,
    )
    for step in range(1, STEPS + 1):
        optimizer.param_groups[0]["lr"] = rate(step)
        for batch in (step + 1, step) if exact else (step,):
            for name, weight in weights.items():
                weight.grad = gradient(name, batch, weight.detach())
            if batch > step:
                optimizer.record_reference()
        optimizer.step()
    return weights, optimizer


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("clip", [1.0, None])
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("variant", ["adamw", *MATRIX_RULES])
def test_the_optimizer_follows_the_rule(variant: str, exact: bool, clip: float | None) -> None:
    weights, optimizer = by_optimizer(variant, exact, 0.3, clip)
    assert [row.rule for row in optimizer.explain()] == ["matrix"] * 4 + ["fallback"]
    for name, weight in weights.items():
        wanted = by_rule(variant, name, exact, 0.3, clip)
        assert (weight.detach() - wanted).norm() <= 1e-12 * wanted.norm(), name
        assert (wanted - start(name)).abs().max() > 1e-3


def test_what_the_comparison_sees() -> None:
    """The modes, the correction and the clip change the weights of some matrix by far more than rounding."""
    plain = by_rule("adamw", "tall.weight", False, 0.3, 1.0)
    for other in ((True, 0.3, 1.0), (False, 0.0, 1.0), (False, 0.3, None)):
        assert (by_rule("adamw", "tall.weight", *other) - plain).norm() > 1e-4 * plain.norm()
