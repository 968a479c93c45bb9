"""How the parameters of Transformer Engine's layers are cut, which cannot be built here: stand-ins with their marks.

The marks are those that Transformer Engine's ``reset_parameters`` and megatron-core 0.16's classes leave.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from megatron_patches.parameters import ModelParameter, describe_chunks
from rankwise.layout.layout import LayoutError
from rankwise.routing.roles import Role

OUTPUTS, INPUTS, WAYS, RANK = 8, 6, 2, 1


class Linear(nn.Module):
    """Transformer Engine's: it marks weights as cut whether it knows of other ranks or not."""

    def __init__(self, parallel_mode: str | None, experts: int | None = None, **attributes: Any) -> None:
        super().__init__()
        self.parallel_mode = parallel_mode
        for name, value in attributes.items():
            setattr(self, name, value)
        for suffix in [""] if experts is None else map(str, range(experts)):
            weight, bias = nn.Parameter(torch.zeros(OUTPUTS, INPUTS)), nn.Parameter(torch.zeros(OUTPUTS))
            self.register_parameter(f"weight{suffix}", weight)
            self.register_parameter(f"bias{suffix}", bias)
            mark(weight, 1 if parallel_mode == "row" else 0)
            if parallel_mode == "column":
                mark(bias, 0)


class TELinear(Linear): ...


class TEColumnParallelLinear(TELinear): ...


class TERowParallelLinear(TELinear): ...


class TEGroupedLinear(Linear): ...


class TEColumnParallelGroupedLinear(TEGroupedLinear): ...


class TERowParallelGroupedLinear(TEGroupedLinear): ...


class Subclassed(TERowParallelLinear): ...


def mark(parameter: nn.Parameter, dim: int, stride: int = 1) -> None:
    parameter.tensor_model_parallel, parameter.partition_dim, parameter.partition_stride = True, dim, stride


def described(module: nn.Module) -> dict[str, ModelParameter]:
    groups: Any = SimpleNamespace(
        tensor=lambda expert: (RANK, WAYS),
        block=lambda expert: None,
        expert_rank=0,
        data=lambda expert: (0, 1),
        averaging=None,
    )
    found = describe_chunks([nn.Sequential(module)], groups)
    return {name: found[parameter] for name, parameter in module.named_parameters()}


CUTS: dict[str, tuple[Linear, int | None, int | None]] = {
    "duplicated": (TELinear(None), None, None),
    "of Transformer Engine alone": (Linear(None), None, None),
    "told that it is cut": (TELinear("row"), 1, None),
    "column": (TEColumnParallelLinear("column"), 0, 0),
    "row": (TERowParallelLinear("row"), 1, None),
    "expert, column": (TEColumnParallelLinear(None), 0, 0),
    "expert, row": (TERowParallelLinear(None), 1, None),
    "a user's subclass": (Subclassed(None), 1, None),
    "grouped, column": (TEColumnParallelGroupedLinear(None, experts=2), 0, 0),
    "grouped, row": (TERowParallelGroupedLinear(None, experts=2), 1, None),
}


@pytest.mark.parametrize(("module", "weight_dim", "bias_dim"), CUTS.values(), ids=CUTS)
def test_what_is_cut(module: Linear, weight_dim: int | None, bias_dim: int | None) -> None:
    shapes = {None: (OUTPUTS, INPUTS), 0: (WAYS * OUTPUTS, INPUTS), 1: (OUTPUTS, WAYS * INPUTS)}
    for name, parameter in described(module).items():
        dim = weight_dim if name.startswith("weight") else bias_dim
        assert parameter.dim == dim, name
        if name.startswith("weight"):
            assert parameter.info.shape == shapes[dim]
        else:
            assert parameter.info.shape == (OUTPUTS if dim is None else WAYS * OUTPUTS,)


class TELayerNormColumnParallelLinear(Linear):
    """With a norm inside."""

    def __init__(self) -> None:
        super().__init__("column")
        self.layer_norm_weight = nn.Parameter(torch.ones(INPUTS))


def test_a_norm_inside_makes_no_norm_of_the_weight() -> None:
    roles = {name: parameter.info.role for name, parameter in described(TELayerNormColumnParallelLinear()).items()}
    assert roles == {"weight": Role.LINEAR, "bias": Role.LINEAR, "layer_norm_weight": Role.NORM}


def test_weights_of_experts_have_their_biases() -> None:
    found = described(TEColumnParallelGroupedLinear("column", experts=2))
    assert [found[f"weight{number}"].info.bias for number in range(2)] == ["0.bias0", "0.bias1"]


def test_weights_of_all_experts_in_one_parameter_are_refused() -> None:
    with pytest.raises(LayoutError, match="single_grouped_weight=True.*Unset NVTE_GROUPED_LINEAR_SINGLE_PARAM"):
        described(TEGroupedLinear("column", single_grouped_weight=True))


def test_copies_of_a_duplicated_weight_are_told_apart() -> None:
    (whole,) = described(TELinear(None))["weight"].slices(0, OUTPUTS * INPUTS, copy=3)
    assert (whole.start, whole.end, whole.columns, whole.copy) == (0, OUTPUTS * INPUTS, None, 3 * WAYS + RANK)


def test_gate_and_up_are_two_strips() -> None:
    module = TEColumnParallelLinear("column")
    mark(module.weight, 0, stride=2)
    grouped = TEColumnParallelGroupedLinear(None, experts=1, config=SimpleNamespace(gated_linear_unit=True))
    plain = TEColumnParallelGroupedLinear(None, experts=1, config=SimpleNamespace(gated_linear_unit=False))
    half = OUTPUTS // 2 * INPUTS
    for parameter in (described(module)["weight"], described(grouped)["weight0"]):
        found = [(part.start, part.end) for part in parameter.slices(0, 2 * half, copy=0)]
        assert found == [(half, 2 * half), (3 * half, 4 * half)]
    assert [part.start for part in described(plain)["weight0"].slices(0, 2 * half, copy=0)] == [2 * half]
    assert described(grouped)["bias0"].sections == (OUTPUTS // 2,) * 2
