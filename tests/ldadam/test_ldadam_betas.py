"""LDAdam while a schedule moves its betas: the published step in its dense form, with an error of its own."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from ranks import run_ranks
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


@dataclass
class Dense:
    """The step as published, with full matrices and the error apart from the momentum; wide matrices only.

    The momentum that a new basis drops enters the error with the weight ``k`` of the step that made it.
    """

    weight: Tensor
    step: int = 0

    def __post_init__(self) -> None:
        self.error = torch.zeros_like(self.weight)
        self.k = 0.0

    def advance(self, grad: Tensor, betas: tuple[float, float]) -> None:
        self.step += 1
        t, (b1, b2) = self.step, betas
        a_full = grad + self.error
        if t == 1:
            self.U = torch.linalg.svd(a_full, full_matrices=False)[0][:, :RANK]
            low = self.U.T @ a_full
            moved = torch.zeros_like(low)
            second = torch.zeros_like(low)
            self.error = a_full - self.U @ low
        else:
            d1, d2 = 1 - b1 ** (t - 1), 1 - b2 ** (t - 1)
            momentum = self.U @ self.M
            followed = RHO * momentum / d1 + (1 - RHO) * a_full
            U = torch.linalg.qr(followed @ (followed.T @ self.U))[0]
            low = U.T @ a_full
            R = U.T @ self.U
            moved = R @ self.M
            self.error = a_full - U @ low + self.k * (momentum - U @ moved)
            variance = self.V / d2 - (self.M / d1) ** 2
            second = d2 * ((R**2) @ variance + (moved / d1) ** 2).abs()
            self.U = U
        self.M = b1 * moved + (1 - b1) * low
        self.V = b2 * second + (1 - b2) * low**2
        direction = self.M / (1 - b1**t) / ((self.V / (1 - b2**t)).sqrt() + EPS)
        self.weight = (1 - LR * DECAY) * self.weight - LR * self.U @ direction
        self.k = b1 / (1 - b1)


def dense(shape: tuple[int, int], steps: int = STEPS) -> Tensor:
    tall = shape[0] > shape[1]
    start = gradient(shape, 99)
    oracle = Dense(start.T if tall else start)
    for step in range(steps):
        grad = gradient(shape, step)
        oracle.advance(grad.T if tall else grad, betas(step))
    return oracle.weight.T if tall else oracle.weight


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
            file = io.BytesIO()
            torch.save(optimizer.state_dict(), file)
            file.seek(0)
            optimizer = optimizer_for(weights)
            optimizer.load_state_dict(torch.load(file, weights_only=True))
        advance(optimizer, weights, step)
    assert all(rule.rule == "matrix" for rule in optimizer.explain())
    assert deviation(weights) < 1e-9


def test_matrices_that_skipped_the_change() -> None:
    """Each remembers the betas of its own last step, though they are computed as one batch."""
    weights = {"w0": start()["w0"], "late": start()["w0"].detach().clone().requires_grad_()}
    optimizer = optimizer_for(weights)
    late = Dense(weights["late"].detach().clone())
    for step in range(STEPS):
        optimizer.param_groups[0]["betas"] = betas(step)
        for name, weight in weights.items():
            weight.grad = gradient(SHAPES[0], step)
            if name == "late" and step in (0, 2, 3, 8):
                weight.grad = None
        if weights["late"].grad is not None:
            late.advance(gradient(SHAPES[0], step), betas(step))
        optimizer.step()
    assert deviation({"w0": weights["w0"]}) < 1e-9
    assert float((weights["late"] - late.weight).detach().abs().max()) < 1e-10


def test_constant_betas_are_the_published_step() -> None:
    """The oracle's own: with one beta the two forms of the error are one, and mass is conserved."""
    oracle = Dense(gradient(SHAPES[0], 99))
    total, carried, previous = torch.zeros(SHAPES[0]).double(), torch.zeros(SHAPES[0]).double(), 0.0
    for step in range(6):
        oracle.advance(gradient(SHAPES[0], step), (0.9, 0.99))
        total = total + gradient(SHAPES[0], step)
        carried = carried + (oracle.U @ oracle.M - 0.9 * previous) / 0.1
        previous = oracle.U @ oracle.M
    assert torch.allclose(total, carried + oracle.error, rtol=0, atol=1e-11)


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
            file = io.BytesIO()
            torch.save(framework.optimizer.state_dict(), file)
            file.seek(0)
            framework.optimizer.load_state_dict(torch.load(file, weights_only=True))
        for group in framework.optimizer.param_groups:
            group["betas"] = betas(step)
        framework.step()
    return framework


def test_layouts_follow_one_process() -> None:
    gradients(0)
    for found in run_ranks(2, _sharded):
        assert max(found.values()) < 1e-11, found
