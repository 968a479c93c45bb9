"""What users change in a living optimizer: parameters between groups, options of groups, the model's type."""

from __future__ import annotations

import copy
import math
from typing import Any
from unittest.mock import patch

import pytest
import torch
from cases import BY_NAME, Case, advance, assert_same, cases, loss_of, net, setup, weights
from torch import Tensor, nn

from rankwise import MARS, MKOR, LDAdam, SONew
from rankwise.options.validation import OptionError

CHANGES = [
    ("ldadam", {"rank": 1}),
    ("ldadam", {"error_feedback": False}),
    ("ldadam-no-feedback", {"error_feedback": True}),
    *((name, {"fallback": True}) for name in ("mars-adamw", "mars-m", "sonew-tridiagonal", "ldadam", "mkor-adamw")),
    ("sonew-tridiagonal", {"band": 3}),
    ("mars-adamw", {"optimize_1d": True}),
    ("mkor-adamw", {"update_interval": 7}),
]


def move(optimizer: Any, name: str, model: nn.Module, group: int) -> None:
    """As users do it: torch has no call for it."""
    parameter = dict(model.named_parameters())[name]
    for each in optimizer.param_groups:
        kept = [place for place, other in enumerate(each["params"]) if other is not parameter]
        each["param_names"] = [each["param_names"][place] for place in kept]
        each["params"] = [each["params"][place] for place in kept]
    optimizer.param_groups[group]["params"].append(parameter)
    optimizer.param_groups[group]["param_names"].append(name)


def changes_by_rate(case: Case, first: list[str], second: list[str], moves: list[tuple[str, int]]) -> dict[str, float]:
    """How much further every parameter went because the second group's rate is 100 times as high."""
    found = {}
    for factor in (1.0, 100.0):
        model = net()
        named = dict(model.named_parameters())
        groups = [{"params": [(name, named[name]) for name in names]} for names in (first, second)]
        optimizer = case.build(groups, model)
        advance(model, optimizer, range(2))
        for name, group in moves:
            move(optimizer, name, model, group)
        optimizer.param_groups[1]["lr"] = case.options["lr"] * factor
        start = weights(model)
        advance(model, optimizer, range(2, 3))
        found[factor] = {name: float((value - start[name]).abs().max()) for name, value in weights(model).items()}
    return {name: found[100.0][name] / found[1.0][name] for name in found[1.0]}


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        (
            "weight_deacy",
            0.5,
            "weight_deacy=.* in a param group is invalid: nothing reads it; did you mean 'weight_decay'",
        ),
        (
            "fallback",
            "false",
            "fallback='false' in a param group is invalid: it must be true .* write it without quotes",
        ),
        ("fallback", 1, "fallback=1 in a param group is invalid"),
    ],
)
@cases(exact=False)
def test_keys_that_mean_nothing_are_refused_in_living_groups_too(case: Case, key: str, value: Any, words: str) -> None:
    model, optimizer = setup(case)
    advance(model, optimizer, range(1))
    start = weights(model)
    optimizer.param_groups[0][key] = value
    with pytest.raises(OptionError, match=words):
        advance(model, optimizer, range(1, 2))
    assert_same(weights(model), start)
    del optimizer.param_groups[0][key]
    optimizer.param_groups[0]["note"] = "of somebody else"
    advance(model, optimizer, range(1, 2))
    other = net()
    with pytest.raises(OptionError, match=words):
        case.build([{"params": list(other.named_parameters()), key: value}], other)


@pytest.mark.parametrize("way", ["boundary", "to the end"])
@cases(exact=False)
def test_a_moved_parameter_takes_the_rate_of_its_group(case: Case, way: str) -> None:
    """Also where the tensors come in the same order as before; and nobody else takes it."""
    names = [name for name, _ in net().named_parameters()]
    pair = ["5.weight", "5.bias"]  # a bias rides along with its weight
    others = [name for name in names if name not in pair]
    if way == "boundary":
        ratios = changes_by_rate(case, [*others[:3], *pair], others[3:], [(name, 1) for name in pair])
        fast = {*pair, *others[3:]}
    else:
        ratios = changes_by_rate(case, [*pair, *others[:3]], others[3:], [(name, 1) for name in pair])
        fast = {*pair, *others[3:]}
    for name, ratio in ratios.items():
        assert ratio == pytest.approx(100.0 if name in fast else 1.0, rel=1e-3), name


@cases(exact=False)
def test_a_move_between_like_groups_changes_nothing(case: Case) -> None:
    trajectories = []
    for moved in (False, True):
        model = net()
        named = list(model.named_parameters())
        optimizer = case.build([{"params": named[:4]}, {"params": named[4:]}], model)
        advance(model, optimizer, range(3))
        if moved:
            move(optimizer, "2.weight", model, 1)
        advance(model, optimizer, range(3, 6))
        trajectories.append(weights(model))
        assert len([row for row in optimizer.explain() if row.name == "2.weight"]) == 1
        assert sum(row.state_bytes for row in optimizer.explain()) == sum(optimizer.state_bytes().values())
    for name, value in trajectories[0].items():
        assert torch.allclose(trajectories[1][name], value, rtol=0, atol=1e-12), name


@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize(("name", "values"), CHANGES, ids=str)
def test_what_states_depend_on_may_not_change(name: str, values: dict[str, Any], moved: bool) -> None:
    """Edited in the group, or by a move to a group that has it."""
    case, model = BY_NAME[name], net()
    named = list(model.named_parameters())
    optimizer = case.build([{"params": named[:2]}, {"params": named[2:]}], model)
    advance(model, optimizer, range(2))
    (option, value), key = next(iter(values.items())), "2.weight"
    if moved and option in ("band", "optimize_1d", "update_interval"):
        pytest.skip("no group may have it")
    if moved:
        other = nn.Linear(12, 12).double()
        optimizer.add_param_group({"params": [("late.weight", other.weight)], **values})
        if case.is_mkor:
            optimizer.capture(nn.ModuleList([model, other]))
        move(optimizer, key, model, 2)
    else:
        optimizer.param_groups[1][option] = value
    before = copy.deepcopy(optimizer.state_dict()["state"]), weights(model)
    loss_of(model, 3).backward()
    with pytest.raises(
        OptionError, match=f"{option}={value!r} in param group {2 if moved else 1} is invalid.*(back|remove it)"
    ):
        optimizer.step()
    assert_same(weights(model), before[1])
    for index, state in optimizer.state_dict()["state"].items():
        assert all(torch.equal(entry, before[0][index][name]) for name, entry in state.items())


@pytest.mark.parametrize("values", [{"rank": 1}, {"error_feedback": False}, {"fallback": True}], ids=str)
def test_what_states_depend_on_may_change_before_there_are_any(values: dict[str, Any]) -> None:
    case = BY_NAME["ldadam"]
    trajectories = []
    for early in (True, False):
        model = net()
        named = list(model.named_parameters())
        groups: list[dict[str, Any]] = [{"params": named[:2]}, {"params": named[2:]}]
        if early:
            groups[0].update(values)
        optimizer = case.build(groups, model)
        if not early:
            optimizer.param_groups[0].update(values)
        advance(model, optimizer, range(3))
        trajectories.append((weights(model), [str(row) for row in optimizer.explain()]))
    assert_same(trajectories[0][0], trajectories[1][0])
    assert trajectories[0][1] == trajectories[1][1]


def test_a_group_put_in_by_hand_must_be_complete() -> None:
    model, optimizer = setup(BY_NAME["mars-adamw"])
    parameter = optimizer.param_groups[0]["params"].pop()
    optimizer.param_groups.append({"params": [parameter], "lr": 1e-3})
    loss_of(model, 0).backward()
    with pytest.raises(OptionError, match="param group 1 is invalid: it must have 'betas'; add groups with"):
        optimizer.step()


# --- the model's type and shape --------------------------------------------------------------------------------------


@cases(exact=False)
def test_a_model_may_change_its_type(case: Case) -> None:
    """States follow; the same as a checkpoint loaded into a model of that type."""
    model, optimizer = setup(case, torch.float32)
    advance(model, optimizer, range(3))
    twin = net(dtype=torch.float64)
    twin.load_state_dict(model.state_dict())
    other = case.build(twin.named_parameters(), twin)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    model.double()
    advance(model, optimizer, range(3, 6))
    advance(twin, other, range(3, 6))
    for name, value in weights(model).items():
        # MKOR's statistics stay of the type in which they were first taken.
        assert torch.allclose(weights(twin)[name], value, rtol=0, atol=1e-8 if case.is_mkor else 0), name


@cases(names=["mars-adamw", "sonew-tridiagonal", "ldadam", "mkor-adamw"])
def test_a_resized_parameter_is_refused(case: Case) -> None:
    model, optimizer = setup(case)
    advance(model, optimizer, range(2))
    parameter = model[0].weight
    parameter.data = torch.zeros(20, 6, dtype=torch.float64)
    parameter.grad = torch.ones_like(parameter)
    with pytest.raises(RuntimeError, match="'0.weight' has 120 elements, but had 60 when the optimizer was built"):
        optimizer.step()


# --- tensors whose values lie elsewhere ------------------------------------------------------------------------------


class Elsewhere(Tensor):
    """A wrapper, as DTensor is one."""

    @staticmethod
    def __new__(cls, values: Tensor) -> Elsewhere:
        return Tensor._make_wrapper_subclass(cls, values.shape, dtype=values.dtype)  # type: ignore[attr-defined]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise AssertionError("its values were asked for")


@pytest.mark.parametrize("cls", [MARS, SONew, LDAdam, MKOR])
def test_tensor_subclasses_are_refused(cls: Any) -> None:
    strange = nn.Parameter(Elsewhere(torch.zeros(99, 99)))
    message = "'w' is invalid, because it is a Elsewhere, a tensor subclass.*must be a plain tensor or a DTensor"
    with pytest.raises(OptionError, match=message):
        cls([("w", strange)])
    optimizer = cls([nn.Parameter(torch.zeros(99, 99))])
    with pytest.raises(OptionError, match="the parameter 'number 0' is invalid"):
        optimizer.add_param_group({"params": [strange]})
    assert len(optimizer.param_groups) == len(optimizer.explain()) == 1


@pytest.mark.parametrize("cls", [MARS, SONew, LDAdam, MKOR])
def test_flattened_parameters_are_refused_by_name_or_mark(cls: Any) -> None:
    marked = nn.Parameter(torch.zeros(99, 99))
    marked._fsdp_flattened = True  # type: ignore[attr-defined]
    plain = nn.Parameter(torch.zeros(99, 99))
    for name, parameter in (("w", marked), ("_flat_param", plain), ("_fsdp_wrapped_module.0.weight", plain)):
        with pytest.raises(
            OptionError, match=f"'{name}' is invalid, because it is a parameter that FSDP has flattened.*fully_shard"
        ):
            cls([(name, parameter)])


@cases(names=["mars-adamw", "sonew-tridiagonal", "ldadam", "mkor-adamw"])
def test_parameters_that_become_subclasses_are_refused(case: Case) -> None:
    model, optimizer = setup(case)
    advance(model, optimizer, range(1))
    strange = nn.Parameter(Elsewhere(torch.zeros(10, 6, dtype=torch.float64)))
    parameter = model[0].weight
    torch.utils.swap_tensors(parameter, strange)
    with pytest.raises(OptionError, match="'0.weight' is invalid, because it is a Elsewhere"):
        optimizer.step()


# --- complex parameters ----------------------------------------------------------------------------------------------


def complex_pair() -> tuple[nn.Parameter, nn.Parameter]:
    torch.manual_seed(0)
    return nn.Parameter(torch.randn(4, 6, dtype=torch.complex128)), nn.Parameter(torch.randn(20, 20).double())


def train_complex(value: Tensor, matrix: Tensor, optimizer: Any, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        target = torch.full((4, 6), 1 + 2j * step)
        ((value - target).abs().square().sum() + (matrix - step).square().sum()).backward()
        optimizer.step()


OPTIONS = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
MADE = {
    "mars": lambda params: MARS(params, betas_1d=(0.9, 0.99), lr_1d=1e-2, weight_decay_1d=0.1, **OPTIONS),
    "sonew": lambda params: SONew(params, **OPTIONS),
    "ldadam": lambda params: LDAdam(params, rank=2, **OPTIONS),
}


@pytest.mark.parametrize("name", ["mars", "sonew", "ldadam"])
def test_complex_parameters_are_stepped_as_torch_does(name: str) -> None:
    """On the fallback, which is AdamW; also through a checkpoint."""
    value, matrix = complex_pair()
    optimizer = MADE[name]([("value", value), ("matrix", matrix)])
    train_complex(value, matrix, optimizer, range(3))
    row = {row.name: row for row in optimizer.explain()}["value"]
    assert (row.rule, row.reason) == ("fallback", "complex")
    state, kept = copy.deepcopy(optimizer.state_dict()), (value.detach().clone(), matrix.detach().clone())
    train_complex(value, matrix, optimizer, range(3, 6))
    expected, other = complex_pair()
    train_complex(expected, other, torch.optim.AdamW([expected], **OPTIONS), range(6))
    assert torch.allclose(value, expected, rtol=0, atol=1e-12)
    again, second = complex_pair()
    twin = MADE[name]([("value", again), ("matrix", second)])
    with torch.no_grad():
        again.copy_(kept[0])
        second.copy_(kept[1])
    twin.load_state_dict(state)
    train_complex(again, second, twin, range(3, 6))
    assert torch.equal(again, value) and torch.equal(second, matrix)


def test_complex_parameters_take_no_matrix_rule() -> None:
    value, matrix = complex_pair()
    with pytest.raises(OptionError, match="fallback=False in the param group of 'value' is invalid.*complex"):
        SONew([{"params": [("matrix", matrix)]}, {"params": [("value", value)], "fallback": False}])


# --- values written into a living group -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [("betas", (2.0, 0.9)), ("betas", 0.9), ("betas", None), ("weight_decay", "x"), ("weight_decay", math.nan)],
    ids=str,
)
@cases(exact=False)
def test_a_bad_value_ends_the_step_before_it_begins(case: Case, name: str, value: Any) -> None:
    model, optimizer = setup(case)
    if name not in optimizer.param_groups[0]:
        return
    advance(model, optimizer, range(2))
    before, counts = weights(model), [float(state["step"]) for state in optimizer.state.values()]
    optimizer.param_groups[0][name] = value
    with pytest.raises(OptionError, match=name):
        advance(model, optimizer, range(2, 3))
    assert_same(weights(model), before)
    assert [float(state["step"]) for state in optimizer.state.values()] == counts


@cases(exact=False)
def test_a_missing_rate_is_named(case: Case) -> None:
    model, optimizer = setup(case)
    advance(model, optimizer, range(1))
    del optimizer.param_groups[0]["lr"]
    with pytest.raises(OptionError, match="it must have 'lr'"):
        advance(model, optimizer, range(1, 2))


def test_values_are_judged_once() -> None:
    model, optimizer = setup(BY_NAME["mars-adamw"])
    with patch.object(optimizer.values, "validate", wraps=optimizer.values.validate) as judged:
        for index in range(4):
            optimizer.param_groups[0]["lr"] = 0.1 / (1 + index)
            advance(model, optimizer, range(index, index + 1))
        assert judged.call_count == 0
        optimizer.param_groups[0]["betas"] = (0.8, 0.9)
        advance(model, optimizer, range(4, 7))
    assert judged.call_count == 1
