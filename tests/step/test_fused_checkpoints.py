"""Checkpoints of fused weights: states by block, and what goes on where weights are divided otherwise."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from fused_networks import CASES, LAYERS, Network, as_fused, build, train
from saved_files import through_a_file

F64 = torch.float64
WHOLE = {"blocks": {"*": "none"}}
MATRIX = [case for case in CASES if not case.startswith("mars")]


def trained(case: str, steps: int = 3, **options: Any) -> tuple[Network, Any]:
    network = Network(F64, True)
    optimizer = build(case, network, **options)
    train(network, optimizer, steps)
    return network, optimizer


def reloaded(case: str, network: Network, optimizer: Any, **options: Any) -> tuple[Network, Any]:
    """A new optimizer of the same weights with the old one's states, by way of a file."""
    fresh = Network(F64, True)
    fresh.load_state_dict(network.state_dict())
    found = build(case, fresh, **options)
    found.load_state_dict(through_a_file(optimizer.state_dict()))
    return fresh, found


@pytest.mark.parametrize("case", CASES)
def test_resumed_to_the_bit(case: str) -> None:
    network, optimizer = trained(case)
    fresh, found = reloaded(case, network, optimizer)
    assert {name: value.tolist() for name, value in train(fresh, found, 3).items()} == {
        name: value.tolist() for name, value in train(network, optimizer, 3).items()
    }
    assert set(found.matrix_states) == set(optimizer.matrix_states)


def test_states_are_kept_by_block() -> None:
    _, ldadam = trained("ldadam")
    assert {key for key in ldadam.matrix_states if key.startswith("groups")} == {
        "groups.weight[q]",
        "groups.weight[k]",
        "groups.weight[v]",
    }
    assert ldadam.matrix_states["groups.weight[k]"]["basis"].shape == (6, 2)
    _, mkor = trained("mkor")
    factors = mkor.matrix_states["qkv.weight"]
    K = mkor.options.window
    assert {name: tuple(value.shape) for name, value in factors.items() if "weights" not in name} == {
        "left_vectors[q]": (K, 12),
        "left_vectors[k]": (K, 8),
        "left_vectors[v]": (K, 6),
        "right_vectors": (K, 15),  # with the bias
        "failures": (),
    }
    sides = ("left_vectors", "left_weights", "right_vectors", "right_weights")
    assert set(mkor.matrix_states["plain.weight"]) == {*sides, "failures"}


@pytest.mark.parametrize("case", MATRIX)
@pytest.mark.parametrize("divided", [True, False], ids=["to blocks", "from blocks"])
def test_other_matrices_start_afresh(case: str, divided: bool, caplog: pytest.LogCaptureFixture) -> None:
    before, after = ({}, WHOLE)[:: 1 if not divided else -1]
    network, optimizer = trained(case, **before)
    elements = {name: dict(optimizer.state[value]) for name, value in network.named_parameters()}
    with caplog.at_level(logging.WARNING, "rankwise"):
        fresh, found = reloaded(case, network, optimizer, **after)
    (message,) = [record.getMessage() for record in caplog.records if "afresh" in record.getMessage()]
    lost = "(left_vectors, left_weights)" if case.startswith("mkor") else "(basis, exp_avg, exp_avg_sq, step, beta1)"
    # Three are named; under MKOR a stack's states are by element.
    others = len(LAYERS) - 3 - case.startswith("mkor")
    assert lost in message and f" and {others} more for another" in message and "plain" not in message
    for name, value in fresh.named_parameters():
        for state, kept in elements[name].items():
            assert torch.equal(found.state[value][state], kept), (name, state)
    kept = {key: set(state) for key, state in found.matrix_states.loaded.items()}
    assert "plain.weight" in kept
    if case.startswith("mkor"):
        # All blocks see the same inputs.
        assert kept["qkv.weight"] == {"right_vectors", "right_weights", "failures"}
    else:
        assert set(kept) == {"plain.weight"}
    weights = train(fresh, found, 2)
    assert all(value.isfinite().all() for value in weights.values())
    assert any(not torch.equal(weights[name], value) for name, value in as_fused(network).items())


@pytest.mark.parametrize("case", CASES)
def test_one_matrix_keeps_its_keys(case: str) -> None:
    """What is not fused, or is said not to be, is stored as it always was."""
    _, optimizer = trained(case, **WHOLE)
    assert not optimizer.table.blocks
    for key, state in optimizer.matrix_states.items():
        assert "[" not in key or key in ("stack.weight[0]", "stack.weight[1]")
        assert all("[" not in name for name in state)
    (unit,) = optimizer.planned_units
    assert unit.entries is unit.stored_entries and unit.layout is unit.stored
