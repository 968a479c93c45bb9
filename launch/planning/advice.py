"""This module says why the fullest rank is so full, and what would bring a plan below a limit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from rankwise.launch.planning.cluster import Cluster
from rankwise.launch.planning.optimizers import Chosen
from rankwise.launch.planning.rank_figures import Figures
from rankwise.names import BY_NAME

__all__ = ["BALANCED", "Change", "changes", "why_unbalanced"]

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
class Change:
    """A change of a setting.

    Attributes:
        words: The change in words.
        picked: The optimizer after the change.
        cluster: The ranks after the change.
    """

    words: str
    picked: Chosen
    cluster: Cluster


def changes(picked: Chosen, cluster: Cluster) -> Iterator[Change]:
    """Yield changes that are worth trying, the mildest first; each includes earlier ones to the optimizer."""
    if cluster.stage == 0:
        cluster = replace(cluster, stage=2)
        yield Change('"stage": 2', picked, cluster)
    options_type = BY_NAME[picked.name].optimizer.options_type
    tried: dict[str, Any] = {}
    params = dict(picked.params)
    for key, change in _CHANGES:
        # With sketches a longer interval would not spare any messages.
        if key not in options_type.table() or (key == "update_interval" and params.get("rule") == "sketch"):
            continue
        now = options_type(**params).value_of(key)
        wanted = change(now)
        if wanted is None or wanted == now:
            continue
        params[key] = tried[key] = wanted
        yield Change(
            ", ".join(f"{key}={value!r}" for key, value in tried.items()), replace(picked, params=dict(params)), cluster
        )


def _smaller(least: int) -> Callable[[Any], Any]:
    return lambda now: now // 2 if isinstance(now, int) and now // 2 >= least else None


_CHANGES: tuple[tuple[str, Callable[[Any], Any]], ...] = (
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
