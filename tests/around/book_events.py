"""What may happen before a step or around it: the rows of the play-book.

An event acts on a run and leaves the run with which training goes on. It asks for what it needs of a framework by a
word; where a framework does not offer it, the cell is not applicable, for the reason that the word stands for.
"""

from __future__ import annotations

import copy
import pickle
import warnings
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from book_runs import Run
from saved_files import through_a_file
from surrounding_kinds import default_device, default_dtype, deterministic
from torch import nn

__all__ = ["EVENTS", "HOMES", "WORDS", "Event", "events_of"]

WORDS = {
    "loop": "the user has no optimizer in hand: the framework steps it",
    "whole": "parameters are cut, and edited by the framework's own means",
    "copies": "models that are spread over processes are not copied",
    "groups": "the framework builds its groups once",
    "state": "states are kept by the framework",
    "alone": "it is a matter of one process",
    "ranks": "there is one process",
    "dcp": "the framework has checkpoints of its own",
    "engine": "it is a method of DeepSpeed's engine",
    "masters": "there is no other copy of the weights",
    "broken": "nothing is broken",
    "megatron": "it is Megatron's own",
}
HOMES = {"engine", "megatron", "broken"}
"""Words of what there is in one framework alone."""
OTHER = 50
"""Number of a batch that belongs to an event."""


class Event(NamedTuple):
    """A row.

    Attributes:
        name: In the reader's words.
        act: Acts on a run; returns the one to go on with, or None for the same.
        needs: What of a framework it asks for.
    """

    name: str
    act: Callable[[Any], Any]
    needs: tuple[str, ...] = ()

    def lacks(self, run: type[Run]) -> str | None:
        """Why it does not apply."""
        return next((WORDS[word] for word in self.needs if word not in run.offers), None)


EVENTS: dict[str, Event] = {}


def event(name: str, *needs: str) -> Callable[[Callable[[Any], Any]], Callable[[Any], Any]]:
    def add(act: Callable[[Any], Any]) -> Callable[[Any], Any]:
        EVENTS[name] = Event(name, act, needs)
        return act

    return add


@event("nothing")
def _nothing(run: Run) -> None:
    pass


@event("a step")
def _step(run: Run) -> None:
    run.train(OTHER)


# --- passes that no step follows --------------------------------------------------------------------------------------


@event("a forward pass in training mode")
def _forward(run: Run) -> None:
    run.loss(OTHER)


@event("a forward pass of one rank", "ranks", "whole")
def _forward_of_one(run: Run) -> None:
    if run.rank == 0:
        run.forward_alone(OTHER)


@event("a forward pass without gradients")
def _evaluated(run: Run) -> None:
    run.model.eval()
    with torch.no_grad():
        run.loss(OTHER)
    run.model.train()


@event("a forward pass in inference mode")
def _inferred(run: Run) -> None:
    with torch.inference_mode():
        run.loss(OTHER)


@event("torch.autograd.grad", "loop", "whole", "alone")
def _penalty(run: Run) -> None:
    torch.autograd.grad(run.loss(OTHER), list(run.module.parameters()))


@event("a loss through frozen weights", "loop", "whole", "alone")
def _through_frozen(run: Run) -> None:
    run.module.requires_grad_(False)
    inputs = run.batch(OTHER)[0].requires_grad_()
    run.model(inputs).sum().backward()
    run.module.requires_grad_(True)


# --- gradients --------------------------------------------------------------------------------------------------------


@event("a step without any gradient", "loop")
def _no_gradients(run: Run) -> None:
    run.step()


@event("a step in which a weight has no gradient", "loop", "whole")
def _missing_gradient(run: Run) -> None:
    run.report(run.backward(OTHER))
    run.named()[run.middle].grad = None
    run.step()
    run.clear()


@event("two backward passes before a step", "loop")
def _accumulated(run: Run) -> None:
    run.backward(OTHER, 0.5)
    run.report(run.backward(OTHER + 1, 0.5))
    run.step()
    run.clear()


@event("gradients clipped before a step", "loop")
def _clipped(run: Run) -> None:
    run.report(run.backward(OTHER))
    nn.utils.clip_grad_norm_(run.module.parameters(), 0.01)
    run.step()
    run.clear()


@event("GradScaler finds an overflow", "loop", "whole")
def _overflow(run: Run) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(run.loss(OTHER)).backward()
    for value in run.module.parameters():
        value.grad.fill_(torch.inf)
    scaler.step(run.optimizer)
    scaler.update()
    run.clear()


@event("a NaN step that is skipped", "loop")
def _skipped(run: Run) -> None:
    """By `skip_nonfinite`, where the type has it; else by the user, who looks at the loss."""
    run.backward(OTHER, float("nan"))
    if run.kind.options.get("skip_nonfinite"):
        run.step()
    run.clear()


@event("a frozen layer, then unfrozen")
def _frozen_for_a_step(run: Run) -> None:
    frozen = [run.named()[run.middle]]
    for value in frozen:
        value.requires_grad_(False)
    run.train(OTHER)
    for value in frozen:
        value.requires_grad_(True)


@event("requires_grad toggled between steps")
def _toggled(run: Run) -> None:
    run.module.requires_grad_(False)
    run.module.requires_grad_(True)


# --- groups -----------------------------------------------------------------------------------------------------------


@event("lr changed")
def _rate(run: Run) -> None:
    run.groups[0]["lr"] = 3e-3


@event("lr set to 0 for a step")
def _rate_zero(run: Run) -> None:
    before = [group["lr"] for group in run.groups]
    for group in run.groups:
        group["lr"] = 0.0
    run.train(OTHER)
    for group, rate in zip(run.groups, before, strict=True):
        group["lr"] = rate


@event("lr as a tensor", "groups")
def _tensor_rate(run: Run) -> None:
    for group in run.groups:
        group["lr"] = torch.tensor(float(group["lr"]))


@event("betas changed")
def _betas(run: Run) -> None:
    for group in run.groups:
        if "betas" in group:
            group["betas"] = (0.5, 0.8)
        elif "momentum" in group:
            group["momentum"] = 0.5


@event("weight_decay changed")
def _decay(run: Run) -> None:
    for group in run.groups:
        for key in ("weight_decay", "weight_decay_1d"):
            if key in group:
                group[key] = 0.3


@event("an unknown key in a group")
def _unknown_key(run: Run) -> None:
    run.groups[0]["name"] = "matrices"


@event("a group added", "groups")
def _group_added(run: Run) -> None:
    late = nn.Parameter(torch.ones(10, 8, dtype=run.kind.dtype))
    run.optimizer.add_param_group({"params": [("late", late)]})


@event("a group removed", "groups")
def _group_removed(run: Run) -> None:
    del run.groups[1]


@event("groups in another order", "groups")
def _groups_reordered(run: Run) -> None:
    run.groups.reverse()


@event("parameters of a group in another order", "groups")
def _parameters_reordered(run: Run) -> None:
    run.groups[0]["params"].reverse()
    if "param_names" in run.groups[0]:
        run.groups[0]["param_names"].reverse()


@event("a parameter moved to another group", "groups")
def _regrouped(run: Run) -> None:
    first, second = run.groups
    second["params"].append(first["params"].pop())
    if "param_names" in first:
        second["param_names"].append(first["param_names"].pop())


@event("a parameter exchanged", "groups", "whole", "alone")
def _exchanged(run: Run) -> None:
    old = run.module.mid.weight
    run.module.mid.weight = new = nn.Parameter(old.detach() * 0.5)
    params = run.groups[0]["params"]
    params[next(at for at, value in enumerate(params) if value is old)] = new


# --- states -----------------------------------------------------------------------------------------------------------


@event("state.clear()", "state")
def _cleared(run: Run) -> None:
    run.inner.state.clear()


@event("state = defaultdict(dict)", "state")
def _state_replaced(run: Run) -> None:
    run.inner.state = defaultdict(dict)


@event("a weight's state popped", "state", "loop")
def _state_popped(run: Run) -> None:
    run.inner.state.pop(run.named()[run.middle])


@event("state replaced by a copy", "state")
def _state_copied(run: Run) -> None:
    run.inner.state = defaultdict(
        dict,
        {
            tensor: {key: value.clone() if torch.is_tensor(value) else value for key, value in states.items()}
            for tensor, states in run.inner.state.items()
        },
    )


@event("a checkpoint loaded, of now")
def _own_loaded(run: Run) -> None:
    run.load(run.saved())


@event("a checkpoint loaded, of a step ago")
def _older_loaded(run: Run) -> None:
    saved = run.saved()
    run.train(OTHER)
    run.load(saved)


@event("another optimizer's state_dict loaded", "loop", "whole")
def _foreign(run: Run) -> None:
    groups = [{**group, "params": [value for _, value in group["params"]]} for group in run.present_groups()]
    other = torch.optim.SGD([{"params": group["params"]} for group in groups], lr=0.1, momentum=0.9)
    run.optimizer.load_state_dict(other.state_dict())


# --- models and copies ------------------------------------------------------------------------------------------------


@event("model.double().float()", "loop", "whole", "alone")
def _there_and_back(run: Run) -> None:
    dtype = run.kind.dtype
    run.module.double()
    run.module.to(dtype)


@event("the model copied, and the copy trained on by itself", "copies")
def _model_copied(run: Run) -> None:
    twin = copy.deepcopy(run.module)
    (twin(run.batch(OTHER)[0])).square().mean().backward()


@event("both copied, and the copies trained", "copies")
def _both_copied(run: Run) -> None:
    copied = copy.deepcopy(run)
    copied.train(OTHER)


@event("the optimizer copied alone", "loop", "alone")
def _optimizer_copied(run: Run) -> None:
    copy.deepcopy(run.optimizer)


@event("the optimizer pickled", "loop", "alone")
def _optimizer_pickled(run: Run) -> None:
    pickle.loads(pickle.dumps(run.optimizer))


@event("two models in turn", "alone")
def _two_models(run: Run) -> None:
    other = type(run)(run.kind)
    other.train(OTHER)


@event("a second optimizer of the same weights, unused", "loop")
def _second_unused(run: Run) -> None:
    run.kind.build(run.present_groups())


@event("a second optimizer of the same weights, for a step", "loop")
def _second_used(run: Run) -> None:
    first = run.optimizer
    run.build(run.present_groups())
    run.train(OTHER)
    run.optimizer = first


@event("half of the weights, to another optimizer of this type", "groups", "loop")
def _halved(run: Run) -> None:
    group = run.groups[0]
    value = group["params"].pop(1)
    name = group["param_names"].pop(1) if "param_names" in group else "mid.weight"
    other = run.kind.build([(name, value)])
    if getattr(other, "needs_capture", False):
        other.capture(run.model)
    other.step()


@event("a run built and dropped")
def _built_and_dropped(run: Run) -> None:
    type(run)(run.kind).close()


# --- around a step ----------------------------------------------------------------------------------------------------


SURROUNDINGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "torch.autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "torch.no_grad": torch.no_grad,
    "torch.enable_grad": torch.enable_grad,
    "torch.inference_mode": torch.inference_mode,
    "torch.set_default_device": lambda: default_device("meta"),
    "torch.set_default_dtype": lambda: default_dtype(torch.float64),
    "torch.use_deterministic_algorithms": deterministic,
    "torch.autograd.detect_anomaly": lambda: torch.autograd.detect_anomaly(check_nan=False),
    "warnings as errors": lambda: warnings.catch_warnings(action="error"),
}


def _within(name: str) -> Callable[[Any], None]:
    def act(run: Run) -> None:
        run.report(run.backward(OTHER))
        with SURROUNDINGS[name]():
            run.step()
        run.clear()

    return act


for _name in SURROUNDINGS:
    EVENTS[f"a step within {_name}"] = Event(f"a step within {_name}", _within(_name))


@event("a step through torch.compile", "loop", "alone")
def _compiled(run: Run) -> None:
    run.report(run.backward(OTHER))
    torch.compile(run.optimizer.step, backend="eager")()
    run.clear()
    # What captures a model later must not think that something in this process is compiled.
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()


@event("hooks of the optimizer registered", "loop")
def _hooks(run: Run) -> None:
    run.optimizer.register_step_pre_hook(lambda *given: None)
    run.optimizer.register_step_post_hook(lambda *given: None)
    run.optimizer.register_state_dict_pre_hook(lambda *given: None)
    run.optimizer.register_load_state_dict_post_hook(lambda *given: None)


@event("hooks of the model registered")
def _model_hooks(run: Run) -> None:
    run.first.register_forward_hook(lambda *given: None)
    run.first.register_full_backward_hook(lambda *given: None)
    run.named()[run.middle].register_hook(lambda gradient: None)


class _InterruptedError(Exception):
    pass


def _interrupt(*given: Any) -> Any:
    raise _InterruptedError


def _caught(act: Callable[[], Any]) -> None:
    try:
        act()
    except _InterruptedError:
        return
    raise AssertionError("the exception was swallowed")


@event("an exception in a forward pass")
def _in_forward(run: Run) -> None:
    handle = run.last.register_forward_pre_hook(_interrupt)
    _caught(lambda: run.loss(OTHER))
    handle.remove()
    run.clear()


@event("an exception in a backward pass", "alone")
def _in_backward(run: Run) -> None:
    handle = run.named()[run.middle].register_hook(_interrupt)
    _caught(lambda: run.backward(OTHER))
    handle.remove()
    run.clear()


@event("an exception in a closure, then the step", "loop")
def _in_closure(run: Run) -> None:
    def closure() -> Any:
        run.clear()
        run.backward(OTHER + 1)
        raise _InterruptedError

    _caught(lambda: run.optimizer.step(closure))
    run.clear()
    run.train(OTHER)


@event("an exception in a hook before the step, then the step", "loop")
def _before_the_step(run: Run) -> None:
    handle = run.optimizer.register_step_pre_hook(_interrupt)
    run.report(run.backward(OTHER))
    _caught(run.step)
    handle.remove()
    run.step()
    run.clear()


@event("an exception in a hook after the step", "loop")
def _after_the_step(run: Run) -> None:
    handle = run.optimizer.register_step_post_hook(_interrupt)
    run.report(run.backward(OTHER))
    _caught(run.step)
    handle.remove()
    run.clear()


# --- the ways of each framework ---------------------------------------------------------------------------------------


def _thrown_away(way: str, factor: float) -> Callable[[Any], None]:
    def act(run: Run) -> None:
        run.backward(OTHER, factor)
        run.ways_to_clear[way]()

    return act


def _edited(way: str) -> Callable[[Any], None]:
    return lambda run: run.ways_to_edit[way]()


def events_of(run: Run) -> dict[str, Event]:
    """All events, with those that the framework's own ways make."""
    found = dict(EVENTS)
    for way in run.ways_to_clear:
        for text, factor in (("a batch", 3.0), ("a NaN batch", float("nan"))):
            name = f"{text} thrown away by {way}"
            found[name] = Event(name, _thrown_away(way, factor))
    for way in run.ways_to_edit:
        name = f"weights edited {way}"
        found[name] = Event(name, _edited(way))
    return found


def foreign_states(run: Run) -> Any:
    """A dictionary of torch's AdamW for the run's groups, after a step on unit gradients."""
    groups = [{"params": [torch.ones_like(v) for v in group["params"]]} for group in run.inner.param_groups]
    other = torch.optim.AdamW(groups, lr=1e-2)
    for group in groups:
        for value in group["params"]:
            value.grad = torch.full_like(value, 0.1)
    other.step()
    return through_a_file(other.state_dict())
