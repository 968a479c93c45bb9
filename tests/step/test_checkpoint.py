"""state_dict: saved at any step, loaded with weights_only=True, it continues bit for bit."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from cases import BY_NAME, Case, advance, assert_same, cases, is_exact, loss_of, net, setup, weights
from saved_files import through_a_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from rankwise import LDAdam


def other_values(case: Case) -> dict[str, float]:
    """Of a group, which a checkpoint must bring back; an option that nothing reads cannot be given."""
    found = {"lr": 0.7, "weight_decay": 0.9, "eps": 0.3}
    return {key: value for key, value in found.items() if case.options.get("backend") != "sgd" or key != "eps"}


def resumed(case: Case, model: nn.Module, optimizer: Any, **overrides: Any) -> tuple[nn.Module, Any]:
    """A process of its own that has the files alone."""
    saved = through_a_file({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    other = net(seed=99)
    twin = case.build(other.named_parameters(), other, **overrides)
    other.load_state_dict(saved["model"])
    twin.load_state_dict(saved["optimizer"])
    return other, twin


def tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict | list | tuple):
        return [t for item in (value.values() if isinstance(value, dict) else value) for t in tensors(item)]
    return []


def everything(model: nn.Module, optimizer: Any) -> list[Any]:
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    return [copy.deepcopy(groups), [t.clone() for t in tensors(optimizer.state_dict())], list(weights(model).values())]


def refused(model: nn.Module, optimizer: Any, state: Any, message: str) -> None:
    before = everything(model, optimizer)
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(state)
    after = everything(model, optimizer)
    assert after[0] == before[0]
    for ours, theirs in zip(after[1] + after[2], before[1] + before[2], strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("steps", [0, 1, 2, 4, 6])
@cases()
def test_resumes_bit_for_bit(case: Case, steps: int) -> None:
    model, optimizer = setup(case)
    advance(model, optimizer, range(steps))
    other, twin = resumed(case, model, optimizer, **other_values(case))
    later = range(steps, steps + 5)
    advance(model, optimizer, later)
    advance(other, twin, later)
    assert_same(weights(other), weights(model))
    ours, theirs = tensors(twin.state_dict()), tensors(optimizer.state_dict())
    assert len(ours) == len(theirs) > 0
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("pending", ["a backward pass", "a skipped step"])
@cases()
def test_a_run_rolls_back_bit_for_bit(case: Case, pending: str) -> None:
    """Whatever has happened since, and whatever still waits for a step, it goes on as fresh objects do."""
    skips = {"skip_nonfinite": pending == "a skipped step"}
    model, optimizer = setup(case, **skips)
    advance(model, optimizer, range(3))
    saved = through_a_file({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    other, twin = resumed(case, model, optimizer, **skips)
    advance(model, optimizer, range(20, 25))
    loss_of(model, 25).backward()
    if skips["skip_nonfinite"]:
        next(model.parameters()).grad.fill_(torch.nan)
        if is_exact(optimizer):
            optimizer.record_reference()
        optimizer.step()
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    for each, target in ((model, optimizer), (other, twin)):
        advance(each, target, range(3, 8))
    assert_same(weights(model), weights(other))
    ours, theirs = tensors(optimizer.state_dict()), tensors(twin.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@cases()
def test_hyper_parameters_of_the_groups_are_restored(case: Case) -> None:
    model, optimizer = setup(case)
    advance(model, optimizer, range(2))
    optimizer.param_groups[0]["lr"] = 0.123
    _, twin = resumed(case, model, optimizer, **other_values(case))
    (ours,), (theirs,) = twin.param_groups, optimizer.param_groups
    assert {k: v for k, v in ours.items() if k != "params"} == {k: v for k, v in theirs.items() if k != "params"}
    assert ours["lr"] == 0.123


@cases()
def test_a_checkpoint_before_the_first_step_holds_no_state(case: Case) -> None:
    _, optimizer = setup(case)
    state = optimizer.state_dict()
    assert state["state"] == {} and state["matrix_states"] == {}


@cases()
def test_loading_shares_no_tensor(case: Case) -> None:
    model, optimizer = setup(case)
    advance(model, optimizer, range(4))
    state = optimizer.state_dict()
    kept = copy.deepcopy(state)
    other, twin = setup(case)
    other.load_state_dict(model.state_dict())
    twin.load_state_dict(state)
    advance(other, twin, range(4, 8))
    for a, b in zip(tensors(state), tensors(kept), strict=True):
        assert torch.equal(a, b)
    # Nor between two optimizers that read the same dictionary.
    third, triplet = setup(case)
    third.load_state_dict(model.state_dict())
    triplet.load_state_dict(state)
    advance(third, triplet, range(4, 8))
    assert_same(weights(third), weights(other))


@cases()
def test_loading_replaces_what_was_there(case: Case) -> None:
    """Into an optimizer that has gone another way."""
    model, optimizer = setup(case)
    advance(model, optimizer, range(3))
    other, twin = setup(case)
    advance(other, twin, range(20, 25))
    other.load_state_dict(model.state_dict())
    twin.load_state_dict(through_a_file(optimizer.state_dict()))
    advance(model, optimizer, range(3, 8))
    advance(other, twin, range(3, 8))
    assert_same(weights(other), weights(model))


@cases(exact=False)
def test_looking_at_what_was_loaded_changes_nothing(case: Case) -> None:
    """Nothing is planned yet, and states of half-precision weights are in the type of the computation."""
    model, optimizer = setup(case, torch.bfloat16)
    advance(model, optimizer, range(2))
    saved = optimizer.state_dict()
    other, twin = setup(case, torch.bfloat16)
    twin.load_state_dict(saved)
    for name, parameter in other.named_parameters():
        for state in twin.kept_states(name):
            twin.stored_states(parameter, name, state)
    both = (each.saved.opened(each.param_groups, each.state).values() for each in (twin, optimizer))
    for found, expected in zip(*both, strict=True):
        names = [name for name, value in expected.items() if isinstance(value, Tensor)]
        assert_same({name: found[name] for name in names}, {name: expected[name] for name in names})


def test_a_mismatched_checkpoint_changes_nothing() -> None:
    model, optimizer = setup(BY_NAME["ldadam"])
    advance(model, optimizer, range(2))
    named = list(net().named_parameters())
    split = BY_NAME["ldadam"].build([{"params": named[:3]}, {"params": named[3:]}])
    refused(model, optimizer, split.state_dict(), "different number of parameter groups")


def test_another_optimizers_checkpoint_is_refused() -> None:
    saved = {}
    for name in ("mars-adamw", "mars-lion", "sonew-tridiagonal", "ldadam", "mkor-adamw", "mkor-lamb"):
        model, optimizer = setup(BY_NAME[name])
        advance(model, optimizer, range(2))
        optimizer.param_groups[0]["lr"] = 0.5
        saved[name] = (model, optimizer, through_a_file(optimizer.state_dict()))
    for ours, (model, optimizer, _) in saved.items():
        for theirs, (_, other, state) in saved.items():
            if ours != theirs:
                message = f"{optimizer.identity}: the checkpoint's rankwise='{other.identity}' is invalid.*must be"
                refused(model, optimizer, state, message)


@pytest.mark.parametrize("name", ["ldadam", "mkor-adamw"])
def test_a_checkpoint_without_matrix_states_is_refused(name: str) -> None:
    """As of torch.optim.AdamW, or of a tool that keeps nothing but what torch has."""
    model, optimizer = setup(BY_NAME[name])
    advance(model, optimizer, range(2))
    state = {key: value for key, value in optimizer.state_dict().items() if key in ("state", "param_groups")}
    setup(BY_NAME[name])[1].load_state_dict(state)  # everything is there
    state["state"] = {
        key: {kind: value for kind, value in own.items() if not kind.startswith("matrix.")}
        for key, own in state["state"].items()
    }
    refused(model, optimizer, state, "lost its matrix states")
    for group in state["param_groups"]:
        del group["rankwise"]
    refused(model, optimizer, state, "(lost its matrix states|written by another optimizer)")
    setup(BY_NAME[name])[1].load_state_dict({**state, "state": {}})  # nothing in it to be misread


def test_a_checkpoint_of_element_states_alone_is_accepted() -> None:
    model, optimizer = setup(BY_NAME["mars-adamw"])
    advance(model, optimizer, range(2))
    state = {key: value for key, value in optimizer.state_dict().items() if key in ("state", "param_groups")}
    _, twin = setup(BY_NAME["mars-adamw"])
    twin.load_state_dict(state)
    assert len(tensors(twin.state_dict()["state"])) == len(tensors(state["state"])) > 0


@pytest.mark.parametrize("name", ["ldadam", "mkor-adamw"])
def test_matrix_states_of_unknown_names_are_refused(name: str) -> None:
    model, optimizer = setup(BY_NAME[name])
    advance(model, optimizer, range(2))
    state = optimizer.state_dict()
    key = next(iter(state["matrix_states"]))
    strange = {**state, "matrix_states": {**state["matrix_states"], "9.weight": state["matrix_states"][key]}}
    refused(model, optimizer, strange, "has '9.weight', which is invalid: it must be the name of one .*0.weight")
    state["matrix_states"][key]["other"] = torch.ones(1)
    refused(model, optimizer, state, f"matrix_states.'{key}'. has 'other', which is invalid: it must be one of")


# --- LDAdam ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stepped", [False, True])
@pytest.mark.parametrize("built_with", [{"rank": 1}, {"rank": 3}, {"error_feedback": False}])
def test_rank_and_feedback_come_from_the_checkpoint(built_with: dict[str, Any], stepped: bool) -> None:
    """Rank 3 would leave matrices to the fallback that rank 2 projects: routes and plans are made anew."""
    case = BY_NAME["ldadam"]
    model, optimizer = setup(case)
    advance(model, optimizer, range(3))
    other, twin = setup(case, **built_with)
    if stepped:
        advance(other, twin, range(2))
    other.load_state_dict(model.state_dict())
    twin.load_state_dict(through_a_file(optimizer.state_dict()))
    advance(model, optimizer, range(3, 8))
    advance(other, twin, range(3, 8))
    assert_same(weights(other), weights(model))
    assert [str(row) for row in twin.explain()] == [str(row) for row in optimizer.explain()]


# --- MARS, exact mode ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("into", ["a fresh run", "the run itself"])
def test_exact_mode_needs_the_look_ahead_again_after_resuming(into: str) -> None:
    case = BY_NAME["mars-adamw-exact"]
    model, optimizer = setup(case)
    advance(model, optimizer, range(2))
    loss_of(model, 3).backward()
    optimizer.record_reference()
    if into == "a fresh run":
        other, twin = resumed(case, model, optimizer)
    else:
        other, twin = model, optimizer
        twin.load_state_dict(through_a_file(optimizer.state_dict()))
    loss_of(other, 2).backward()
    with pytest.raises(RuntimeError, match="call record_reference"):
        twin.step()


# --- MKOR ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("capture_first", [True, False])
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_mkor_in_the_middle_of_an_interval(steps: int, capture_first: bool) -> None:
    """Gradients reset through the model, so that only the optimizer itself can drop statistics off factor steps."""
    case = BY_NAME["mkor-adamw"]

    def train(model: nn.Module, optimizer: Any, indices: range) -> None:
        for index in indices:
            model.zero_grad()
            loss_of(model, index).backward()
            optimizer.step()

    model, optimizer = setup(case)
    train(model, optimizer, range(steps))
    saved = through_a_file({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    other = net(seed=99)
    other.load_state_dict(saved["model"])
    twin = case.build(other.named_parameters())
    if capture_first:
        twin.capture(other)
    twin.load_state_dict(saved["optimizer"])
    if not capture_first:
        twin.capture(other)
    train(model, optimizer, range(steps, steps + 7))
    train(other, twin, range(steps, steps + 7))
    assert_same(weights(other), weights(model))


def test_mkor_forgets_statistics_gathered_before_loading() -> None:
    case = BY_NAME["mkor-adamw"]
    model, optimizer = setup(case)
    advance(model, optimizer, range(3))
    other, twin = setup(case)
    loss_of(other, 77).backward()
    other.load_state_dict(model.state_dict())
    twin.load_state_dict(through_a_file(optimizer.state_dict()))
    for each, step in ((model, optimizer), (other, twin)):
        each.zero_grad()
        loss_of(each, 3).backward()
        step.step()
    assert_same(weights(other), weights(model))


def test_hybrid_switch_is_part_of_the_checkpoint() -> None:
    case = BY_NAME["mkor-hybrid"]
    model, optimizer = setup(case)
    advance(model, optimizer, range(3))
    before = through_a_file({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    detector = optimizer.switch.detector
    detector._knee = detector._knee._replace(slow_steps=100)  # the next check finds the knee
    optimizer.switch.detector.beta = 1e9
    advance(model, optimizer, range(3, 6))
    assert optimizer.switched
    other, twin = resumed(case, model, optimizer)
    assert twin.switched and not any(module._forward_hooks for module in other.modules())
    advance(model, optimizer, range(6, 9))
    advance(other, twin, range(6, 9))
    assert_same(weights(other), weights(model))
    assert twin.matrix_states == {} and twin.state_dict()["matrix_states"] == {}
    # Back to a checkpoint of before: hooks and factors are in use again.
    fresh, straight = setup(case)
    for each, target in ((other, twin), (fresh, straight)):
        each.load_state_dict(before["model"])
        target.load_state_dict(before["optimizer"])
        assert not target.switched
        advance(each, target, range(3, 9))
    assert_same(weights(other), weights(fresh))
    assert twin.matrix_states


OTHERS: dict[str, Any] = {
    "SGD": lambda named: torch.optim.SGD(named, 0.1),
    "SGD with momentum": lambda named: torch.optim.SGD(named, 0.1, momentum=0.9),
    "AdamW": torch.optim.AdamW,
    "Adagrad": torch.optim.Adagrad,
    "Muon": getattr(torch.optim, "Muon", None),
}


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("other", [name for name, build in OTHERS.items() if build is not None])
@cases(exact=False)
def test_dictionaries_of_other_optimizers_are_refused(case: Case, other: str, steps: int) -> None:
    """Of a fresh one, too: its rates and betas mean something else."""
    model = nn.Sequential(nn.Linear(24, 40, bias=False), nn.Linear(40, 24, bias=False))
    theirs, ours = OTHERS[other](model.named_parameters()), case.build(model.named_parameters(), model)
    for _ in range(steps):
        model(torch.ones(2, 24)).square().sum().backward()
        theirs.step()
    before = ours.state_dict()["param_groups"]
    with pytest.raises(ValueError, match=r"written by another optimizer than rankwise's.* continue_from\(\)"):
        ours.load_state_dict(through_a_file(theirs.state_dict()))
    assert ours.state_dict()["param_groups"] == before and not ours.state


def test_dictionaries_of_others_are_told_in_a_sentence() -> None:
    """Adam's states; ours after a journey through functions that keep states by parameter alone are complete."""
    model = nn.Sequential(nn.Linear(24, 40), nn.Linear(40, 24))
    adamw, ours = torch.optim.AdamW(model.named_parameters()), LDAdam(model.named_parameters(), rank=4)
    for optimizer in (adamw, ours):
        model(torch.ones(2, 24)).square().sum().backward()
        optimizer.step()
    with pytest.raises(ValueError, match=r"LDAdam: .* written by another optimizer than rankwise's, torch.optim.AdamW"):
        ours.load_state_dict(adamw.state_dict())
    kept = get_optimizer_state_dict(model, ours)
    for state in kept["state"].values():
        for name in [name for name in state if name.startswith("matrix.")]:
            del state[name]
    with pytest.raises(ValueError, match=r"LDAdam: .* lost its matrix states \(basis, .*; save all"):
        set_optimizer_state_dict(model, ours, kept)
