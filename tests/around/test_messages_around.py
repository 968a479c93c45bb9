"""Refusals name the user's thing and an action; what torch's AdamW takes is taken, or refused at construction.

Tables are generated: every option of every type and of torch's optimizers as a key of a param group, every form of a
rate in every place, every way a model comes by other parameters.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import rankwise
from rankwise.names import BY_SPELLING
from rankwise.options.fields import Options
from rankwise.options.hints import ADVICE, LEFT_OVER, OPTION_WORDS
from rankwise.options.validation import OptionError, called
from rankwise.step.optimizer import ShardedOptimizer

FURTHER: Mapping[str, Mapping[str, Any]] = {"LDAdam": {"rank": 2}, "MKOR": {"rule": "sketch"}}
MORE: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "MKOR, sgd": ("MKOR", {"backend": "sgd"}),
    "MKOR, lamb": ("MKOR", {"backend": "lamb"}),
    "MARS-M, scaled": ("MARS-M", {"lr_scale": {"*weight": 0.5}}),
    "MARS-M, independent": ("MARS-M", {"weight_decay_method": "independent", "weight_decay": 0.1}),
}
KINDS = [*BY_SPELLING, *MORE]
ACTION = re.compile(
    r"\b(did you mean|remove|leave|write|set|call|pass|build|use|choose|give|load|move|add|start|make|the default)\b"
)


def built(kind: str, params: Any, **options: Any) -> ShardedOptimizer:
    spelling, own = MORE.get(kind, (kind, {}))
    named = BY_SPELLING[spelling]
    return named.optimizer(params, **{**FURTHER.get(named.optimizer.__name__, {}), **named.preset, **own, **options})


def parameters() -> list[tuple[str, nn.Parameter]]:
    torch.manual_seed(0)
    return [("mlp.weight", nn.Parameter(torch.randn(8, 16))), ("mlp.bias", nn.Parameter(torch.randn(8)))]


def change(optimizer: torch.optim.Optimizer) -> Tensor:
    own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    before = [parameter.detach().clone() for parameter in own]
    generator = torch.Generator().manual_seed(3)
    for _ in range(2):
        for parameter in own:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
    return torch.cat([(new.detach() - old).flatten() for new, old in zip(own, before, strict=True)])


def names_and_acts(message: str, *things: str) -> None:
    assert all(thing in message for thing in things), f"{things} in {message!r}"
    assert ACTION.search(message), f"no action in {message!r}"


# --- rates -----------------------------------------------------------------------------------------------------------

RATES: Mapping[str, Any] = {
    "np.float32": np.float32(1e-3),
    "np.float64": np.float64(1e-3),
    "array without dimensions": np.array(1e-3),
    "array of one element": np.array([1e-3]),
    "tensor without dimensions": torch.tensor(1e-3),
    "tensor of one element": torch.tensor([1e-3]),
    "tensor of one element, two dimensions": torch.tensor([[1e-3]]),
    "tensor in double": torch.tensor([1e-3], dtype=torch.float64),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", RATES)
def test_a_rate_of_any_form_is_the_number(kind: str, form: str) -> None:
    """At construction, in a group, and written into a living group, as schedules do."""
    expected, rate = change(built(kind, parameters(), lr=1e-3)), RATES[form]
    edited = built(kind, parameters(), lr=1e-3)
    edited.param_groups[0]["lr"] = rate
    given = [built(kind, parameters(), lr=rate), built(kind, [{"params": parameters(), "lr": rate}]), edited]
    for optimizer in given:
        assert torch.allclose(change(optimizer), expected, rtol=1e-4, atol=0.0), form


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "rate", [torch.tensor([1e-3, 1e-3]), np.array([1e-3, 1e-3]), "1e-3", None, True, [1e-3]], ids=repr
)
def test_what_is_no_rate_is_refused_before_a_step(kind: str, rate: Any) -> None:
    attempts: list[Callable[[], Any]] = [
        lambda: built(kind, parameters(), lr=rate),
        lambda: built(kind, [{"params": parameters(), "lr": rate}]),
    ]
    for attempt in attempts:
        with pytest.raises(OptionError) as refused:
            attempt()
        names_and_acts(str(refused.value), "lr=")
    optimizer = built(kind, parameters())
    optimizer.param_groups[0]["lr"] = rate
    weight = optimizer.param_groups[0]["params"][0]
    before, weight.grad = weight.detach().clone(), torch.ones_like(weight)
    with pytest.raises(OptionError) as refused:
        optimizer.step()
    names_and_acts(str(refused.value), "lr=", "param group 0")
    assert torch.equal(weight, before) and not optimizer.state


@pytest.mark.parametrize("kind", KINDS)
def test_schedulers_write_any_of_them(kind: str) -> None:
    expected, found = (built(kind, parameters(), lr=1e-3) for _ in range(2))
    schedule = torch.optim.lr_scheduler.LambdaLR(found, lambda step: np.float32(1.0))
    assert torch.allclose(change(found), change(expected), rtol=1e-4, atol=0.0)
    schedule.step()
    assert torch.allclose(change(found), change(expected), rtol=1e-4, atol=0.0)


@pytest.mark.parametrize("kind", BY_SPELLING)
def test_numbers_of_numpy_are_numbers_in_other_options_too(kind: str) -> None:
    found = built(kind, parameters(), eps=np.float32(1e-6), betas=(np.float32(0.5), np.float64(0.5)))
    group = found.param_groups[0]
    assert type(group["eps"]) is float and all(type(beta) is float for beta in group["betas"])
    found.param_groups[0]["weight_decay"] = np.float32(0.5)
    change(found)
    assert type(found.param_groups[0]["weight_decay"]) is float


# --- keys of param groups --------------------------------------------------------------------------------------------


def _of_torch() -> set[str]:
    classes = [found for found in vars(torch.optim).values() if inspect.isclass(found)]
    classes = [
        found for found in classes if issubclass(found, torch.optim.Optimizer) and found.__module__.startswith("torch.")
    ]
    return {key for found in classes for key in inspect.signature(found).parameters} - {
        "params",
        "args",
        "kwargs",
        "defaults",
    }


WRITTEN_BY_OTHERS = {"lr_mult", "wd_mult", "initial_lr", "max_lr", "min_lr"}
"""Frameworks and schedulers write them into every optimizer's groups."""
KEYS = sorted((_of_torch() | Options.of_all() | set(LEFT_OVER) | set(ADVICE) | set(OPTION_WORDS)) - WRITTEN_BY_OTHERS)


@pytest.mark.parametrize("kind", [*BY_SPELLING, "MKOR, sgd"])
def test_what_the_constructor_does_not_know_no_group_may_have(kind: str) -> None:
    """Given with a group, added later, and written into a living one."""
    unknown = [key for key in KEYS if key not in BY_SPELLING[MORE.get(kind, (kind,))[0]].optimizer.options_type.names()]
    assert {"use_muon", "foreach", "dampening"} <= set(unknown)
    for key in unknown:
        with pytest.raises((TypeError, OptionError)):
            built(kind, parameters(), **{key: 0.5})
        with pytest.raises(OptionError) as refused:
            built(kind, [{"params": parameters(), key: 0.5}])
        names_and_acts(str(refused.value), key, "0.5", "param group")
        living = built(kind, parameters())
        with pytest.raises(OptionError, match=key):
            living.add_param_group({"params": [("more.weight", nn.Parameter(torch.ones(8, 16)))], key: 0.5})
        assert len(living.param_groups) == 1
        living.param_groups[0][key] = 0.5
        with pytest.raises(OptionError, match=key):
            change(living)


def test_a_key_in_the_place_of_another_is_seen() -> None:
    optimizer = built("MARS-M", [{"params": parameters(), "name": "all"}])
    change(optimizer)
    del optimizer.param_groups[0]["name"]
    optimizer.param_groups[0]["momentum"] = 0.5
    with pytest.raises(OptionError, match="'betas' is the momentum"):
        change(optimizer)


OF_OTHERS = {"name", "layer", "is_expert_parallel", "swa_lr", "moe", "max_momentum", "base_momentum"}


@pytest.mark.parametrize("key", sorted(WRITTEN_BY_OTHERS | OF_OTHERS))
def test_keys_of_other_programs_are_theirs(key: str) -> None:
    optimizer = built("MARS-M", [{"params": parameters(), key: 0.5}])
    change(optimizer)
    optimizer.add_param_group({"params": [("more.weight", nn.Parameter(torch.ones(8, 16)))], key: 0.25})
    assert [group[key] for group in optimizer.param_groups] == [0.5, 0.25]


@pytest.mark.parametrize(("kind", "key", "advice"), [
    ("MARS-M", "muon_lr", "4 to 5 times AdamW's rate"),
    ("MARS-Shampoo", "adam_lr", "set 'lr_1d'"),
    ("LDAdam", "adam_lr", "'fallback': true"),
    ("MARS-M", "use_muon", "'fallback': true"),
])  # fmt: skip
def test_keys_of_muon_name_what_to_set(kind: str, key: str, advice: str) -> None:
    with pytest.raises(OptionError, match=re.escape(advice)):
        BY_SPELLING[kind].complete({key: 0.02}, kind, "x")


# --- parameters ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", BY_SPELLING)
def test_a_tensor_given_twice_is_refused_with_both_names(kind: str) -> None:
    """torch's AdamW warns of the first, and raises without a name for the second."""
    weight, named = nn.Parameter(torch.ones(8, 16)), parameters()
    twice = [*named, ("first.weight", weight), ("tied.weight", weight)]
    with pytest.raises(OptionError) as refused:
        built(kind, twice)
    names_and_acts(str(refused.value), "'first.weight'", "'tied.weight'")
    with pytest.raises(OptionError) as refused:
        built(kind, [{"params": [*named, ("first.weight", weight)]}, {"params": [("tied.weight", weight)]}])
    names_and_acts(str(refused.value), "'first.weight'", "'tied.weight'")
    with pytest.raises(OptionError) as refused:
        built(kind, [{"params": [tensor for _, tensor in named]}, {"params": [weight, weight]}])
    names_and_acts(str(refused.value), "parameter 0 of param group 1", "parameter 1 of param group 1")
    living = built(kind, named)
    with pytest.raises(OptionError, match="'mlp.weight' and 'again'"):
        living.add_param_group({"params": [("again", named[0][1])]})
    assert len(living.param_groups) == 1
    change(living)


@pytest.mark.parametrize("kind", BY_SPELLING)
def test_an_exchanged_parameter_is_named_by_its_place(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = built(kind, parameters())
    monkeypatch.setattr("rankwise.plan.group_changes.loaded_advice", lambda: "")
    optimizer.param_groups[0]["params"][0] = nn.Parameter(torch.ones(16, 8))
    with pytest.raises(RuntimeError) as refused:
        change(optimizer)
    names_and_acts(str(refused.value), "param group 0", "(16, 8)", "'mlp.weight'", "build a new optimizer")
    assert "deepspeed" not in str(refused.value)


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok, self.up = nn.Embedding(64, 64), nn.Linear(64, 64)


def _assigned(model: nn.Module) -> nn.Module:
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    return model


def _rebound(model: Any) -> nn.Module:
    model.tok.weight = nn.Parameter(model.tok.weight.detach().clone())
    return model  # type: ignore[no-any-return]


WAYS: Mapping[str, Callable[[nn.Module], nn.Module]] = {
    "as it is": lambda model: model,
    "deepcopy": copy.deepcopy,
    "to_empty": lambda model: model.to("meta").to_empty(device="cpu"),
    "assign": _assigned,
    "rebound": _rebound,
    "double": lambda model: copy.deepcopy(model).double(),
    "inside another": lambda model: nn.Sequential(copy.deepcopy(model)),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("named", [True, False])
def test_roles_survive_what_gives_a_model_other_parameters(way: str, named: bool) -> None:
    """`tok` is no name of an embedding: only its module tells."""
    model = _Model()
    rankwise.annotate(model)
    changed = WAYS[way](model)
    given = changed.named_parameters() if named else changed.parameters()
    assert [each.rule for each in rankwise.MARS(given, variant="muon").explain()] == ["fallback", "matrix", "fallback"]


def test_roles_survive_where_nobody_else_holds_the_copy() -> None:
    model = _Model()
    rankwise.annotate(model)
    found = rankwise.MARS(copy.deepcopy(model).parameters(), variant="muon").explain()
    assert [each.rule for each in found] == ["fallback", "matrix", "fallback"]


# --- names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BY_SPELLING)
def test_messages_begin_with_the_name_that_the_user_chose(name: str) -> None:
    """Of bad values, of groups at construction, and of a living optimizer, long after."""
    with called(name):
        optimizer = built(name, parameters())
        with pytest.raises(OptionError, match=f"^{name}: "):
            built(name, parameters(), lr=-1.0)
        with pytest.raises(OptionError, match=f"^{name}: "):
            built(name, [{"params": parameters(), "eps": -1.0}])
    with pytest.raises(OptionError, match=f"^{name}: "):
        optimizer.add_param_group({"params": [("w", nn.Parameter(torch.ones(8, 16)))], "eps": -1.0})
    optimizer.param_groups[0]["eps"] = -1.0
    with pytest.raises(OptionError, match=f"^{name}: "):
        change(optimizer)
    optimizer.param_groups[0]["eps"] = 1e-8
    optimizer.param_groups[0]["params"][0].grad = torch.ones(8, 16).to_sparse()
    with pytest.raises(RuntimeError, match=f"^{name} "):
        optimizer.step()
    assert optimizer.summary().startswith(f"rankwise {name}: ")
    assert copy.deepcopy(optimizer).spec.name == name and optimizer.identity == built(name, parameters()).identity


@pytest.mark.parametrize("kind", BY_SPELLING)
def test_every_option_s_refusal_names_key_value_and_an_action(kind: str) -> None:
    options = BY_SPELLING[kind].optimizer.options_type
    for key in options.table():
        if key in BY_SPELLING[kind].preset:
            continue
        with pytest.raises(OptionError) as refused:
            built(kind, parameters(), **{key: object})
        names_and_acts(str(refused.value), f"{key}=<class 'object'>", "it must")
