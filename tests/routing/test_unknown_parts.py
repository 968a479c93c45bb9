"""What is said of weights that look fused and are not known to be."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rankwise import MARS
from rankwise.routing.roles import ParameterInfo, Role, annotate, describe
from rankwise.routing.unknown_parts import unknown_parts


class Strange(nn.Module):
    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict({"qkv_proj": nn.Linear(8, 24), "gate_up_proj": nn.Linear(8, 16), "out": nn.Linear(8, 8)})
            for _ in range(layers)
        )


def test_one_line_for_each_kind_of_layer_with_the_pattern_to_write() -> None:
    qkv, gate = unknown_parts("MARS", describe(Strange()).values(), ())
    assert "MARS: by its name layers.0.qkv_proj.weight and 2 more (24x8) holds several" in qkv
    assert '"blocks": {"*qkv_proj*": "qkv"}' in qkv and "annotate" not in qkv
    assert '"*gate_up_proj*"' in gate


def test_what_the_user_has_said_is_not_asked_again() -> None:
    infos = list(describe(Strange(1)).values())
    assert len(unknown_parts("MARS", infos, ("*qkv_proj.weight",))) == 1
    assert unknown_parts("MARS", infos, ("*qkv*", "*gate_up*")) == []


def test_what_nobody_has_shown_is_to_be_annotated() -> None:
    (line,) = unknown_parts("MARS", [ParameterInfo("h.0.c_attn.weight", (24, 8))], ())
    assert "rankwise.annotate(model)" in line


def test_names_that_tell_nothing_are_not_asked_about() -> None:
    names = ("mlp.in_proj.weight", "q_proj.weight", "attn.qkv.bias", "kv_a_layernorm.weight", "key.weight")
    assert unknown_parts("MARS", [ParameterInfo(name, (24, 8), Role.LINEAR) for name in names], ()) == []
    convolution = ParameterInfo("qkv.weight", (24, 8, 1), Role.CONV)
    assert unknown_parts("MARS", [convolution], ()) == []


def test_it_is_announced_once_by_rules_that_would_split(monkeypatch: pytest.MonkeyPatch) -> None:
    model, said = Strange(1), list[str]()
    annotate(model)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    for variant, lines in (("muon", 2), ("adamw", 0)):
        monkeypatch.setattr(MARS.spec_class, "splits", lambda self, info, lines=lines: lines > 0, raising=False)
        said.clear()
        optimizer = MARS(model.named_parameters(), lr=0.1, variant=variant)
        optimizer.reports.announce = said.append
        for _ in range(2):
            optimizer.step()
        assert len(said) == 1 + lines and all('"blocks": {"*' in line for line in said[1:])
