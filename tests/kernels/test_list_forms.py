"""The in-place list forms against the pure functions, shard by shard."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rankwise.kernels import dispatch as forms
from rankwise.kernels import lists as foreach
from rankwise.kernels import native, triton
from rankwise.kernels.dispatch import kernels_for, using
from rankwise.kernels.low_precision_runs import LowPrecisionRuns
from rankwise.kernels.native import compiled_passes as elementwise
from rankwise.kernels.passes import FIELDS, Pass, Scalars
from rankwise.mars import rule as mars
from rankwise.sonew import native as native_sonew
from rankwise.sonew.dispatch import directions_for
from rankwise.updates import adamw

DTYPES = st.sampled_from([torch.float32, torch.float64])
SIZES = st.lists(st.integers(0, 9), max_size=5)
STEPS = 5
FORMS = pytest.mark.parametrize(
    "form", [foreach, pytest.param(native, marks=pytest.mark.compiled)], ids=["foreach", "native"]
)


@pytest.fixture(autouse=True, scope="module")
def _small_blocks() -> Iterator[None]:
    """So that the shards of these tests take several."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(elementwise, "_TILE", 4)
        yield


def shards(sizes: list[int], dtype: torch.dtype, seed: int) -> list[Tensor]:
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
def test_adamw(form, sizes, dtype, tensor_lr, decay, seed):
    betas, eps = (0.9, 0.95), 1e-3
    lr = as_lr(0.02, tensor_lr, dtype)
    x, m, v = shards(sizes, dtype, seed), zeros(sizes, dtype), zeros(sizes, dtype)
    pure = clones(x), clones(m), clones(v)
    for step in range(1, STEPS + 1):
        grads = shards(sizes, dtype, seed + step)
        kept = clones(grads)
        scalars = Scalars(lr=lr, betas=betas, eps=eps, weight_decay=decay, step=step)
        form.run(Pass("adamw", {"param": x, "grad": grads, "exp_avg": m, "exp_avg_sq": v}, scalars))
        assert all(torch.equal(a, b) for a, b in zip(grads, kept, strict=True))
        for i, grad in enumerate(grads):
            pure[1][i], pure[2][i], direction = adamw.adamw_update(
                grad,
                pure[1][i],
                pure[2][i],
                betas=betas,
                eps=eps,
                corrections=adamw.bias_corrections(betas, step),
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
    x, m, v, last = shards(sizes, dtype, seed), *(zeros(sizes, dtype) for _ in range(3))
    pure_x, pure_m, pure_v, pure_last = (clones(s) for s in (x, m, v, last))
    buffers = zeros(sizes, dtype)
    for step in range(1, STEPS + 1):
        for buffer, grad in zip(buffers, shards(sizes, dtype, seed + step), strict=True):
            buffer.copy_(grad)  # a framework refills its gradient buffers
        grads = clones(buffers)
        corrected = [mars.corrected_gradient(g, h, gamma, betas[0]) for g, h in zip(grads, pure_last, strict=True)]
        coefficients = [mars.clip_coefficient(c.square().sum(), 1.0) for c in corrected]
        known = torch.stack(coefficients) if clip and coefficients else None
        if sizes:
            squares = form.squared_norms(buffers, last, k)
            assert squares.dtype == torch.float64
            exact = torch.stack([c.double().square().sum() for c in corrected])
            # Relative to what g and h would give one by one: they may cancel.
            rounding = 1e-14 if dtype == torch.float64 else 1e-6
            torch.testing.assert_close(squares, exact, rtol=rounding, atol=10 * rounding)
        held = {"param": x, "grad": buffers, "exp_avg": m, "exp_avg_sq": v}
        fields = {"reference": last, **{name: held[name] for name in FIELDS[rule]}}
        scalars = Scalars(lr=lr, betas=betas, eps=eps, weight_decay=decay, step=step, k=k, advance=advance)
        form.run(Pass(rule, fields, scalars, known))
        if not advance:
            assert_lists_close(last, pure_last, dtype)
            foreach.copy_(last, buffers)
        for i, c in enumerate(corrected):
            if clip:
                c = c * coefficients[i]
            if rule == "adamw":
                corrections = adamw.bias_corrections(betas, step)
                pure_m[i], pure_v[i], direction = adamw.adamw_update(
                    c, pure_m[i], pure_v[i], betas=betas, eps=eps, corrections=corrections
                )
            else:
                pure_m[i] = mars.momentum(pure_m[i], c, betas[0])
                direction = pure_m[i].sign()
            if rule == "momentum":
                continue
            pure_x[i] = adamw.decoupled_step(pure_x[i], direction, lr, decay)
        pure_last = grads
    for got, expected in zip((x, m, v, last), (pure_x, pure_m, pure_v, pure_last), strict=True):
        assert_lists_close(got, expected, dtype)


@FORMS
@settings(deadline=None, max_examples=20)
@common
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("rule", ["momentum", "lion", "adamw"])
def test_rules_without_a_reference(form, rule, scaled, sizes, dtype, tensor_lr, decay, seed):
    lr, betas, eps = as_lr(0.3, tensor_lr, dtype), (0.9, 0.95), 1e-3
    x, g, m, v = (shards(sizes, dtype, seed + i) for i in range(4))
    v = [value.square() for value in v]
    factors = torch.rand(len(sizes), dtype=dtype, generator=torch.Generator().manual_seed(seed)) if scaled else None
    kept, scales = clones(g), factors if scaled else [1.0] * len(sizes)
    expected = []
    for param, grad, first, second, factor in zip(x, g, m, v, scales, strict=True):
        grad = grad * factor
        if rule == "adamw":
            corrections = adamw.bias_corrections(betas, 3)
            first, second, direction = adamw.adamw_update(
                grad, first, second, betas=betas, eps=eps, corrections=corrections
            )
        else:
            first = mars.momentum(first, grad, betas[0])
            direction = first.sign()
        expected.append(
            (param if rule == "momentum" else adamw.decoupled_step(param, direction, lr, decay), first, second)
        )
    held = {"param": x, "grad": g, "exp_avg": m, "exp_avg_sq": v}
    scalars = Scalars(lr=lr, betas=betas, eps=eps, weight_decay=decay, step=3)
    form.run(Pass(rule, {name: held[name] for name in FIELDS[rule]}, scalars, factors))
    assert all(torch.equal(a, b) for a, b in zip(g, kept, strict=True))
    for got, wanted in zip((x, m, v), zip(*expected, strict=True) if expected else ([], [], []), strict=True):
        assert_lists_close(got, list(wanted), dtype)


@FORMS
def test_equals_torch_adamw_in_place(form):
    x = shards([5, 0, 7], torch.float64, 0)
    base = torch.cat(x)
    views = list(base.split([5, 0, 7]))  # shards are views of a flat buffer
    reference = [p.clone().requires_grad_() for p in x]
    optimizer = torch.optim.AdamW(reference, lr=0.01, betas=(0.9, 0.99), weight_decay=0.1, foreach=True)
    m, v = zeros([5, 0, 7], torch.float64), zeros([5, 0, 7], torch.float64)
    for step in range(1, 7):
        grads = shards([5, 0, 7], torch.float64, step)
        for p, g in zip(reference, grads, strict=True):
            p.grad = g.clone()
        optimizer.step()
        scalars = Scalars(lr=0.01, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1, step=step)
        form.run(Pass("adamw", {"param": views, "grad": grads, "exp_avg": m, "exp_avg_sq": v}, scalars))
    torch.testing.assert_close(base, torch.cat(reference).detach(), rtol=1e-14, atol=1e-15)


def test_corrected_gradients_are_new_tensors():
    g, h = shards([4, 6], torch.float64, 0), shards([4, 6], torch.float64, 1)
    kept = clones(g), clones(h)
    corrected = foreach.corrected(g, h, 0.475)
    foreach.scale_by_(corrected, torch.tensor([0.5, 2.0], dtype=torch.float64))
    for c, a, b, factor in zip(corrected, *kept, (0.5, 2.0), strict=True):
        torch.testing.assert_close(c, factor * (a + 0.475 * (a - b)), rtol=1e-14, atol=1e-15)
    assert all(torch.equal(a, b) for a, b in zip([*g, *h], [*kept[0], *kept[1]], strict=True))


def test_shards_of_one_parameter_share_a_coefficient():
    """Views of a vector of all norms, in its own dtype, scale without changing the dtype of the shards."""
    c = shards([3, 2, 4], torch.float32, 0)
    expected = [c[0] * 0.25, c[1] * 0.25, c[2]]
    coefficients = torch.tensor([0.25, 1.0], dtype=torch.float64)
    foreach.scale_by_(c, [coefficients[0], coefficients[0], coefficients[1]])
    assert all(x.dtype == torch.float32 for x in c)
    assert all(torch.equal(a, b) for a, b in zip(c, expected, strict=True))


@FORMS
def test_empty_lists(form):
    for rule, names in FIELDS.items():
        for more in ((), ("reference",)):
            form.run(
                Pass(rule, {name: [] for name in (*names, *more)}, Scalars(lr=0.1, weight_decay=0.1, advance=True))
            )
    assert form.squared_norms([]).shape == form.squared_norms([], []).shape == (0,)
    foreach.copy_([], [])
    foreach.decay_([], 0.1, 0.1)
    foreach.scale_by_([], [])


def test_bad_arguments():
    x = shards([3, 4], torch.float32, 0)
    fields = dict.fromkeys(("param", "grad", "exp_avg", "exp_avg_sq"), x)
    with pytest.raises(ValueError, match="coefficients has 1 entries for 2 tensors"):
        foreach.scale_by_(x, [torch.ones(())])
    with pytest.raises(ValueError, match="step must be at least 1, got 0"):
        Pass("adamw", fields, Scalars(step=0))
    with pytest.raises(ValueError, match=r"step is \(1,\) for 2 tensors"):
        Pass("adamw", fields, Scalars(step=torch.ones(1)))
    with pytest.raises(ValueError, match=r"factors of shape \(1,\) for 2 tensors; pass one for each"):
        Pass("adamw", fields, Scalars(), torch.ones(1))
    with pytest.raises(ValueError, match="rule 'lion' takes the lists"):
        Pass("lion", fields, Scalars())
    with pytest.raises(ValueError, match="rule 'adamw' takes the lists"):
        Pass("adamw", {"param": x, "grad": x, "exp_avg": x}, Scalars())


@FORMS
def test_numbers_of_steps_may_be_tensors(form):
    """Where the host does not know them: a number for every shard."""
    sizes, numbers = [5, 9], torch.tensor([2.0, 300.0])
    together = [shards(sizes, torch.float64, i) for i in range(3)] + [
        [value.square() for value in shards(sizes, torch.float64, 3)]
    ]
    alone = [clones(field) for field in together]
    names = ("param", "grad", "exp_avg", "exp_avg_sq")
    scalars = Scalars(lr=0.1, betas=(0.9, 0.99), eps=1e-3, weight_decay=0.1, step=numbers)
    form.run(Pass("adamw", dict(zip(names, together, strict=True)), scalars))
    for index in range(2):
        scalars.step = int(numbers[index])
        form.run(Pass("adamw", {name: [field[index]] for name, field in zip(names, alone, strict=True)}, scalars))
    for got, expected in zip(together, alone, strict=True):
        assert_lists_close(got, expected, torch.float64)


@FORMS
@given(sizes=SIZES, dtype=DTYPES, seed=st.integers(0, 2**16))
@settings(deadline=None, max_examples=20)
def test_squared_norms_are_summed_in_double_precision(form, sizes, dtype, seed) -> None:
    tensors = shards(sizes, dtype, seed)
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
    x, d = shards(sizes, dtype, seed), shards(sizes, dtype, seed + 1)
    ratios = torch.rand(len(sizes), dtype=dtype, generator=torch.Generator().manual_seed(seed))
    factors = ratios if with_ratios else torch.ones_like(ratios)
    expected = [adamw.decoupled_step(a, b * r, lr, decay) for a, b, r in zip(x, d, factors, strict=True)]
    fields, scalars = {"param": x, "grad": d}, Scalars(lr=lr, weight_decay=decay)
    form.run(Pass("step", fields, scalars, ratios if with_ratios else None))
    assert_lists_close(x, expected, dtype)


@pytest.mark.parametrize("module", [native, triton], ids=["native", "triton"])
def test_all_forms_take_the_same_arguments(module) -> None:
    for name in forms.FORMS:
        own, general = (inspect.signature(getattr(form, name)).parameters.values() for form in (module, foreach))
        assert [(p.name, p.kind, p.default) for p in own] == [(p.name, p.kind, p.default) for p in general], name


def test_sonew_takes_the_same_arguments_everywhere() -> None:
    cuda = pytest.importorskip("rankwise.sonew.cuda")
    own, general = (
        [(p.name, p.kind) for p in inspect.signature(form).parameters.values()]
        for form in (cuda.sonew_directions, native_sonew.sonew_directions)
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
        assert directions_for(cpu, torch.float32, 1) is None
    assert directions_for(cpu, torch.float32, 1) is native_sonew.sonew_directions
    assert directions_for(cpu, torch.bfloat16, 1) is None


@FORMS
def test_references_of_fewer_digits_are_rounded_to_the_nearest(form: ModuleType) -> None:
    """As torch rounds, ties and what is not finite included; what is compared is what was kept."""
    numbers = [0.0, -0.0, 1.0, 1.0 + 2**-8, 1.0 + 3 * 2**-8, 1e-40, 3.4e38, torch.inf, -torch.inf, torch.nan]
    grad = torch.cat([torch.tensor(numbers), torch.randn(100, generator=torch.Generator().manual_seed(0))])
    kept, momentum = torch.full((110,), 0.3, dtype=torch.bfloat16), torch.zeros(110)
    reference = LowPrecisionRuns([kept], [], [0], [1])
    corrected = grad + 0.5 * (grad - kept.float())
    found = form.squared_norms([grad[10:]], LowPrecisionRuns([kept[10:]], [], [0], [1]), 0.5)
    torch.testing.assert_close(found[0], corrected[10:].double().square().sum(), rtol=1e-6, atol=0.0)
    fields = {"grad": [grad], "exp_avg": [momentum], "reference": reference}
    form.run(Pass("momentum", fields, Scalars(betas=(0.9, 0.0), k=0.5, advance=True)))
    torch.testing.assert_close(momentum, 0.1 * corrected, rtol=1e-5, atol=1e-7, equal_nan=True)
    assert torch.equal(kept.view(torch.int16)[:-101], grad.bfloat16().view(torch.int16)[:-101])
    torch.testing.assert_close(kept, grad.bfloat16(), rtol=0.0, atol=0.0, equal_nan=True)
