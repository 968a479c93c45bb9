"""Models of many kinds: which of their weights are one matrix, several, or none, found without configuration."""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path

import pytest

from benchmarks.architectures import ARCHITECTURES, Architecture
from benchmarks.routing_page import routing_page
from rankwise.routing.fused import Fused
from rankwise.routing.recognised import looks_fused
from rankwise.routing.roles import ParameterInfo, RoutingPolicy, describe, route

MATRICES = RoutingPolicy(embeddings=False)


def expected(architecture: Architecture, name: str) -> tuple[str, Fused | None] | None:
    for pattern, fused in architecture.blocks.items():
        if fnmatch(name, pattern):
            return "matrix", fused
    for rule, patterns in (("fallback", architecture.fallback), ("matrix", architecture.whole)):
        if any(fnmatch(name, pattern) for pattern in patterns):
            return rule, None
    return None


def found(info: ParameterInfo) -> tuple[str, Fused | None]:
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
    for pattern in (*architecture.blocks, *architecture.whole):
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


def test_the_page_is_this_table() -> None:
    """Written anew by ``python -m benchmarks routing``."""
    page = Path(__file__).parents[2] / "docs/routing.md"
    assert page.read_text() == routing_page()
