"""What a user calls after an event and before the next steps: the columns of the play-book.

AdamW has no ``explain`` or ``forget_states``: it is judged by the nearest that it has, which each entry says.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import torch
from book_events import OTHER, Event, foreign_states
from book_runs import Run
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

__all__ = ["ENTRIES", "Event"]

ENTRIES: dict[str, Event] = {}
NEXT = OTHER + 5


def entry(name: str, *needs: str) -> Callable[[Callable[[Any], Any]], Callable[[Any], Any]]:
    def add(act: Callable[[Any], Any]) -> Callable[[Any], Any]:
        ENTRIES[name] = Event(name, act, needs)
        return act

    return add


@entry("step()")
def _step(run: Run) -> None:
    """The steps that follow in every cell."""


@entry("the first step()")
def _first(run: Run) -> None:
    """As `step()`, but nothing is trained before the event."""


@entry("another step")
def _another(run: Run) -> None:
    run.train(NEXT)


@entry("construct")
def _construct(run: Run) -> Any:
    return run.fresh()


@entry("add_param_group", "groups")
def _add(run: Run) -> None:
    late = torch.nn.Parameter(torch.ones(12, 8, dtype=run.kind.dtype))
    run.optimizer.add_param_group({"params": [("later", late)]})


@entry("step(closure)", "loop")
def _closure(run: Run) -> None:
    def closure() -> Any:
        run.clear()
        return run.backward(NEXT)

    run.optimizer.step(closure)
    run.clear()


@entry("GradScaler.step", "loop", "whole")
def _scaled(run: Run) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    loss = run.loss(NEXT)
    scaler.scale(loss).backward()
    run.report(loss.detach())
    scaler.step(run.optimizer)
    scaler.update()
    run.clear()


@entry("step at lr 0")
def _rate_zero(run: Run) -> None:
    before = [group["lr"] for group in run.groups]
    for group in run.groups:
        group["lr"] = 0.0
    run.train(NEXT)
    for group, rate in zip(run.groups, before, strict=True):
        group["lr"] = rate


@entry("zero_grad()")
def _zero_grad(run: Run) -> None:
    run.clear()


@entry("zero_grad(set_to_none=False)", "loop")
def _zero_grad_kept(run: Run) -> None:
    run.optimizer.zero_grad(set_to_none=False)


@entry("state_dict()")
def _state_dict(run: Run) -> None:
    run.optimizer.state_dict()


@entry("load_state_dict(state_dict())", "loop")
def _own(run: Run) -> None:
    run.optimizer.load_state_dict(run.optimizer.state_dict())


@entry("save and load")
def _saved(run: Run) -> None:
    run.load(run.saved())


@entry("save, load into new objects")
def _rebuilt(run: Run) -> Any:
    return run.rebuilt()


@entry("deepcopy of both", "copies")
def _copied(run: Run) -> Any:
    return copy.deepcopy(run)


@entry("pickle of both", "copies")
def _pickled(run: Run) -> Any:
    return pickle.loads(pickle.dumps(run))


@entry("continue_from / load_state_dict of AdamW's", "loop", "whole")
def _continue_from(run: Run) -> None:
    states = foreign_states(run)
    if run.kind.is_adamw:
        run.optimizer.load_state_dict(states)
    else:
        run.optimizer.continue_from(states)


@entry("hand_over / state_dict into AdamW", "loop", "whole")
def _hand_over(run: Run) -> None:
    groups = [{"params": list(group["params"])} for group in run.optimizer.param_groups]
    other = torch.optim.AdamW(groups, lr=1e-2)
    if run.kind.is_adamw:
        other.load_state_dict(run.optimizer.state_dict())
    else:
        run.optimizer.hand_over(other)


@entry("forget_states / state.clear()", "state", "loop")
def _forget(run: Run) -> None:
    if run.kind.is_adamw:
        run.inner.state.clear()
    else:
        run.inner.forget_states()


@entry("explain, summary, read_health / repr")
def _reports(run: Run) -> None:
    for name in ("explain", "summary", "read_health", "owners", "state_bytes", "__repr__"):
        getattr(run.inner, name, lambda: None)()


@entry("release, capture / nothing", "loop")
def _captured(run: Run) -> None:
    if not run.kind.is_adamw:
        run.inner.release()
        run.inner.capture(run.model)


@entry("scheduler.step()", "loop")
def _scheduled(run: Run) -> None:
    run.optimizer.step()  # torch's order: without it schedulers warn
    torch.optim.lr_scheduler.ExponentialLR(run.optimizer, 0.5).step()


@entry("get and set_optimizer_state_dict", "dcp")
def _dcp(run: Run) -> None:
    states = get_optimizer_state_dict(run.module, run.optimizer)
    set_optimizer_state_dict(run.module, run.optimizer, copy.deepcopy(states))
