"""What PyTorch's own optimizer tests ask of every optimizer, beyond what the files beside this one have."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from cases import Case, advance, assert_same, cases, net, setup, weights

from rankwise.options.validation import OptionError

STEPS = range(4)
LATER = range(4, 8)


def trained(case: Case) -> tuple[Any, Any]:
    model, optimizer = setup(case)
    advance(model, optimizer, STEPS)
    return model, optimizer


def continued(case: Case, model: Any, state: dict[str, Any], named: bool = True) -> dict[str, Any]:
    """Weights after further steps of an optimizer that was built anew and has loaded ``state``."""
    other = net(seed=99)
    other.load_state_dict(model.state_dict())
    twin = case.build(other.named_parameters() if named else other.parameters(), other)
    twin.load_state_dict(state)
    advance(other, twin, LATER)
    return weights(other)


@cases()
def test_a_step_count_may_be_a_number(case: Case) -> None:
    """As versions of torch have written it that kept no tensor."""
    model, optimizer = trained(case)
    state = copy.deepcopy(optimizer.state_dict())
    for states in state["state"].values():
        states["step"] = states["step"].item()
    found = continued(case, model, state)
    advance(model, optimizer, LATER)
    assert_same(found, weights(model))


@cases()
def test_options_that_a_checkpoint_does_not_have_keep_their_values(case: Case) -> None:
    """As one of a version that did not know them yet."""
    model, optimizer = trained(case)
    state = copy.deepcopy(optimizer.state_dict())
    missing = [name for name in ("weight_decay", "eps") if name in state["param_groups"][0]]
    assert missing
    for name in missing:
        del state["param_groups"][0][name]
    found = continued(case, model, state)
    advance(model, optimizer, LATER)
    assert_same(found, weights(model))


@pytest.mark.parametrize("named", [True, False], ids=["into_named", "into_nameless"])
@cases(mkor=False)
def test_names_on_one_side_alone_do_not_matter(case: Case, named: bool) -> None:
    model = net()
    optimizer = case.build(model.parameters() if named else model.named_parameters(), model)
    advance(model, optimizer, STEPS)
    found = continued(case, model, copy.deepcopy(optimizer.state_dict()), named)
    advance(model, optimizer, LATER)
    assert_same(found, weights(model))


@cases()
def test_hooks_of_dictionaries_run_in_their_order(case: Case) -> None:
    _, optimizer = trained(case)
    calls: list[str] = []

    def renewed(optimizer: Any, state: dict[str, Any]) -> dict[str, Any]:
        calls.append("changes what is loaded")
        return {**state, "param_groups": [{**group, "lr": 0.5} for group in state["param_groups"]]}

    optimizer.register_state_dict_pre_hook(lambda *_: calls.append("before saving"))
    optimizer.register_state_dict_post_hook(lambda *_: calls.append("saved"))
    optimizer.register_load_state_dict_pre_hook(renewed)
    optimizer.register_load_state_dict_pre_hook(lambda *_: calls.append("first"), prepend=True)
    optimizer.register_load_state_dict_post_hook(lambda *_: calls.append("loaded"))
    optimizer.load_state_dict(optimizer.state_dict())
    assert calls == ["before saving", "saved", "first", "changes what is loaded", "loaded"]
    assert [group["lr"] for group in optimizer.param_groups] == [0.5]


@pytest.mark.parametrize("way", ["to_empty", "assign"])
@cases(names=["mars-m", "ldadam", "mkor-adamw", "mkor-sketch"])
def test_parameters_that_never_get_memory_are_refused(case: Case, way: str) -> None:
    """Built on the meta device, the optimizer has other parameters than the model is trained with."""
    with torch.device("meta"):
        model = net()
    optimizer = case.build(model.named_parameters(), model)
    if way == "to_empty":
        model.to_empty(device="cpu")
    model.load_state_dict(net().state_dict(), assign=way == "assign")
    before = weights(model)
    with pytest.raises(OptionError, match=r"'0.weight' is invalid, because it is on the meta device: .* build the"):
        advance(model, optimizer, range(1))
    assert_same(weights(model), before)
    assert not optimizer.state
