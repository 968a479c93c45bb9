"""The AdamW update against torch.optim.AdamW and the definition of the second form."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rankwise.updates.adamw import adamw_update, bias_corrections, decoupled_step


@settings(deadline=None, max_examples=20)
@given(
    shape=st.lists(st.integers(1, 6), min_size=0, max_size=3),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    betas=st.sampled_from([(0.9, 0.999), (0.95, 0.99), (0.0, 0.9), (0.9, 0.0)]),
    eps=st.sampled_from([1e-8, 1e-3]),
    weight_decay=st.sampled_from([0.0, 0.1]),
    tensor_scalars=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_equals_torch_adamw(shape, dtype, betas, eps, weight_decay, tensor_scalars, seed):
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(shape, dtype=dtype, generator=generator)
    reference = weights.clone().requires_grad_()
    optimizer = torch.optim.AdamW([reference], lr=0.02, betas=betas, eps=eps, weight_decay=weight_decay)
    exp_avg, exp_avg_sq = torch.zeros_like(weights), torch.zeros_like(weights)
    for step in range(1, 8):
        grad = torch.randn(shape, dtype=dtype, generator=generator)
        reference.grad = grad.clone()
        optimizer.step()
        first, second = bias_corrections(betas, step)
        lr = 0.02
        if tensor_scalars:
            first, second, lr = (torch.tensor(x, dtype=dtype) for x in (first, second, lr))
        before = [x.clone() for x in (grad, exp_avg, exp_avg_sq)]
        outputs = adamw_update(grad, exp_avg, exp_avg_sq, betas=betas, eps=eps, corrections=(first, second))
        assert all(torch.equal(a, b) for a, b in zip(before, (grad, exp_avg, exp_avg_sq), strict=True))
        exp_avg, exp_avg_sq, direction = outputs
        weights = decoupled_step(weights, direction, lr, weight_decay)
    state = optimizer.state[reference]
    tolerance = 1e-13 if dtype == torch.float64 else 2e-6
    for got, expected in [
        (weights, reference.detach()),
        (exp_avg, state["exp_avg"]),
        (exp_avg_sq, state["exp_avg_sq"]),
    ]:
        assert got.dtype == dtype
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


def test_first_step_has_size_lr():
    grad = torch.randn(50, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    zeros = torch.zeros_like(grad)
    corrections = bias_corrections((0.95, 0.99), 1)
    direction = adamw_update(grad, zeros, zeros, betas=(0.95, 0.99), eps=0.0, corrections=corrections)[2]
    torch.testing.assert_close(direction, grad.sign(), rtol=1e-13, atol=0)


def test_zero_gradient_moves_by_the_decay_alone():
    weights, zeros = torch.randn(6), torch.zeros(6)
    direction = adamw_update(zeros, zeros, zeros, betas=(0.9, 0.99), eps=1e-8, corrections=(0.1, 0.01))[2]
    assert torch.equal(decoupled_step(weights, direction, 0.5, 0.1), weights * 0.95)


@pytest.mark.parametrize("step", [0, -1])
def test_corrections_of_no_step(step):
    with pytest.raises(ValueError, match=f"step must be at least 1, got {step}"):
        bias_corrections((0.9, 0.99), step)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_corrections_of_a_tensor_of_steps(dtype):
    """As accurate as those of numbers, whatever the type of the counts."""
    steps = [1, 2, 37, 10_000]
    found = bias_corrections((0.9, 0.9999), torch.tensor(steps, dtype=dtype))
    wanted = zip(*(bias_corrections((0.9, 0.9999), step) for step in steps), strict=True)
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, torch.tensor(theirs, dtype=torch.float64), rtol=1e-12, atol=0)
