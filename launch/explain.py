"""Which rule each parameter takes, and which rank owns each matrix, with the reasons, as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from re import split, sub
from typing import NamedTuple

from rich.markup import escape
from rich.table import Table

from rankwise.comm.owner_plan import IMBALANCE_TOLERANCE, MatrixTask, added
from rankwise.estimate import imagined_units
from rankwise.launch.planning.megatron import stage_model, stage_parts
from rankwise.launch.planning.optimizers import built
from rankwise.launch.planning.plan_request import Asked
from rankwise.step.optimizer import ShardedOptimizer

__all__ = [
    "ExplainedOwner",
    "ExplainedParameter",
    "equal_layers",
    "explain_table",
    "explained",
    "explained_owners",
    "owners_table",
    "why_owner",
]

_MEBIBYTE = 1 << 20


class ExplainedParameter(NamedTuple):
    """The route of a parameter of a model.

    Attributes:
        parameter: Name of the parameter.
        shape: Shape in the model.
        rule: Rule that steps it.
        why: Reason for the rule.
        state_bytes: Bytes of all its states on one rank.
    """

    parameter: str
    shape: tuple[int, ...]
    rule: str
    why: str
    state_bytes: int


class ExplainedOwner(NamedTuple):
    """Where a matrix is updated.

    Attributes:
        matrix: Its name: the parameter's, with the block or slice of it.
        owner: Rank that updates it and has its states.
        why: Reason for the owner.
        kept_by: Ranks that keep states in the owner's place between steps, by state.
    """

    matrix: str
    owner: int
    why: str
    kept_by: Mapping[str, int]


def explained(asked: Asked) -> list[ExplainedParameter]:
    """Return a row per parameter, as one rank would hold it; no weight is made.

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
    # Each parameter has one row, whether its rule takes it as one matrix or as several.
    rows = {optimizer.table.base_name(row.name): row for row in optimizer.explain()}
    states, shapes = _state_bytes(optimizer), optimizer.table.parameters
    return [
        ExplainedParameter(name, tuple(shapes[name].shape), row.rule, row.reason, states[name])
        for name, row in rows.items()
    ]


def explain_table(rows: list[ExplainedParameter], optimizer: str, whole: bool = False) -> Table:
    """Return the rows of an optimizer as a table for the terminal.

    Args:
        rows: A row per parameter.
        optimizer: Its name.
        whole: Whether each parameter has a line, not only each kind of them.
    """
    table = Table(title=f"{optimizer}, the whole model")
    table.add_column("parameter", overflow="fold")
    for heading in ("shape", "rule", "why"):
        table.add_column(heading)
    table.add_column("state, bytes", justify="right", no_wrap=True)
    for name, row in ((row.parameter, row) for row in rows) if whole else equal_layers(rows):
        table.add_row(name, " x ".join(map(str, row.shape)), row.rule, row.why, f"{row.state_bytes:,}")
    total, adamw = sum(row.state_bytes for row in rows), 8 * sum(prod(row.shape) for row in rows)
    table.add_section()
    table.add_row("all", "", "", "", f"{total:,}")
    table.caption = f"{total / _MEBIBYTE:,.1f} MiB; AdamW's would be {adamw / _MEBIBYTE:,.1f} MiB"
    return table


def equal_layers(rows: list[ExplainedParameter]) -> list[tuple[str, ExplainedParameter]]:
    """Return a row for parameters that differ in numbers of layers alone, with a name for all and their bytes together.

    The name is ``h.*.attn.c_attn.weight ×12``; a parameter that is like no other keeps its own.
    """
    alike: dict[tuple[object, ...], list[ExplainedParameter]] = {}
    for row in rows:
        alike.setdefault((sub(r"(?<=\.)\d+(?=\.)", "*", row.parameter), *row[1:]), []).append(row)
    return [
        (f"{key[0]} ×{len(group)}", group[0]._replace(state_bytes=sum(row.state_bytes for row in group)))
        if len(group) > 1
        else (group[0].parameter, group[0])
        for key, group in alike.items()
    ]


def explained_owners(asked: Asked) -> list[ExplainedOwner]:
    """Return a row per matrix, by name and number, as the ranks of ``asked`` plan it before their first step.

    Raises:
        ValueError: The ranks cannot share the model.
    """
    rows: list[ExplainedOwner] = []
    for exchange, places in asked.figures().exchanges:
        layout, plan = exchange.layout, exchange.plan
        for task in (task for batch in plan.batches for task in batch.tasks):
            held = {places[rank]: count for rank, count in added([layout.elements(p) for p in task.parts]).items()}
            owner = places[plan.owners[task.key]]
            kept_by = {state: places[rank] for (key, state), rank in plan.keepers.items() if key == task.key}
            rows.append(ExplainedOwner(task.key, owner, why_owner(task, owner, held), kept_by))
    return sorted(rows, key=lambda row: [int(w) if w.isdigit() else w for w in split(r"(\d+)", row.matrix)])


def why_owner(task: MatrixTask, owner: int, held: Mapping[int, int]) -> str:
    """Return why :func:`rankwise.comm.owner_plan.assign_owners` chose the owner; ``held`` has elements by rank."""
    if task.whole is not None:
        return "a slice; the ranks that share the matrix had least work"
    elements, most = held.get(owner, 0), max(held.values())
    equal = sum(count == most for count in held.values())
    if elements < most:
        fuller = "rank that holds" if equal == 1 else "ranks that hold"
        return f"the {fuller} most would have over {IMBALANCE_TOLERANCE:g} times the mean work"
    if equal > 1:
        return f"had least work of the {equal} ranks that hold as much of it"
    return "holds it whole" if len(held) == 1 else f"holds most of it, {elements / sum(held.values()):.0%}"


def owners_table(rows: Sequence[ExplainedOwner], ranks: int) -> Table:
    """Return the owners as a table for the terminal."""
    table = Table(title=f"owners on {ranks} rank{'s' if ranks > 1 else ''}")
    table.add_column("matrix", overflow="fold")
    table.add_column("rank", justify="right")
    table.add_column("why")
    for row in rows:
        kept = "".join(f"; {state} is kept by rank {rank}" for state, rank in row.kept_by.items())
        table.add_row(escape(row.matrix), str(row.owner), row.why + kept)
    return table


def _state_bytes(optimizer: ShardedOptimizer) -> dict[str, int]:
    """Return the bytes of all states in one process, by parameter; a bias that rides along counts with its matrix."""
    sizes = dict.fromkeys(optimizer.table.parameters, 0)
    name_of = optimizer.table.base_name

    for unit in imagined_units(optimizer, 1, 1):
        for key, shape in unit.layout.shapes.items():
            width = sum((dtype or unit.dtype).itemsize for dtype in unit.parameters[key].states.values())
            sizes[name_of(key)] += prod(shape) * width
        batches = [] if unit.exchange is None else unit.exchange.plan.batches
        for task in (task for batch in batches for task in batch.tasks):
            stored = unit.stored_states(task).values()
            sizes[name_of(task.parts[0])] += sum(state.nbytes(unit.dtype) for state in stored)
    return sizes
