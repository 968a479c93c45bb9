"""Models of many kinds: which of their weights are one matrix, several, or none, found without configuration."""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from torch import nn

from benchmarks.architectures import ARCHITECTURES, EQUAL, FEWER, GROUPED, PER_HEAD, Architecture
from benchmarks.routing_page import routing_page
from rankwise.routing.fused_layers import looks_fused
from rankwise.routing.fused_shape import FusedShape
from rankwise.routing.roles import ParameterInfo, RoutingPolicy, describe, route

MATRICES = RoutingPolicy(embeddings=False)


def expected(architecture: Architecture, name: str) -> tuple[str, FusedShape | None] | None:
    for pattern, fused in architecture.blocks.items():
        if fnmatch(name, pattern):
            return "matrix", fused
    for rule, patterns in (("fallback", architecture.fallback), ("matrix", architecture.whole)):
        if any(fnmatch(name, pattern) for pattern in patterns):
            return rule, next((heads for alone, heads in architecture.heads.items() if fnmatch(name, alone)), None)
    return None


def found(info: ParameterInfo) -> tuple[str, FusedShape | None]:
    return route(info, MATRICES).rule, info.fused


@pytest.mark.parametrize("title", ARCHITECTURES)
def test_weights_go_where_the_table_says(title: str) -> None:
    architecture = ARCHITECTURES[title]
    infos = list(describe(architecture.build()).values())
    for info in infos:
        if len(info.shape) < 2:
            assert found(info) == ("fallback", None), info
        else:
            assert found(info) == expected(architecture, info.name), info
            assert info.fused is not None or not looks_fused(info.name, info.shape, info.role), info
    names = [info.name for info in infos if len(info.shape) > 1]
    for pattern in (*architecture.blocks, *architecture.whole, *architecture.heads):
        assert any(fnmatch(name, pattern) for name in names), pattern


@pytest.mark.parametrize(
    ("title", "names"),
    [
        ("GPT-2", {"c_attn.weight", "q_attn.weight", "c_proj.weight", "c_fc.weight"}),
        ("gpt-oss", {"experts.gate_up_proj", "experts.down_proj"}),
        ("Llama 4", {"experts.gate_up_proj", "experts.down_proj"}),
        ("DBRX", {"mlp.w2"}),
        ("Mixtral", set()),
    ],
)
def test_weights_that_multiply_from_the_right(title: str, names: set[str]) -> None:
    infos = describe(ARCHITECTURES[title].build()).values()
    assert {".".join(info.name.split(".")[-2:]) for info in infos if info.transposed} == names


# --- models that are not as they should be ---------------------------------------------------------------------------


def attention(kind: str, outputs: int, fused: str = "qkv_proj", **members: Any) -> nn.Module:
    """A module of a class of this name, with a fused layer."""
    module: nn.Module = type(kind, (nn.Module,), {name: each for name, each in members.items() if callable(each)})()
    module.add_module(fused, nn.Linear(32, outputs, bias=False))
    for name, value in members.items():
        if not callable(value):
            setattr(module, name, value)
    return module


def only_block(model: nn.Module) -> FusedShape | None:
    (info,) = describe(model).values()
    return info.fused


CONFIG = SimpleNamespace(num_attention_heads=4, num_key_value_heads=2)


@pytest.mark.parametrize("outputs", [32, 60, 72, 96, 128])
def test_sizes_that_do_not_fit_are_not_guessed(outputs: int) -> None:
    assert only_block(attention("LlamaAttention", 64, config=CONFIG)) == FEWER
    assert only_block(attention("LlamaAttention", outputs, config=CONFIG)) is None


def test_a_class_that_is_not_known_is_not_guessed() -> None:
    strange = attention("SomebodysAttention", 64, config=CONFIG)
    assert only_block(strange) is None
    (info,) = describe(nn.Sequential(strange)).values()
    assert looks_fused(info.name, info.shape, info.role)


def test_numbers_of_the_nearest_module_count() -> None:
    inner = attention("LlamaAttention", 64, config=CONFIG)
    outer = nn.Sequential(inner)
    outer.config = SimpleNamespace(num_attention_heads=8, num_key_value_heads=8)
    assert only_block(outer) == FEWER
    inner.config = SimpleNamespace(other=1)
    assert only_block(outer) is None


class _Failing:
    def __getattr__(self, name: str) -> object:
        raise KeyError(name)


def test_attributes_that_fail_or_are_no_numbers_count_for_nothing() -> None:
    for config in (_Failing(), MagicMock(), {"num_attention_heads": 4}, SimpleNamespace(num_attention_heads=True)):
        assert only_block(attention("LlamaAttention", 64, config=config)) is None


def test_a_subclass_is_what_its_forward_pass_is() -> None:
    model = ARCHITECTURES["Falcon 40B, 180B"].build()
    layer = model.get_submodule("transformer.h.0.self_attention")
    layer.__class__ = type("Mine", (type(layer),), {})
    assert [info.fused for info in describe(model).values() if info.fused is not None] == [GROUPED]
    layer.__class__ = type("Mine", (type(layer),), {"forward": lambda self, hidden: hidden})
    assert all(info.fused is None for info in describe(model).values())


def test_an_adapter_hides_nothing() -> None:
    model = attention("LlamaAttention", 64, config=CONFIG)
    wrapper = nn.Module()
    wrapper.base_layer = model.qkv_proj
    model.qkv_proj = wrapper
    assert only_block(model) == FEWER


def test_heads_that_come_first() -> None:
    plain, turned = (attention("Attention", 96, "qkv", num_heads=4, head_first=first) for first in (False, True))
    assert only_block(plain) == EQUAL and only_block(turned) == PER_HEAD
    # TinyViT's and EfficientFormer's, of a class that is called like all others.
    assert only_block(attention("Attention", 96, "qkv", num_heads=4, key_dim=8, val_dim=8)) == PER_HEAD
    assert only_block(attention("Attention", 96, "qkv", num_heads=4, key_dim=8, val_dim=16)) is None


def test_the_page_is_this_table() -> None:
    """Written anew by ``python -m benchmarks routing``."""
    page = Path(__file__).parents[2] / "docs/routing.md"
    assert page.read_text() == routing_page()
