"""LDAdam while a schedule moves its betas, against the published step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from published_ldadam import published
from ranks import run_ranks
from saved_files import through_a_file
from simulated import CASES, Framework, gradients, world_group
from torch import Tensor

from rankwise import LDAdam

LR, RHO, DECAY, EPS, RANK = 1e-2, 0.8, 0.1, 1e-8, 3
STEPS = 12
SHAPES = ((9, 14), (15, 8), (10, 10))


def betas(step: int) -> tuple[float, float]:
    """Down and up again, as under OneCycleLR, and at rest in between."""
    cycle = (0.95, 0.9, 0.85, 0.85, 0.9, 0.95, 0.95, 0.5, 0.95, 0.0, 0.9, 0.9)
    return cycle[step], 0.99 - 0.01 * (step % 3)


def gradient(shape: tuple[int, int], step: int) -> Tensor:
    fixed, fresh = (torch.Generator().manual_seed(seed) for seed in (sum(shape), 100 + step))
    return torch.randn(shape, dtype=torch.float64, generator=fixed) + 0.5 * torch.randn(
        shape, dtype=torch.float64, generator=fresh
    )


def dense(shape: tuple[int, int], steps: Sequence[int] = range(STEPS)) -> Tensor:
    """The weight after these steps, by the published ones."""
    found = [gradient(shape, step) for step in (99, *steps)]
    start, *grads = [value.T for value in found] if shape[0] > shape[1] else found
    weight = published(grads, RANK, start, [betas(step) for step in steps], LR, RHO, EPS, DECAY)[-1].W
    return weight.T if shape[0] > shape[1] else weight


def optimizer_for(weights: dict[str, Tensor]) -> LDAdam:
    return LDAdam(weights.items(), lr=LR, rank=RANK, rho=RHO, eps=EPS, weight_decay=DECAY)


def advance(optimizer: LDAdam, weights: dict[str, Tensor], step: int) -> None:
    for group in optimizer.param_groups:
        group["betas"] = betas(step)
    for weight in weights.values():
        weight.grad = gradient(tuple(weight.shape), step)  # type: ignore[arg-type]
    optimizer.step()


def deviation(weights: dict[str, Tensor]) -> float:
    worst = 0.0
    for weight in weights.values():
        shape: Any = tuple(weight.shape)
        expected, start = dense(shape), gradient(shape, 99)
        worst = max(worst, float((weight - expected).detach().abs().max() / (expected - start).abs().max()))
    return worst


def start() -> dict[str, Tensor]:
    return {f"w{index}": gradient(shape, 99).requires_grad_() for index, shape in enumerate(SHAPES)}


@pytest.mark.parametrize("saved_at", [None, 1, 3, 8])
def test_follows_the_dense_step(saved_at: int | None) -> None:
    """In one go, and over a checkpoint: between steps of equal and of different betas."""
    weights = start()
    optimizer = optimizer_for(weights)
    for step in range(STEPS):
        if step == saved_at:
            saved = through_a_file(optimizer.state_dict())
            optimizer = optimizer_for(weights)
            optimizer.load_state_dict(saved)
        advance(optimizer, weights, step)
    assert all(rule.rule == "matrix" for rule in optimizer.explain())
    assert deviation(weights) < 1e-9


def test_matrices_that_skipped_the_change() -> None:
    """Each remembers the betas of its own last step, though they are computed as one batch."""
    weights = {"w0": start()["w0"], "late": start()["w0"].detach().clone().requires_grad_()}
    optimizer = optimizer_for(weights)
    skipped = (0, 2, 3, 8)
    for step in range(STEPS):
        optimizer.param_groups[0]["betas"] = betas(step)
        for name, weight in weights.items():
            weight.grad = gradient(SHAPES[0], step)
            if name == "late" and step in skipped:
                weight.grad = None
        optimizer.step()
    assert deviation({"w0": weights["w0"]}) < 1e-9
    late = dense(SHAPES[0], [step for step in range(STEPS) if step not in skipped])
    assert float((weights["late"] - late).detach().abs().max()) < 1e-10


def _sharded(rank: int, world: int) -> dict[str, float]:
    """Largest deviation from one process, over each layout, with a rank's part saved and loaded on the way."""
    alone = _train("replicated", 0, 1)
    expected = {piece.key: values for piece, values in alone.pieces()}
    found = {}
    for layout in ("replicated", "flat", "cut"):
        framework = _train(layout, rank, world)
        found[layout] = max(
            float((values - expected[piece.key].reshape(-1)[piece.start : piece.end]).abs().max())
            for piece, values in framework.pieces()
        )
    return found


def _train(layout: str, rank: int, world: int) -> Framework:
    framework = Framework(layout, CASES["ldadam-ef"], torch.float64, rank, world, world_group() if world > 1 else None)
    for step in range(8):
        if step == 4:
            framework.optimizer.load_state_dict(through_a_file(framework.optimizer.state_dict()))
        for group in framework.optimizer.param_groups:
            group["betas"] = betas(step)
        framework.step()
    return framework


def test_layouts_follow_one_process() -> None:
    gradients(0)
    for found in run_ranks(2, _sharded):
        assert max(found.values()) < 1e-11, found
