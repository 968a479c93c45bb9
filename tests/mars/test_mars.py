"""MARS's update rules: recorded trajectories of the official optimizers, and identities with other optimizers."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import oracles
import pytest
import torch
from golden_io import load_golden
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rankwise.mars import formulas as mars
from rankwise.updates import adamw
from rankwise.updates.newton_schulz import newton_schulz

F64 = torch.float64


def noise(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


def clipped(corrected: Tensor) -> Tensor:
    return corrected * mars.clip_coefficient(corrected.square().sum(), 1.0)


def momenta(grads: list[Tensor], references: list[Tensor], gamma: float, beta1: float, clip: bool) -> list[Tensor]:
    """Momentum after each step from zero."""
    m, out = torch.zeros_like(grads[0]), []
    for grad, reference in zip(grads, references, strict=True):
        c = oracles.corrected_gradient(grad, reference, gamma, beta1)
        m = oracles.momentum_update(clipped(c) if clip else c, m, beta1)
        out.append(m)
    return out


def approximate(grads: list[Tensor]) -> list[Tensor]:
    """Comparison gradients of the approximate mode."""
    return [torch.zeros_like(grads[0]), *grads[:-1]]


# --- recorded trajectories -------------------------------------------------------------------------------------------


class Follower:
    """One parameter of a recorded case, stepped by the update functions with the recorded gradients."""

    def __init__(self, meta: dict[str, Any], info: dict[str, Any], weights: Tensor):
        self.meta, self.hyper, self.info = meta, meta["hyper"], info
        self.x, self.step = weights, 0
        self.m, self.v, self.last_grad = (torch.zeros_like(weights) for _ in range(3))
        self.norms: list[float] = []

    def advance(self, grad: Tensor, reference: Tensor | None, lr: float) -> None:
        self.step += 1
        decay = self.info["weight_decay"]
        if self.info["mars_path"]:
            direction = self._mars(grad, self.last_grad if reference is None else reference)
        else:
            direction = self._fallback(grad)
            if "lr_1d" in self.hyper:
                lr, decay = lr * self.hyper["lr_1d"] / self.meta["ctor_lr"], self.hyper["weight_decay_1d"]
        self.last_grad = grad
        self.x = oracles.decoupled_step(self.x, direction, lr, decay)

    def _fallback(self, grad: Tensor) -> Tensor:
        marsm = "adamw_betas" in self.hyper
        betas = tuple(self.hyper["adamw_betas" if marsm else "betas_1d"])
        corrections = adamw.bias_corrections(betas, self.step)
        # The code of MARS-M adds it to the root before its correction.
        eps = self.hyper["adamw_eps"] / corrections[1] ** 0.5 if marsm else self.hyper["eps"]
        self.m, self.v, direction = adamw.adamw_update(
            grad, self.m, self.v, betas=betas, eps=eps, corrections=corrections
        )
        return direction

    def _mars(self, grad: Tensor, reference: Tensor) -> Tensor:
        hyper = self.hyper
        kind = hyper.get("mars_type", "mars-m")
        betas = tuple(hyper["betas"]) if "betas" in hyper else (hyper["momentum"], 0.0)
        c = oracles.corrected_gradient(grad, reference, hyper["gamma"], betas[0])
        self.norms.append(float(c.double().norm()))
        c = clipped(c)
        if kind == "mars-adamw" or (kind == "mars-shampoo" and grad.ndim == 1):
            corrections = adamw.bias_corrections(betas, self.step)
            self.m, self.v, direction = adamw.adamw_update(
                c, self.m, self.v, betas=betas, eps=hyper["eps"], corrections=corrections
            )
        elif kind == "mars-lion":
            self.m, direction = oracles.lion_update(c, self.m, betas[0])
        else:
            half = self.meta["ns_precision"].startswith("bfloat16")
            self.m, direction = oracles.orthogonal_update(
                c,
                self.m,
                "shampoo" if kind == "mars-shampoo" else "muon",
                *grad.shape,
                beta1=betas[0],
                ns_dtype=torch.bfloat16 if half else None,
            )
        return direction


def follow(name: str) -> dict[str, float]:
    """Largest absolute errors of weights, moments and clip norms over a recorded case."""
    meta, arrays = load_golden(name)
    errors = {"weights": 0.0, "moments": 0.0, "norms": 0.0, "change": 0.0, "scaled_weights": 0.0}
    for info in meta["params"]:
        i = info["index"]
        follower = Follower(meta, info, arrays[f"p{i}_0"])
        factor = mars.shape_factor("shampoo", *info["shape"]) if len(info["shape"]) == 2 else 1.0
        for t, lr in enumerate(meta["lr"], start=1):
            follower.advance(arrays[f"g{i}_{t}"], None if meta["is_approx"] else arrays[f"h{i}_{t}"], lr)
            gap = float((follower.x - arrays[f"p{i}_{t}"]).abs().max())
            errors["weights"] = max(errors["weights"], gap)
            errors["scaled_weights"] = max(errors["scaled_weights"], gap / (lr * factor))
            errors["change"] = max(errors["change"], float((arrays[f"p{i}_{t}"] - arrays[f"p{i}_0"]).abs().max()))
            for state in ("m", "v"):
                if f"{state}{i}_{t}" in arrays:
                    gap = float((getattr(follower, state) - arrays[f"{state}{i}_{t}"]).abs().max())
                    errors["moments"] = max(errors["moments"], gap)
        if info["mars_path"]:
            norms = torch.tensor(follower.norms, dtype=F64)
            errors["norms"] = max(errors["norms"], float((norms / arrays[f"clip{i}"] - 1).abs().max()))
    return errors


@pytest.mark.parametrize(
    "name",
    [
        "mars_adamw_approx_sched_opt1d",
        "mars_adamw_exact",
        "mars_lion_exact_opt1d",
        "mars_shampoo_approx_hpns_opt1d",
        "mars_m_approx_hpns",
    ],
)
def test_golden_float64(name):
    errors = follow(name)
    assert errors["change"] > 1e-3
    assert errors["weights"] <= 1e-12 * max(1.0, errors["change"])
    assert errors["moments"] <= 1e-13
    assert errors["norms"] <= 1e-12


@pytest.mark.parametrize("name", ["mars_adamw_approx", "mars_lion_approx"])
def test_golden_float32(name):
    errors = follow(name)
    assert errors["change"] > 1e-3
    assert errors["weights"] <= 2e-6
    assert errors["moments"] <= 2e-7
    assert errors["norms"] <= 1e-6


def test_golden_bfloat16_newton_schulz():
    """Rounding in bfloat16 differs with the order of the products; the momentum does not pass through it."""
    errors = follow("mars_shampoo_approx_bf16ns")
    assert errors["scaled_weights"] <= 0.15
    assert errors["moments"] <= 2e-7
    assert errors["norms"] <= 1e-6


# --- other optimizers as special cases -------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [0.05, 3.0])
@pytest.mark.parametrize("shape", [(7, 5), (9,)])
def test_gamma_zero_is_adamw_on_clipped_gradients(scale, shape):
    """Below norm 1 that is plain AdamW; above it AdamW is fed g / |g|."""
    weights = noise(*shape)
    reference = weights.clone().requires_grad_()
    optimizer = torch.optim.AdamW([reference], lr=0.01, betas=(0.95, 0.99), eps=1e-8, weight_decay=0.1)
    m, v, last_grad = torch.zeros(3, *shape, dtype=F64)
    for step in range(1, 9):
        grad = noise(*shape, seed=step, scale=scale) / math.sqrt(math.prod(shape))
        reference.grad = grad / max(1.0, float(grad.norm()))
        optimizer.step()
        c = clipped(oracles.corrected_gradient(grad, last_grad, 0.0, 0.95))
        corrections = adamw.bias_corrections((0.95, 0.99), step)
        m, v, direction = adamw.adamw_update(c, m, v, betas=(0.95, 0.99), eps=1e-8, corrections=corrections)
        weights, last_grad = oracles.decoupled_step(weights, direction, 0.01, 0.1), grad
    torch.testing.assert_close(weights, reference.detach(), rtol=0, atol=1e-13)


@pytest.mark.parametrize("shape", [(12, 5), (5, 12)])
@pytest.mark.parametrize("nesterov", [True, False])
def test_gamma_one_minus_beta_is_nesterov_muon(shape, nesterov):
    """From the first step on; gamma = 0 is Muon without Nesterov momentum."""
    mu = 0.95
    grads = [noise(*shape, seed=t) for t in range(6)]
    gamma = 1 - mu if nesterov else 0.0
    u, m = torch.zeros(2, *shape, dtype=F64)
    for grad, last in zip(grads, approximate(grads), strict=True):
        u = mu * u + grad
        muon = newton_schulz(grad + mu * u if nesterov else u, eps=1e-8) * max(1, shape[0] / shape[1]) ** 0.5
        c = oracles.corrected_gradient(grad, last, gamma, mu)
        m, direction = oracles.orthogonal_update(c, m, "shampoo", *shape, beta1=mu)
        torch.testing.assert_close(direction, muon, rtol=0, atol=1e-12)


def test_shampoo_orthogonalises_the_momentum_over_one_minus_beta():
    """Which shows only against eps."""
    m = noise(4, 7, scale=1e-3)
    direct = newton_schulz(m / (1 - 0.9), eps=0.02)
    torch.testing.assert_close(
        mars.orthogonal_direction(m, "shampoo", 4, 7, beta1=0.9, eps=0.02), direct, rtol=1e-12, atol=0
    )
    assert (direct - newton_schulz(m, eps=0.02)).abs().max() > 0.05
    torch.testing.assert_close(
        mars.orthogonal_direction(m, "muon", 4, 7, beta1=0.9, eps=0.02),
        newton_schulz(m, eps=0.02) * 0.2 * 7**0.5,
        rtol=1e-12,
        atol=0,
    )


def test_lion_map():
    """Lion(b1, b2) is MARS-Lion with beta1 = b2 and gamma = (b2 - b1) / b2, without the clip."""
    b1, b2 = 0.9, 0.99
    grads = [noise(4, 6, seed=t) for t in range(12)]
    lion, m = torch.zeros(2, 4, 6, dtype=F64)
    for grad, last in zip(grads, approximate(grads), strict=True):
        interpolation = b1 * lion + (1 - b1) * grad
        lion = b2 * lion + (1 - b2) * grad
        m, direction = oracles.lion_update(oracles.corrected_gradient(grad, last, (b2 - b1) / b2, b2), m, b2)
        torch.testing.assert_close(m, interpolation, rtol=0, atol=1e-13)
        assert torch.equal(direction, interpolation.sign())


def test_adan_momentum():
    """gamma = 1 - beta1 is Adan's corrected momentum with beta2 = beta1."""
    beta = 0.9
    grads = [noise(3, 4, seed=t) for t in range(10)]
    first, change = torch.zeros(2, 3, 4, dtype=F64)
    for grad, last, m in zip(
        grads, approximate(grads), momenta(grads, approximate(grads), 1 - beta, beta, False), strict=True
    ):
        first = beta * first + (1 - beta) * grad
        change = beta * change + (1 - beta) * (grad - last)
        torch.testing.assert_close(m, first + beta * change, rtol=0, atol=1e-14)


def test_storm_follows_a_deterministic_gradient():
    """Exact mode, gamma = 1, no noise, zero start: the momentum is the gradient at every step."""
    curvature = torch.linspace(0.1, 2.0, 8, dtype=F64)
    x, m, reference = noise(8), torch.zeros(8, dtype=F64), torch.zeros(8, dtype=F64)
    for _ in range(30):
        grad = curvature * x
        m = oracles.momentum_update(oracles.corrected_gradient(grad, reference, 1.0, 0.95), m, 0.95)
        torch.testing.assert_close(m, grad, rtol=0, atol=1e-14)
        x = x - 0.3 * m
        reference = grad  # the gradient at the weights before the step, without noise


def test_exact_with_frozen_weights_keeps_only_the_first_correction():
    """m_t(gamma) - m_t(0) = beta^(t-1) (m_1(gamma) - m_1(0)) when h_t = g_t from the second step on."""
    beta = 0.9
    grads = [noise(5, 3, seed=t) for t in range(9)]
    references = [torch.zeros(5, 3, dtype=F64), *grads[1:]]
    gaps = [
        a - b
        for a, b in zip(
            momenta(grads, references, 0.3, beta, False), momenta(grads, references, 0.0, beta, False), strict=True
        )
    ]
    assert gaps[0].abs().max() > 1e-3
    for before, after in pairwise(gaps):
        torch.testing.assert_close(after, beta * before, rtol=0, atol=1e-15)


# --- sizes, bounds, variance -----------------------------------------------------------------------------------------


def test_first_step_sizes():
    """m_1 = (1 - beta1)(1 + k) g_1; AdamW and Lion move by the learning rate."""
    grad = noise(4, 5, scale=0.01)
    zeros = torch.zeros_like(grad)
    k = mars.correction_factor(0.025, 0.95)
    assert k == pytest.approx(0.475, rel=1e-12)
    c = oracles.corrected_gradient(grad, zeros, 0.025, 0.95)
    torch.testing.assert_close(oracles.momentum_update(c, zeros, 0.95), 0.05 * (1 + k) * grad, rtol=1e-13, atol=0)
    assert torch.equal(oracles.lion_update(c, zeros, 0.95)[1], grad.sign())
    corrections = adamw.bias_corrections((0.95, 0.99), 1)
    direction = adamw.adamw_update(c, zeros, zeros, betas=(0.95, 0.99), eps=0.0, corrections=corrections)[2]
    torch.testing.assert_close(direction, grad.sign(), rtol=1e-12, atol=0)


@settings(deadline=None, max_examples=25)
@given(
    scale=st.sampled_from([1e-9, 0.3, 1.0, 1e4]),
    clip=st.sampled_from([0.5, 1.0, 10.0]),
    seed=st.integers(0, 2**16),
)
def test_clip_by_norm(scale, clip, seed):
    """Per matrix in a stack: at most the threshold after it, untouched below it."""
    c = noise(3, 4, 5, seed=seed) * torch.tensor([1.0, scale, 0.0], dtype=F64).reshape(3, 1, 1)
    coefficient = mars.clip_coefficient(c.square().sum((-2, -1), keepdim=True), clip)
    result = c * coefficient
    assert coefficient.shape == (3, 1, 1)
    for before, after in zip(c, result, strict=True):
        norm = before.norm()
        assert after.norm() <= clip * (1 + 1e-14)
        if norm <= clip:
            assert torch.equal(after, before)
        else:
            torch.testing.assert_close(after, before * clip / norm, rtol=1e-14, atol=0)


def test_clip_coefficient_of_zero_and_nan():
    coefficient = mars.clip_coefficient(torch.tensor([0.0, float("nan"), 4.0]), 1.0)
    assert coefficient[0] == 1.0 and coefficient[1].isnan() and coefficient[2] == 0.5


def test_lion_moves_by_lr_or_not_at_all():
    c = noise(6, 6)
    c[:, 0] = 0
    direction = oracles.lion_update(c, torch.zeros_like(c), 0.95)[1]
    assert direction.abs().unique().tolist() == [0.0, 1.0]
    assert torch.equal(direction[:, 0], torch.zeros(6, dtype=F64))


@pytest.mark.parametrize("ns_dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("variant", ["shampoo", "muon"])
@pytest.mark.parametrize("shape", [(18, 6), (6, 18), (3, 10, 4)])
def test_scale_of_singular_values_of_the_update(shape, variant, ns_dtype):
    m = torch.zeros(shape, dtype=F64)
    m, direction = oracles.orthogonal_update(noise(*shape), m, variant, *shape[-2:], beta1=0.95, ns_dtype=ns_dtype)
    assert direction.dtype == F64 and direction.shape == shape
    singular = torch.linalg.svdvals(direction / mars.shape_factor(variant, *shape[-2:]))
    slack = 0.05 if ns_dtype else 0.0
    assert singular.min() >= 0.68 - slack
    assert singular.max() <= 1.21 + slack


def test_shape_factors_take_the_logical_shape():
    assert mars.shape_factor("shampoo", 50304, 768) == pytest.approx(8.093, abs=1e-3)
    assert mars.shape_factor("shampoo", 768, 50304) == 1.0
    assert mars.shape_factor("muon", 16, 100) == mars.shape_factor("muon", 100, 16) == pytest.approx(2.0)
    shard = noise(5, 4)
    ratio = mars.orthogonal_direction(shard, "shampoo", 20, 4, beta1=0.9) / mars.orthogonal_direction(
        shard, "shampoo", 5, 4, beta1=0.9
    )
    torch.testing.assert_close(ratio, torch.full_like(ratio, 2.0), rtol=1e-12, atol=0)


@pytest.mark.parametrize("variant", ["adamw", "lion", "shampoo", "muon"])
def test_zero_gradient_moves_by_the_decay_alone(variant):
    zeros, weights = torch.zeros(4, 6), noise(4, 6).float()
    c = clipped(oracles.corrected_gradient(zeros, zeros, 0.025, 0.95))
    if variant == "adamw":
        *_, direction = adamw.adamw_update(c, zeros, zeros, betas=(0.95, 0.99), eps=1e-8, corrections=(0.05, 0.01))
    elif variant == "lion":
        _, direction = oracles.lion_update(c, zeros, 0.95)
    else:
        _, direction = oracles.orthogonal_update(c, zeros, variant, 4, 6, beta1=0.95)
    assert torch.equal(oracles.decoupled_step(weights, direction, 0.1, 0.5), weights * 0.95)


@pytest.mark.parametrize("gamma", [0.0, 0.025, 0.05, 0.2, 1.0])
def test_white_noise_variance(gamma):
    """The approximate mode is a linear filter: its impulse response has the published sum, lag and energy."""
    beta, steps = 0.95, 800
    impulse = [torch.ones(1, dtype=F64)] + [torch.zeros(1, dtype=F64)] * (steps - 1)
    response = torch.cat(momenta(impulse, approximate(impulse), gamma, beta, False))
    energy = (1 - beta + gamma * beta) ** 2 + beta**2 * (1 - beta) ** 2 * (1 - gamma) ** 2 / (1 - beta**2)
    assert response.sum().item() == pytest.approx(1.0, abs=1e-12)
    assert response.square().sum().item() == pytest.approx(energy, rel=1e-12)
    assert (response * torch.arange(steps)).sum().item() == pytest.approx(beta * (1 - gamma) / (1 - beta), abs=1e-9)


# --- the norm from sums ----------------------------------------------------------------------------------------------


# --- purity and arguments --------------------------------------------------------------------------------------------


def test_a_reused_gradient_buffer_changes_nothing():
    """Results are new tensors, so a framework may refill its buffers, and a skipped step has touched no state."""
    grad, reference, m = noise(4, 6), noise(4, 6, seed=1), noise(4, 6, seed=2)
    v = m.square()
    inputs = [grad, reference, m, v]
    copies = [x.clone() for x in inputs]
    c = oracles.corrected_gradient(grad, reference, 0.0, 0.95)
    results = [
        c,
        oracles.momentum_update(grad, m, 0.0),
        *adamw.adamw_update(grad, m, v, betas=(0.9, 0.99), eps=1e-8, corrections=(1.0, 1.0)),
        *oracles.lion_update(grad, m, 0.9),
        *oracles.orthogonal_update(grad, m, "muon", 4, 6, beta1=0.9),
    ]
    assert all(torch.equal(a, b) for a, b in zip(inputs, copies, strict=True))
    storages = {x.untyped_storage().data_ptr() for x in inputs}
    assert not storages & {x.untyped_storage().data_ptr() for x in results}


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: mars.correction_factor(0.1, 1.0), r"beta1 must lie in \[0, 1\), got 1.0"),
        (lambda: oracles.corrected_gradient(torch.ones(2), torch.ones(2), 0.1, -0.1), r"beta1 must lie in \[0, 1\)"),
        (lambda: mars.clip_coefficient(torch.ones(()), 0.0), "clip must be positive, got 0.0; use None"),
        (lambda: mars.shape_factor("adamw", 2, 2), "variant must be 'shampoo' or 'muon', got 'adamw'"),
        (lambda: mars.shape_factor("muon", 0, 2), r"rows and cols must be at least 1, got \(0, 2\)"),
    ],
)
def test_bad_arguments(call, words):
    with pytest.raises(ValueError, match=words):
        call()
