"""The table of whole training steps, with which the page of a GPU begins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.gpu.whole_steps import ENGINES, TOKENS
from benchmarks.performance import markdown

__all__ = ["whole_section"]

Row = Mapping[str, Any]
_MODELS = {"gpt2-small": "GPT-2 small", "llama-1b": "Llama 3.2 1B"}
_TEXT = """
## Whole training steps

The model is compiled and multiplies in bfloat16 with torch's flash attention; gradients of micro-batches add up to the
tokens of a step. *Peak* is the rate of a large product of bfloat16, measured on the same card. *Plan* is what
[`rankwise plan`](model-plans.md) says of the optimizer, and by how much it took longer.

"""


def whole_section(rows: Sequence[Row]) -> str:
    """The section; what was not measured says so, with the command that measures it.

    Args:
        rows: Rows of :func:`.whole_steps.measure_whole_steps`.
    """
    headings = ("model", "under", "optimizer", "tokens/s at 131 k a step", "of peak")
    headings += ("optimizer's share: at 131 k", "at 524 k", "optimizer, ms", "plan, ms", "memory, GiB")
    lines: list[tuple[str, ...]] = []
    for model, title in _MODELS.items():
        for engine in ENGINES:
            own = [row for row in rows if (row["model"], row["engine"]) == (model, engine)]
            if not own:
                command = f'`python -m benchmarks gpu --section whole-steps --item "{model}, {engine}"`'
                lines.append((title, engine, f"not yet measured: {command}", *[""] * (len(headings) - 3)))
            lines += [(title, engine, row["name"], *_cells(row)) for row in own]
    return _TEXT + markdown(headings, lines)


def _cells(row: Row) -> tuple[str, ...]:
    few, many = map(str, TOKENS)
    rate = row["tokens_of_a_step"][few] / row["whole_seconds"][few]
    share = f"{rate * row['operations'] / row['peak_rate']:.0%}" if row.get("peak_rate") else ""
    taken, planned = row["update_seconds"], row.get("planned_seconds")
    plan = "" if planned is None else f"{planned * 1e3:.1f} ({taken / planned - 1:+.0%})"
    memory = "" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**30:.1f}"
    shares = (f"{taken / row['whole_seconds'][tokens]:.1%}" for tokens in (few, many))
    return (f"{rate:,.0f}", share, *shares, f"{taken * 1e3:.1f}", plan, memory)
