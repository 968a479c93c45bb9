"""``split_heads`` divides every fused attention into its heads, as ``"blocks": {...: "heads"}`` does some."""

from __future__ import annotations

import pytest
import torch
from fused_networks import CASES, LAYERS, Network, build, distance, train

STEPS = 4
RULES = ("mars-shampoo", "mars-m", "ldadam", "mkor")
# Megatron's groups stay three matrices, as they are without the option.
WHOLE = {"groups.weight": {"q": 12, "k": 3, "v": 3, "groups": 2}}
DIVIDED = {name for name in LAYERS if name.endswith("_heads")}


@pytest.mark.parametrize("case", RULES)
@pytest.mark.parametrize("split", [True, False], ids=["heads", "parts"])
def test_heads_are_apart(case: str, split: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the option the trajectory leaves the twin's."""
    kind, options = CASES[case]
    monkeypatch.setitem(CASES, f"{case} split", (kind, {**options, "blocks": WHOLE, "split_heads": split}))
    network = Network(torch.float64, True)
    optimizer = build(f"{case} split", network)
    assert ("grouped_heads.weight[q.3]" in {line.name for line in optimizer.explain()}) == split
    found = distance(train(network, optimizer, STEPS), case, torch.float64, STEPS)
    left = set() if split else DIVIDED
    assert all(found[f"{name}.weight"] > 1e-5 for name in left), found
    assert max(value for name, value in found.items() if name.partition(".")[0] not in left) < 1e-10, found
