"""``split_heads`` divides every fused attention into its heads, as ``"blocks": {...: "heads"}`` does some."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fused_networks import CASES, LAYERS, Network, build, distance, train

from benchmarks.architectures import ARCHITECTURES
from rankwise import MARS, MKOR, annotate
from rankwise.launch.planning.model_shapes import CONFIGS
from rankwise.launch.planning.model_shapes import build as shaped
from rankwise.options.validation import OptionError

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


def _llama(shown: bool = True, **options: Any) -> MARS:
    model = ARCHITECTURES["Llama, Mistral"].build()
    if shown:
        annotate(model)
    return MARS(model.named_parameters(), **{"variant": "muon", "split_heads": True, **options})


def test_one_line_says_what_was_divided() -> None:
    (line,) = _llama().reports._heads()
    layers = "1 q_proj (4 of 8x32), 1 k_proj (2 of 8x32), 1 v_proj (2 of 8x32)"
    assert line == f"rankwise MARS: split_heads makes matrices of the heads of {layers}"
    (line,) = _llama(blocks={"*q_proj*": "none"}).reports._heads()
    assert line.endswith("1 v_proj (2 of 8x32), and leaves 1 q_proj undivided")
    assert not _llama(split_heads=False).reports._heads()


def test_an_option_that_divides_nothing_is_refused() -> None:
    with pytest.raises(OptionError, match=r"no weight's are; call rankwise.annotate\(model\) before"):
        _llama(shown=False)
    with pytest.raises(OptionError, match="those of 'model.layers.0.self_attn.q_proj.weight' do not"):
        _llama(blocks={"*_proj.weight": "none"})
    _llama(shown=False, blocks={"*q_proj.weight": {"q": 32, "heads": 4}})
    _llama(shown=False, variant="adamw")  # heads make no difference to it


def test_mkor_learns_of_heads_when_it_is_shown_the_model() -> None:
    model = ARCHITECTURES["Llama, Mistral"].build()
    optimizer = MKOR(model.named_parameters(), split_heads=True)
    optimizer.capture(model)
    assert [each for each in optimizer.explain() if "q_proj.weight[q.3]" in each.name]
    other = torch.nn.Sequential(torch.nn.Linear(32, 32))
    with pytest.raises(OptionError, match="no weight's are"):
        MKOR(other.named_parameters(), split_heads=True).capture(other)


def test_keys_and_values_of_a_head_may_stay_together() -> None:
    model = ARCHITECTURES["DeepSeek-V3, Kimi K2"].build()
    annotate(model)
    optimizer = MARS(model.named_parameters(), variant="muon", blocks={"*.kv_b_proj.weight": "groups"})
    lines = [each for each in optimizer.explain() if "layers.0.self_attn.kv_b_proj" in each.name]
    assert [(each.name.partition("[")[2], each.shape) for each in lines] == [
        (f"kv.{head}]", (14, 8)) for head in range(4)
    ]
    with pytest.raises(OptionError, match="the attention heads in 'model.layers.0.self_attn.q_b_proj.weight' must be"):
        MARS(model.named_parameters(), variant="muon", blocks={"*.q_b_proj.weight": "groups"})


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("qwen3-8b", "36 q_proj (32 of 128x4096), 36 k_proj (8 of 128x4096), 36 v_proj (8 of 128x4096)"),
        ("gpt-oss-20b", "24 q_proj (64 of 64x2880), 24 k_proj (8 of 64x2880), 24 v_proj (8 of 64x2880)"),
        ("deepseek-v3", "61 q_b_proj (128 of 192x1536), 61 kv_b_proj (256 of 128x512)"),
        ("kimi-k2", "61 q_b_proj (64 of 192x1536), 61 kv_b_proj (128 of 128x512)"),
    ],
)
def test_shapes_of_large_models(name: str, line: str) -> None:
    assert name in CONFIGS
    model, _ = shaped(name)
    annotate(model)
    (said,) = MARS(model.named_parameters(), variant="muon", split_heads=True).reports._heads()
    assert said.endswith(line)
