"""The first-order rules MKOR hands its gradients to: LAMB and SGD."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rankwise.updates.lamb import lamb_direction, trust_ratio
from rankwise.updates.sgd import sgd_direction

quick = settings(max_examples=20, deadline=None)
shapes = st.sampled_from([(), (5,), (3, 4), (2, 3, 2)])


def randn(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def lamb_reference(
    weight: np.ndarray, grads: list[np.ndarray], lr: float, weight_decay: float, corrected: bool, bound: float | None
) -> np.ndarray:
    """Algorithm 2 of the LAMB paper, written on whole histories instead of recursions."""
    beta1, beta2, eps = 0.9, 0.999, 1e-6
    for step in range(1, len(grads) + 1):
        powers = np.arange(step - 1, -1, -1)
        m = sum((1 - beta1) * beta1**k * g for k, g in zip(powers, grads[:step], strict=True))
        v = sum((1 - beta2) * beta2**k * g**2 for k, g in zip(powers, grads[:step], strict=True))
        if corrected:
            m, v = m / (1 - beta1**step), v / (1 - beta2**step)
        r = m / (np.sqrt(v) + eps) + weight_decay * weight
        phi = math.sqrt((weight**2).sum())
        phi = phi if bound is None else min(phi, bound)
        weight = weight - lr * (phi / math.sqrt((r**2).sum()) if phi > 0 else 1.0) * r
    return weight


@quick
@given(
    shapes,
    st.integers(0, 999),
    st.sampled_from([0.0, 0.01]),
    st.booleans(),
    st.sampled_from([None, 0.5, 10.0]),
    st.sampled_from([0.0, 1.0, 30.0]),
)
def test_lamb(
    shape: tuple[int, ...], seed: int, weight_decay: float, corrected: bool, bound: float | None, size: float
) -> None:
    start, grads = size * randn(shape, seed), [randn(shape, seed + k) for k in range(1, 6)]
    weight, moments = start, [torch.zeros_like(start), torch.zeros_like(start)]
    for step, grad in enumerate(grads, 1):
        corrections = (1 - 0.9**step, 1 - 0.999**step) if corrected else None
        *moments, direction = lamb_direction(grad, *moments, weight, weight_decay=weight_decay, corrections=corrections)
        weight = weight - 0.1 * trust_ratio(weight.norm(), direction.norm(), bound) * direction
    expected = lamb_reference(start.numpy(), [g.numpy() for g in grads], 0.1, weight_decay, corrected, bound)
    assert np.abs(weight.numpy() - expected).max() <= 1e-9 * np.abs(expected - start.numpy()).max()


def test_lamb_takes_tensor_corrections_and_shards() -> None:
    grad, weight = randn((6,), 1), randn((6,), 2)
    zeros = torch.zeros_like(grad)
    corrections = torch.tensor(0.1, dtype=torch.float64), torch.tensor(0.001, dtype=torch.float64)
    whole = lamb_direction(grad, zeros, zeros, weight, weight_decay=0.1, corrections=corrections)
    floats = lamb_direction(grad, zeros, zeros, weight, weight_decay=0.1, corrections=(0.1, 0.001))
    parts = [
        lamb_direction(grad[s], zeros[s], zeros[s], weight[s], weight_decay=0.1, corrections=(0.1, 0.001))
        for s in (slice(0, 2), slice(2, 6))
    ]
    for a, b, pieces in zip(whole, floats, zip(*parts, strict=True), strict=True):
        assert torch.allclose(a, b, rtol=1e-15)
        assert torch.equal(b, torch.cat(pieces))


def test_trust_ratio_of_special_norms() -> None:
    weight_norm = torch.tensor([0.0, 0.0, 3.0, 3.0, 20.0])
    update_norm = torch.tensor([0.0, 2.0, 0.0, 2.0, 2.0])
    assert trust_ratio(weight_norm, update_norm).tolist() == [1.0, 1.0, 1.0, 1.5, 5.0]
    assert trust_ratio(weight_norm, update_norm, None).tolist() == [1.0, 1.0, 1.0, 1.5, 10.0]
    assert trust_ratio(weight_norm.double(), update_norm.double()).dtype == torch.float64
    with pytest.raises(ValueError, match="max_weight_norm=0.0 must be positive"):
        trust_ratio(weight_norm, update_norm, 0.0)


@quick
@given(
    shapes,
    st.integers(0, 999),
    st.sampled_from([(0.0, 0.0, False), (0.0, 0.3, False), (0.9, 0.0, False), (0.9, 0.3, False), (0.9, 0.0, True)]),
    st.sampled_from([0.0, 0.1]),
)
def test_sgd_follows_torch(
    shape: tuple[int, ...], seed: int, options: tuple[float, float, bool], weight_decay: float
) -> None:
    momentum, dampening, nesterov = options
    start = randn(shape, seed)
    parameter = torch.nn.Parameter(start.clone())
    reference = torch.optim.SGD(
        [parameter], lr=0.1, momentum=momentum, dampening=dampening, nesterov=nesterov, weight_decay=weight_decay
    )
    weight, buffer = start, None
    for step in range(5):
        grad = randn(shape, seed + step + 1)
        parameter.grad = grad.clone()
        reference.step()
        buffer, direction = sgd_direction(grad, buffer, weight, momentum, dampening, nesterov, weight_decay)
        weight = weight - 0.1 * direction
    assert float((weight - parameter.detach()).abs().max()) <= 1e-12 * float((weight - start).abs().max())
    if momentum:
        assert torch.allclose(buffer, reference.state[parameter]["momentum_buffer"], rtol=1e-12)


def test_sgd_arguments() -> None:
    grad = torch.ones(2)
    with pytest.raises(ValueError, match="momentum=-0.1 must be at least 0"):
        sgd_direction(grad, None, grad, momentum=-0.1)
    for momentum, dampening in ((0.0, 0.0), (0.9, 0.1)):
        with pytest.raises(ValueError, match="nesterov=True with momentum=.* is not defined"):
            sgd_direction(grad, None, grad, momentum, dampening, nesterov=True)


def test_results_are_new_tensors() -> None:
    grad, weight = torch.ones(3), torch.ones(3)
    buffer, direction = sgd_direction(grad, None, weight)
    assert len({t.data_ptr() for t in (grad, weight, direction, buffer)}) == 4
    exp_avg, exp_avg_sq, direction = lamb_direction(grad, torch.zeros(3), torch.zeros(3), weight)
    assert len({t.data_ptr() for t in (grad, weight, direction, exp_avg, exp_avg_sq)}) == 5
