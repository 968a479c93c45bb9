"""LDAdam's optimizer against its rule, called in a loop: every shape, form of feedback and kernel form, to rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from rankwise import LDAdam
from rankwise.comm.owner_plan import Batch
from rankwise.ldadam.formulas import side_normalized
from rankwise.ldadam.rule import Subspace, ldadam_step
from rankwise.ldadam.subspaces import Subspaces

STEPS, RANK = 8, 3
NUMBERS = {"rho": 0.8, "eps": 1e-6, "weight_decay": 0.1}
SHAPES = {"wide": (9, 14), "tall": (15, 8), "square": (10, 10), "twin": (9, 14)}


def tensor(name: str, index: int) -> Tensor:
    """A weight (index 0) or the gradient of a step: drifting, of low rank, with noise."""
    rows, columns = SHAPES[name]
    fixed = torch.Generator().manual_seed(len(name))
    fresh = torch.Generator().manual_seed(100 * index + ord(name[1]))
    signal = torch.randn(rows, 2, dtype=torch.float64, generator=fixed) @ torch.randn(
        2, columns, dtype=torch.float64, generator=fixed
    )
    return signal + 0.5 * torch.randn(rows, columns, dtype=torch.float64, generator=fresh)


def rate(step: int) -> float:
    return 0.01 * min(step, 3) / 3


def betas(step: int, scheduled: bool) -> tuple[float, float]:
    return ((0.95, 0.9, 0.85, 0.85)[step % 4], 0.99 - 0.01 * (step % 3)) if scheduled else (0.9, 0.99)


def by_rule(name: str, scheduled: bool, feedback: bool) -> tuple[Tensor, Tensor, Subspace]:
    W = side_normalized(tensor(name, 0))
    (m, n), F, written = W.shape, torch.zeros_like(W), None
    state = Subspace(W.new_zeros(m, RANK), W.new_zeros(RANK, n), W.new_zeros(RANK, n))
    for step in range(1, STEPS + 1):
        now = betas(step, scheduled)
        numbers = {**NUMBERS, "lr": rate(step), "betas": now, "error_feedback": feedback, "written_beta1": written}
        W, F, state = ldadam_step(W, side_normalized(tensor(name, step)), F, state, step, **numbers)
        written = now[0]
    return W, F, state


def by_optimizer(scheduled: bool, feedback: bool) -> tuple[dict[str, Tensor], Any]:
    weights = {name: tensor(name, 0).requires_grad_() for name in SHAPES}
    optimizer = LDAdam(weights.items(), lr=0.01, rank=RANK, error_feedback=feedback, **NUMBERS)
    for step in range(1, STEPS + 1):
        optimizer.param_groups[0].update(lr=rate(step), betas=betas(step, scheduled))
        for name, weight in weights.items():
            weight.grad = tensor(name, step)
        optimizer.step()
    return weights, optimizer


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("feedback", [True, False])
@pytest.mark.parametrize("scheduled", [False, True])
def test_the_optimizer_follows_the_rule(scheduled: bool, feedback: bool) -> None:
    weights, optimizer = by_optimizer(scheduled, feedback)
    assert {row.rule for row in optimizer.explain()} == {"matrix"}
    for name, weight in weights.items():
        W, F, state = by_rule(name, scheduled, feedback)
        kept = optimizer.matrix_states[name]
        pairs = [(side_normalized(weight.detach()), W), (kept["exp_avg"], state.M), (kept["exp_avg_sq"], state.V)]
        pairs += [(kept["basis"], state.U)]
        if feedback:
            pairs += [(side_normalized(optimizer.state[weight]["error"]), F)]
        for found, wanted in pairs:
            assert (found - wanted).norm() <= 1e-12 * wanted.norm(), name
        assert (W - side_normalized(tensor(name, 0))).abs().max() > 1e-3


def test_matrices_that_travelled_together_are_taken_apart_on_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """They round as they do where they lie whole."""
    named = [(f"{index}.weight", Parameter(tensor("wide", index).float())) for index in range(3)]
    optimizer = LDAdam(named, rank=RANK)
    for index, (_, weight) in enumerate(named):
        weight.grad = tensor("wide", index + 1).float()
    optimizer.step()
    (unit,) = optimizer.planned_units
    tasks = unit.exchange.owned()
    sizes, advance = [], Subspaces.advance
    monkeypatch.setattr(
        Subspaces, "advance", lambda self, own, stack: sizes.append(len(own)) or advance(self, own, stack)
    )
    stack = torch.stack([tensor("wide", index).float().view(-1) for index in range(3)])
    optimizer._matrix_rule(unit, []).update(Batch(tasks[0].signature, tuple(tasks)), tasks, stack)
    assert sizes == [1, 1, 1]
