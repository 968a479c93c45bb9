"""The outcome of an optimizer's routing as a table."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from rich.table import Table

from rankwise.names import BY_NAME, BY_SPELLING
from rankwise.routing.roles import annotate

__all__ = ["explain_table"]


def explain_table(model: Any, block: dict[str, Any]) -> Table:
    """One row per parameter: shape, rule, owner and state.

    The optimizer takes one step on a few random tokens, so that the bytes are those it really holds.

    Args:
        model: a causal language model; its weights change.
        block: ``"optimizer"`` block of a DeepSpeed configuration.

    Raises:
        ValueError: if the type is not one of ours, or the optimizer refuses its params.
    """
    name = str(block["type"])
    if name.lower() not in BY_NAME:
        ours = ", ".join(BY_SPELLING)
        raise ValueError(f"optimizer.type is {name!r}, which is not one of ours ({ours}): there is nothing to explain")
    importlib.import_module("deepspeed_plugin")
    annotate(model)
    optimizer = getattr(torch.optim, name)(list(model.parameters()), **block.get("params", {}))
    optimizer.capture(model)
    tokens = torch.randint(
        model.get_input_embeddings().num_embeddings, (1, min(8, model.config.max_position_embeddings))
    )
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()

    table = Table(title=f"{name}, one rank")
    table.add_column("parameter", overflow="fold")
    for heading in ("shape", "rule", "why"):
        table.add_column(heading)
    for heading in ("owner", "state, bytes"):
        table.add_column(heading, justify="right")
    total = 0
    for row in optimizer.explain():
        shape = " x ".join(map(str, row.shape))
        owner = "-" if row.owner is None else str(row.owner)
        table.add_row(row.name, shape, row.rule, row.reason, owner, f"{row.state_bytes:,}")
        total += row.state_bytes
    table.add_section()
    table.add_row("all", "", "", "", "", f"{total:,}")
    return table
