"""Tensors and gradients of another length than was planned: refused before anything changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rankwise import MARS, LDAdam, SONew
from rankwise.layout.layout_source import LayoutSource, Slice, TensorContents

LENGTH = 128
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "mars": (MARS, {}),
    "sonew": (SONew, {}),
    "ldadam": (LDAdam, {"rank": 2}),
}


class Flat(LayoutSource):
    """Two matrices in one tensor."""

    group = None

    def contents(self, tensor: Tensor) -> TensorContents:
        return TensorContents(0, (Slice("a", 0, 64, 0), Slice("b", 0, 64, 64)))


def stepped(name: str) -> tuple[Any, nn.Parameter]:
    kind, options = KINDS[name]
    torch.manual_seed(0)
    optimizer = kind([(key, nn.Parameter(torch.randn(8, 8))) for key in "ab"], lr=1e-2, **options)
    flat = nn.Parameter(torch.randn(LENGTH))
    optimizer.param_groups[0]["params"] = [flat]
    optimizer.attach(Flat())
    flat.grad = torch.randn(LENGTH)
    optimizer.step()
    return optimizer, flat


def everything(optimizer: Any) -> list[Tensor]:
    states = [*optimizer.state.values(), *optimizer.matrix_states.values()]
    return [value.clone() for state in states for value in state.values()]


@pytest.mark.parametrize("length", [1, 100, 127, 129, 200])
@pytest.mark.parametrize("what", ["gradient", "tensor"])
@pytest.mark.parametrize("name", KINDS)
def test_no_state_changes_and_the_next_step_is_as_ever(name: str, what: str, length: int) -> None:
    optimizer, flat = stepped(name)
    twin, other = stepped(name)
    before, weight = everything(optimizer), flat.data
    assert flat.grad is not None and other.grad is not None
    flat.grad.data = torch.randn(length)
    if what == "tensor":
        flat.data = torch.randn(length)
    with pytest.raises(RuntimeError, match=f"the {what} of some parameters has {length} elements, but must have 128"):
        optimizer.step()
    flat.data, flat.grad.data = weight, other.grad.clone()
    assert all(map(torch.equal, everything(optimizer), before))
    optimizer.step()
    twin.step()
    assert torch.equal(flat, other) and all(map(torch.equal, everything(optimizer), everything(twin)))


def test_a_parameter_is_named() -> None:
    weight = nn.Parameter(torch.randn(8, 8))
    optimizer = SONew([("some.weight", weight)])
    weight.grad = torch.randn(8, 8)
    weight.grad.data = torch.randn(8, 4)
    with pytest.raises(RuntimeError, match=r"the gradient of some\.weight has 32 elements, but must have 64"):
        optimizer.step()
    assert not optimizer.state
