"""The four classes behave as torch.optim optimizers do."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import pytest
import torch
from cases import BY_NAME, CASES, Case, advance, assert_same, batch, cases, deviation, is_exact, loss_of, net, setup
from cases import weights as weights_of
from torch import Tensor, nn
from torch.optim import lr_scheduler

from rankwise import MARS, MKOR, LDAdam, SONew

CLASSES = [MARS, SONew, LDAdam, MKOR]
STEPS = range(7)
ROUNDING = 1e-11


def halves(model: nn.Sequential) -> tuple[list[Any], list[Any]]:
    """Named parameters in two groups: a layer with its bias, and the rest."""
    named = list(model.named_parameters())
    return named[:2], named[2:]


def apart(case: Case, first: dict[str, Any], second: dict[str, Any]) -> dict[str, Tensor]:
    """The trajectory of two optimizers that share nothing but the model."""
    model = net()
    optimizers = [
        case.build(part, model, **values) for part, values in zip(halves(model), (first, second), strict=True)
    ]
    train_together(model, optimizers)
    return weights_of(model)


def train_together(model: nn.Module, optimizers: list[Any], steps: Any = STEPS) -> None:
    for index in steps:
        if is_exact(optimizers[0]):
            model.zero_grad()
            loss_of(model, index + 1).backward()
            for optimizer in optimizers:
                optimizer.record_reference()
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss_of(model, index).backward()
        for optimizer in optimizers:
            optimizer.step()


# --- signatures ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("method", ["step", "state_dict", "load_state_dict", "zero_grad", "add_param_group"])
def test_signatures_are_those_of_torch(cls: type, method: str) -> None:
    ours, theirs = (inspect.signature(getattr(owner, method)).parameters for owner in (cls, torch.optim.Optimizer))
    assert [(p.name, p.kind) for p in ours.values()][: len(theirs)] == [(p.name, p.kind) for p in theirs.values()]
    for name, parameter in list(ours.items())[len(theirs) :]:
        assert parameter.default is not inspect.Parameter.empty, name
    if method == "zero_grad":
        assert ours["set_to_none"].default is True
    if method == "step":
        assert ours["closure"].default is None


@pytest.mark.parametrize("cls", CLASSES)
def test_is_a_torch_optimizer(cls: type) -> None:
    assert issubclass(cls, torch.optim.Optimizer)
    first, second = list(inspect.signature(cls).parameters.values())[:2]
    assert (first.name, second.name) == ("params", "lr")
    keywords = inspect.signature(torch.optim.AdamW).parameters
    shared = {"lr", "betas", "eps", "weight_decay"}
    assert shared <= inspect.signature(cls).parameters.keys() & keywords.keys()


# --- param groups ----------------------------------------------------------------------------------------------------

GROUP_VALUES = [
    ("mars-adamw", {"lr": 3e-3}),
    ("mars-adamw", {"lr_1d_ratio": 0.9}),
    ("mars-adamw", {"betas": (0.8, 0.9)}),
    ("mars-adamw", {"eps": 1e-2}),
    ("mars-adamw", {"weight_decay": 0.5}),
    ("mars-adamw", {"gamma": 0.3}),
    ("mars-adamw", {"clip": 0.01}),
    ("mars-adamw", {"clip": None}),
    ("mars-adamw", {"betas_1d": (0.5, 0.6)}),
    ("mars-adamw", {"weight_decay_1d": 0.7}),
    ("mars-shampoo", {"ns_steps": 3}),
    ("mars-shampoo", {"ns_coefficients": "polar_express"}),
    ("mars-m", {"ns_coefficients": "cans", "ns_steps": 4}),
    ("mars-lion", {"betas": (0.7, 0.9), "weight_decay": 0.4}),
    ("mars-adamw-exact", {"lr": 2e-3, "gamma": 0.1}),
    ("sonew-tridiagonal", {"lr": 3e-3}),
    ("sonew-tridiagonal", {"betas": (0.8, 0.95)}),
    ("sonew-tridiagonal", {"eps": 1e-3}),
    ("sonew-tridiagonal", {"weight_decay": 0.5}),
    ("sonew-tridiagonal", {"graft_eps": 1e-1}),
    ("sonew-tridiagonal", {"gamma": 0.5}),
    ("ldadam", {"lr": 3e-3}),
    ("ldadam", {"rank": 1}),
    ("ldadam", {"rho": 0.3}),
    ("ldadam", {"betas": (0.8, 0.95)}),
    ("ldadam", {"eps": 1e-2}),
    ("ldadam", {"weight_decay": 0.5}),
    ("ldadam", {"error_feedback": False}),
    ("mkor-adamw", {"lr": 3e-3}),
    ("mkor-adamw", {"betas": (0.8, 0.95)}),
    ("mkor-adamw", {"eps": 1e-2}),
    ("mkor-lamb", {"weight_decay": 0.5}),
    ("mkor-sgd", {"momentum": 0.5}),
]


@pytest.mark.parametrize(("name", "values"), GROUP_VALUES, ids=lambda value: str(value))
def test_a_group_follows_its_own_values(name: str, values: dict[str, Any]) -> None:
    """Two groups step as two optimizers do, and the value matters."""
    case, model = BY_NAME[name], net()
    first, second = halves(model)
    optimizer = case.build([{"params": first}, {"params": second, **values}], model)
    start = weights_of(model)
    advance(model, optimizer, STEPS)
    as_option = {key: value for key, value in values.items() if key != "lr_1d_ratio"}
    if "lr_1d_ratio" in values:
        as_option["lr_1d"] = values["lr_1d_ratio"] * case.options["lr"]
    assert deviation(weights_of(model), apart(case, {}, as_option), start) < ROUNDING
    assert deviation(weights_of(model), apart(case, {}, {}), start) > 1e-7


@cases()
def test_every_group_option_has_a_default_in_each_group(case: Case) -> None:
    model = net()
    first, second = halves(model)
    optimizer = case.build([{"params": first}, {"params": second, "lr": 0.5}])
    assert [group["lr"] for group in optimizer.param_groups] == [case.options["lr"], 0.5]
    for group in optimizer.param_groups:
        assert set(optimizer.spec.group_options) <= group.keys()
    assert set(optimizer.spec.group_options) <= optimizer.defaults.keys()
    assert "lr: 0.5" in repr(optimizer)


@cases()
def test_names_and_containers_do_not_matter(case: Case) -> None:
    """Tensors, (name, tensor) pairs, groups of either, and generators: one trajectory."""
    trajectories = []
    for kind in range(5):
        model = net()
        named = list(model.named_parameters())
        params: Any = [
            [parameter for _, parameter in named],
            named,
            (pair for pair in named),
            [{"params": named[:3]}, {"params": named[3:]}],
            [{"params": [p for _, p in named[:3]]}, {"params": [p for _, p in named[3:]]}],
        ][kind]
        optimizer = case.build(params, model)
        names = [row.name for row in optimizer.explain()]
        if kind in (1, 2, 3):
            assert names == [name for name, _ in named]
        else:
            assert len(set(names)) == len(named)
        start = weights_of(model)
        advance(model, optimizer, STEPS)
        trajectories.append(weights_of(model))
    for other in trajectories[1:]:
        # Names set the order of a batched product, hence its rounding.
        assert deviation(other, trajectories[0], start) < ROUNDING


@cases()
def test_a_group_added_later_starts_its_own_count(case: Case) -> None:
    """As an optimizer of its own that starts then."""
    cut = 3 * case.options.get("update_interval", 1)  # MKOR's factor steps are common to all groups
    model, other = net(), net()
    late = [(name, value) for name, value in model.named_parameters() if name == "2.weight" or name.startswith("4.")]
    early = [(name, value) for name, value in model.named_parameters() if name not in dict(late)]
    optimizer = case.build([{"params": early}], model)
    steps = [range(cut), range(cut, cut + 4)]
    advance(model, optimizer, steps[0])
    optimizer.add_param_group({"params": late, "lr": 2e-3})
    if case.is_mkor:
        optimizer.capture(model)
    advance(model, optimizer, steps[1])
    others = dict(other.named_parameters())
    reference = case.build([(name, others[name]) for name, _ in early], other)
    train_together(other, [reference], steps[0])
    second = case.build([(name, others[name]) for name, _ in late], other, lr=2e-3)
    if "lr_1d" in case.options:
        second.param_groups[0]["lr_1d_ratio"] = optimizer.param_groups[0]["lr_1d_ratio"]
    train_together(other, [reference, second], steps[1])
    assert deviation(weights_of(model), weights_of(other), weights_of(net())) < ROUNDING
    counts = [int(optimizer.state[group["params"][0]]["step"]) for group in optimizer.param_groups]
    assert counts == [cut + 4, 4]
    # Each parameter's state is reported once, though it has been part of two plans.
    assert sum(row.state_bytes for row in optimizer.explain()) == sum(optimizer.state_bytes().values())


@pytest.mark.parametrize("fallback", [True, False])
@cases(exact=False)
def test_fallback_groups(case: Case, fallback: bool) -> None:
    """True forces the first-order rule on a matrix; False the matrix rule on what would not take it."""
    model = net()
    named = dict(model.named_parameters())
    chosen = "2.weight" if fallback else "5.weight"
    bias = chosen.replace("weight", "bias")  # rides along with its weight if it is in the same group
    forced = [(name, value) for name, value in named.items() if name in (chosen, bias)]
    rest = [(name, value) for name, value in named.items() if name not in (chosen, bias)]
    if case.cls is not MKOR:
        rest, forced = rest + forced[1:], forced[:1]
    groups = [{"params": rest}, {"params": forced, "fallback": fallback}]
    optimizer = case.build(groups, model)
    row = next(row for row in optimizer.explain() if row.name == chosen)
    assert (row.rule, row.reason) == (("fallback" if fallback else "matrix"), "param group")
    start = weights_of(model)
    advance(model, optimizer, STEPS)
    other, plain = setup(case)
    advance(other, plain, STEPS)
    same = {row.name: row.rule for row in plain.explain()}[chosen] == row.rule
    assert (deviation(weights_of(model), weights_of(other), start) < ROUNDING) == same


@cases()
def test_a_fallback_group_of_everything_is_refused(case: Case) -> None:
    with pytest.raises(ValueError, match="would update none of the 7 parameters"):
        case.build([{"params": list(net().named_parameters()), "fallback": True}])


@pytest.mark.parametrize("name", ["mars-shampoo", "mars-m", "ldadam", "mkor-adamw"])
def test_matrix_rules_cannot_be_forced_on_vectors(name: str) -> None:
    """A group that asks for it trains all the same, and explain() says what its vectors take."""
    case, model = BY_NAME[name], net()
    optimizer = case.build([{"params": list(model.named_parameters()), "fallback": False}], model)
    advance(model, optimizer, STEPS)
    rules = {row.name: row.rule for row in optimizer.explain()}
    assert rules["0.weight"] == rules["2.weight"] == rules["5.weight"] == "matrix"
    if case.cls is not MARS:
        assert rules["0.bias"] == rules["4.weight"] == "fallback"


# --- schedulers, lr ---------------------------------------------------------------------------------------------------


@cases()
def test_one_cycle_moves_lr_and_betas(case: Case) -> None:
    """Values taken from the same schedule on torch.optim.AdamW, or on its SGD where that is the backend."""
    key = "momentum" if case.options.get("backend") == "sgd" else "betas"

    def one_cycle(target: torch.optim.Optimizer) -> lr_scheduler.OneCycleLR:
        return lr_scheduler.OneCycleLR(target, max_lr=2 * case.options["lr"], total_steps=10)

    model, optimizer = setup(case)
    schedule = one_cycle(optimizer)
    other, manual = setup(case)
    single = [nn.Parameter(torch.zeros(1))]
    twin: torch.optim.Optimizer
    if key == "betas":
        twin = torch.optim.AdamW(single, betas=(0.9, manual.param_groups[0]["betas"][1]))
    else:
        twin = torch.optim.SGD(single, momentum=0.9)
    twin_schedule = one_cycle(twin)
    seen = set()
    for index in STEPS:
        advance(model, optimizer, [index])
        schedule.step()
        for group in manual.param_groups:
            group["lr"], group[key] = twin.param_groups[0]["lr"], twin.param_groups[0][key]
        seen.add(manual.param_groups[0][key])
        advance(other, manual, [index])
        twin.step()
        twin_schedule.step()
    assert len(seen) > 3
    assert_same(weights_of(model), weights_of(other))


@cases()
def test_tensor_lr_equals_float_lr(case: Case) -> None:
    model, optimizer = setup(case)
    start = weights_of(model)
    other, tensor = setup(case, lr=torch.tensor(case.options["lr"], dtype=torch.float64))
    schedules = [lr_scheduler.ExponentialLR(each, 0.7) for each in (optimizer, tensor)]
    for index in STEPS:
        advance(model, optimizer, [index])
        advance(other, tensor, [index])
        for schedule in schedules:
            schedule.step()
    assert isinstance(tensor.param_groups[0]["lr"], Tensor)
    assert float(tensor.param_groups[0]["lr"]) == pytest.approx(case.options["lr"] * 0.7 ** len(STEPS), rel=1e-12)
    assert deviation(weights_of(other), weights_of(model), start) < ROUNDING


@cases(exact=False)
def test_lr_zero_moves_nothing(case: Case) -> None:
    model, optimizer = setup(case)
    advance(model, optimizer, range(2))
    optimizer.param_groups[0]["lr"] = 0.0
    before = weights_of(model)
    advance(model, optimizer, range(2, 5))
    assert_same(weights_of(model), before)


# --- step and gradients ----------------------------------------------------------------------------------------------


@cases(exact=False)
def test_closure(case: Case) -> None:
    model, optimizer = setup(case)
    other, plain = setup(case)
    for index in STEPS:

        def closure(index: int = index) -> Tensor:
            assert torch.is_grad_enabled()
            optimizer.zero_grad()
            loss = loss_of(model, index)
            loss.backward()
            optimizer.record_loss(loss) if case.is_mkor else None
            return loss

        expected = loss_of(model, index).detach()
        assert torch.equal(optimizer.step(closure).detach(), expected)
        advance(other, plain, [index])
    assert_same(weights_of(model), weights_of(other))


@cases()
def test_step_without_closure_returns_none(case: Case) -> None:
    model, optimizer = setup(case)
    assert optimizer.step() is None


@cases()
def test_reused_gradient_buffers_change_nothing(case: Case) -> None:
    """Zeroed in place and refilled, as frameworks do, against fresh tensors."""
    model, optimizer = setup(case)
    advance(model, optimizer, STEPS, set_to_none=True)
    other, reusing = setup(case)
    advance(other, reusing, [0], set_to_none=False)
    addresses = [parameter.grad.data_ptr() for parameter in other.parameters()]
    advance(other, reusing, STEPS[1:], set_to_none=False)
    assert addresses == [parameter.grad.data_ptr() for parameter in other.parameters()]
    assert_same(weights_of(other), weights_of(model))


@cases()
def test_gradients_are_left_as_they_were(case: Case) -> None:
    model, optimizer = setup(case)
    advance(model, optimizer, range(3))
    loss_of(model, 3).backward()
    grads = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    optimizer._recorded = True  # exact mode: the reference of the step before will do
    optimizer.step()
    assert_same({name: parameter.grad for name, parameter in model.named_parameters()}, grads)


@cases()
def test_zero_grad(case: Case) -> None:
    model, optimizer = setup(case)
    loss_of(model, 0).backward()
    optimizer.zero_grad(set_to_none=False)
    assert all(not parameter.grad.any() for parameter in model.parameters())
    optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())


@cases()
def test_accumulated_micro_batches_equal_one_batch(case: Case) -> None:
    model, optimizer = setup(case)
    start = weights_of(model)
    advance(model, optimizer, STEPS)
    other, accumulating = setup(case)
    advance(other, accumulating, STEPS, micro_batches=4)
    # The order of the sums differs: rounding, which a bf16 buffer may amplify to its own.
    bound = 1e-2 if case.narrow_states or case.is_mkor else 1e-9
    if case.options.get("factor_dtype") == "float64":
        bound = 1e-9
    assert deviation(weights_of(other), weights_of(model), start) < bound


@cases(exact=False)
def test_parameters_without_gradient_are_skipped(case: Case) -> None:
    """They keep bits, state and count; later they continue as if alone."""
    overrides = {"update_interval": 1} if case.is_mkor else {}
    absent = {"2.weight", "4.weight"}
    model, optimizer = setup(case, **overrides)
    other = net()
    named = dict(other.named_parameters())
    alone = case.build([(name, named[name]) for name in named if name in absent], other, **overrides)
    rest = case.build([(name, named[name]) for name in named if name not in absent], other, **overrides)
    for index in range(6):
        skipped = index in (0, 2)
        for each in (optimizer, alone, rest):
            each.zero_grad()
        loss_of(model, index).backward()
        loss_of(other, index).backward()
        if skipped:
            for name, parameter in model.named_parameters():
                parameter.grad = None if name in absent else parameter.grad
        before = weights_of(model)
        optimizer.step()
        rest.step()
        if skipped:
            assert all(torch.equal(model.get_parameter(name), before[name]) for name in absent)
            alone.zero_grad()
        else:
            alone.step()
    counts = {name: int(optimizer.state[parameter]["step"]) for name, parameter in model.named_parameters()}
    assert counts == {name: 4 if name in absent else 6 for name in counts}
    assert deviation(weights_of(model), weights_of(other), weights_of(net())) < ROUNDING


@cases()
def test_no_gradient_at_all(case: Case) -> None:
    model, optimizer = setup(case)
    before = weights_of(model)
    optimizer.step()
    assert_same(weights_of(model), before)
    assert not optimizer.state and not optimizer.matrix_states
    advance(model, optimizer, range(2))
    optimizer.zero_grad()
    before, counts = weights_of(model), [int(state["step"]) for state in optimizer.state.values()]
    optimizer.step()
    assert_same(weights_of(model), before)
    assert counts == [int(state["step"]) for state in optimizer.state.values()]


@pytest.mark.parametrize("cls", CLASSES)
def test_sparse_gradients_are_refused_before_anything_changes(cls: type) -> None:
    model = nn.ModuleDict({"body": nn.Linear(8, 8), "embed": nn.Embedding(9, 8, sparse=True)})
    optimizer = cls(model.named_parameters(), **({"rank": 1} if cls is LDAdam else {}))
    if cls is MKOR:
        optimizer.capture(model)
    before = weights_of(model)
    model["body"](model["embed"](torch.tensor([1, 2]))).sum().backward()
    with pytest.raises(RuntimeError, match=f"{cls.__name__} does not support sparse gradients; use dense"):
        optimizer.step()
    assert_same(weights_of(model), before)
    assert not optimizer.state


def test_exact_mode_with_gradients_that_come_and_go() -> None:
    """A parameter absent from the look-ahead batch has a comparison gradient of zero, not one of another step."""
    case = BY_NAME["mars-adamw-exact"]
    absent_when_recording = {0, 3}
    trajectories = []
    for explicit_zeros in (False, True):
        model, optimizer = setup(case)
        name = "2.weight"
        for index in range(6):
            model.zero_grad()
            loss_of(model, index + 1).backward()
            if index in absent_when_recording:
                parameter = model.get_parameter(name)
                parameter.grad = torch.zeros_like(parameter) if explicit_zeros else None
            optimizer.record_reference()
            model.zero_grad()
            loss_of(model, index).backward()
            optimizer.step()
        trajectories.append(weights_of(model))
    assert_same(*trajectories)


def test_exact_mode_with_a_gradient_only_in_the_look_ahead() -> None:
    model, optimizer = setup(BY_NAME["mars-adamw-exact"])
    loss_of(model, 1).backward()
    optimizer.record_reference()
    model.zero_grad()
    loss_of(model, 0).backward()
    model.get_parameter("2.weight").grad = None
    before = weights_of(model)
    optimizer.step()
    assert torch.equal(model.get_parameter("2.weight"), before["2.weight"])
    advance(model, optimizer, range(1, 3))
    assert int(optimizer.state[model.get_parameter("2.weight")]["step"]) == 2


def test_exact_mode_refuses_a_step_without_reference() -> None:
    model, optimizer = setup(BY_NAME["mars-adamw-exact"])
    loss_of(model, 0).backward()
    with pytest.raises(RuntimeError, match=r"call record_reference\(\) with the next batch's gradient"):
        optimizer.step()
    with pytest.raises(RuntimeError, match="build MARS with exact=True"):
        setup(BY_NAME["mars-adamw"])[1].record_reference()


# --- types, layouts, shapes ------------------------------------------------------------------------------------------


@cases()
def test_bf16_parameters_keep_fp32_states(case: Case) -> None:
    overrides = {"ns_dtype": "float32"} if case.cls is MARS else {}
    overrides |= {"factor_dtype": "float32"} if case.is_mkor else {}
    model, optimizer = setup(case, torch.bfloat16, **overrides)
    advance(model, optimizer, range(4))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    allowed = {torch.float32} | case.narrow_states

    def types(target: Any) -> list[torch.dtype]:
        found = [value.dtype for state in target.state.values() for value in state.values()]
        return found + [
            v.dtype for s in target.matrix_states.values() for v in s.values() if v.is_floating_point() and v.dim()
        ]

    assert set(types(optimizer)) == allowed
    other, resumed = setup(case, torch.bfloat16, **overrides)
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(optimizer.state_dict())
    advance(model, optimizer, range(4, 8))
    advance(other, resumed, range(4, 8))
    assert types(resumed) == types(optimizer)
    assert_same(weights_of(other), weights_of(model))


@cases(mkor=False, exact=False)
def test_bf16_step_is_the_fp32_step_rounded_once(case: Case) -> None:
    overrides = {"ns_dtype": "float32"} if case.cls is MARS else {}
    model, optimizer = setup(case, torch.bfloat16, **overrides)
    other, exact = setup(case, torch.float32, **overrides)
    for index in range(4):
        for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
            theirs.data.copy_(ours.data)
        optimizer.zero_grad()
        loss_of(model, index).backward()
        for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
            theirs.grad = ours.grad.float()
        optimizer.step()
        exact.step()
        assert_same(weights_of(model), {name: value.bfloat16() for name, value in weights_of(other).items()})


@cases()
def test_fp64_parameters_have_fp64_states(case: Case) -> None:
    model, optimizer = setup(case)
    advance(model, optimizer, range(2))
    allowed = {torch.float64} | case.narrow_states
    found = {v.dtype for state in optimizer.state.values() for name, v in state.items() if name != "step"}
    assert found == allowed


@cases()
def test_non_contiguous_parameters_and_gradients(case: Case) -> None:
    model, optimizer = setup(case)
    other = net()
    for module in other:
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(module.weight.detach().t().contiguous().t())
    strided = case.build(other.named_parameters(), other)
    start = weights_of(model)
    for each in other.parameters():
        each.register_hook(lambda grad: grad.t().contiguous().t() if grad.dim() == 2 else grad)
    for index in STEPS:
        advance(model, optimizer, [index])
        advance(other, strided, [index])
    assert not other.get_parameter("0.weight").is_contiguous()
    assert not other.get_parameter("0.weight").grad.is_contiguous()
    assert deviation(weights_of(other), weights_of(model), start) < ROUNDING


def feed(optimizer: Any, parameters: list[Tensor], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters:
        parameter.grad = 0.2 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    optimizer.step()


@cases(mkor=False, exact=False)
def test_channels_last_and_empty_and_scalar_parameters(case: Case) -> None:
    torch.manual_seed(0)
    plain = [torch.randn(s, dtype=torch.float64) for s in ((8, 8), (4, 3, 2, 2), (0, 5), (), (1,), (1, 1))]
    ours = [value.clone().requires_grad_() for value in plain]
    strided = [value.clone() for value in plain]
    strided[1] = strided[1].to(memory_format=torch.channels_last)
    theirs = [value.requires_grad_() for value in strided]
    optimizers = case.build(ours), case.build(theirs)
    for seed in range(4):
        feed(optimizers[0], ours, seed)
        feed(optimizers[1], theirs, seed)
    assert not theirs[1].is_contiguous()
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    moved = [not torch.equal(a, b) for a, b in zip(ours, plain, strict=True)]
    assert moved == [True, True, False, True, True, True]
    assert all(value.isfinite().all() for value in ours)


def test_mkor_steps_empty_parameters() -> None:
    model = net()
    model.register_parameter("empty", nn.Parameter(torch.empty(0, 5, dtype=torch.float64)))
    optimizer = BY_NAME["mkor-adamw"].build(model.named_parameters(), model)
    for index in range(3):
        optimizer.zero_grad()
        (loss_of(model, index) + model.empty.sum()).backward()
        optimizer.step()
    assert model.empty.grad is not None


@cases(mkor=False, exact=False)
def test_a_stack_of_experts_equals_its_matrices(case: Case) -> None:
    torch.manual_seed(1)
    stack = torch.randn(3, 9, 8, dtype=torch.float64)
    together = [stack.clone().requires_grad_()]
    separate = [matrix.clone().requires_grad_() for matrix in stack]
    joint, split = case.build(together), case.build(separate)
    scale = torch.tensor([0.02, 1.0, 3.0], dtype=torch.float64)  # below and above the clip
    generator = torch.Generator().manual_seed(7)
    for _ in range(5):
        grad = torch.randn(3, 9, 8, generator=generator, dtype=torch.float64) * scale[:, None, None]
        together[0].grad = grad
        for matrix, piece in zip(separate, grad, strict=True):
            matrix.grad = piece.clone()
        joint.step()
        split.step()
    actual, expected = {"": together[0].detach()}, {"": torch.stack([m.detach() for m in separate])}
    assert deviation(actual, expected, {"": stack}) < ROUNDING
    (row,) = joint.explain()
    assert (row.rule, row.reason) == ("matrix", "stack of matrices")


def test_mixed_devices_are_refused() -> None:
    parameters = [nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(4, 4, device="meta"))]
    optimizer = SONew(parameters)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    with pytest.raises(RuntimeError, match=r"lie on \['cpu', 'meta'\]; use one optimizer per device"):
        optimizer.step()


# --- copies ----------------------------------------------------------------------------------------------------------


def by_pickle(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


@pytest.mark.parametrize("copied", [copy.deepcopy, by_pickle])
@pytest.mark.parametrize("steps", [0, 4])
@cases()
def test_copies_continue_on_their_own(case: Case, copied: Any, steps: int) -> None:
    """As torch.optim.AdamW: model and optimizer copied together go on bit for bit, and share nothing."""
    model, optimizer = setup(case)
    advance(model, optimizer, range(steps))
    other, twin = copied((model, optimizer))
    assert type(twin) is type(optimizer)
    if case.is_mkor:
        twin.capture(other)
    before = weights_of(model)
    advance(other, twin, range(steps, steps + 4))
    assert_same(weights_of(model), before)
    advance(model, optimizer, range(steps, steps + 4))
    assert_same(weights_of(other), weights_of(model))
    assert [str(row) for row in twin.explain()] == [str(row) for row in optimizer.explain()]
    torchs_own = vars(torch.optim.AdamW([nn.Parameter(torch.ones(1))])).keys()
    assert vars(twin).keys() - torchs_own == vars(optimizer).keys() - torchs_own


def test_the_table_covers_every_class_and_variant() -> None:
    assert {case.cls for case in CASES} == set(CLASSES)
    variants = {case.options.get("variant", "adamw") for case in CASES if case.cls is MARS}
    assert variants == {"adamw", "lion", "shampoo", "muon"}
    assert {case.options.get("backend", "adamw") for case in CASES if case.is_mkor} == {"adamw", "lamb", "sgd"}
    assert batch(0)[0].shape == (8, 3, 6)
