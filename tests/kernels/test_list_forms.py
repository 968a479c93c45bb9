"""The in-place list forms against the pure functions, fragment by fragment."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rankwise.kernels import blocked, forms, native, triton
from rankwise.kernels import lists as foreach
from rankwise.kernels.forms import kernels_for, using
from rankwise.ldadam import formulas as updates_ldadam
from rankwise.ldadam import native as native_ldadam
from rankwise.ldadam.forms import step_for
from rankwise.mars import formulas as mars
from rankwise.sonew import blocked as blocked_sonew
from rankwise.sonew import native as native_sonew
from rankwise.sonew.forms import directions_for
from rankwise.updates import adamw

DTYPES = st.sampled_from([torch.float32, torch.float64])
SIZES = st.lists(st.integers(0, 9), max_size=5)
STEPS = 5
FORMS = pytest.mark.parametrize(
    "form", [foreach, blocked, pytest.param(native, marks=pytest.mark.compiled)], ids=["foreach", "blocked", "native"]
)


@pytest.fixture(autouse=True, scope="module")
def _small_blocks() -> Iterator[None]:
    """So that the fragments of these tests take several."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocked, "_BLOCK", 4)
        patch.setattr(native, "_TILE", 4)
        yield


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


@FORMS
@settings(deadline=None, max_examples=20)
@common
@pytest.mark.parametrize("correct_eps", [True, False])
def test_adamw(form, correct_eps, sizes, dtype, tensor_lr, decay, seed):
    betas, eps = (0.9, 0.95), 1e-3
    lr = as_lr(0.02, tensor_lr, dtype)
    x, m, v = fragments(sizes, dtype, seed), zeros(sizes, dtype), zeros(sizes, dtype)
    pure = clones(x), clones(m), clones(v)
    for step in range(1, STEPS + 1):
        grads = fragments(sizes, dtype, seed + step)
        kept = clones(grads)
        form.adamw_(x, grads, m, v, lr=lr, betas=betas, eps=eps, weight_decay=decay, step=step, correct_eps=correct_eps)
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


@FORMS
@settings(deadline=None, max_examples=20)
@common
@pytest.mark.parametrize("rule", ["adamw", "lion", "momentum"])
@pytest.mark.parametrize(("clip", "advance"), [(True, True), (False, True), (True, False)])
def test_mars(form, rule, clip, advance, sizes, dtype, tensor_lr, decay, seed):
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
        known = torch.stack(coefficients) if clip and coefficients else None
        if sizes:
            squares = form.mars_squared_norms(buffers, last, k)
            assert squares.dtype == torch.float64
            exact = torch.stack([c.double().square().sum() for c in corrected])
            # Relative to what g and h would give one by one: they may cancel.
            rounding = 1e-14 if dtype == torch.float64 else 1e-6
            torch.testing.assert_close(squares, exact, rtol=rounding, atol=10 * rounding)
        options = {"k": k, "coefficients": known, "advance": advance}
        if rule != "momentum":
            options |= {"lr": lr, "weight_decay": decay}
        if rule == "adamw":
            form.mars_adamw_(x, buffers, last, m, v, betas=betas, eps=eps, step=step, **options)
        elif rule == "momentum":
            form.mars_momentum_(buffers, last, m, beta1=betas[0], **options)
        else:
            form.mars_lion_(x, buffers, last, m, beta1=betas[0], **options)
        if not advance:
            assert_lists_close(last, pure_last, dtype)
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
            if rule == "momentum":
                continue
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


@FORMS
def test_equals_torch_adamw_in_place(form):
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
        form.adamw_(views, grads, m, v, lr=0.01, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1, step=step)
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


@FORMS
def test_empty_lists(form):
    options = {"lr": 0.1, "weight_decay": 0.1}
    form.adamw_([], [], [], [], betas=(0.9, 0.99), eps=1e-8, step=1, **options)
    foreach.lion_([], [], [], beta1=0.9, **options)
    options |= {"k": 0.1, "coefficients": None, "advance": True}
    form.mars_adamw_([], [], [], [], [], betas=(0.9, 0.99), eps=1e-8, step=1, **options)
    form.mars_lion_([], [], [], [], beta1=0.9, **options)
    foreach.decoupled_step_([], [], 0.1, 0.1)
    foreach.momentum_([], [], 0.9)
    foreach.copy_([], [])
    foreach.decay_([], 0.1, 0.1)
    foreach.scale_by_([], [])
    assert foreach.mars_corrected([], [], 0.1) == []


@FORMS
def test_bad_arguments(form):
    x = fragments([3, 4], torch.float32, 0)
    with pytest.raises(ValueError, match="coefficients has 1 entries for 2 tensors"):
        foreach.scale_by_(x, [torch.ones(())])
    with pytest.raises(ValueError, match="step must be at least 1, got 0"):
        form.adamw_(x, x, x, x, lr=0.1, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0, step=0)


@FORMS
@given(sizes=SIZES, dtype=DTYPES, seed=st.integers(0, 2**16))
@settings(deadline=None, max_examples=20)
def test_squared_norms_are_summed_in_double_precision(form, sizes, dtype, seed) -> None:
    tensors = fragments(sizes, dtype, seed)
    got = form.squared_norms(tensors)
    assert got.dtype == torch.float64 and got.shape == (len(sizes),)
    exact = torch.tensor([float(x.double().square().sum()) for x in tensors], dtype=torch.float64)
    torch.testing.assert_close(got, exact, rtol=1e-14 if dtype == torch.float64 else 1e-6, atol=0.0)


@FORMS
@settings(deadline=None, max_examples=20)
@common
@pytest.mark.parametrize("with_ratios", [True, False])
def test_scaled_step(form, with_ratios, sizes, dtype, tensor_lr, decay, seed) -> None:
    lr = as_lr(0.3, tensor_lr, dtype)
    x, d = fragments(sizes, dtype, seed), fragments(sizes, dtype, seed + 1)
    ratios = torch.rand(len(sizes), dtype=dtype, generator=torch.Generator().manual_seed(seed))
    factors = ratios if with_ratios else torch.ones_like(ratios)
    expected = [adamw.decoupled_step(a, b * r, lr, decay) for a, b, r in zip(x, d, factors, strict=True)]
    form.scaled_step_(x, d, ratios if with_ratios else None, lr=lr, weight_decay=decay)
    assert_lists_close(x, expected, dtype)


@pytest.mark.parametrize("module", [blocked, native, triton], ids=["blocked", "native", "triton"])
def test_all_forms_take_the_same_arguments(module) -> None:
    for name in forms.FORMS:
        own, general = (inspect.signature(getattr(form, name)).parameters.values() for form in (module, foreach))
        assert [(p.name, p.kind, p.default) for p in own] == [(p.name, p.kind, p.default) for p in general], name


def test_sonew_takes_the_same_arguments_everywhere() -> None:
    cuda = pytest.importorskip("rankwise.sonew.cuda")
    own, general = (
        [(p.name, p.kind) for p in inspect.signature(form).parameters.values()]
        for form in (cuda.sonew_directions, blocked_sonew.sonew_directions)
    )
    assert own == general


@pytest.mark.compiled
def test_the_form_follows_device_and_type() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert kernels_for(cpu, torch.float32) is kernels_for(cpu, torch.float64) is native
    assert kernels_for(gpu, torch.float64) is foreach  # the kernels are fp32
    assert kernels_for(torch.device("meta"), torch.float32) is foreach
    with using(foreach):
        assert kernels_for(cpu, torch.float32) is foreach
        assert directions_for(cpu, torch.float32) is None
        assert step_for(cpu, torch.float32).func is updates_ldadam.ldadam_step
    with using(blocked):
        assert directions_for(cpu, torch.float32) is blocked_sonew.sonew_directions
    assert directions_for(cpu, torch.float32) is native_sonew.sonew_directions
    assert step_for(cpu, torch.float32) is native_ldadam.ldadam_step
