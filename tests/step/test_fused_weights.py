"""A network with fused weights follows its twin with a weight for each matrix."""

from __future__ import annotations

import pytest
import torch
from fused_networks import CASES, LAYERS, Network, build, distance, train

from rankwise.routing.fused import Fused

STEPS = 5


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["f64", "f32"])
@pytest.mark.parametrize("case", CASES)
def test_fused_is_apart(case: str, dtype: torch.dtype) -> None:
    network = Network(dtype, True)
    optimizer = build(case, network)
    found = distance(train(network, optimizer, STEPS), case, dtype, STEPS)
    assert max(found.values()) < (1e-10 if dtype is torch.float64 else 1e-6), found


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", LAYERS)
def test_another_table_is_noticed(case: str, name: str) -> None:
    """Two parts change their sizes, or all rows are one matrix: the trajectory leaves the twin's."""
    known = LAYERS[name].fused
    (first, one), (second, other), *rest = known.parts
    changed = ((first, other), (second, one)) if one != other else ((first, one * known.groups + 1),)
    if one == other:
        left = known.length - changed[0][1]
        mutated = Fused((*changed, (second, left)), known.dim)
    else:
        mutated = Fused((*changed, *rest), known.dim, known.groups)
    network = Network(torch.float64, True, {**{n: layer.fused for n, layer in LAYERS.items()}, name: mutated})
    found = distance(train(network, build(case, network), STEPS), case, torch.float64, STEPS)
    assert found.pop(f"{name}.weight") > 1e-5
    assert max(value for own, value in found.items() if not own.startswith(f"{name}.")) < 1e-10
