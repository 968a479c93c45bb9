"""Which part of each layer's statistics a rank sums up, for modules that cannot be built without Transformer Engine.

The stand-ins have the class names, attributes and calls of the real ones; the ranks are simulated one after the other.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megatron_patches.capture import linear_views
from megatron_patches.parameters import ModelParameter
from rankwise.routing.roles import ParameterInfo, Role
from rankwise.statistics.hooks import Capture

TOKENS, INPUTS, OUTPUTS, WAYS = 10, 6, 8, 2


def values(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class TELayerNormColumnParallelLinear(nn.Module):
    """Normalizes, gathers the tokens under sequence parallelism, multiplies."""

    def __init__(self, weight: Tensor, **attributes: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.layer_norm_weight = nn.Parameter(values(8, INPUTS))
        self.layer_norm_bias = nn.Parameter(values(9, INPUTS))
        self.eps, self.normalization, self.zero_centered_gamma = 1e-2, "LayerNorm", False
        for name, value in attributes.items():
            setattr(self, name, value)

    def normalized(self, x: Tensor) -> Tensor:
        gain = self.layer_norm_weight + (1.0 if self.zero_centered_gamma else 0.0)
        if self.normalization == "RMSNorm":
            return x / (x.pow(2).mean(-1, keepdim=True) + self.eps).sqrt() * gain
        centered = x - x.mean(-1, keepdim=True)
        return centered / (centered.pow(2).mean(-1, keepdim=True) + self.eps).sqrt() * gain + self.layer_norm_bias

    def forward(self, x: Tensor, everyone: Tensor | None = None) -> tuple[Tensor, None]:
        return F.linear(self.normalized(x if everyone is None else everyone), self.weight), None


class TERowParallelLinear(nn.Module):
    """Multiplies, and hands out this rank's tokens under sequence parallelism; a stand-in for their sum will do."""

    def __init__(self, weight: Tensor, sequence_parallel: bool = False) -> None:
        super().__init__()
        self.weight, self.sequence_parallel = nn.Parameter(weight), sequence_parallel

    def forward(self, x: Tensor, kept: slice = slice(None)) -> tuple[Tensor, None]:
        return F.linear(x, self.weight)[kept], None


class TEGroupedLinear(nn.Module):
    """One weight per expert, for tokens sorted by expert."""

    explicit_expert_comm, sequence_parallel = True, True

    def __init__(self, weights: list[Tensor]) -> None:
        super().__init__()
        for index, weight in enumerate(weights):
            self.register_parameter(f"weight{index}", nn.Parameter(weight))
            self.register_parameter(f"bias{index}", nn.Parameter(torch.zeros(weight.shape[0])))

    def forward(self, x: Tensor, m_splits: list[int]) -> tuple[Tensor, None]:
        parts = x.split(m_splits)
        return torch.cat([F.linear(part, getattr(self, f"weight{i}")) for i, part in enumerate(parts)]), None


def own_tokens(rank: int) -> slice:
    return slice(rank * TOKENS // WAYS, (rank + 1) * TOKENS // WAYS)


def known(weight: nn.Parameter, dim: int | None, rank: int, strips: int = 1, expert: bool = False) -> ModelParameter:
    info = ParameterInfo("layer.weight", (OUTPUTS, INPUTS), Role.LINEAR)
    sections = (len(weight) // strips,) * strips if dim == 0 else ()
    return ModelParameter(info, tuple(weight.shape), dim, sections, rank, WAYS, expert)


def captured(module: nn.Module, parameters: dict[nn.Parameter, ModelParameter]) -> Capture:
    return Capture(module, describe=linear_views(parameters))


def added(parts: list[tuple[Tensor, int, Tensor]]) -> tuple[Tensor, int, Tensor]:
    return sum(p[0] for p in parts), sum(p[1] for p in parts), sum(p[2] for p in parts)  # type: ignore[return-value]


def check(parts: list[tuple[Tensor, int, Tensor]], x: Tensor, dy: Tensor) -> None:
    inputs, count, outputs = added(parts)
    assert count == x.shape[0]
    torch.testing.assert_close(inputs, x.sum(0))
    torch.testing.assert_close(outputs, dy.sum(0))


@pytest.mark.parametrize("attributes", [{}, {"normalization": "RMSNorm"}, {"zero_centered_gamma": True}], ids=str)
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("strips", [1, 2])
def test_a_column_parallel_layer_with_a_norm_inside(
    attributes: dict[str, Any], sequence_parallel: bool, strips: int
) -> None:
    x, dy = values(0, TOKENS, INPUTS) + 0.5, values(1, TOKENS, OUTPUTS)
    full = values(2, OUTPUTS, INPUTS)
    parts = []
    for rank in range(WAYS):
        positions = torch.arange(OUTPUTS).view(strips, WAYS, -1)[:, rank].flatten()
        module = TELayerNormColumnParallelLinear(full[positions], sequence_parallel=sequence_parallel, **attributes)
        capture = captured(module, {module.weight: known(module.weight, 0, rank, strips)})
        call = (x.chunk(WAYS)[rank], x) if sequence_parallel else (x,)
        (module(*call)[0] * dy[:, positions]).sum().backward()
        parts.append(capture.take(module.weight))
    check(parts, module.normalized(x).detach(), dy)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_row_parallel_layer(sequence_parallel: bool) -> None:
    x, dy, full = values(0, TOKENS, INPUTS), values(1, TOKENS, OUTPUTS), values(2, OUTPUTS, INPUTS)
    parts = []
    for rank in range(WAYS):
        module = TERowParallelLinear(full.chunk(WAYS, 1)[rank], sequence_parallel)
        capture = captured(module, {module.weight: known(module.weight, 1, rank)})
        kept = own_tokens(rank) if sequence_parallel else slice(None)
        (module(x.chunk(WAYS, 1)[rank], kept)[0] * dy[kept]).sum().backward()
        parts.append(capture.take(module.weight))
    check(parts, x, dy)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_duplicated_layer(sequence_parallel: bool) -> None:
    """Every rank has the whole weight; the mark says whether it sees tokens of its own."""
    x, dy, full = values(0, TOKENS, INPUTS), values(1, TOKENS, OUTPUTS), values(2, OUTPUTS, INPUTS)
    parts = []
    for rank in range(WAYS):
        module = TERowParallelLinear(full)
        module.weight.sequence_parallel = sequence_parallel
        capture = captured(module, {module.weight: known(module.weight, None, rank)})
        own = own_tokens(rank) if sequence_parallel else slice(None)
        (module(x[own])[0] * dy[own]).sum().backward()
        parts.append(capture.take(module.weight))
    check(parts, x, dy)


@pytest.mark.parametrize("dim", [0, 1])
def test_grouped_experts(dim: int) -> None:
    """Tensor-parallel ranks of an expert see all its tokens, whatever the module says of sequence parallelism."""
    splits = [3, 0, TOKENS - 3]
    x, dy = values(0, TOKENS, INPUTS), values(1, TOKENS, OUTPUTS)
    full = [values(2 + expert, OUTPUTS, INPUTS) for expert in range(len(splits))]
    parts: list[list[tuple[Tensor, int, Tensor]]] = [[] for _ in splits]
    for rank in range(WAYS):
        module = TEGroupedLinear([weight.chunk(WAYS, dim)[rank] for weight in full])
        weights = [getattr(module, f"weight{index}") for index in range(len(splits))]
        capture = captured(module, {weight: known(weight, dim, rank, expert=True) for weight in weights})
        assert [capture.records[w].bias for w in weights] == [getattr(module, f"bias{i}") for i in range(len(splits))]
        seen = x if dim == 0 else x.chunk(WAYS, 1)[rank]
        wanted = dy.chunk(WAYS, 1)[rank] if dim == 0 else dy
        (module(seen, m_splits=splits)[0] * wanted).sum().backward()
        for expert, weight in enumerate(weights):
            parts[expert].append(capture.take(weight))
    for expert, (own_x, own_dy) in enumerate(zip(x.split(splits), dy.split(splits), strict=True)):
        check(parts[expert], own_x, own_dy)


def test_only_linear_weights_are_captured() -> None:
    module = TELayerNormColumnParallelLinear(values(0, OUTPUTS, INPUTS))
    router = ModelParameter(ParameterInfo("router", (OUTPUTS, INPUTS)), (OUTPUTS, INPUTS), None, 1, 0, 1, False)
    assert not captured(module, {module.weight: router}).records
    assert not captured(module, {}).records
