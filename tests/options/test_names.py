"""One table of names, and what an optimizer says of itself where others would ask for its type."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import rankwise
from rankwise import MARS
from rankwise.names import BY_NAME, BY_SPELLING, CLASSES, READY
from rankwise.options.hints import LEFT_OVER
from rankwise.options.validation import OptionError


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(80, 80), nn.Tanh(), nn.Linear(80, 80))


def test_every_framework_reads_the_same_table() -> None:
    blocks = pytest.importorskip("deepspeed_plugin.optimizer_block")
    registry = pytest.importorskip("megatron_patches.registry")
    from rankwise.configs import OPTIMIZERS

    assert blocks.JSON_TYPES is BY_SPELLING and registry.NAMES is BY_NAME
    assert OPTIMIZERS == {"adamw": "AdamW", **{spelling.lower(): spelling for spelling in BY_SPELLING}}
    assert list(READY) == list(BY_NAME)
    assert set(CLASSES) == {getattr(rankwise, name) for name in rankwise.__all__ if name[0].isupper()}
    for name, (cls, preset) in BY_NAME.items():
        assert cls.options_type(**preset).owner == cls.__name__ and name.startswith(cls.__name__.lower())


@pytest.mark.parametrize("name", BY_NAME)
def test_a_name_completes_its_options(name: str) -> None:
    named = BY_NAME[name]
    assert named.complete({"betas": [0.5, 0.5]}, "x", "y") == {**named.preset, "betas": (0.5, 0.5)}
    with pytest.raises(OptionError, match="^x has no option 'betaz': did you mean 'betas'"):
        named.complete({"betaz": 1}, "x", "y")
    for key, value in named.preset.items():
        with pytest.raises(OptionError, match=f"'{key}', which the name fixes .* under the name 'y'"):
            named.complete({key: f"not {value}"}, "x", "y")
        with pytest.raises(OptionError, match=f"'{key}', which the name fixes .*: leave it out$"):
            named.complete({key: value}, "x", "y")
    with pytest.raises(OptionError, match="valid keys are") as caught:
        named.complete({"nothing": 1}, "x", "y")
    offered = str(caught.value).removesuffix(".").partition("valid keys are ")[2].split(", ")
    assert set(offered) == set(named.optimizer.options_type.names()) - set(named.preset)


@pytest.mark.parametrize("key", LEFT_OVER)
def test_what_another_optimizer_has_left_is_to_be_removed(key: str) -> None:
    for name, named in BY_NAME.items():
        if key in named.optimizer.options_type.names():
            continue
        with pytest.raises(OptionError, match=f"^{name} has no option '{key}': remove it; "):
            named.complete({key: True}, name, "y")


@pytest.mark.parametrize("name", BY_NAME)
def test_any_optimizer_takes_the_calls_of_a_loop_that_serves_all(name: str) -> None:
    """A training loop need not know which of them it has: what a rule has no use for changes nothing."""
    (cls, preset), model = BY_NAME[name], network()
    optimizer = cls(list(model.named_parameters()), **preset)
    assert optimizer.needs_capture == (name in ("mkor", "mkor-h")) and optimizer.needs_loss == (name == "mkor-h")
    assert not optimizer.switched
    optimizer.capture(model)
    loss = model(torch.ones(2, 80)).square().mean()
    optimizer.record_loss(loss.detach())
    loss.backward()
    optimizer.step()
    optimizer.release()
    hooks = [hook for module in model.modules() for hook in (*module._forward_hooks, *module._forward_pre_hooks)]
    assert not hooks
    assert any(row.rule == "matrix" for row in optimizer.explain())


@pytest.mark.parametrize("name", BY_NAME)
def test_what_no_engine_serves_is_named_with_the_reason(name: str) -> None:
    cls, preset = BY_NAME[name]
    assert cls.options_type(**preset).beyond_engines() == {}
    modes: dict[str, Any] = {"exact": True} if cls is MARS else {}
    assert set(cls.options_type(**preset, **modes).beyond_engines()) == set(modes)
    assert set(cls.options_type.decay_options) == {key for key in cls.options_type.names() if "decay" in key} - {
        "factor_decay",
        "weight_decay_method",
    }
