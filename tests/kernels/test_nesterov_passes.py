"""Momentum with a share of the gradient, written or stepped along, in every form of the passes and in float64."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from torch import Tensor

from rankwise.kernels import lists, native, triton
from rankwise.kernels.passes import FIELDS, Pass, Rule, Scalars

LR, DECAY, BETA = 0.05, 0.8, 0.9
LENGTHS = (1, 7, 0, 33, 5000, 20000)
FORMS = pytest.mark.parametrize(
    "form",
    [lists, pytest.param(native, marks=pytest.mark.compiled), triton],
    ids=["lists", "native", "triton"],
)


def _fields(rule: Rule, dtype: torch.dtype) -> dict[str, list[Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return {name: [torch.randn(size, generator=generator).to(dtype) for size in LENGTHS] for name in FIELDS[rule]}


def _prepare(form: ModuleType, dtype: torch.dtype, request: pytest.FixtureRequest) -> None:
    if form is triton:
        if dtype is torch.float64:
            pytest.skip("these kernels are in float32")
        pytest.importorskip("triton")
        request.getfixturevalue("interpreter")


@FORMS
@pytest.mark.parametrize("rule", ["nesterov", "lion"])
@pytest.mark.parametrize(("share", "scaled"), [(0.0, False), (0.1, False), (0.7, True), (1.0, False)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["f32", "f64"])
def test_a_share_of_the_gradient(
    form: ModuleType, rule: Rule, share: float, scaled: bool, dtype: torch.dtype, request: pytest.FixtureRequest
) -> None:
    _prepare(form, dtype, request)
    fields = _fields(rule, dtype)
    factors = torch.linspace(0.5, 1.0, len(LENGTHS), dtype=dtype) if scaled else None
    own = {name: [tensor.double() for tensor in tensors] for name, tensors in fields.items()}
    grads = [g * (1.0 if factors is None else float(factors[at])) for at, g in enumerate(own["grad"])]
    averages = [BETA * m + (1 - BETA) * g for m, g in zip(own["exp_avg"], grads, strict=True)]
    ahead = [(1 - share) * m + share * g for m, g in zip(averages, grads, strict=True)]
    if rule == "lion":
        changed = [(1 - LR * DECAY) * x - LR * d.sign() for x, d in zip(own["param"], ahead, strict=True)]
    else:
        changed = ahead
    scalars = Scalars(lr=LR, betas=(BETA, 0.0), weight_decay=DECAY if rule == "lion" else 0.0, nesterov=share)
    form.run(Pass(rule, fields, scalars, factors))
    tolerance = 1e-14 if dtype == torch.float64 else 2e-6
    for name, expected in (("exp_avg", averages), ("param", changed), ("grad", own["grad"])):
        for found, wanted in zip(fields[name], expected, strict=True):
            torch.testing.assert_close(found.double(), wanted, rtol=tolerance, atol=tolerance)


@FORMS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["f32", "f64"])
def test_it_may_be_written_over_the_gradient(
    form: ModuleType, dtype: torch.dtype, request: pytest.FixtureRequest
) -> None:
    _prepare(form, dtype, request)
    apart, over = _fields("nesterov", dtype), _fields("nesterov", dtype)
    over["param"] = over["grad"]
    for fields in (apart, over):
        form.run(Pass("nesterov", fields, Scalars(betas=(BETA, 0.0), nesterov=0.3)))
    for name in ("exp_avg", "param"):
        assert all(map(torch.equal, over[name], apart[name]))


@FORMS
def test_without_a_share_it_is_the_momentum_even_where_that_is_infinite(
    form: ModuleType, request: pytest.FixtureRequest
) -> None:
    _prepare(form, torch.float32, request)
    fields = _fields("nesterov", torch.float32)
    fields["grad"][1][2] = torch.inf
    form.run(Pass("nesterov", fields, Scalars(betas=(BETA, 0.0))))
    assert all(map(torch.equal, fields["param"], fields["exp_avg"])) and fields["param"][1][2] == torch.inf
