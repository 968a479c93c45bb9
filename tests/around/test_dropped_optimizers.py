"""An optimizer that nobody has any more is gone with its states, though the model lives on; as torch's are."""

from __future__ import annotations

import copy
import gc
import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from surrounded_runs import FORMS, TYPES, Run, same_bits
from torch import nn

from rankwise.hf import CapturingMKOR

_USUAL = ("MARS-M", "LDAdam", "MKOR")
"""Types that are tried by default; the others are exhaustive."""


def dropped(live: Run) -> list[weakref.ref[Any]]:
    """The run's optimizer, and all states that it has; its users hold it no more."""
    optimizer: Any = live.__dict__.pop("optimizer")
    states = [value for state in optimizer.state.values() for value in state.values()]
    matrices = [value for state in optimizer.matrix_states.everything().values() for value in state.values()]
    return [weakref.ref(found) for found in (optimizer, *states, *matrices)]


@pytest.mark.parametrize(
    "kind", [kind if kind in _USUAL else pytest.param(kind, marks=pytest.mark.exhaustive) for kind in TYPES]
)
def test_states_are_freed(kind: str) -> None:
    live = Run(TYPES[kind], FORMS["compiled"], nullcontext)
    for index in range(2):
        live.step(index)
    found = dropped(live)
    gc.collect()
    assert len(found) > 4 and not any(reference() is not None for reference in found)
    # A forward and a backward pass are the model's alone now.
    live.model(torch.ones(8, 64)).sum().backward()


@pytest.mark.parametrize("kind", ["MKOR-H"])
def test_another_one_begins_on_the_same_model(kind: str) -> None:
    """Its hooks come beside those of the first, which hear no more: also where a copy of the model has them."""

    def trained(before: bool) -> Any:
        live = Run(TYPES[kind], FORMS["compiled"], nullcontext)
        weights = copy.deepcopy(live.model.state_dict())
        if before:
            live.step(0)
            live.model.load_state_dict(weights)
            live.model.zero_grad()
            dropped(live)
            gc.collect()
            live.optimizer = live.built()
        for index in range(3):
            live.step(index)
        return live.left()

    assert same_bits(trained(True), trained(False)) == []


class Model(nn.Module):
    """Returns its loss, as models of Hugging Face do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, values: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.layer(values).square().mean()}


def test_the_trainer_s_is_freed_too() -> None:
    model = Model()
    optimizer = CapturingMKOR(model.named_parameters(), model, lr=1e-2, hybrid=True)
    for _ in range(2):
        model(torch.ones(2, 8))["loss"].backward()
        assert len(optimizer.switch.losses._losses) == 1
        optimizer.step()
        optimizer.zero_grad()
    found = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert found() is None
    model(torch.ones(2, 8))["loss"].backward()
