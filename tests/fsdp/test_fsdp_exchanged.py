"""Frameworks that shard a model after its optimizer was built, and put the new parameters into the param groups."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import run_ranks
from sharded_models import CLASSES, SETTINGS, Network, Run
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from rankwise import MARS, LDAdam
from rankwise.options.validation import OptionError


def exchange(optimizer: Any, model: nn.Module, shard: Callable[[], Any]) -> Any:
    """As accelerate does: every parameter's successor by name, in the place of the parameter."""
    before = {id(parameter): name for name, parameter in model.named_parameters()}
    names = [[before[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]
    found = shard()
    after = dict(model.named_parameters())
    for group, own in zip(optimizer.param_groups, names, strict=True):
        group["params"] = [after[name] for name in own]
    return found


class Late(Run):
    """Sharded after its optimizer was built, and the model captured."""

    def __init__(self, case: str, setting: str, **options: Any) -> None:
        super().__init__(case, **options)
        chosen = SETTINGS[setting]
        shard = lambda: chosen.shard(self.model, chosen.world)  # noqa: E731
        self.part, self.parts = exchange(self.optimizer, self.model, shard)


def _trained(rank: int, world: int, cases: list[str], setting: str) -> dict[str, bool]:
    """Bitwise as where the optimizer was built on the sharded model."""
    found = {}
    for case in cases:
        late, early = Late(case, setting).train(4), Run(case, setting).train(4)
        expected = early.weights()
        found[case] = all(torch.equal(value, expected[name]) for name, value in late.weights().items())
        states = [get_optimizer_state_dict(run.model, run.optimizer)["state"] for run in (late, early)]
        found[case] &= {name: list(state) for name, state in states[0].items()} == {
            name: list(state) for name, state in states[1].items()
        }
        reports = [list(map(str, run.optimizer.explain())) for run in (late, early)]
        found[case] &= reports[0] == reports[1]
    return found


@pytest.mark.parametrize(
    ("setting", "cases"),
    [
        ("rows-2", ["mars-adamw", "mars-m", "sonew", "ldadam", "mkor-h"]),
        pytest.param("rows-3", list(CLASSES), marks=pytest.mark.exhaustive),
        pytest.param("hybrid-4", list(CLASSES), marks=pytest.mark.exhaustive),
    ],
)
def test_new_parameters_stand_for_the_old_ones(setting: str, cases: list[str]) -> None:
    for found in run_ranks(SETTINGS[setting].world, _trained, cases, setting):
        assert found == dict.fromkeys(cases, True)


def _asked_first(rank: int, world: int) -> bool:
    """Reports, dictionaries and captures between the exchange and the first step know the new parameters, too."""
    runs = [Late("mkor", "rows-2") for _ in range(3)] + [Run("mkor", "rows-2")]
    runs[0].optimizer.explain()
    runs[1].optimizer.load_state_dict(runs[1].optimizer.state_dict())
    runs[2].optimizer.capture(runs[2].model)
    weights = [run.train(3).weights() for run in runs]
    return all(torch.equal(other[name], value) for name, value in weights[3].items() for other in weights[:3])


def _without_copies(rank: int, world: int) -> bool:
    """Of the old parameters nothing is kept once a step was taken."""
    run = Run("mkor")
    old = [weakref.ref(parameter) for parameter in run.model.parameters()]
    exchange(run.optimizer, run.model, lambda: SETTINGS["rows-2"].shard(run.model, world))
    run.train(1)
    return all(reference() is None for reference in old)


@pytest.mark.parametrize("check", [_asked_first, _without_copies], ids=lambda check: check.__name__)
def test_holds_on_all_ranks(check: Callable[[int, int], bool]) -> None:
    assert all(run_ranks(2, check))


# --- what is refused --------------------------------------------------------------------------------------------------


def _in_other_places(world: int) -> None:
    model = Network()
    optimizer = MARS(model.named_parameters(), lr=1e-2)
    exchange(optimizer, model, lambda: SETTINGS["rows-2"].shard(model, world))
    weights = optimizer.param_groups[0]["params"]
    at = [id(parameter) for parameter in weights]
    first, second = (at.index(id(layer.up.weight)) for layer in model.layers)
    weights[first], weights[second] = weights[second], weights[first]
    _step(model, optimizer)


def _of_other_shapes(world: int) -> None:
    model = Network()
    optimizer = MARS(model.named_parameters(), lr=1e-2)
    exchange(optimizer, model, lambda: SETTINGS["rows-2"].shard(model, world))
    optimizer.param_groups[0]["params"].reverse()
    _step(model, optimizer)


def _after_a_step(world: int) -> None:
    model = Network()
    optimizer = LDAdam(model.named_parameters(), lr=1e-2, rank=3)
    _step(model, optimizer)
    exchange(optimizer, model, lambda: SETTINGS["rows-2"].shard(model, world))
    _step(model, optimizer)


def _after_loading(world: int) -> None:
    saved = Run("ldadam").train(2).optimizer.state_dict()
    run = Run("ldadam")
    run.optimizer.load_state_dict(saved)
    exchange(run.optimizer, run.model, lambda: SETTINGS["rows-2"].shard(run.model, world))
    run.step()


def _cut_among_ranks_that_share_layers(world: int) -> None:
    run = Run("mkor")
    exchange(run.optimizer, run.model, lambda: SETTINGS["tensor-2"].shard(run.model, world))
    run.step()


def _step(model: nn.Module, optimizer: Any) -> None:
    model(torch.arange(6)).sum().backward()
    optimizer.step()


def _refusal(rank: int, world: int, attempt: Callable[[int], Any]) -> str:
    with pytest.raises((OptionError, RuntimeError)) as refused:
        attempt(world)
    return str(refused.value)


@pytest.mark.parametrize(
    ("attempt", "message"),
    [
        (_in_other_places, "'layers.0.up.weight' is invalid: .* have 'layers.1.up.weight' .* build the optimizer"),
        (_of_other_shapes, "has a tensor of shape .* in the place of .* was not built on: .* build a new optimizer"),
        (_after_a_step, "sharded after the optimizer had got states, .* before the first step"),
        (_after_loading, "sharded after the optimizer had got states, .* load states after it"),
        (_cut_among_ranks_that_share_layers, "must not be cut by tensor parallelism after the capture; call"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_is_refused_on_all_ranks(attempt: Callable[[int], Any], message: str) -> None:
    for text in run_ranks(2, _refusal, attempt):
        assert re.search(message, text), text
