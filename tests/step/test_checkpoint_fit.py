"""A checkpoint of another model is refused before anything changes; parameters in another order find their states."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import BY_NAME, Case, advance, assert_same, cases, loss_of, net, setup, weights
from saved_files import through_a_file
from test_checkpoint import refused, tensors
from torch import Tensor, nn

OF_EVERY_TYPE = ["mars-adamw", "mars-lion", "mars-shampoo", "mars-m", "sonew-tridiagonal", "ldadam", "mkor-adamw"]


class Tokens(nn.Module):
    """Embedding, a layer, a head; every size can be chosen."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, 16)
        self.middle = nn.Linear(16, width)
        self.out = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.out(torch.tanh(self.middle(self.embedding(tokens))))
        return found


def trained(case: Case, vocabulary: int, width: int, steps: int = 2, **overrides: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = Tokens(vocabulary, width)
    optimizer = case.build(model.named_parameters(), model, **overrides)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.arange(6).view(2, 3)).square().mean().backward()
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("stepped", [False, True])
@pytest.mark.parametrize(
    ("saved", "built"),
    [((20, 32), (80, 32)), ((80, 32), (20, 32)), ((20, 24), (20, 64)), ((20, 64), (20, 24))],
    ids=["vocabulary grown", "vocabulary shrunk", "wider", "narrower"],
)
@cases(names=OF_EVERY_TYPE)
def test_other_shapes_are_refused(case: Case, saved: Any, built: Any, stepped: bool) -> None:
    _, theirs = trained(case, *saved)
    theirs.param_groups[0]["lr"] = 0.5
    model, ours = trained(case, *built, steps=2 if stepped else 0)
    refused(model, ours, through_a_file(theirs.state_dict()), "has the shape .* which is invalid: it must be")


@pytest.mark.parametrize("name", ["ldadam", "mkor-adamw"])
def test_matrix_states_of_another_shape_are_refused(name: str) -> None:
    """Where the element states fit: they alone would not show it."""
    model, ours = trained(BY_NAME[name], 20, 24)
    for key, state in ours.state_dict()["matrix_states"].items():
        for entry in ("basis", "exp_avg", "left_vectors", "right_vectors"):
            if entry in state:
                broken = through_a_file(ours.state_dict())
                broken["matrix_states"][key][entry] = torch.zeros(3, 2)
                refused(model, ours, broken, f"the state '{entry}' of '{key}' has the shape .3, 2., which is invalid")


@cases(names=OF_EVERY_TYPE)
def test_a_state_that_was_replaced_never_reaches_a_kernel(case: Case) -> None:
    """By the user, or a tool; the loaded dictionary was right."""
    for size in (1, 7):
        model, optimizer = trained(case, 20, 24)
        name = next(key for key in optimizer.state[model.middle.weight] if key != "step")
        optimizer.state[model.middle.weight][name] = torch.zeros(size)
        model(torch.arange(6)).square().mean().backward()
        with pytest.raises(RuntimeError, match=f"the state '{name}' of 'middle.weight' has the shape"):
            optimizer.step()


def test_states_that_the_options_need_must_be_there() -> None:
    for saved, built in ({"band": 1}, {"band": 3}), ({"graft": "adam"}, {"graft": "rmsprop"}):
        _, theirs = trained(BY_NAME["sonew-tridiagonal"], 20, 24, **saved)
        model, ours = trained(BY_NAME["sonew-tridiagonal"], 20, 24, **built)
        refused(model, ours, theirs.state_dict(), "states of 'embedding.weight' are invalid: they must include")


def test_a_pre_hook_may_repair_a_dictionary() -> None:
    """What is compared, and loaded, is what it returns."""
    _, theirs = trained(BY_NAME["sonew-tridiagonal"], 20, 24)
    _, ours = trained(BY_NAME["sonew-tridiagonal"], 20, 24)
    state = through_a_file(theirs.state_dict())
    kept = state["state"][0]["exp_avg"]
    state["state"][0]["exp_avg"] = torch.zeros(1)
    calls = []

    def repair(optimizer: Any, found: Any) -> Any:
        calls.append(found)
        return {**found, "state": {**found["state"], 0: {**found["state"][0], "exp_avg": kept}}}

    ours.register_load_state_dict_pre_hook(repair)
    ours.load_state_dict(state)
    assert len(calls) == 1
    assert torch.equal(ours.state[ours.param_groups[0]["params"][0]]["exp_avg"], kept)
    ours.load_state_dict(state)
    assert len(calls) == 2


# --- order -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("grouped", [False, True])
@cases()
def test_parameters_in_another_order_find_their_states(case: Case, grouped: bool) -> None:
    def params(model: nn.Module, backwards: bool) -> list[Any]:
        named = list(model.named_parameters())
        parts = [named[:3], named[3:]] if grouped else [named]
        return [{"params": part[:: -1 if backwards else 1]} for part in parts]

    model, twin = net(), net(seed=9)
    optimizer = case.build(params(model, False), model)
    advance(model, optimizer, range(3))
    saved = through_a_file(optimizer.state_dict())
    other = case.build(params(twin, True), twin)
    twin.load_state_dict(model.state_dict())
    other.load_state_dict(saved)
    names = [name for group in params(twin, True) for name, _ in group["params"]]
    assert [name for group in other.param_groups for name in group["param_names"]] == names
    advance(model, optimizer, range(3, 6))
    advance(twin, other, range(3, 6))
    # Order sets that of sums over layers in some kernels, hence their rounding.
    for name, value in weights(model).items():
        assert torch.allclose(weights(twin)[name], value, rtol=0, atol=1e-12), name


def test_names_in_other_groups_are_refused() -> None:
    case, model = BY_NAME["sonew-tridiagonal"], net()
    named = dict(model.named_parameters())

    def build(*groups: tuple[str, ...]) -> Any:
        return case.build([{"params": [(name, named[name]) for name in names]} for names in groups], model)

    here = build(("0.weight", "0.bias"), ("2.weight", "5.bias"))
    advance(model, here, range(2))
    swapped = build(("0.weight", "2.weight"), ("0.bias", "5.bias"))
    refused(model, swapped, here.state_dict(), "'2.weight' is number 0 of group 1 there and number 1 of group 0 here")


def test_a_renamed_parameter_keeps_its_place() -> None:
    case, model = BY_NAME["sonew-tridiagonal"], net()
    optimizer = case.build(model.named_parameters(), model)
    advance(model, optimizer, range(2))
    renamed = case.build([(f"module.{name}", parameter) for name, parameter in model.named_parameters()], model)
    renamed.load_state_dict(optimizer.state_dict())
    ours, theirs = tensors(renamed.state_dict()), tensors(optimizer.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


# --- types -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("saved", "built"), [(torch.float32, torch.float64), (torch.float64, torch.float32)])
@cases(exact=False)
def test_a_checkpoint_of_another_precision_is_converted(case: Case, saved: torch.dtype, built: torch.dtype) -> None:
    model, optimizer = setup(case, saved)
    advance(model, optimizer, range(3))
    twin, other = setup(case, built)
    twin.load_state_dict(model.state_dict())
    other.load_state_dict(through_a_file(optimizer.state_dict()))
    start = weights(twin)
    advance(model, optimizer, range(3, 6))
    advance(twin, other, range(3, 6))
    # LDAdam's error, and MARS's reference if so chosen, are bfloat16 whatever the weights.
    kept = {"step", "error"} | ({"reference"} if case.narrow_states else set())
    for state in other.state.values():
        assert all(value.dtype == built for name, value in state.items() if name not in kept)
        assert all(state[name].dtype == torch.bfloat16 for name in kept & state.keys() & {"reference"})
    change = max(float((weights(twin)[name] - start[name]).abs().max()) for name in start)
    # Without the states the difference is of the size of the change itself; the factors of a case are bfloat16.
    for name, value in weights(model).items():
        assert float((weights(twin)[name] - value).abs().max()) < 2e-2 * change, name


@pytest.mark.parametrize("name", ["mars-adamw", "sonew-tridiagonal", "ldadam", "mkor-adamw"])
def test_step_counts_do_not_depend_on_the_default_type(name: str) -> None:
    """bfloat16 rounds 257 to 256."""

    def trajectory(default: torch.dtype) -> dict[str, Tensor]:
        model, optimizer = setup(BY_NAME[name], torch.float32)
        advance(model, optimizer, [0])
        for state in optimizer.state.values():
            state["step"].fill_(256.0)
        torch.set_default_dtype(default)
        try:
            model.zero_grad()
            loss_of(model, 1).backward()
            optimizer.step()
        finally:
            torch.set_default_dtype(torch.float32)
        return weights(model)

    assert_same(trajectory(torch.bfloat16), trajectory(torch.float32))
