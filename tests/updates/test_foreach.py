"""The in-place list forms against the pure functions, fragment by fragment."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rankwise.kernels import foreach
from rankwise.updates import adamw, mars

DTYPES = st.sampled_from([torch.float32, torch.float64])
SIZES = st.lists(st.integers(0, 9), max_size=5)
STEPS = 5


def fragments(sizes: list[int], dtype: torch.dtype, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, dtype=dtype, generator=generator) for size in sizes]


def zeros(sizes: list[int], dtype: torch.dtype) -> list[Tensor]:
    return [torch.zeros(size, dtype=dtype) for size in sizes]


def clones(tensors: list[Tensor]) -> list[Tensor]:
    return [x.clone() for x in tensors]


def assert_lists_close(got: list[Tensor], expected: list[Tensor], dtype: torch.dtype) -> None:
    tolerance = 1e-14 if dtype == torch.float64 else 1e-6
    assert len(got) == len(expected)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def as_lr(value: float, tensor_lr: bool, dtype: torch.dtype) -> float | Tensor:
    return torch.tensor(value, dtype=dtype) if tensor_lr else value


common = given(
    sizes=SIZES,
    dtype=DTYPES,
    tensor_lr=st.booleans(),
    decay=st.sampled_from([0.0, 0.1]),
    seed=st.integers(0, 2**16),
)


@settings(deadline=None, max_examples=20)
@common
@pytest.mark.parametrize("correct_eps", [True, False])
def test_adamw(correct_eps, sizes, dtype, tensor_lr, decay, seed):
    betas, eps = (0.9, 0.95), 1e-3
    lr = as_lr(0.02, tensor_lr, dtype)
    x, m, v = fragments(sizes, dtype, seed), zeros(sizes, dtype), zeros(sizes, dtype)
    pure = clones(x), clones(m), clones(v)
    for step in range(1, STEPS + 1):
        grads = fragments(sizes, dtype, seed + step)
        kept = clones(grads)
        foreach.adamw_(
            x, grads, m, v, lr=lr, betas=betas, eps=eps, weight_decay=decay, step=step, correct_eps=correct_eps
        )
        assert all(torch.equal(a, b) for a, b in zip(grads, kept, strict=True))
        for i, grad in enumerate(grads):
            pure[1][i], pure[2][i], direction = adamw.adamw_update(
                grad,
                pure[1][i],
                pure[2][i],
                betas=betas,
                eps=eps,
                corrections=adamw.bias_corrections(betas, step),
                correct_eps=correct_eps,
            )
            pure[0][i] = adamw.decoupled_step(pure[0][i], direction, lr, decay)
    for got, expected in zip((x, m, v), pure, strict=True):
        assert_lists_close(got, expected, dtype)


@settings(deadline=None, max_examples=20)
@common
@pytest.mark.parametrize("rule", ["adamw", "lion"])
@pytest.mark.parametrize("clip", [True, False])
def test_mars(rule, clip, sizes, dtype, tensor_lr, decay, seed):
    betas, eps, gamma = (0.95, 0.99), 1e-3, 0.05
    lr, k = as_lr(0.02, tensor_lr, dtype), mars.correction_factor(gamma, betas[0])
    x, m, v, last = fragments(sizes, dtype, seed), *(zeros(sizes, dtype) for _ in range(3))
    pure_x, pure_m, pure_v, pure_last = (clones(s) for s in (x, m, v, last))
    buffers = zeros(sizes, dtype)
    for step in range(1, STEPS + 1):
        for buffer, grad in zip(buffers, fragments(sizes, dtype, seed + step), strict=True):
            buffer.copy_(grad)  # a framework refills its gradient buffers
        grads = clones(buffers)
        corrected = [mars.corrected_gradient(g, h, gamma, betas[0]) for g, h in zip(grads, pure_last, strict=True)]
        coefficients = [mars.clip_coefficient(c.square().sum(), 1.0) for c in corrected]
        options = {"k": k, "coefficients": coefficients if clip else None, "lr": lr, "weight_decay": decay}
        if rule == "adamw":
            foreach.mars_adamw_(x, buffers, last, m, v, betas=betas, eps=eps, step=step, **options)
        else:
            foreach.mars_lion_(x, buffers, last, m, beta1=betas[0], **options)
        foreach.copy_(last, buffers)
        for i, c in enumerate(corrected):
            if clip:
                c = c * coefficients[i]
            if rule == "adamw":
                corrections = adamw.bias_corrections(betas, step)
                pure_m[i], pure_v[i], direction = mars.adamw_update(
                    c, pure_m[i], pure_v[i], betas=betas, eps=eps, corrections=corrections
                )
            else:
                pure_m[i], direction = mars.lion_update(c, pure_m[i], betas[0])
            pure_x[i] = adamw.decoupled_step(pure_x[i], direction, lr, decay)
        pure_last = grads
    for got, expected in zip((x, m, v, last), (pure_x, pure_m, pure_v, pure_last), strict=True):
        assert_lists_close(got, expected, dtype)


@settings(deadline=None, max_examples=20)
@common
def test_decoupled_step_and_momentum(sizes, dtype, tensor_lr, decay, seed):
    lr = as_lr(0.3, tensor_lr, dtype)
    x, d, m = (fragments(sizes, dtype, seed + i) for i in range(3))
    expected_m = [mars.momentum_update(b, a, 0.9) for a, b in zip(m, d, strict=True)]
    expected_x = [adamw.decoupled_step(a, b, lr, decay) for a, b in zip(x, d, strict=True)]
    foreach.momentum_(m, d, 0.9)
    foreach.decoupled_step_(x, d, lr, decay)
    assert_lists_close(m, expected_m, dtype)
    assert_lists_close(x, expected_x, dtype)


def test_equals_torch_adamw_in_place():
    x = fragments([5, 0, 7], torch.float64, 0)
    base = torch.cat(x)
    views = list(base.split([5, 0, 7]))  # fragments are views of a flat buffer
    reference = [p.clone().requires_grad_() for p in x]
    optimizer = torch.optim.AdamW(reference, lr=0.01, betas=(0.9, 0.99), weight_decay=0.1, foreach=True)
    m, v = zeros([5, 0, 7], torch.float64), zeros([5, 0, 7], torch.float64)
    for step in range(1, 7):
        grads = fragments([5, 0, 7], torch.float64, step)
        for p, g in zip(reference, grads, strict=True):
            p.grad = g.clone()
        optimizer.step()
        foreach.adamw_(views, grads, m, v, lr=0.01, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1, step=step)
    torch.testing.assert_close(base, torch.cat(reference).detach(), rtol=1e-14, atol=1e-15)


def test_corrected_gradients_are_new_tensors():
    g, h = fragments([4, 6], torch.float64, 0), fragments([4, 6], torch.float64, 1)
    kept = clones(g), clones(h)
    corrected = foreach.mars_corrected(g, h, 0.475)
    foreach.scale_by_(corrected, torch.tensor([0.5, 2.0], dtype=torch.float64))
    for c, a, b, factor in zip(corrected, *kept, (0.5, 2.0), strict=True):
        torch.testing.assert_close(c, factor * (a + 0.475 * (a - b)), rtol=1e-14, atol=1e-15)
    assert all(torch.equal(a, b) for a, b in zip([*g, *h], [*kept[0], *kept[1]], strict=True))


def test_fragments_of_one_parameter_share_a_coefficient():
    """Views of a vector of all norms, in its own dtype, scale without changing the dtype of the fragments."""
    c = fragments([3, 2, 4], torch.float32, 0)
    expected = [c[0] * 0.25, c[1] * 0.25, c[2]]
    coefficients = torch.tensor([0.25, 1.0], dtype=torch.float64)
    foreach.scale_by_(c, [coefficients[0], coefficients[0], coefficients[1]])
    assert all(x.dtype == torch.float32 for x in c)
    assert all(torch.equal(a, b) for a, b in zip(c, expected, strict=True))


def test_empty_lists():
    options = {"lr": 0.1, "weight_decay": 0.1}
    foreach.adamw_([], [], [], [], betas=(0.9, 0.99), eps=1e-8, step=1, **options)
    foreach.lion_([], [], [], beta1=0.9, **options)
    foreach.mars_adamw_([], [], [], [], [], k=0.1, coefficients=[], betas=(0.9, 0.99), eps=1e-8, step=1, **options)
    foreach.mars_lion_([], [], [], [], k=0.1, coefficients=torch.empty(0), beta1=0.9, **options)
    foreach.decoupled_step_([], [], 0.1, 0.1)
    foreach.momentum_([], [], 0.9)
    foreach.copy_([], [])
    foreach.decay_([], 0.1, 0.1)
    foreach.scale_by_([], [])
    assert foreach.mars_corrected([], [], 0.1) == []


def test_bad_arguments():
    x = fragments([3, 4], torch.float32, 0)
    with pytest.raises(ValueError, match="coefficients has 1 entries for 2 tensors"):
        foreach.scale_by_(x, [torch.ones(())])
    with pytest.raises(ValueError, match="step must be at least 1, got 0"):
        foreach.adamw_(x, x, x, x, lr=0.1, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0, step=0)


@given(sizes=SIZES, dtype=DTYPES, seed=st.integers(0, 2**16))
@settings(deadline=None, max_examples=20)
def test_squared_norms_are_taken_in_double_precision(sizes: list[int], dtype: torch.dtype, seed: int) -> None:
    tensors = fragments(sizes, dtype, seed)
    expected = [x.double().square().sum() for x in tensors]
    got = foreach.squared_norms(tensors)
    assert all(norm.dtype == torch.float64 and norm.shape == () for norm in got)
    assert_lists_close(got, expected, torch.float64)
