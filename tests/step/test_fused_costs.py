"""What dividing a fused weight costs and saves, counted by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fused_networks import CASES, LAYERS, Network, build, train
from torch import nn

from rankwise import MARS, MKOR
from rankwise.estimate import estimate

WIDTH = 24
WHOLE = {"blocks": {"*": "none"}}


def joined(**options: Any) -> tuple[MKOR, Any]:
    """MKOR on a projection to queries, keys and values of equal widths, stepped once."""
    network = nn.Sequential(nn.Linear(WIDTH, 3 * WIDTH))
    optimizer = MKOR(network.named_parameters(), factor_dtype="float32", **options)
    optimizer.capture(network)
    network(torch.randn(5, WIDTH)).square().mean().backward()
    optimizer.step()
    (unit,) = optimizer.planned_units
    assert unit.exchange is not None
    return optimizer, unit.exchange.owned()[0]


def test_mkor_keeps_and_computes_less() -> None:
    """With square factors; windows of vectors take as much of the parts as of the whole."""
    whole, task = joined(rule="ema")
    # A factor of all outputs, and one of the inputs with the bias's column; their products with the gradient.
    inputs, outputs = WIDTH + 1, 3 * WIDTH
    failures = 4
    assert whole.state_bytes()["matrix"] == 4 * (outputs**2 + inputs**2) + failures
    assert task.cost == 2 * outputs * inputs * (outputs + inputs)
    divided, own = joined(rule="ema", blocks={"0.weight": "qkv"})
    assert divided.state_bytes()["matrix"] == 4 * (3 * WIDTH**2 + inputs**2) + failures
    assert own.cost == 3 * 2 * WIDTH * inputs * (WIDTH + inputs)
    # 72^2 + 25^2 = 5809 numbers have become 2353, and 349,200 operations 176,400.
    assert (4 * 2353 + failures, own.cost) == (divided.state_bytes()["matrix"], 176_400)
    assert joined()[1].cost == joined(blocks={"0.weight": "qkv"})[1].cost == 8 * 352 * outputs * inputs


@pytest.mark.parametrize("case", [case for case in CASES if not case.startswith("ldadam")])
@pytest.mark.parametrize("stage", [0, 3])  # where what owners are sent does not depend on who they are
def test_no_more_is_sent(case: str, stage: int) -> None:
    """The elements of a weight travel as before; MARS adds a number for each block to the sums of norms."""
    found = []
    for options in ({}, WHOLE):
        ranks = estimate(build(case, Network(torch.float64, True), **options), world=4, stage=stage)
        found.append([rank.bytes_sent + rank.periodic_bytes / rank.period for rank in ranks])
    blocks = sum(len(layer.rows) for layer in LAYERS.values()) - len(LAYERS)
    sums = 8 * blocks * case.startswith("mars")
    assert sum(found[0]) <= sum(found[1]) + 4 * sums


def blocks_of(name: str) -> list[str]:
    """The parts of a layer; their heads by number; of all experts of a stack together."""
    parts = LAYERS[name].rows
    if LAYERS[name].experts:
        return [*dict.fromkeys(part[:-1] for part in parts)]
    return [f"{part[:-1]}.{part[-1]}" for part in parts] if name.endswith("_heads") else [*parts]


@pytest.mark.parametrize("case", CASES)
def test_estimates_are_what_is_kept(case: str) -> None:
    network = Network(torch.float64, True)
    optimizer = build(case, network)
    (rank,) = estimate(optimizer, world=1, stage=0)
    train(network, optimizer, 1)
    assert rank.matrix_state_bytes == optimizer.state_bytes()["matrix"]
    lines = optimizer.explain()
    held = optimizer.state_bytes()
    assert sum(line.state_bytes for line in lines) == held["element"] + held["matrix"]
    names = [line.name for line in lines]
    for name, layer in LAYERS.items():
        whole = layer.experts and case.startswith("mkor")  # it takes the backend
        expected = [f"{name}.weight"] if whole else [f"{name}.weight[{block}]" for block in blocks_of(name)]
        assert [own for own in names if own.startswith(f"{name}.weight")] == expected
    assert all(line.owner == 0 for line in lines if line.rule == "matrix")


def test_blocks_keep_states_as_their_weight_does() -> None:
    """Codes are for parameters of many elements, which none of the blocks has."""
    network = nn.Sequential(nn.Linear(48, 3 * 48, bias=False))
    blocks = {"0.weight": "qkv"}
    optimizer = MARS(network.named_parameters(), variant="muon", blocks=blocks, state_dtype="int8")
    (rank,) = estimate(optimizer, world=1, stage=0)
    network(torch.randn(5, 48)).square().mean().backward()
    optimizer.step()
    assert rank.element_state_bytes == optimizer.state_bytes()["element"] < 4 * 3 * 48**2
