"""What users do with an optimizer besides steps: on three ranks, whose parts are uneven, as in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from ranks import run_ranks
from sharded_models import CLASSES, Run
from torch import Tensor

STEPS = 3
F64 = torch.float64
CASES = ("mars-m", "sonew-4", "ldadam")
Weights = dict[str, Tensor]


def _frozen_on_the_way(case: str, setting: str | None) -> Weights:
    run = Run(case, setting, F64).train(STEPS)
    layer = run.model.layers[0]
    for parameter in layer.parameters():
        parameter.requires_grad_(False)
    run.train(STEPS)
    for parameter in layer.parameters():
        parameter.requires_grad_(True)
    return run.train(STEPS).weights()


def _group_added_later(case: str, setting: str | None) -> Weights:
    run = Run(case, setting, F64)
    kind, options = CLASSES[case]
    late = list(run.model.layers[1].named_parameters(prefix="layers.1"))
    first = [(name, value) for name, value in run.model.named_parameters() if not name.startswith("layers.1")]
    given = {**options, **({"ns_dtype": "float64"} if "ns_dtype" in options else {})}
    run.optimizer = kind(first, lr=1e-2, **given)
    run.train(STEPS)
    for _, value in late:
        value.grad = None
    run.optimizer.add_param_group({"params": late, "lr": 5e-3})
    return run.train(STEPS).weights()


def _two_optimizers(case: str, setting: str | None) -> Weights:
    run = Run(case, setting, F64)
    kind, options = CLASSES[case]
    given = {**options, **({"ns_dtype": "float64"} if "ns_dtype" in options else {})}
    named = list(run.model.named_parameters())
    apart = [("layers.0" in name) for name, _ in named]
    halves = [[pair for pair, own in zip(named, apart, strict=True) if own is wanted] for wanted in (True, False)]
    optimizers = [kind(half, lr=1e-2, **given) for half in halves]
    for _ in range(2 * STEPS):
        run.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        run.count += 1
    return run.weights()


def _copied(case: str, setting: str | None) -> Weights:
    """The copy has weights and states of its own."""
    run = Run(case, setting, F64).train(STEPS)
    other = copy.deepcopy(run.optimizer)
    for group in other.param_groups:
        for parameter in group["params"]:
            parameter.grad = parameter.detach().clone()
    other.step()
    return run.train(STEPS).weights()


def _from_adamw(case: str, setting: str | None) -> Weights:
    adamw = Run((torch.optim.AdamW, {}), setting, F64).train(STEPS)
    run = Run(case, setting, F64)
    with torch.no_grad():
        for own, parameter in zip(run.model.parameters(), adamw.model.parameters(), strict=True):
            own.copy_(parameter)
    run.optimizer.continue_from(adamw.optimizer.state_dict())
    run.count = STEPS
    return run.train(STEPS).weights()


def _rate_in_a_tensor(case: str, setting: str | None) -> Weights:
    return Run(case, setting, F64, lr=torch.tensor(1e-2, dtype=F64)).train(STEPS).weights()


HABITS: list[Callable[[str, str | None], Weights]] = [
    _frozen_on_the_way,
    _group_added_later,
    _two_optimizers,
    _copied,
    _from_adamw,
    _rate_in_a_tensor,
]


Jobs = list[tuple[Callable[[str, str | None], Weights], str]]
USUAL: Jobs = [(habit, "ldadam") for habit in (_frozen_on_the_way, _from_adamw)]


def _all(rank: int, world: int, jobs: Jobs) -> list[Weights]:
    return [habit(case, "rows-3") for habit, case in jobs]


def _check(jobs: Jobs) -> None:
    outcomes = run_ranks(3, _all, jobs)
    for at, (habit, case) in enumerate(jobs):
        expected = habit(case, None)
        for found in outcomes:
            gap = max(float((found[at][name] - value).abs().max()) for name, value in expected.items())
            assert gap <= 1e-11, (habit.__name__, case)


def test_as_in_one_process() -> None:
    _check(USUAL)


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", CASES)
def test_all_as_in_one_process(case: str) -> None:
    _check([(habit, case) for habit in HABITS])
