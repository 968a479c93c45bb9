"""SONew's directions on a device: in gradients that nobody needs, or a part at a time in memory of their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton")

from rankwise import SONew  # noqa: E402
from rankwise.kernels import triton  # noqa: E402
from rankwise.kernels.dispatch import using  # noqa: E402
from rankwise.plan import step_unit as unit  # noqa: E402
from rankwise.sonew import optimizer as module  # noqa: E402

SHAPES = ((7, 40), (30, 11), (5, 3, 20), (9, 40), (64, 2))


@pytest.fixture(autouse=True)
def on_device(monkeypatch: pytest.MonkeyPatch, interpreter: None) -> None:
    """The kernels run in the interpreter; memory is managed as on a device."""
    monkeypatch.setattr(module, "_is_on_cpu", lambda unit: False)


def trained(options: dict[str, Any], spends: bool = False, steps: int = 3, dtype: Any = None) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]
    vector = nn.Parameter(torch.randn(13, generator=generator).to(dtype))
    groups = [{"params": parameters[:3]}, {"params": [*parameters[3:], vector], "lr": 2e-3}]
    optimizer = SONew(groups, lr=1e-2, **options)
    optimizer.planner.source.spends_gradients = spends
    everything = [*parameters, vector]
    for _ in range(steps):
        given = [torch.randn(parameter.shape, generator=generator).to(dtype) for parameter in everything]
        for parameter, gradient in zip(everything, given, strict=True):
            parameter.grad = gradient.clone()
        with using(triton):
            optimizer.step()
        stayed = [torch.equal(p.grad, gradient) for p, gradient in zip(everything, given, strict=True)]
        assert all(stayed) != spends
    return [parameter.detach() for parameter in everything]


@pytest.mark.parametrize(
    "options",
    [
        {"band": 0},
        {"band": 1},
        pytest.param({"band": 4, "graft": "none"}, marks=pytest.mark.exhaustive),
        {"graft": "rmsprop"},
    ],
    ids=str,
)
@pytest.mark.parametrize("at_once", [700, *(pytest.param(few, marks=pytest.mark.exhaustive) for few in (1, 300, 640))])
def test_a_part_at_a_time(at_once: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    whole = trained(options)
    monkeypatch.setattr(unit, "AT_ONCE", at_once)
    parts: list[int] = []
    split = module._at_once

    def counted(*given: Any) -> Any:
        for some in split(*given):
            parts.append(sum(grad.numel() for bucket in some for grad in bucket.grads))
            yield some

    monkeypatch.setattr(module, "_at_once", counted)
    assert all(torch.equal(a, b) for a, b in zip(trained(options), whole, strict=True))
    assert len(parts) > 3 and max(parts) <= max(at_once, 360) and min(parts) > 0


@pytest.mark.parametrize("options", [{"band": 0}, {"band": 1}, {"band": 4, "graft": "sgd"}], ids=str)
def test_in_gradients_that_nobody_needs(options: dict[str, Any]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(trained(options, spends=True), trained(options), strict=True))


def test_copies_of_narrow_gradients_are_nobody_s(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = trained({}, dtype=torch.bfloat16)
    monkeypatch.setattr(unit, "AT_ONCE", 1)
    monkeypatch.setattr(torch, "empty_like", lambda *given, **more: pytest.fail("no memory is needed"))
    assert all(torch.equal(a, b) for a, b in zip(trained({}, dtype=torch.bfloat16), whole, strict=True))


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="this torch keeps a gradient in its tensor's type")
def test_a_gradient_in_another_type_than_its_parameter_is_no_copy() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = nn.Parameter(torch.randn(9, 40, generator=generator).bfloat16())
    weight.grad_dtype = torch.float32
    given = torch.randn(9, 40, generator=generator)
    weight.grad = given.clone()
    with using(triton):
        SONew([("weight", weight)], lr=1e-2).step()
    assert torch.equal(weight.grad, given)
