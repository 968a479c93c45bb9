"""What an optimizer says that nobody told where its parameters lie."""

from __future__ import annotations

import sys
import types
from collections.abc import Sequence

import pytest
import torch
from torch import nn

from rankwise import MARS, MKOR
from rankwise.options.validation import OptionError

PLUGIN = "import deepspeed_plugin before deepspeed.initialize"
PATCHES = "let Megatron build the optimizer after megatron_patches.apply()"


@pytest.fixture(params=[["deepspeed"], ["megatron.core"], ["deepspeed", "megatron.core"], []], ids=" and ".join)
def expected(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether DeepSpeed's and Megatron's package must be named in a process that has loaded some of the two."""
    loaded: Sequence[str] = request.param
    for name in ("deepspeed", "megatron.core"):
        monkeypatch.delitem(sys.modules, name, raising=False)
        if name in loaded:
            monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    return [not loaded or name in loaded for name in ("deepspeed", "megatron.core")]


def test_a_replaced_parameter_names_what_tells_the_layout(expected: list[bool]) -> None:
    """In plain PyTorch there is nothing to import."""
    frameworks = [name in sys.modules for name in ("deepspeed", "megatron.core")]
    optimizer = MARS(nn.Linear(3, 2).parameters())
    flat = torch.zeros(8, requires_grad=True)
    flat.grad = torch.ones(8)
    optimizer.param_groups[0]["params"] = [flat]
    place = r"MARS: param group 0 has a tensor of shape \(8,\) in the place of 'group0\.param0'"
    with pytest.raises(RuntimeError, match=place + ".*build a new optimizer") as failure:
        optimizer.step()
    assert [advice in str(failure.value) for advice in (PLUGIN, PATCHES)] == frameworks


def test_missing_statistics_name_what_captures_them(expected: list[bool]) -> None:
    model = nn.Linear(3, 2)
    optimizer = MKOR(model.named_parameters())
    model(torch.ones(1, 3)).sum().backward()
    with pytest.raises(OptionError, match=r"call optimizer.capture\(model\) before the first step") as failure:
        optimizer.step()
    assert [advice in str(failure.value) for advice in (PLUGIN, PATCHES)] == expected
