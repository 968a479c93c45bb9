"""SONew's optimizer against its rule, called in a loop: bands, chains, grafts and kernel forms, to rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rankwise import SONew
from rankwise.sonew.formulas import GRAFTS
from rankwise.sonew.rule import Statistics, sonew_step

STEPS = 8
NUMBERS: dict[str, Any] = {"betas": (0.8, 0.95), "eps": 1e-3, "gamma": 0.05, "graft_eps": 1e-6, "weight_decay": 0.1}
SHAPES = {"wide": (5, 12), "tall": (11, 3), "narrow": (4, 2), "twin": (5, 12)}


def tensor(name: str, index: int) -> Tensor:
    """A weight (index 0) or the gradient of a step, whose neighbours are correlated."""
    generator = torch.Generator().manual_seed(100 * index + list(SHAPES).index(name))
    return torch.randn(SHAPES[name], dtype=torch.float64, generator=generator).cumsum(-1).sin()


def rate(step: int) -> float:
    return 0.02 * min(step, 3) / 3


def by_rule(name: str, band: int, chain: str, graft: str) -> tuple[Tensor, Statistics]:
    w = tensor(name, 0)
    w = w.flatten() if chain == "tensor" else w
    averages, q = Statistics(w * 0, w * 0, [w * 0] * band), w * 0
    for step in range(1, STEPS + 1):
        g = tensor(name, step).view_as(w)
        w, averages, q = sonew_step(w, g, averages, step, lr=rate(step), graft=graft, q=q, **NUMBERS)
    return w.view(SHAPES[name]), averages


def by_optimizer(band: int, chain: str, graft: str) -> tuple[dict[str, Tensor], SONew]:
    weights = {name: tensor(name, 0).requires_grad_() for name in SHAPES}
    optimizer = SONew(weights.items(), lr=0.02, band=band, chain=chain, graft=graft, **NUMBERS)
    for step in range(1, STEPS + 1):
        optimizer.param_groups[0]["lr"] = rate(step)
        for name, weight in weights.items():
            weight.grad = tensor(name, step)
        optimizer.step()
    return weights, optimizer


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("graft", GRAFTS)
@pytest.mark.parametrize("chain", ["row", "tensor"])
@pytest.mark.parametrize("band", [0, 1, 4])
def test_the_optimizer_follows_the_rule(band: int, chain: str, graft: str) -> None:
    weights, optimizer = by_optimizer(band, chain, graft)
    assert {row.rule for row in optimizer.explain()} == {"matrix"}
    for name, weight in weights.items():
        w, averages = by_rule(name, band, chain, graft)
        state = optimizer.state[weight]
        kept = [state["exp_avg"], state["exp_avg_sq"], *(state[f"covariance_{k}"] for k in range(1, band + 1))]
        for found, wanted in zip(kept, (averages.m, averages.d, *averages.edges), strict=True):
            assert (found.flatten() - wanted.flatten()).norm() <= 1e-14 * averages.d.norm(), name
        assert (weight.detach() - w).norm() <= 1e-12 * w.norm(), name
        assert (w - tensor(name, 0)).abs().max() > 1e-3


def test_what_the_comparison_sees() -> None:
    """Bands and chains change the weights by far more than rounding, and some edges are dropped."""
    plain = by_rule("wide", 1, "row", "adam")[0]
    for other in ((0, "row", "adam"), (4, "row", "adam"), (1, "tensor", "adam"), (1, "row", "adam_official")):
        assert (by_rule("wide", *other)[0] - plain).norm() > 1e-5 * plain.norm()
