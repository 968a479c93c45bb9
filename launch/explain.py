"""The outcome of an optimizer's routing as a table."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import torch
from rich.table import Table

from rankwise.estimate import imagined_units
from rankwise.launch.planning.megatron import stage_model, stage_parts
from rankwise.launch.planning.optimizers import built
from rankwise.launch.planning.plan_request import Asked
from rankwise.step.optimizer import ShardedOptimizer

__all__ = ["ExplainedParameter", "explain_table", "explained"]

_MEBIBYTE = 1 << 20


class ExplainedParameter(NamedTuple):
    """What becomes of a parameter of a model.

    Attributes:
        parameter: Its name.
        shape: As in the model.
        rule: Rule that steps it.
        why: What decided so.
        state_bytes: State bytes of all its states on one rank.
    """

    parameter: str
    shape: tuple[int, ...]
    rule: str
    why: str
    state_bytes: int


def explained(asked: Asked) -> list[ExplainedParameter]:
    """A row per parameter, as one rank would hold it; no weight is made.

    Args:
        asked: Optimizer and model; under Megatron all stages are shown, whole.

    Raises:
        ValueError: The optimizer refuses its params.
    """
    if asked.sizes is not None:
        parts = stage_parts(asked.sizes, asked.cluster, 0)
        optimizer = built(asked.picked, stage_model(parts), {part.name: part.fused for part in parts if part.fused})
    else:
        assert asked.model is not None
        optimizer = built(asked.picked, asked.model)
    # One for each parameter, whether its rule takes it as one matrix or as several.
    rows = {optimizer.table.base_name(row.name): row for row in optimizer.explain()}
    states, shapes = _state_bytes(optimizer), optimizer.table.parameters
    return [
        ExplainedParameter(name, tuple(shapes[name].shape), row.rule, row.reason, states[name])
        for name, row in rows.items()
    ]


def explain_table(rows: list[ExplainedParameter], optimizer: str) -> Table:
    """The rows of an optimizer for the terminal."""
    table = Table(title=f"{optimizer}, one rank")
    table.add_column("parameter", overflow="fold")
    for heading in ("shape", "rule", "why"):
        table.add_column(heading)
    table.add_column("state, bytes", justify="right")
    for row in rows:
        table.add_row(row.parameter, " x ".join(map(str, row.shape)), row.rule, row.why, f"{row.state_bytes:,}")
    total, adamw = sum(row.state_bytes for row in rows), 8 * sum(prod(row.shape) for row in rows)
    table.add_section()
    table.add_row("all", "", "", "", f"{total:,}")
    table.caption = f"{total / _MEBIBYTE:,.1f} MiB; AdamW's would be {adamw / _MEBIBYTE:,.1f} MiB"
    return table


def _state_bytes(optimizer: ShardedOptimizer) -> dict[str, int]:
    """By parameter, of all states it would have in one process; a bias that rides along is its matrix's."""
    found = dict.fromkeys(optimizer.table.parameters, 0)
    name_of = optimizer.table.base_name

    for unit in imagined_units(optimizer, 1, 1):
        work = optimizer.step_costs(unit)
        for key, shape in unit.layout.shapes.items():
            width = sum((dtype or unit.dtype).itemsize for dtype in unit.parameters[key].states.values())
            found[name_of(key)] += prod(shape) * width
        batches = [] if unit.exchange is None else unit.exchange.plan.batches
        for task in (task for batch in batches for task in batch.tasks):
            states = work.matrix_state(task, torch.device("meta"))
            found[name_of(task.parts[0])] += sum(state.nbytes for state in states.values())
    return found
