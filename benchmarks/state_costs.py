"""What the states of every type weigh by the type they are kept in, and how many bytes a step moves."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

import rankwise
from benchmarks.counts import META, count
from benchmarks.models import layer_set
from rankwise.estimate import estimate

__all__ = ["DTYPES", "KINDS", "state_row", "state_table"]

_MODEL = "llama-1b"
DTYPES = ("float32", "bfloat16", "int8")


_MKOR = partial(rankwise.MKOR, update_interval=3)
KINDS: dict[str, Callable[..., Any]] = {
    "MARS-AdamW": partial(rankwise.MARS, variant="adamw"),
    "MARS-Lion": partial(rankwise.MARS, variant="lion"),
    "MARS-Lion, no clip": partial(rankwise.MARS, variant="lion", clip=None),
    "MARS-M": partial(rankwise.MARS, variant="muon"),
    "MARS-M, no clip": partial(rankwise.MARS, variant="muon", clip=None),
    "SONew, tridiagonal": partial(rankwise.SONew, band=1),
    "SONew, band 4": partial(rankwise.SONew, band=4),
    "LDAdam, rank d/4": partial(rankwise.LDAdam, rank=512),
    "LDAdam, rank 16": partial(rankwise.LDAdam, rank=16),
    "MKOR on AdamW": _MKOR,
    "MKOR on AdamW, no factor above 4,096": partial(_MKOR, max_factor_dim=4096),
}
"""By name, what makes the optimizer of named parameters."""


def _build(kind: str, dtype: str, model: nn.Module) -> Any:
    optimizer = KINDS[kind](list(model.named_parameters()), state_dtype=dtype)
    # As under DeepSpeed and Megatron, which need the gradients no more after the step.
    optimizer.planner.source.spends_gradients = True
    optimizer.capture(model)
    return optimizer


def _cell(kind: str, dtype: str) -> str:
    network = layer_set(_MODEL, META)
    held = estimate(_build(kind, dtype, network), world=1)[0]
    parameters = sum(parameter.numel() for parameter in network.parameters())
    moved = count(partial(_build, kind, dtype), _MODEL, 2)[0].bytes / parameters
    return f"{held.element_state_bytes / parameters:.2f} ({held.state_bytes / parameters:.2f}); {moved:.0f}"


def state_row(kind: str) -> str:
    """A line of the table.

    Args:
        kind: Key of :data:`KINDS`.
    """
    return f"| {kind} | {' | '.join(_cell(kind, dtype) for dtype in DTYPES)} |"


def state_table() -> str:
    """A table in Markdown: bytes a parameter of element states (of all states), and of memory that a step moves."""
    return "\n".join(["| | " + " | ".join(DTYPES) + " |", "|---" * (1 + len(DTYPES)) + "|", *map(state_row, KINDS)])
