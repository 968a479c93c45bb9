"""What torch's tests ask of every optimizer that has a record: its dictionaries, copies and pickles."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.peers.torch_problem import Problem, Trial, close, hear

__all__ = ["CHECKS"]

_STEPS = 5


def _trained(trial: Trial, **settings: Any) -> Problem:
    problem = Problem(trial, **settings)
    problem.train(_STEPS)
    return problem


def _same_from_here(problem: Problem, other: Problem) -> None:
    problem.train(_STEPS), other.train(_STEPS)
    close(other.weights(), problem.weights(), "weights after further steps")


def dictionary_is_loaded(trial: Trial) -> None:
    """An optimizer that loads another's dictionary goes on as that does, and leaves the dictionary as it was."""
    problem = _trained(trial)
    state, kept = copy.deepcopy(problem.optimizer.state_dict()), copy.deepcopy(problem.optimizer.state_dict())
    other = problem.twin()
    other.optimizer.load_state_dict(state)
    close(state, kept, "the dictionary that was loaded")
    close(other.optimizer.state_dict(), kept, "the dictionary of what has loaded it")
    _same_from_here(problem, other)


def dictionary_is_saved(trial: Trial) -> None:
    """The dictionary goes through torch.save, and is loaded with ``weights_only``."""
    problem, file = _trained(trial), io.BytesIO()
    torch.save(problem.optimizer.state_dict(), file)
    file.seek(0)
    other = problem.twin()
    other.optimizer.load_state_dict(torch.load(file, weights_only=True))
    _same_from_here(problem, other)


def older_dictionary(trial: Trial) -> None:
    """Options that a dictionary does not have keep the values they have here."""
    problem = _trained(trial)
    state = copy.deepcopy(problem.optimizer.state_dict())
    flags = trial.info.not_og_supported_flags or ("eps",)
    for group in state["param_groups"]:
        for flag in flags:
            group.pop(flag, None)
    other = problem.twin()
    other.optimizer.load_state_dict(state)
    _same_from_here(problem, other)


def count_as_a_number(trial: Trial) -> None:
    """A step count that is a number is as good as one in a tensor."""
    problem = _trained(trial)
    state = copy.deepcopy(problem.optimizer.state_dict())
    for states in state["state"].values():
        if isinstance(states.get("step"), Tensor):
            states["step"] = states["step"].item()
    other = problem.twin()
    other.optimizer.load_state_dict(state)
    _same_from_here(problem, other)


def names_on_one_side(trial: Trial) -> None:
    """Named parameters and nameless ones load each other's dictionaries; the names are in the groups."""
    ways = ({"groups": lambda model: list(model.named_parameters())}, {})
    for mine in ways:
        for theirs in ways:
            problem = _trained(trial, **mine)
            names = problem.optimizer.state_dict()["param_groups"][0].get("param_names")
            assert names == (["layer.weight", "layer.bias"] if mine else None), names
            other = problem.twin(groups=theirs.get("groups", lambda model: list(model.parameters())))
            other.optimizer.load_state_dict(copy.deepcopy(problem.optimizer.state_dict()))
            _same_from_here(problem, other)


def other_groups_are_refused(trial: Trial) -> None:
    """A dictionary of other groups, or of groups of another size, is refused with torch's words."""

    def apart(model: nn.Module) -> list[dict[str, Any]]:
        return [{"params": [parameter]} for parameter in model.parameters()]

    problem = _trained(trial)
    for groups in (apart, lambda model: list(model.parameters())[:1]):
        other = Problem(trial, groups=groups)
        try:
            other.optimizer.load_state_dict(problem.optimizer.state_dict())
        except ValueError as error:
            assert "parameter group" in str(error), error
        else:
            raise AssertionError("other groups were loaded")


def types_of_loaded_states(trial: Trial) -> None:
    """States take the type of the parameters that they are loaded for; the dictionary keeps its own."""
    problem = _trained(trial, dtype=torch.float64)
    state = problem.optimizer.state_dict()
    kept = copy.deepcopy(state)
    other = Problem(trial, dtype=torch.float32)
    other.optimizer.load_state_dict(state)
    close(state, kept, "the dictionary that was loaded")
    other.train(2)
    for parameter in other.model.parameters():
        for name, value in other.optimizer.state[parameter].items():
            assert not (value.dtype == torch.float64 and value.shape == parameter.shape), f"{name} stays in float64"


def steps_after_loading_in_mid_run(trial: Trial) -> None:
    """An optimizer that has stepped takes a dictionary as one that has not."""
    problem = _trained(trial)
    state, weights = copy.deepcopy(problem.optimizer.state_dict()), problem.weights()
    first = problem.twin()
    first.optimizer.load_state_dict(copy.deepcopy(state))
    first.train(_STEPS)
    problem.train(3)
    with torch.no_grad():
        for parameter, weight in zip(problem.model.parameters(), weights, strict=True):
            parameter.copy_(weight)
    problem.optimizer.load_state_dict(state)
    problem.train(_STEPS)
    close(problem.weights(), first.weights(), "weights after going back")


def hooks_of_dictionaries(trial: Trial) -> None:
    """Hooks around saving and loading run in torch's order, may change what passes, and can be removed."""
    problem, calls = _trained(trial), []

    def changed(optimizer: Any, state: dict[str, Any]) -> dict[str, Any]:
        calls.append("changes")
        return {**state, "param_groups": [{**group, "lr": 0.25} for group in state["param_groups"]]}

    handles = [
        problem.optimizer.register_state_dict_pre_hook(lambda *_: calls.append("before saving")),
        problem.optimizer.register_state_dict_post_hook(lambda *_: calls.append("saved")),
        problem.optimizer.register_load_state_dict_pre_hook(changed),
        problem.optimizer.register_load_state_dict_pre_hook(lambda *_: calls.append("first"), prepend=True),
        problem.optimizer.register_load_state_dict_post_hook(lambda *_: calls.append("loaded")),
    ]
    problem.optimizer.load_state_dict(problem.optimizer.state_dict())
    assert calls == ["before saving", "saved", "first", "changes", "loaded"], calls
    assert float(problem.optimizer.param_groups[0]["lr"]) == 0.25
    for handle in handles:
        handle.remove()
    problem.optimizer.load_state_dict(problem.optimizer.state_dict())
    assert len(calls) == 5


def deep_copy(trial: Trial) -> None:
    """A deep copy has every public attribute, and shares no memory with what it was copied from."""
    problem = _trained(trial)
    twin = copy.deepcopy(problem.optimizer)
    public = [{name for name in value.__dict__ if not name.startswith("_")} for value in (problem.optimizer, twin)]
    assert public[0] == public[1]
    mine = {p.data_ptr() for group in problem.optimizer.param_groups for p in group["params"]}
    assert mine.isdisjoint(p.data_ptr() for group in twin.param_groups for p in group["params"])
    close(twin.state_dict(), problem.optimizer.state_dict(), "the copy's dictionary")


def copied_with_the_model(trial: Trial) -> None:
    """Model and optimizer copied together go on as those they were copied from."""
    problem = _trained(trial)
    other = copy.copy(problem)
    other.model, other.optimizer = copy.deepcopy((problem.model, problem.optimizer))
    hear(other.optimizer, other.model)
    _same_from_here(problem, other)


def pickled(trial: Trial) -> None:
    """Model and optimizer pickled together go on as before."""
    problem = _trained(trial)
    other = copy.copy(problem)
    other.model, other.optimizer = pickle.loads(pickle.dumps((problem.model, problem.optimizer)))
    hear(other.optimizer, other.model)
    _same_from_here(problem, other)


def groups_are_added(trial: Trial) -> None:
    """A group that is added gets the defaults, steps, and is saved; one with a known parameter is refused."""
    problem = Problem(trial, groups=lambda model: [model.layer.weight])  # type: ignore[union-attr, list-item]
    problem.train(2)
    bias = problem.model.layer.bias
    before = bias.detach().clone()
    problem.optimizer.add_param_group({"params": [bias]})
    problem.train(2)
    assert not torch.equal(bias, before), "the added group does not step"
    assert len(problem.optimizer.state_dict()["param_groups"]) == 2
    for wrong in ({"params": [bias]}, {"params": {bias}}, {"params": [bias.detach() * 2 + 0 * bias]}):
        try:
            problem.optimizer.add_param_group(wrong)
        except (ValueError, TypeError):
            continue
        raise AssertionError(f"a group was taken: {wrong}")


CHECKS = (
    dictionary_is_loaded,
    dictionary_is_saved,
    older_dictionary,
    count_as_a_number,
    names_on_one_side,
    other_groups_are_refused,
    types_of_loaded_states,
    steps_after_loading_in_mid_run,
    hooks_of_dictionaries,
    deep_copy,
    copied_with_the_model,
    pickled,
    groups_are_added,
)
