"""What is done to ``optimizer.state`` means for matrix states what it means for AdamW's: nothing, a fresh parameter, or
a refusal by name before anything changes.

AdamW is the judge: of every parameter it says whether it went on as if nothing had been done, as one of a fresh
optimizer, or otherwise. Gradients are given, so that no parameter depends on another.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from state_actions import ACTIONS, SHAPES, Run
from torch import Tensor

from rankwise import MARS, MKOR, LDAdam, SONew

BEFORE, AFTER = range(12), range(12, 17)

TYPES: dict[str, Callable[[Any], Any]] = {
    "MARS-AdamW": lambda p: MARS(p, lr=1e-2),
    "MARS-M": lambda p: MARS(p, lr=1e-2, variant="muon", ns_dtype="float32", clip=None),
    "SONew": lambda p: SONew(p, lr=1e-2),
    "LDAdam": lambda p: LDAdam(p, lr=1e-2, rank=4),
    "LDAdam, no feedback": lambda p: LDAdam(p, lr=1e-2, rank=4, error_feedback=False),
    "LDAdam, skips": lambda p: LDAdam(p, lr=1e-2, rank=4, skip_nonfinite=True),
    "LDAdam, codes": lambda p: LDAdam(p, lr=1e-2, rank=4, error_dtype="int8"),
    "MKOR": lambda p: MKOR(p, lr=1e-2, rule="sketch"),
    "MKOR, lamb": lambda p: MKOR(p, lr=1e-2, rule="sketch", backend="lamb", update_interval=4),
}
KEEPS_MATRICES = ("LDAdam", "MKOR")


def _adamw(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=1e-2, foreach=False)


def _label(found: Tensor, **runs: Tensor) -> str:
    return next((name for name, values in runs.items() if torch.equal(found, values)), "another")


def outcome(build: Callable[[Any], Any], action: str) -> dict[str, str] | str:
    """By parameter, how it went on after an action: "same", "fresh" or "another"; or what was raised."""
    run = Run(build).steps(BEFORE[:-2])
    run.past["state"] = copy.deepcopy(run.optimizer.state)
    run.steps(BEFORE[-2:])
    try:
        ACTIONS[action](run)
        weights = run.values()
        counts = {name: run.of(name).get("step") for name in SHAPES} if run.optimizer.state else {}
        counts = {name: float(count) for name, count in counts.items() if isinstance(count, Tensor)}
        held = run.values()
        run.steps(AFTER)
    except Exception as error:
        if "held" in locals() and build is not _adamw:
            assert all(torch.equal(held[name], value) for name, value in run.values().items()), "weights have changed"
            now = {name: float(run.optimizer.state[run.weights[name]]["step"]) for name in counts}
            assert now == counts, "steps have been counted"
        return f"{type(error).__name__}: {error}"
    fresh = Run(build)
    for name, weight in fresh.weights.items():
        weight.data.copy_(weights[name])
    # What the action itself has stepped.
    same = _undisturbed(build, tuple(run.past["extra"]) if "extra" in run.past else None)
    fresh_values = fresh.steps(AFTER).values()
    return {name: _label(value, same=same[name], fresh=fresh_values[name]) for name, value in run.values().items()}


@functools.cache
def adamws(action: str) -> dict[str, str] | str:
    """What all types are compared with."""
    return outcome(_adamw, action)


@functools.cache
def _undisturbed(build: Callable[[Any], Any], extra: tuple[str, ...] | None) -> dict[str, Tensor]:
    """The values of a run in which nothing is done to states; named parameters have taken one step more in between."""
    found = Run(build).steps(BEFORE)
    if extra is not None:
        gradients = Run(build).steps(range(99, 100))
        for name, weight in found.weights.items():
            weight.grad = gradients.weights[name].grad if name in extra else None
        found.optimizer.step()
    return found.steps(AFTER).values()


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("kind", TYPES)
def test_states_mean_what_they_mean_to_adamw(kind: str, action: str) -> None:
    wanted, found = adamws(action), outcome(TYPES[kind], action)
    if isinstance(found, str):
        # A refusal names the parameter and what can be done; nothing has changed.
        assert wanted != {name: "same" for name in SHAPES} and wanted != {name: "fresh" for name in SHAPES}, found
        assert "RuntimeError: " in found and "state" in found and "to begin afresh" in found
        assert "'a'" in found or "'bias'" in found, found
        return
    if action == "moment in bfloat16":
        # It is brought to its own type, rounded as it is.
        assert sorted(found.values()) == ["another", "same", "same", "same"]
        return
    if isinstance(wanted, str):
        # AdamW ends in an error of its own; what goes on must be one thing.
        assert set(found.values()) <= {"same", "fresh"}, (wanted, found)
        return
    for name, label in found.items():
        counts_nothing = kind == "MARS-M" and label == "same"
        assert label == wanted[name] or (action == "count set back" and counts_nothing), (wanted, found)
    # Matrix states never go on with other states than theirs.
    assert "another" not in wanted.values() or not kind.startswith(KEEPS_MATRICES), (wanted, found)
