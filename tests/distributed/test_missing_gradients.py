"""Replicas without a gradient for some parameters do what one process does: leave them alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import once, run_ranks
from simulated import CASES, Framework, world_group
from torch import Tensor

CHECKED = (
    "mars-adamw",
    "mars-muon",
    "mars-muon-unclipped",
    "sonew-1-row-adam",
    "ldadam-ef",
    "ldadam-plain",
    "mkor-official-adamw",
    "mkor-ema-lamb",
)
FROZEN = ("d.weight", "d.bias")
MATRICES = ("a.weight", "b.weight", "c.weight", "d.weight", "unused.weight", "experts")
# At the third step no matrix has a gradient, so that no owner has anything to compute.
ABSENT = {0: ("c.weight", "norm"), 2: MATRICES, 3: ("c.weight", "experts")}


class _Outcome:
    def __init__(self, framework: Framework) -> None:
        named = dict(framework.model.named_parameters())
        self.weights = {name: parameter.detach().clone() for name, parameter in named.items()}
        states = framework.optimizer.state
        self.counts = {name: int(states[p]["step"]) for name, p in named.items() if p in states}
        self.states = {
            f"{name}/{key}": value
            for name, parameter in named.items()
            for key, value in states.get(parameter, {}).items()
        }
        self.matrices: dict[str, dict[str, Tensor]] = dict(framework.optimizer.matrix_states)


def _train(case: str, rank: int, world: int) -> _Outcome:
    framework = Framework("replicated", CASES[case], torch.float64, rank, world, world_group())
    optimizer, named = framework.optimizer, dict(framework.model.named_parameters())
    for name in FROZEN:
        named[name].requires_grad_(False)
    step = optimizer.step

    def without_some() -> None:
        for name in (*FROZEN, *ABSENT.get(framework.count, ())):
            named[name].grad = None
        step()

    optimizer.step = without_some  # type: ignore[assignment, method-assign]
    for _ in range(6):
        framework.step()
    return _Outcome(framework)


def _train_all(rank: int, world: int) -> dict[str, _Outcome]:
    return {case: _train(case, rank, world) for case in CHECKED}


@once
def _outcomes() -> tuple[dict[str, _Outcome], list[dict[str, _Outcome]]]:
    return _train_all(0, 1), run_ranks(2, _train_all)


@pytest.mark.parametrize("case", CHECKED)
def test_missing_gradients_leave_replicas_alone(case: str) -> None:
    alone, ranks = _outcomes()
    expected = alone[case]
    start = dict(Framework("replicated", CASES[case], torch.float64).model.named_parameters())
    change = max(float((weight - start[name]).detach().abs().max()) for name, weight in expected.weights.items())
    assert change > 1e-3
    matrices: dict[str, Any] = {}
    for outcome in (rank[case] for rank in ranks):
        assert all(torch.equal(outcome.weights[name], start[name]) for name in FROZEN)
        assert outcome.counts == expected.counts and not set(FROZEN) & set(outcome.counts)
        for name, weight in outcome.weights.items():
            assert float((weight - expected.weights[name]).abs().max()) <= 1e-10 * change, name
        assert outcome.states.keys() == expected.states.keys()
        for name, value in outcome.states.items():
            assert torch.allclose(value, expected.states[name], rtol=1e-9, atol=1e-9), name
        assert not matrices.keys() & outcome.matrices.keys()
        matrices.update(outcome.matrices)
    assert matrices.keys() == expected.matrices.keys()
    for key, state in matrices.items():
        for name, value in state.items():
            assert torch.allclose(value, expected.matrices[key][name], rtol=1e-9, atol=1e-9), f"{key}/{name}"
