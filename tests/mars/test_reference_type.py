"""``reference_dtype``: the previous gradient with fewer digits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rankwise import MARS


def _optimizer(dtype: str | None, weights: Tensor | None = None, **options: Any) -> tuple[Tensor, MARS]:
    start = torch.randn(6, 5, generator=torch.Generator().manual_seed(0)) if weights is None else weights.clone()
    weight = torch.nn.Parameter(start)
    return weight, MARS([("linear.weight", weight)], lr=0.01, reference_dtype=dtype, clip=1e6, **options)


def _step(weight: Tensor, optimizer: MARS, step: int) -> None:
    weight.grad = torch.randn(6, 5, generator=torch.Generator().manual_seed(1 + step))
    optimizer.step()


@pytest.mark.parametrize("variant", ["adamw", "lion", "shampoo", "muon"])
def test_the_gradient_before_is_rounded_and_nothing_else(variant: str) -> None:
    options = {"variant": variant, "ns_dtype": "float32"}
    (weight, optimizer), (other, exact) = _optimizer("bfloat16", **options), _optimizer(None, **options)
    for step in range(4):
        if step:
            exact.state[other]["reference"].copy_(exact.state[other]["reference"].bfloat16())
        _step(weight, optimizer, step)
        _step(other, exact, step)
    types = {name: value.dtype for name, value in optimizer.state[weight].items() if name != "step"}
    assert types.pop("reference") == torch.bfloat16 and set(types.values()) == {torch.float32}
    torch.testing.assert_close(weight, other, rtol=0.0, atol=1e-6)


@pytest.mark.parametrize(("before", "after"), [(None, "bfloat16"), ("bfloat16", None)])
def test_checkpoints_of_either_type_continue_with_the_other(before: str | None, after: str | None) -> None:
    weight, optimizer = _optimizer(before)
    for step in range(3):
        _step(weight, optimizer, step)
    following, continued = _optimizer(after, weight.detach())
    continued.load_state_dict(optimizer.state_dict())
    for step in (3, 4):
        _step(weight, optimizer, step)
        _step(following, continued, step)
    wanted = torch.float32 if after is None else torch.bfloat16
    assert continued.state[following]["reference"].dtype == wanted
    # Some of 0.2 % of the gradient, times gamma beta1 / (1 - beta1) = 0.475.
    difference = (following - weight).norm() / weight.norm()
    assert 0 < difference < 1e-4
