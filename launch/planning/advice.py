"""This module says why the fullest rank is so full, and what would bring a plan below a limit."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from rankwise.launch.planning.plan_request import Asked
from rankwise.launch.planning.rank_figures import Figures
from rankwise.names import BY_NAME

__all__ = ["BALANCED", "Advice", "advised", "why_unbalanced"]

BALANCED = 1.15
"""Up to this ratio of the fullest rank's state to the mean nothing is said."""


def why_unbalanced(found: Figures) -> str:
    """Return the reason for the largest part of the imbalance; empty if there is hardly any."""
    if found.fullest <= BALANCED:
        return ""
    states = found.states()
    head = f"The fullest rank holds {found.fullest:.2f} times the mean: "
    matrix = [rank.matrix_state_bytes for rank in found.ranks]
    element = [rank.element_state_bytes for rank in found.ranks]
    if max(element) - fmean(element) >= max(matrix) - fmean(matrix):
        adamw, mean = found.adamw[states.index(max(states))], fmean(found.adamw)
        if adamw > BALANCED * mean:
            return f"{head}it holds {adamw / mean:.2f} times the mean of parameters, as a stage with an embedding does."
        return (
            f"{head}states for each element differ between rules, and the cuts are the framework's; a rank with "
            "much of an embedding or a head holds AdamW's 8 bytes for each."
        )
    size, name = found.largest
    if len(found.owners) < len(states):
        return f"{head}there are {len(found.owners)} matrices for {len(states)} ranks, and a matrix has one owner."
    if size > (BALANCED - 1) * fmean(states):
        return f"{head}the states of one matrix ({name}, {size / 2**20:,.0f} MiB) are not divided."
    return f"{head}owners are balanced by their work, and states do not grow as work does."


@dataclass(frozen=True)
class Advice:
    """Changes of settings that bring a plan nearer to its limits.

    Attributes:
        words: The changes as the run's framework takes them.
        figures: The plan with them.
        meets: Whether the plan meets its limits then.
    """

    words: str
    figures: Figures
    meets: bool


def advised(asked: Asked, excess: Callable[[Figures], float]) -> Advice | None:
    """Return the mildest changes that meet the limits, or those that come nearest; None if nothing helps.

    Args:
        asked: The request that does not meet its limits.
        excess: How far figures are above the limits; 0 where they are met.
    """
    figures = asked.figures()
    kept: list[tuple[str, Any]] = []
    for key, change in _CHANGES:
        for wanted in _wanted(_with(asked, kept), key, change):
            trial = [(other, value) for other, value in kept if other != key] + [(key, wanted)]
            tried = _figures(_with(asked, trial))
            # A change that does not help is not advised, and the next ones go on without it.
            if tried is not None and excess(tried) < excess(figures):
                kept, figures = trial, tried
        if not excess(figures):
            break
    for one in kept[:-1] if not excess(figures) else ():  # a later change may have made an earlier one needless
        fewer = [other for other in kept if other != one]
        tried = _figures(_with(asked, fewer))
        if tried is not None and not excess(tried):
            kept, figures = fewer, tried
    return Advice(_words(asked, kept), figures, not excess(figures)) if kept else None


def _wanted(asked: Asked, key: str, change: Callable[[Any], Any]) -> list[Any]:
    """Return the next value of a setting, if it has one."""
    if key == STAGE:
        return [change(asked.cluster.stage)] if asked.cluster.stage == 0 else []
    options_type = BY_NAME[asked.picked.name].optimizer.options_type
    # With sketches a longer interval would not spare any messages.
    sketch = {**asked.picked.params, **BY_NAME[asked.picked.name].preset}.get("rule") == "sketch"
    if key not in options_type.table() or (key == "update_interval" and sketch):
        return []
    now = options_type(**asked.picked.params).value_of(key)
    wanted = change(now)
    return [] if wanted is None or wanted == now else [wanted]


def _with(asked: Asked, changes: list[tuple[str, Any]]) -> Asked:
    params = {**asked.picked.params, **{key: value for key, value in changes if key != STAGE}}
    stages = [value for key, value in changes if key == STAGE]
    cluster = replace(asked.cluster, stage=stages[0]) if stages else asked.cluster
    return asked.changed(replace(asked.picked, params=params), cluster)


def _figures(asked: Asked) -> Figures | None:
    """Return the figures of a request; None if its settings do not go together."""
    try:
        return asked.figures()
    except ValueError:
        return None


def _words(asked: Asked, changes: list[tuple[str, Any]]) -> str:
    """Return changes as lines of a DeepSpeed JSON, Megatron's flags, or keywords of the constructor."""
    optimizer = BY_NAME[asked.picked.name].optimizer
    if asked.cluster.stage is not None:
        params = ", ".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in changes if key != STAGE)
        stages = [f'"zero_optimization": {{"stage": {value}}}' for key, value in changes if key == STAGE]
        return " and ".join([*stages, *([f'"params": {{{params}}}'] if params else [])])
    if asked.cluster.mesh is not None:
        return f"{optimizer.__name__}(..., {', '.join(f'{key}={value!r}' for key, value in changes)})"
    flags = {key: f"--{optimizer.options_type.flag(key)}" for key, _ in changes}
    return " ".join(
        f"{flags[key]} {value}" if value is not False else f"--no-{flags[key][2:]}" for key, value in changes
    )


def _smaller(least: int) -> Callable[[Any], Any]:
    return lambda now: now // 2 if isinstance(now, int) and now // 2 >= least else None


STAGE = "stage"
_CHANGES: tuple[tuple[str, Callable[[Any], Any]], ...] = (
    (STAGE, lambda now: 2),
    ("comm_dtype", lambda now: None if now == "int8" else "bfloat16"),
    ("update_interval", lambda now: now * 5 if now < 50 else None),
    ("state_dtype", lambda now: None if now == "int8" else "bfloat16"),
    ("state_dtype", lambda now: "int8"),
    ("rank", _smaller(8)),
    ("rank", _smaller(8)),
    ("max_factor_dim", _smaller(1024)),
    ("max_factor_dim", _smaller(1024)),
    ("max_factor_dim", _smaller(1024)),
    ("error_feedback", lambda now: False),
    ("comm_dtype", lambda now: "int8"),
)
