"""Cautious decay (arXiv 2510.12402, Algorithm 1) in every form of the passes, against the formula in float64."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from rankwise.kernels import lists, native, triton
from rankwise.kernels.passes import FIELDS, Pass, Rule, Scalars

LR, DECAY, BETAS, EPS, STEP, K = 0.05, 0.8, (0.9, 0.97), 1e-6, 3, 0.4
LENGTHS = (1, 7, 0, 33, 5000)
RULES: tuple[Rule, ...] = ("step", "lion", "adamw")
FORMS = [lists, pytest.param(native, marks=pytest.mark.compiled), triton]


def _fields(rule: Rule, dtype: torch.dtype, compared: bool) -> dict[str, list[Tensor]]:
    generator = torch.Generator().manual_seed(0)
    names = (*FIELDS[rule], *(("reference",) if compared else ()))
    fields = {name: [torch.randn(size, generator=generator).to(dtype) for size in LENGTHS] for name in names}
    for square in fields.get("exp_avg_sq", ()):
        square.square_()
    for param, grad in zip(fields["param"], fields["grad"], strict=True):
        if len(param) < 6:
            continue
        # Zeros on either side decay; the products of these signs underflow.
        param[1:3] = 0.0
        grad[2:4] = 0.0
        param[4:6] = torch.tensor([1e-30, -1e-30])
        grad[4:6] = torch.tensor([-1e-30, -1e-30])
    return fields


def _expected(rule: Rule, fields: dict[str, list[Tensor]], factors: list[float]) -> list[Tensor]:
    found = []
    for place, factor in enumerate(factors):
        own = {name: tensors[place].double() for name, tensors in fields.items()}
        grad, param = own["grad"], own["param"]
        value = factor * (grad + K * (grad - own["reference"]) if "reference" in own else grad)
        direction = value
        if rule != "step":
            direction = BETAS[0] * own["exp_avg"] + (1 - BETAS[0]) * value
        if rule == "lion":
            direction = direction.sign()
        if rule == "adamw":
            second = BETAS[1] * own["exp_avg_sq"] + (1 - BETAS[1]) * value**2
            direction = (direction / (1 - BETAS[0] ** STEP)) / ((second / (1 - BETAS[1] ** STEP)).sqrt() + EPS)
        aligned = (direction.sign() * param.sign() >= 0).double()
        found.append(param - LR * DECAY * aligned * param - LR * direction)
    return found


@pytest.mark.parametrize("form", FORMS, ids=["lists", "native", "triton"])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    ("compared", "scaled", "tensor_lr"), [(False, False, False), (True, True, False), (True, True, True)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["f32", "f64"])
def test_opposed_elements_do_not_decay(
    form: ModuleType,
    rule: Rule,
    compared: bool,
    scaled: bool,
    tensor_lr: bool,
    dtype: torch.dtype,
    request: pytest.FixtureRequest,
) -> None:
    if form is triton:
        if dtype is torch.float64:
            pytest.skip("these kernels are in float32")
        pytest.importorskip("triton")
        request.getfixturevalue("interpreter")
    fields = _fields(rule, dtype, compared)
    factors = torch.linspace(0.0, 1.0, len(LENGTHS), dtype=dtype) if scaled else None
    expected = _expected(rule, fields, [1.0] * len(LENGTHS) if factors is None else factors.tolist())
    scalars: dict[str, Any] = {"betas": BETAS, "eps": EPS, "step": STEP, "k": K, "advance": True}
    lr = torch.tensor(LR, dtype=dtype) if tensor_lr else LR
    form.run(Pass(rule, fields, Scalars(lr=lr, weight_decay=DECAY, cautious=True, **scalars), factors))
    tolerance = 1e-6 if dtype is torch.float32 else 1e-13
    for found, wanted in zip(fields["param"], expected, strict=True):
        torch.testing.assert_close(found.double(), wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("form", FORMS[:2], ids=["lists", "native"])
@pytest.mark.parametrize("rule", RULES)
def test_without_decay_caution_changes_no_bit(form: ModuleType, rule: Rule) -> None:
    found = []
    for cautious in (False, True):
        fields = _fields(rule, torch.float32, True)
        scalars = Scalars(lr=LR, betas=BETAS, eps=EPS, step=STEP, k=K, cautious=cautious)
        form.run(Pass(rule, fields, scalars))
        found.append(fields["param"])
    assert all(map(torch.equal, *found))
